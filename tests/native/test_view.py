"""deltabox-view as a process: its life, its life-line, its hygiene, and requests that make no sense."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from deltabox.engines.overlay import OverlayEngine
from deltabox.errors import EngineUnavailable, Failed
from deltabox.process import Control, end, native_program, open_process, run_trusted
from tests.places import Place, mounts_at, namespace_users, read, run_python, sh

pytestmark = pytest.mark.overlay


@asynccontextmanager
async def _open_raw(fds: tuple[int, ...] = ()) -> AsyncIterator[tuple[trio.Process, Control]]:
    line, theirs = Control.pair()
    with theirs:
        program = os.fsencode(native_program("view"))
        process = await open_process([program], stdin=theirs.fileno(), fds=fds)
    try:
        yield process, line
    finally:
        line.close()
        await end(process)


async def _ask(line: Control, word: bytes, fields: bytes) -> bytes:
    memfd = os.memfd_create("fields")
    try:
        os.write(memfd, fields)
        await line.send(word, [memfd])
    finally:
        os.close(memfd)
    message = await line.receive()
    return message.data if message else b""


async def test_killed_it_leaves_no_mount_and_no_process(place: Place) -> None:
    async with OverlayEngine().mount(place.spec()) as view:
        namespace = os.fstat(view.enter.mount).st_ino
        assert namespace_users(namespace) == [view.pid]  # the search below can find something
        assert len(mounts_at(place.root, view.pid)) == 2
        os.kill(view.pid, signal.SIGKILL)
        await view._holder.process.wait()
        assert namespace_users(namespace) == []
        with pytest.raises(EngineUnavailable, match="has ended"):
            await view.restack([], place.upper, place.session / "work")
        assert not view.is_alive()
    assert mounts_at(place.root) == []


async def test_end_of_the_life_line_ends_it() -> None:
    async with _open_raw() as (process, line):
        line.close()
        with trio.fail_after(10):
            assert await process.wait() == 0


async def test_stop_ends_it_while_the_line_is_open(place: Place) -> None:
    async with OverlayEngine().mount(place.spec()) as view:
        await view._holder.line.send(b"stop")
        assert await view._holder.line.receive() is None
        with trio.fail_after(10):
            assert await view._holder.process.wait() == 0


async def test_signals_of_a_terminal_do_not_end_it(place: Place) -> None:
    async with OverlayEngine().mount(place.spec()) as view:
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT):
            os.kill(view.pid, number)
        await view.restack([], place.upper, place.session / "work")
        assert read(view, "a") == b"base a"
        assert os.getsid(view.pid) == view.pid


async def test_inherited_descriptors_are_closed_at_once() -> None:
    reader, writer = os.pipe()
    async with _open_raw(fds=(writer,)) as (process, _):
        os.close(writer)
        with open(reader, "rb", buffering=0) as pipe:
            with trio.fail_after(10):
                await trio.lowlevel.wait_readable(pipe)
            assert pipe.read() == b""
        assert process.poll() is None


def test_started_by_hand_it_says_what_it_is() -> None:
    with pytest.raises(Failed, match="started by deltabox"):
        run_trusted([os.fsencode(native_program("view"))])


@pytest.mark.parametrize(
    ("word", "fields", "words"),
    [
        (b"restack", b"upper\0/tmp\0", b"cannot be read"),
        (b"mount", b"", b"cannot be read"),
        (b"mount", b"project\0/tmp", b"cannot be read"),
        (b"mount", b"project\0relative\0", b"field is wrong"),
        (b"mount", b"project\0", b"field is wrong"),
        (b"mount", b"nonsense\0/tmp\0", b"field is wrong"),
        (b"mount", b"tmp\0many\0", b"field is wrong"),
        (b"mount", b"project\0/srv\0", b"is missing"),
        (b"mount", b"project\0/home\0home\0/tmp\0/home/x\0tmp\x001\0", b"would contain"),
    ],
)
async def test_senseless_request_is_answered_by_one_error(
    word: bytes, fields: bytes, words: bytes
) -> None:
    async with _open_raw() as (process, line):
        answer = await _ask(line, word, fields)
        assert answer.startswith(b"error\0")
        assert words in answer
        with trio.fail_after(10):
            assert await process.wait() == 0


async def test_second_mount_is_refused_and_the_first_view_stands(place: Place) -> None:
    async with OverlayEngine().mount(place.spec()) as view:
        answer = await _ask(view._holder.line, b"mount", b"project\0/srv\0")
        assert answer.startswith(b"error\0request\0mount\0")
        assert read(view, "a") == b"base a"


_SHARED = """
import trio
from pathlib import Path
from deltabox.engines.overlay import OverlayEngine
from deltabox.process import run_trusted
from tests.places import Place, mounts_at

table = Path("/proc/self/mountinfo")
place = Place.make(Path(sys.argv[1]))
root = next(line for line in table.read_text().splitlines() if line.split()[4] == "/")
assert " shared:" in root, root

# The control: what a namespace that stays shared mounts does arrive here.
script = "mount -t tmpfs x " + sys.argv[2]
run_trusted([b"/usr/bin/unshare", b"-m", b"--propagation", b"unchanged", b"sh", b"-c", script.encode()])
assert mounts_at(Path(sys.argv[2])) == [sys.argv[2]]
before = table.read_text()

async def main():
    async with OverlayEngine().mount(place.spec(tmp_bytes=1 << 20)) as view:
        assert len(mounts_at(place.root, view.pid)) == 2
        assert table.read_text() == before
    assert table.read_text() == before

trio.run(main)
print("unchanged")
"""


def test_mount_table_of_a_host_with_shared_mounts_is_unchanged(tmp_path: Path) -> None:
    (tmp_path / "control").mkdir()
    under = ("/usr/bin/unshare", "-Urm", "--propagation", "shared")
    said = run_python(_SHARED, tmp_path / "place", tmp_path / "control", under=under)
    assert said == "unchanged"


async def test_its_name_and_its_folder_pin_nothing(place: Place) -> None:
    async with OverlayEngine().mount(place.spec()) as view:
        assert Path(f"/proc/{view.pid}/comm").read_text().strip() == "deltabox-view"
        assert str(Path(f"/proc/{view.pid}/cwd").readlink()) == "/"
        assert sh(view, "pwd") == "/"
