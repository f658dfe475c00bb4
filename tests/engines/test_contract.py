"""What every engine's views do, whoever makes them: the contract of engines/base.py."""

import os
from pathlib import Path

import pytest

from deltabox.engines.base import Engine
from deltabox.engines.probe import choose
from deltabox.errors import EngineUnavailable
from deltabox.paths import Tree, parse
from tests.places import Place, listing

pytestmark = pytest.mark.overlay


@pytest.fixture(params=["overlay"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return choose(request.param)


def _write(root_fd: int, path: str, data: bytes) -> None:
    with Tree(os.dup(root_fd)) as tree:
        fd = tree.open_at(parse(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode=0o644)
        with open(fd, "wb") as file:
            file.write(data)


def _read(root_fd: int, path: str) -> bytes:
    with Tree(os.dup(root_fd)) as tree, open(tree.open_file(parse(path)), "rb") as file:
        return file.read()


async def test_view_shows_the_base_and_keeps_writes_from_it(engine: Engine, place: Place) -> None:
    before = listing(place.project)
    async with engine.mount(place.spec()) as view:
        assert _read(view.root_fd, "dir/b") == b"base b"
        _write(view.root_fd, "dir/b", b"changed")
        _write(view.root_fd, "new", b"new")
        assert _read(view.root_fd, "dir/b") == b"changed"
        assert _read(view.root_fd, "new") == b"new"
    assert listing(place.project) == before


async def test_delta_outlives_the_view_and_is_shown_again(engine: Engine, place: Place) -> None:
    async with engine.mount(place.spec()) as view:
        _write(view.root_fd, "a", b"kept")
    async with engine.mount(place.spec()) as view:
        assert _read(view.root_fd, "a") == b"kept"


async def test_restack_puts_a_frozen_layer_under_a_new_one(engine: Engine, place: Place) -> None:
    async with engine.mount(place.spec()) as view:
        _write(view.root_fd, "a", b"first")
        fresh = place.session / "upper2"
        await view.restack([place.upper], fresh, place.session / "work2")
        assert _read(view.root_fd, "a") == b"first"
        _write(view.root_fd, "a", b"second")
        assert (place.upper / "a").read_bytes() == b"first"
        await view.restack([], place.session / "upper3", place.session / "work3")
        assert _read(view.root_fd, "a") == b"base a"


async def test_failed_restack_leaves_the_old_stack_writable(engine: Engine, place: Place) -> None:
    async with engine.mount(place.spec()) as view:
        _write(view.root_fd, "a", b"first")
        with pytest.raises(EngineUnavailable, match="absent"):
            await view.restack([place.session / "absent"], place.upper, place.session / "work")
        assert _read(view.root_fd, "a") == b"first"
        _write(view.root_fd, "dir/b", b"still copied up")
        assert (place.upper / "dir/b").read_bytes() == b"still copied up"


async def test_teardown_closes_every_descriptor(engine: Engine, place: Place) -> None:
    async with engine.mount(place.spec()):
        pass  # what starts lazily, such as a thread of trio, is open from here on
    before = sorted(os.listdir("/proc/self/fd"))
    async with engine.mount(place.spec()) as view:
        assert view.is_alive()
        assert sorted(os.listdir("/proc/self/fd")) != before
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert not view.is_alive()


async def test_mounting_an_absent_project_is_refused_by_name(
    engine: Engine, place: Place, tmp_path: Path
) -> None:
    place.upper.mkdir()
    with pytest.raises(EngineUnavailable, match="nowhere"):
        async with engine.mount(place.spec(project=tmp_path / "nowhere")):
            pass
