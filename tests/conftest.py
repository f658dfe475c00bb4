"""Fixtures and capability checks that every suite shares."""

import functools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from deltabox.engines.delta import remove_layers
from deltabox.engines.overlay import usable
from tests.places import Place


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


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what cannot run here, unless DELTABOX_REQUIRE says that it must: a silent skip is a hole."""
    required = os.environ.get("DELTABOX_REQUIRE", "").split(",")
    for capability in ("overlay", "bwrap"):
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
