"""The command's own terminal: job control, keys, size, and that it is not the user's."""

import os
import signal

import pytest

from deltabox.isolation.running import Exit
from tests.isolation.boxes import TERMINAL, Box, Screen

SHELL = (
    "/bin/bash",
    "--norc",
    "--noediting",
    "-i",
)  # its line editor would colour what tests wait for
pytestmark = [pytest.mark.overlay, pytest.mark.bwrap]


async def test_command_has_a_terminal_of_the_sandboxs_own(box: Box) -> None:
    async with box.start(
        "/bin/bash", "-c", "tty; stty size; echo x > /dev/tty", stdio=TERMINAL
    ) as c:
        screen = Screen(c)
        await screen.until(b"/dev/pts/0\r\n24 80\r\nx\r\n")
        assert await c.wait() == Exit(code=0)
        assert await screen.terminal.receive_some() == b""
        assert (c.stdin, c.stdout, c.stderr) == (None, None, None)


async def test_without_a_terminal_there_is_none_to_open(box: Box) -> None:
    result = await box.sh("tty; : < /dev/tty")
    assert result.out == b"not a tty\n"
    assert b"/dev/tty: No such device or address" in result.err


async def test_background_job_waits_for_the_terminal_until_fg_gives_it(box: Box) -> None:
    # In the background, reading stops the job (SIGTTIN); no timing is involved.
    script = "set -m; bash -c 'read x; echo got $x' & until jobs -s | grep -q .; do :; done; echo up; fg"
    async with box.start("/bin/bash", "-c", script, stdio=TERMINAL) as command:
        screen = Screen(command)
        await screen.until(b"up\r\n")
        await screen.type(b"word\n")
        await screen.until(b"got word\r\n")
        assert await command.wait() == Exit(code=0)


async def test_interrupt_key_reaches_the_foreground_job_only(box: Box) -> None:
    async with box.start(*SHELL, stdio=TERMINAL) as command:
        screen = Screen(command)
        await screen.type(b"PS1=REA''DY-\n")
        await screen.until(b"READY-")
        await screen.type(
            b"bash -c 'trap \"echo cau''ght; exit\" INT; echo wai''ting; read -r line'\n"
        )
        await screen.until(b"waiting\r\n")
        await screen.type(b"\x03")
        await screen.until(b"caught")
        await screen.until(b"READY-")
        await screen.type(b"echo shell-$((40 + 2)); exit 3\n")
        await screen.until(b"shell-42")
        assert await command.wait() == Exit(code=3)


async def test_stop_key_stops_the_command_and_continue_resumes_it(box: Box) -> None:
    async with box.start(
        "/bin/sh", "-c", "echo up; read line; echo got $line", stdio=TERMINAL
    ) as c:
        screen = Screen(c)
        await screen.until(b"up")
        await screen.type(b"\x1a")
        assert await c.stopped() == signal.SIGTSTP
        await c.cont()
        await screen.type(b"word\n")
        await screen.until(b"got word")
        assert await c.wait() == Exit(code=0)


async def test_stop_key_inside_an_interactive_shell_stops_its_job(box: Box) -> None:
    async with box.start(*SHELL, stdio=TERMINAL) as command:
        screen = Screen(command)
        await screen.type(b"bash -c 'echo jo''b; sleep 1000'\n")
        await screen.until(b"job\r\n")
        await screen.type(b"\x1a")
        await screen.until(b"Stopped")
        await screen.type(b"kill -9 %1; exit 4\n")
        # bash warns about the stopped job or not, as the kill lands; `exit` again settles it.
        await screen.type(b"exit 4\n")
        assert await command.wait() == Exit(code=4)


async def test_resize_is_seen_and_signalled(box: Box) -> None:
    script = "trap 'stty size; exit' WINCH; echo up; while :; do read -t 1; done"
    async with box.start("/bin/bash", "-c", script, stdio=TERMINAL) as command:
        screen = Screen(command)
        await screen.until(b"up")
        command.resize(50, 132)
        await screen.until(b"50 132")
        assert await command.wait() == Exit(code=0)


async def test_signal_goes_to_the_foreground_group(box: Box) -> None:
    async with box.start(*SHELL, stdio=TERMINAL) as command:
        screen = Screen(command)
        await screen.type(b"bash -c 'echo jo''b; sleep 1000'; echo en''ded $?; exit 0\n")
        await screen.until(b"job\r\n")
        await command.signal(signal.SIGTERM)
        await screen.until(b"ended 143")
        assert await command.wait() == Exit(code=0)


async def test_backspace_removes_a_whole_character(box: Box) -> None:
    async with box.start("/bin/cat", stdio=TERMINAL) as command:
        screen = Screen(command)
        await screen.type("aé\x7fb\n\x04".encode())
        await screen.until(b"\nab\r\n")
        assert await command.wait() == Exit(code=0)


async def test_large_output_survives_the_end_of_the_command(box: Box) -> None:
    async with box.start("/bin/sh", "-c", "seq 20000", stdio=TERMINAL) as command:
        seen = b""
        while chunk := await command.terminal.receive_some():  # type: ignore[union-attr]
            seen += chunk
        assert await command.wait() == Exit(code=0)
    assert seen.split() == [b"%d" % n for n in range(1, 20001)]


async def test_callers_terminal_is_not_the_commands(box: Box) -> None:
    leader, follower = os.openpty()
    try:
        name = os.ttyname(follower)
        assert os.path.exists(name)
        assert (await box.sh("[ -e /dev/pts/ptmx ] && ! [ -e $1 ]", name)).exit == Exit(code=0)
    finally:
        os.close(leader)
        os.close(follower)
