"""A session owner's unix socket: 0600, peer uid checked, one task per request.

Knows frames and errors, not what methods do. The socket file lives exactly as long as the context.
"""

import contextlib
import logging
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

log = logging.getLogger(__name__)

Handler = Callable[[str, dict[str, Any]], Awaitable[Any]]

# The verbs of a few terminals; more at once means a client in a loop.
MAX_CONNECTIONS = 32
MAX_IN_FLIGHT = 256
CHUNK = 64 * 1024


@asynccontextmanager
async def listening(path: Path, handle: Handler) -> AsyncIterator[None]:
    """Answer requests on `path` for the context; requests under way at its end are cancelled.

    Raises: OSError when the socket cannot be made. The body's own exception comes out as it is, not
    in a group: no request can end the context.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    raised: BaseException | None = None
    with _bound(path) as listener:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_accept, listener, handle)
            try:
                yield
            except BaseException as exc:  # noqa: BLE001 - raised again below, cancellation too
                raised = exc
            finally:
                nursery.cancel_scope.cancel()
    if raised is not None:
        raise raised


@contextlib.contextmanager
def _bound(path: Path) -> Any:
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            # Stale: the session's lock, which we hold, says that nobody listens there.
            os.unlink(path.name, dir_fd=folder)
        # The socket file takes the descriptor's mode, so it is right from the first moment; a umask
        # for it would hold for what other threads create meanwhile.
        os.fchmod(listener.fileno(), 0o600)
        # By descriptor, since sun_path holds 108 bytes and state folders can be deeper.
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")
        listener.listen(MAX_CONNECTIONS)
        yield trio.SocketListener(trio.socket.from_stdlib_socket(listener))
    finally:
        listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=folder)
        os.close(folder)


async def _accept(listener: trio.SocketListener, handle: Handler) -> None:
    limiter = trio.CapacityLimiter(MAX_CONNECTIONS)

    async def serve(stream: trio.SocketStream) -> None:
        if _peer_uid(stream.socket) in (os.geteuid(), 0):
            await _connection(stream, handle, limiter)

    # It waits and tries again when descriptors run out, where a bare accept() would end the session.
    await trio.serve_listeners(serve, [listener])


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
        except Exception as exc:
            # A defect of ours, or a refusal of the kernel that nobody foresaw: it fails this request
            # alone, and never the session, whose command goes on and has the terminal.
            log.debug("%s failed inside.", frame.method, exc_info=True)
            words = (
                f"{frame.method} failed inside the session's owner ({type(exc).__name__}: {exc})."
            )
            reply = jsonrpc.error(frame.id, jsonrpc.INTERNAL_ERROR, words, {"code": "FAILED"})
        if not frame.notification:
            await send(reply)
        # After sending: who does not read the answers cannot pile them up here.
        in_flight.release()

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
