"""A session owner's unix sockets: 0600, peer uid checked, one task per connection.

Knows neither frames nor methods. The socket file lives exactly as long as the context.
"""

import contextlib
import errno
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from deltabox.session.tasks import beside

Serve = Callable[[trio.socket.SocketType], Awaitable[None]]

# Terminals' verbs and commands by deltabox-sh (a parallel build starts tens); more wait.
MAX_CONNECTIONS = 256
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
AGAIN_S = 0.1


@asynccontextmanager
async def listening(
    path: Path, serve: Serve, *, kind: int = socket.SOCK_STREAM
) -> AsyncIterator[None]:
    """Serve connections to `path` for the context; those that are left at its end are cancelled.

    Raises: OSError when the socket cannot be made. The body's own exception comes out as it is, not
    in a group: no request can end the context.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _bound(path, kind) as listener:
        async with beside() as nursery:
            nursery.start_soon(_accept, listener, serve)
            yield


@contextlib.contextmanager
def _bound(path: Path, kind: int) -> Any:
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    listener = socket.socket(socket.AF_UNIX, kind)
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
        yield trio.socket.from_stdlib_socket(listener)
    finally:
        listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=folder)
        os.close(folder)


async def _accept(listener: trio.socket.SocketType, serve: Serve) -> None:
    limiter = trio.CapacityLimiter(MAX_CONNECTIONS)

    async def checked(peer: trio.socket.SocketType) -> None:
        with peer:
            if _peer_uid(peer) in (os.geteuid(), 0):
                async with limiter:
                    await serve(peer)

    async with trio.open_nursery() as nursery:
        while True:
            try:
                peer, _ = await listener.accept()
            except OSError as exc:
                if exc.errno not in NO_ROOM:
                    raise
                await trio.sleep(AGAIN_S)  # descriptors have run out; that ends no session
                continue
            nursery.start_soon(checked, peer)


def _peer_uid(peer: trio.socket.SocketType) -> int:
    packed = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", packed)[1]
    return uid
