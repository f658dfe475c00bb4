"""Starting and ending processes: exact descriptors, empty environment, bounded ends, packets."""

import os
import signal

import pytest
import trio

from deltabox import process
from deltabox.errors import Failed
from deltabox.process import Control, end, native_program, open_process, run_trusted

SH = b"/bin/sh"


async def output(script: bytes, **how: object) -> bytes:
    reader, writer = os.pipe()
    child = await open_process([SH, b"-c", script], stdout=writer, **how)  # type: ignore[arg-type]
    os.close(writer)
    async with trio.lowlevel.FdStream(reader) as stream:
        data = b"".join([bytes(chunk) async for chunk in stream])
    assert await child.wait() == 0
    return data


async def test_child_has_only_the_named_descriptors_and_no_environment() -> None:
    inheritable = os.open("/", os.O_RDONLY)
    os.set_inheritable(inheritable, True)
    given = os.open("/usr", os.O_RDONLY | os.O_CLOEXEC)
    try:
        listing = (await output(b"echo /proc/$$/fd/*; pwd", fds=[given])).split()
        numbers = {int(word.rpartition(b"/")[2]) for word in listing[:-1]}
        listing_itself = 3
        assert numbers == {0, 1, 2, listing_itself, given}
        assert inheritable > listing_itself
        assert listing[-1] == b"/"
    finally:
        os.close(inheritable)
        os.close(given)
    assert await output(b"/usr/bin/env | grep -v -e ^PWD= -e ^_= -e ^SHLVL= || :") == b""
    assert await output(b"echo $A", env={"A": "b"}) == b"b\n"


async def test_end_waits_for_grace_and_then_kills() -> None:
    child = await open_process([b"/bin/sleep", b"1000"])
    await end(child)
    assert child.returncode == -signal.SIGKILL
    reader, writer = os.pipe()
    obedient = await open_process([SH, b"-c", b"read x; exit 5"], stdin=reader)
    os.close(reader)
    os.close(writer)
    await end(obedient, grace_s=10)
    assert obedient.returncode == 5


async def test_end_is_not_cut_short_by_cancellation() -> None:
    child = await open_process([b"/bin/sleep", b"1000"])
    with trio.CancelScope() as scope:
        scope.cancel()
        await end(child, grace_s=0.01)
    assert child.returncode == -signal.SIGKILL


async def test_end_says_when_a_process_does_not_die(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "END_TIMEOUT_S", 0.0)
    child = await open_process([b"/bin/sleep", b"1000"])
    try:
        with pytest.raises(Failed, match="did not end"):
            # Already cancelled by its own zero deadline, it cannot have seen the end.
            await end(child)
    finally:
        monkeypatch.undo()
        await end(child)


async def test_packets_carry_descriptors_and_the_senders_pid() -> None:
    ours, theirs = Control.pair()
    other = Control(theirs)
    reader, writer = os.pipe()
    await ours.send(b"take", [reader])
    os.close(reader)
    message = await other.receive()
    assert message is not None
    assert (message.data, message.pid, len(message.fds)) == (b"take", os.getpid(), 1)
    assert not os.get_inheritable(message.fds[0])
    os.write(writer, b"x")
    assert os.read(message.fds[0], 1) == b"x"
    for fd in (writer, *message.fds):
        os.close(fd)
    await ours.send(b"a" * 5000)
    await ours.send(b"b")
    first, second = await other.receive(), await other.receive()
    assert first is not None
    assert second is not None
    assert (len(first.data), second.data) == (5000, b"b")
    ours.close()
    ours.close()
    assert await other.receive() is None
    with pytest.raises(BrokenPipeError):
        await other.send(b"late")
    other.close()


def test_trusted_program_answers_or_is_reported() -> None:
    assert run_trusted([SH, b"-c", b"echo ok"]) == b"ok\n"
    with pytest.raises(Failed, match="ended with 3: why"):
        run_trusted([SH, b"-c", b"echo why >&2; exit 3"])
    with pytest.raises(Failed, match="did not answer"):
        run_trusted([b"/bin/sleep", b"1000"], timeout_s=0.01)


def test_missing_native_program_is_said_with_the_remedy() -> None:
    with pytest.raises(Failed, match=r"deltabox-nothing is missing.*native/build\.py"):
        native_program("nothing")
