"""Fixtures and capability checks that every suite shares."""

import functools
import gc
import os
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import trio

from deltabox import config
from deltabox.engines.delta import remove_layers
from deltabox.engines.overlay import usable
from tests.places import Place

# No deadlines: a slow moment of the machine is no defect. More by --hypothesis-profile=nightly.
hypothesis.settings.register_profile("default", max_examples=40, deadline=None, database=None)
hypothesis.settings.register_profile("nightly", max_examples=2000, deadline=None, database=None)
hypothesis.settings.load_profile("default")

CAPABILITIES = ("overlay", "bwrap")  # tests/agents looks for its own


@functools.cache
def _missing(capability: str) -> str:
    """Why a capability is absent here, found by using it; empty when it is there."""
    if capability == "overlay":
        with tempfile.TemporaryDirectory() as folder:
            project, state = Path(folder, "project"), Path(folder, "state")
            project.mkdir()
            state.mkdir()
            verdict = trio.run(usable, project, state)
            return "" if verdict.usable else verdict.reason
    if capability == "bwrap":
        paths = os.environ.get("PATH", os.defpath).split(":")
        found = any(os.access(Path(folder, "bwrap"), os.X_OK) for folder in paths)
        return "" if found else "bubblewrap is not installed"
    return ""


def pytest_report_header() -> list[str]:
    """What this run stands on: the reader of a green result must see what it could not test."""
    found = ", ".join(f"{name}: {_missing(name) or 'works'}" for name in CAPABILITIES)
    required = os.environ.get("DELTABOX_REQUIRE") or "nothing"
    return [
        f"runtime: trio {trio.__version__}, Linux {platform.release()}, uid {os.geteuid()}",
        f"capabilities: {found} (required: {required})",
    ]


def pytest_collection_finish() -> None:
    # Modules never go away: counted out, a collection after each test costs 0.3 ms instead of 20.
    config.checked(config.Config(), {"limits": {}}, source="")  # imports what is imported late
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """What a test forgot to close warns now, in its own name, and a warning is an error."""
    gc.collect()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what cannot run here, unless DELTABOX_REQUIRE says that it must: a silent skip is a hole."""
    required = os.environ.get("DELTABOX_REQUIRE", "").split(",")
    for capability in CAPABILITIES:
        if item.get_closest_marker(capability) is None:
            continue
        reason = _missing(capability)
        if reason and capability in required:
            pytest.fail(f"{capability} is required here: {reason}", pytrace=False)
        if reason:
            pytest.skip(reason)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place.make(tmp_path)
    yield made
    remove_layers(made.session)
