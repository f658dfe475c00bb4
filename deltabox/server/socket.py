"""A session owner's unix socket: 0600, peer uid checked, one task per request.

Knows frames and errors, not what methods do. The socket file lives exactly as long as the context.
"""

import contextlib
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from deltabox.errors import DeltaboxError
from deltabox.protocol import jsonrpc

Handler = Callable[[str, dict[str, Any]], Awaitable[Any]]

# The verbs of a few terminals; more at once means a client in a loop.
MAX_CONNECTIONS = 32
MAX_IN_FLIGHT = 256
CHUNK = 64 * 1024


@asynccontextmanager
async def listening(path: Path, handle: Handler) -> AsyncIterator[None]:
    """Answer requests on `path` for the context; requests under way at its end are cancelled.

    Raises: OSError when the socket cannot be made.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _bound(path) as listener:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_accept, listener, handle)
            try:
                yield
            finally:
                nursery.cancel_scope.cancel()


@contextlib.contextmanager
def _bound(path: Path) -> Any:
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            # Stale: the session's lock, which we hold, says that nobody listens there.
            os.unlink(path.name, dir_fd=folder)
        # By descriptor, since sun_path holds 108 bytes and state folders can be deeper. The mode
        # is right from the first moment: a socket has what the umask leaves.
        before = os.umask(0o177)
        try:
            listener.bind(f"/proc/self/fd/{folder}/{path.name}")
        finally:
            os.umask(before)
        listener.listen(MAX_CONNECTIONS)
        yield trio.socket.from_stdlib_socket(listener)
    finally:
        listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=folder)
        os.close(folder)


async def _accept(listener: trio.socket.SocketType, handle: Handler) -> None:
    limiter = trio.CapacityLimiter(MAX_CONNECTIONS)
    async with trio.open_nursery() as nursery:
        while True:
            peer, _ = await listener.accept()
            if _peer_uid(peer) not in (os.geteuid(), 0):
                peer.close()
                continue
            nursery.start_soon(_connection, trio.SocketStream(peer), handle, limiter)


def _peer_uid(peer: trio.socket.SocketType) -> int:
    packed = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", packed)[1]
    return uid


async def _connection(
    stream: trio.SocketStream, handle: Handler, limiter: trio.CapacityLimiter
) -> None:
    decoder = jsonrpc.Decoder()
    sending = trio.Lock()
    in_flight = trio.Semaphore(MAX_IN_FLIGHT)

    async def send(line: bytes) -> None:
        async with sending:
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await stream.send_all(line)

    async def answer(frame: jsonrpc.Request) -> None:
        try:
            reply = jsonrpc.result(frame.id, await handle(frame.method, frame.params))
        except DeltaboxError as exc:
            reply = jsonrpc.error_of(frame.id, exc)
        finally:
            in_flight.release()
        if not frame.notification:
            await send(reply)

    async with limiter, stream, trio.open_nursery() as nursery:
        with contextlib.suppress(trio.BrokenResourceError):
            async for chunk in stream:
                for frame in decoder.feed(bytes(chunk)):
                    if isinstance(frame, jsonrpc.Request):
                        await in_flight.acquire()
                        nursery.start_soon(answer, frame)
                    elif isinstance(frame, jsonrpc.Malformed):
                        await send(jsonrpc.malformed(frame))
        # The peer has gone: what it asked for is not needed any more.
        nursery.cancel_scope.cancel()
