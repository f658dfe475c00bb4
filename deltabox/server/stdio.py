"""`deltabox serve`: a coordinator on this process's standard input and output.

Owns descriptors 0 and 1: the wire is moved away from them before anything else runs, so that a stray
print goes to stderr and a child inherits neither. Must not know methods.
"""

import contextlib
import os
import signal
from types import TracebackType
from typing import Self

import trio
from trio.lowlevel import FdStream

from deltabox import process
from deltabox.config import Places
from deltabox.protocol import messages as m
from deltabox.server import owner
from deltabox.server.connection import Connection
from deltabox.server.host import open_host
from deltabox.session import project as projects


class Stdio:
    """The two descriptors under private numbers; 0 is /dev/null and 1 is stderr from then on."""

    def __init__(self) -> None:
        self._in = FdStream(_moved(0))
        self._out = FdStream(_moved(1))
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        os.dup2(null, 0, inheritable=False)
        os.close(null)
        os.dup2(2, 1, inheritable=False)

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._in.receive_some(max_bytes)

    async def send_all(self, data: bytes) -> None:
        await self._out.send_all(data)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Also gives the descriptors back their blocking mode, which a shell's terminal shares.
        with trio.CancelScope(shield=True):
            await self._in.aclose()
            await self._out.aclose()


def _moved(fd: int) -> int:
    """A private copy above the standard ones, close-on-exec."""
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)


async def serve(where: Places, *, stop_grace_ms: int = m.STOP_GRACE_MS) -> None:
    """Until end of file or a signal; then a graceful stop.

    The stop: requests under way have the grace to be done, then commands get TERM and the grace
    again, then the end. Reviews stay open. A second signal ends it at once.
    """
    grace_s = stop_grace_ms / 1000
    process.make_undumpable()
    async with Stdio() as stream:
        with projects.open_state(where) as store:
            async with open_host(store, where, grace_s=grace_s) as host:
                host.listen = lambda live: owner.sockets(host, live)
                connection = Connection(host, stream, owner.table())
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_until_signal, connection, nursery.cancel_scope)
                    await connection.serve(settle_s=grace_s)
                    nursery.cancel_scope.cancel()


async def _until_signal(connection: Connection, all_of_it: trio.CancelScope) -> None:
    wanted = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    # What the receiver puts back at its end: by then a further signal has nothing to ask for, and
    # the default would turn an orderly stop into a death.
    for number in wanted:
        signal.signal(number, signal.SIG_IGN)
    with trio.open_signal_receiver(*wanted) as received:
        async for _ in received:
            connection.stop()
            break
        async for _ in received:
            all_of_it.cancel()


def run(where: Places, *, stop_grace_ms: int = m.STOP_GRACE_MS) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        trio.run(_run, where, stop_grace_ms)


async def _run(where: Places, stop_grace_ms: int) -> None:
    await serve(where, stop_grace_ms=stop_grace_ms)
