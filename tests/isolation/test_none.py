"""Isolation `none`: in the view, unconfined, and still ended as a whole."""

import os
import signal
from pathlib import Path

import pytest
import trio

from deltabox.errors import NotFound
from deltabox.isolation import none
from deltabox.isolation.running import Exit
from tests.isolation.boxes import ENVIRON, TERMINAL, Box, Screen, collect, python
from tests.places import ME

pytestmark = pytest.mark.overlay


def test_warning_says_it_aloud() -> None:
    assert "NOT confined" in none.WARNING
    assert "approve" in none.WARNING


async def test_command_stands_in_the_view_and_sees_the_host(box: Box) -> None:
    script = "echo new > a; cat a; id -u; pwd; ls -d /etc/shadow; env | sort | tr '\\n' ' '"
    async with box.unconfined(
        "/bin/bash", "-c", script, env={"PATH": "/usr/bin:/bin", "X": "1"}
    ) as c:
        result = await collect(c)
        assert not c.is_scoped
    assert result.text.splitlines()[:4] == [
        "new",
        str(ME[0]),
        str(box.place.project),
        "/etc/shadow",
    ]
    assert "X=1" in result.text
    assert (box.place.project / "a").read_text() == "base a"


async def test_ends_and_streams_are_exact(box: Box) -> None:
    async with box.unconfined("/bin/sh", "-c", "cat; echo e >&2; exit 9") as command:
        result = await collect(command, b"i" * 100_000)
    assert (result.exit, len(result.out), result.err) == (Exit(code=9), 100_000, b"e\n")
    async with box.unconfined("no-such-command") as command:
        assert (await command.wait()).code == 127
    with pytest.raises(NotFound, match="folder cannot be entered"):
        async with box.unconfined("true", cwd=Path("/no/such")):
            pass


RUNAWAYS = """
import os, sys, time
def run_away():
    if not os.fork():
        os.setsid()
        if os.fork(): os._exit(0)
        print(os.getpid(), flush=True)
        time.sleep(1000)
        os._exit(0)
for _ in range(3): run_away()
sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["exit", "leave"])
async def test_double_forked_descendants_end_with_the_command(box: Box, end: str) -> None:
    handles = []
    async with box.unconfined(*python(RUNAWAYS)) as command:
        assert command.stdout
        assert command.stdin
        seen = b""
        while seen.count(b"\n") < 3:
            seen += await command.stdout.receive_some()
        handles = [os.pidfd_open(int(pid)) for pid in seen.split()]
        if end == "exit":
            await command.stdin.aclose()
            assert await command.wait() == Exit(code=0)
    for handle in handles:
        with trio.fail_after(5):
            await trio.lowlevel.wait_readable(handle)
        os.close(handle)


async def test_processes_of_others_are_left_alone(box: Box) -> None:
    bystander = await trio.lowlevel.open_process(["/bin/sleep", "1000"])
    try:
        async with box.unconfined("/bin/sh", "-c", "echo up; cat") as command:
            assert command.stdout
            await command.stdout.receive_some()
            assert (await command.freeze()).running == 0
            state = Path(f"/proc/{bystander.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
            assert state == "S"
            await command.thaw()
        assert bystander.poll() is None
    finally:
        bystander.kill()
        await bystander.wait()


async def test_terminal_and_stop_key_work(box: Box) -> None:
    async with box.unconfined(
        "/bin/sh", "-c", "echo up; read l; echo got $l", stdio=TERMINAL
    ) as c:
        screen = Screen(c)
        await screen.until(b"up")
        await screen.type(b"\x1a")
        assert await c.stopped() == signal.SIGTSTP
        await c.cont()
        await screen.type(b"word\n")
        await screen.until(b"got word")
        assert await c.wait() == Exit(code=0)


async def test_environment_is_only_what_was_given(box: Box) -> None:
    async with box.unconfined("/usr/bin/env", env=ENVIRON) as command:
        result = await collect(command)
    assert dict(line.split("=", 1) for line in result.text.splitlines()) == ENVIRON
