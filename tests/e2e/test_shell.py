"""deltabox-sh: a command of a live session, as if it ran here; and what it is never given."""

import os
import pty
import signal
import subprocess  # noqa: TID251 - the test is the program that was given a shell
import sys
from pathlib import Path

import pytest
import trio

from deltabox import client
from deltabox.process import native_program
from tests.e2e.serving import HANG_S, World, alive, until_gone

pytestmark = [pytest.mark.overlay, pytest.mark.bwrap]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World.make(tmp_path)


def start(
    world: World, session: client.Session, *words: str, **how: object
) -> "subprocess.Popen[bytes]":
    env = {**world.env, "DELTABOX_SESSION": session.id}
    argv = [str(native_program("sh")), *words]
    options = {"cwd": world.project, "env": env, "stdout": subprocess.PIPE, **how}
    return subprocess.Popen(argv, **options)  # type: ignore[call-overload,no-any-return]


async def run(
    world: World, session: client.Session, *words: str, stdin: bytes = b"", **how: object
) -> tuple[int, bytes, bytes]:
    child = start(world, session, *words, stdin=subprocess.PIPE, stderr=subprocess.PIPE, **how)
    out, err = await trio.to_thread.run_sync(lambda: child.communicate(stdin, HANG_S))
    return child.returncode, out, err


async def test_it_stands_for_the_command(world: World) -> None:
    async with world.session() as session:
        assert await run(world, session, "--", "pwd") == (0, f"{world.project}\n".encode(), b"")
        assert (await run(world, session, "-c", "cat; exit 7", stdin=b"in\0\xff"))[:2] == (
            7,
            b"in\0\xff",
        )
        assert (await run(world, session, "-lc", "echo $0-$1", "x", "y"))[:2] == (0, b"x-y\n")
        assert (await run(world, session, "-c", "kill -9 $$"))[0] == 137
        status, _, err = await run(world, session, "--", "no-such-program")
        assert status == 127
        assert b"no-such-program" in err
        assert (await run(world, session, "--profile", "read-only", "-c", "touch x"))[0] != 0
        assert (await run(world, session, "-c", "echo 1 > x"))[0] == 0
        assert await session.read("x") == b"1\n"
        assert (await run(world, session, "--session", "s0", "--", "true"))[0] == 125
        big = "x" * 100_000
        assert (await run(world, session, "--", "printf", "%s", big, big))[1] == 2 * big.encode()
    assert not (world.project / "x").exists()


async def test_files_directories_and_sockets_are_relayed_and_never_handed(world: World) -> None:
    outside = world.root / "outside"
    outside.write_text("readable\n")
    # Whoever has the descriptor can open its file anew, with the rights of the file's modes.
    attack = (
        "cat; for n in 0 1 2; do echo hacked > /proc/self/fd/$n; done 2>/dev/null; "
        "ls -l /proc/self/fd >&2"
    )
    async with world.session() as session:
        with outside.open("rb") as source, (world.root / "log").open("wb") as log:
            child = start(
                world, session, "-c", attack, stdin=source, stdout=log, stderr=subprocess.PIPE
            )
            _, err = await trio.to_thread.run_sync(lambda: child.communicate(timeout=HANG_S))
        shown = err.decode()
        assert str(world.root) not in shown
        assert shown.count("pipe:") >= 3
        assert outside.read_text() == "readable\n"
        folder = os.open(world.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            child = start(
                world, session, "-c", "ls /proc/self/fd/0/", stdin=folder, stderr=subprocess.PIPE
            )
            out, _ = await trio.to_thread.run_sync(lambda: child.communicate(timeout=HANG_S))
            assert out == b""
            assert child.returncode != 0
            # The control: handed to a program as it is, the folder is open to it.
            control = subprocess.run(
                ["ls", "/proc/self/fd/0/"], stdin=folder, capture_output=True, check=True
            )
            assert b"outside" in control.stdout
        finally:
            os.close(folder)


async def test_the_owner_takes_no_descriptor_but_pipes(world: World) -> None:
    import array
    import socket

    async with world.session() as session:
        words = os.memfd_create("words")
        os.write(words, b"/\0\0ls\0/proc/self/fd/0/\0")
        folder = os.open(world.root, os.O_RDONLY)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as owner:
            owner.connect(str(world.state / "run" / f"{session.id}.sh"))
            fds = array.array("i", [words, folder, folder, folder])
            owner.sendmsg([b"run"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            reply = await trio.to_thread.run_sync(owner.recv, 8192)
        os.close(words)
        os.close(folder)
        assert reply.startswith(b"error ")
        assert b"no pipe" in reply


async def test_signals_reach_the_command_and_its_death_is_the_clients(world: World) -> None:
    async with world.session() as session:
        script = "trap 'echo got; exit 5' TERM; echo on; while :; do sleep 0.02; done"
        child = start(world, session, "-c", script)
        assert child.stdout
        assert await trio.to_thread.run_sync(child.stdout.readline) == b"on\n"
        child.send_signal(signal.SIGTERM)
        with child:
            assert await trio.to_thread.run_sync(child.stdout.read) == b"got\n"
        assert child.returncode == 5


async def test_when_the_client_is_killed_the_command_ends_and_the_queue_goes_on(
    world: World,
) -> None:
    async with world.session() as session:
        child = start(world, session, "-c", "echo on; exec sleep 7401")
        assert child.stdout
        assert await trio.to_thread.run_sync(child.stdout.readline) == b"on\n"
        assert alive("7401")
        with child:
            child.kill()
        await until_gone("sleep\x007401")
        assert (await session.run("echo next"))["stdout"] == "next\n"


async def test_on_a_terminal_the_command_has_one_of_its_own(world: World) -> None:
    async with world.session() as session:
        master, slave = pty.openpty()
        child = start(
            world, session, "-c", "tty; stty -a | head -1; read l; echo =$l=; exit 3",
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        seen = b""

        def until(words: bytes) -> None:
            nonlocal seen
            while words not in seen:
                seen += os.read(master, 4096)

        with trio.fail_after(HANG_S):
            await trio.to_thread.run_sync(until, b"columns")
            os.write(master, b"typed\r")
            await trio.to_thread.run_sync(until, b"=typed=")
            assert await trio.to_thread.run_sync(child.wait) == 3
        os.close(master)
        assert b"/dev/pts/" in seen


def test_a_run_answers_it_too(world: World) -> None:
    script = "echo on; read l; cat seen"
    argv = ["-m", "deltabox", "run", "--review", "keep", "--", "sh", "-c", script]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, *argv],
        cwd=world.project,
        env=world.env,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
    ) as child:
        assert child.stdout
        assert child.stdout.readline() == b"on\n"
        # It waits in no queue: the command of `run` has its own place.
        done = subprocess.run(
            [str(native_program("sh")), "-c", "echo from outside > seen; echo ok"],
            cwd=world.project,
            env=world.env,
            capture_output=True,
            timeout=HANG_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        assert (done.returncode, done.stdout) == (0, b"ok\n"), done.stderr
        out, _ = child.communicate(b"\n", HANG_S)
    assert out == b"from outside\n"
