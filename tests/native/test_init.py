"""deltabox-init by itself: what it refuses, what it says, and that it dies with its owner."""

import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from deltabox.isolation.running import memory_file
from deltabox.process import Control, end, native_program, open_process

INIT = bytes(native_program("init"))
UNCONFINED = (b"--unconfined",)
HANG_S = 20


@asynccontextmanager
async def init(
    *argv: bytes,
    options: Sequence[bytes] = UNCONFINED,
    files: Sequence[bytes] = (),
    under: Sequence[bytes] = (),
) -> AsyncIterator[tuple[Control, trio.Process]]:
    """init with /dev/null as streams; `files` become memory files named %0, %1 … in the options."""
    control, theirs = Control.pair()
    null = os.open(os.devnull, os.O_RDWR)
    fds = [theirs.fileno(), null, *(memory_file("test", f) for f in files)]
    words = list(options)
    for n, fd in enumerate(fds[2:]):
        words = [b"%d" % fd if w == b"%%%d" % n else w for w in words]
    streams = [w for name in (b"--stdin", b"--stdout", b"--stderr") for w in (name, b"%d" % null)]
    line = [*under, INIT, b"--control", b"%d" % fds[0], *streams, *words, b"--", *argv]
    with trio.fail_after(HANG_S):
        process = await open_process(line, fds=fds)
        for fd in fds[1:]:
            os.close(fd)
        theirs.close()
        try:
            yield control, process
        finally:
            control.close()
            await end(process, grace_s=2)


async def say(control: Control) -> bytes | None:
    message = await control.receive()
    return message.data if message else None


async def test_messages_come_in_order_and_then_the_end() -> None:
    async with init(b"/bin/sh", b"-c", b"exit 7") as (control, process):
        assert [await say(control) for _ in range(4)] == [b"ready 0", b"started", b"exit 7", None]
        assert await process.wait() == 0


async def test_confined_it_insists_on_being_pid_1() -> None:
    async with init(b"/bin/true", options=[b"--filter", b"%0"], files=[b""]) as (control, process):
        assert await say(control) == b"error pid1 1 Operation not permitted"
        assert await say(control) is None
        assert await process.wait() == 125


@pytest.mark.parametrize(
    "options",
    [
        [],  # neither --filter nor --unconfined
        [b"--unconfined", b"--rlimit", b"core"],
        [b"--unconfined", b"--rlimit", b"nothing=1"],
        [b"--unconfined", b"--rlimit", b"core=-1"],
        [b"--unconfined", b"--tty", b"24"],
        [b"--unconfined", b"--env", b"x"],
        [b"--unconfined", b"--surprise"],
    ],
)
async def test_wrong_command_line_starts_nothing(options: list[bytes]) -> None:
    async with init(b"/bin/true", options=options) as (control, process):
        assert await say(control) is None
        assert await process.wait() == 2


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([b"/no/such"], b"error exec 2 No such file or directory"),
        ([b"/etc/passwd"], b"error exec 13 Permission denied"),
        ([b"/"], b"error exec 13 Permission denied"),
    ],
)
async def test_command_that_cannot_run_is_one_error(argv: list[bytes], words: bytes) -> None:
    async with init(*argv) as (control, process):
        assert [await say(control) for _ in range(3)] == [b"ready 0", words, None]
        await process.wait()


async def test_owner_going_ends_it_and_the_command() -> None:
    async with init(b"/bin/sh", b"-c", b"trap '' TERM HUP; sleep 1000") as (control, process):
        assert [await say(control) for _ in range(2)] == [b"ready 0", b"started"]
        children = f"/proc/{process.pid}/task/{process.pid}/children"
        with open(children) as file:
            child = os.pidfd_open(int(file.read().split()[0]))
        control.close()
        assert await process.wait() == 0
        await trio.lowlevel.wait_readable(child)
        os.close(child)


async def test_owner_gone_before_the_start_leaves_nothing() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.close()
    null = os.open(os.devnull, os.O_RDWR)
    streams = [w for name in (b"--stdin", b"--stdout", b"--stderr") for w in (name, b"%d" % null)]
    line = [
        INIT,
        b"--control",
        b"%d" % theirs.fileno(),
        *streams,
        *UNCONFINED,
        b"--",
        b"/bin/sleep",
        b"1000",
    ]
    with trio.fail_after(HANG_S):
        process = await open_process(line, fds=[theirs.fileno(), null])
        os.close(null)
        theirs.close()
        assert await process.wait() == 0


async def test_environment_of_any_size_arrives_whole() -> None:
    pairs = [b"N%d=%s" % (n, b"v" * 997) for n in range(1500)]
    script = b'[ "$N0$N1499" = "$(printf %01994d 0 | tr 0 v)" ] && exit 5'
    options = [*UNCONFINED, b"--env", b"%0"]
    content = b"".join(p + b"\0" for p in [*pairs, b"PATH=/usr/bin:/bin"])
    async with init(b"/bin/sh", b"-c", script, options=options, files=[content]) as (control, _):
        assert [await say(control) for _ in range(3)] == [b"ready 0", b"started", b"exit 5"]


async def test_command_starts_with_usual_signals(tmp_path: Path) -> None:
    # What whoever started us ignores or blocks would be inherited over exec: nohup, for one.
    under = [b"/bin/sh", b"-c", b'trap \'\' INT HUP PIPE; exec "$0" "$@"']
    seen = tmp_path / "status"
    # Without a shell in between, which blocks signals for moments of its own.
    command = [b"/bin/cp", b"/proc/self/status", bytes(seen)]
    async with init(*command, under=under) as (control, _):
        assert [await say(control) for _ in range(3)] == [b"ready 0", b"started", b"exit 0"]
    facts = dict(line.split(":\t", 1) for line in seen.read_text().splitlines() if ":\t" in line)
    assert (int(facts["SigBlk"], 16), int(facts["SigIgn"], 16)) == (0, 0)


async def test_unknown_and_broken_orders_are_ignored() -> None:
    async with init(b"/bin/sleep", b"1000") as (control, _):
        for order in (
            b"surprise",
            b"signal",
            b"signal x",
            b"signal 0",
            b"signal 99999",
            b"signal -9",
        ):
            await control.send(order)
        await control.send(b"freeze")
        await control.send(b"thaw")
        heard = [await say(control) for _ in range(4)]
        assert heard == [b"ready 0", b"started", b"frozen 0", b"thawed"]


async def test_descriptors_sent_to_it_do_not_pile_up() -> None:
    async with init(b"/bin/sleep", b"1000") as (control, process):
        assert [await say(control) for _ in range(2)] == [b"ready 0", b"started"]
        await control.send(b"freeze")
        assert await say(control) == b"frozen 0"
        before = sorted(os.listdir(f"/proc/{process.pid}/fd")) if os.geteuid() == 0 else []
        for _ in range(10):
            await control.send(b"surprise", [0, 1])
        await control.send(b"thaw")
        assert await say(control) == b"thawed"
        after = sorted(os.listdir(f"/proc/{process.pid}/fd")) if os.geteuid() == 0 else []
        assert after == before
