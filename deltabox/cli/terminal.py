"""The user's terminal and pipes beside a running command: raw mode, relays, resize, suspend.

The user's terminal never enters the sandbox: bytes are copied between it and the command's own
pty. Descriptors 0 to 2 belong to other processes too, so they are never switched to non-blocking.
Must not decide anything about the review.
"""

import contextlib
import fcntl
import os
import select
import signal
import stat
import struct
import termios
import tty
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol

import trio

CHUNK = 64 * 1024


class Readable(Protocol):
    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray: ...


class Writable(Protocol):
    async def send_all(self, data: bytes) -> None: ...

    async def aclose(self) -> None: ...


def size_of(fd: int) -> tuple[int, int]:
    """Rows and columns; 24 by 80 where the terminal does not say."""
    try:
        rows, columns = struct.unpack("HHHH", fcntl.ioctl(fd, termios.TIOCGWINSZ, b"\0" * 8))[:2]
    except OSError:
        return 24, 80
    return rows or 24, columns or 80


@contextmanager
def raw(fd: int) -> Iterator[Callable[[], contextlib.AbstractContextManager[None]]]:
    """Raw mode for the context; yields a way to leave it for a moment (suspend)."""
    saved = termios.tcgetattr(fd)

    @contextmanager
    def cooked() -> Iterator[None]:
        termios.tcsetattr(fd, termios.TCSADRAIN, saved)
        try:
            yield
        finally:
            tty.setraw(fd, termios.TCSADRAIN)

    tty.setraw(fd, termios.TCSADRAIN)
    try:
        yield cooked
    finally:
        # FLUSH, not DRAIN: keys typed at a program that is gone are not for the shell.
        termios.tcsetattr(fd, termios.TCSAFLUSH, saved)


async def read_some(fd: int) -> bytes:
    """Some bytes of a descriptor that must stay blocking; b"" at its end.

    Cancellation: nothing is lost for terminals and pipes; for files and devices, which epoll does
    not take, the thread's read is thrown away, which nobody can notice.
    """
    mode = os.fstat(fd).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(fd)):
        return await trio.to_thread.run_sync(os.read, fd, CHUNK, abandon_on_cancel=True)
    while True:
        await trio.lowlevel.wait_readable(fd)
        # Another process may have taken the bytes; ask again instead of blocking the loop.
        if select.select([fd], [], [], 0)[0]:
            try:
                return os.read(fd, CHUNK)
            except OSError:  # a hung-up terminal reads as EIO
                return b""


async def write_all(fd: int, data: bytes) -> bool:
    """Write in a thread, since the reader may be slow; False when the reader has gone."""

    def write() -> bool:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(fd, view) :]
            except BlockingIOError:  # somebody else made it non-blocking
                select.select([], [fd], [])
            except OSError:
                return False
        return True

    return await trio.to_thread.run_sync(write)


async def feed(fd: int, sink: Writable) -> None:
    """Copy `fd` into `sink` until its end, then close the sink. Ends quietly when the sink is gone."""
    try:
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while data := await read_some(fd):
                await sink.send_all(data)
    finally:
        await sink.aclose()


async def drain(source: Readable, fd: int) -> None:
    """Copy `source` to `fd` until its end. When the reader of `fd` has gone, the rest is dropped."""
    alive = True
    with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError, OSError):
        while data := await source.receive_some(CHUNK):
            alive = alive and await write_all(fd, bytes(data))


@asynccontextmanager
async def forwarding(send: Callable[[int], None], *, signals: set[int]) -> AsyncIterator[None]:
    """Pass `signals` that reach us on to the command for the context."""
    async with trio.open_nursery() as nursery:

        async def loop() -> None:
            with trio.open_signal_receiver(*(signal.Signals(s) for s in signals)) as received:
                async for number in received:
                    send(number)

        nursery.start_soon(loop)
        try:
            yield
        finally:
            nursery.cancel_scope.cancel()
