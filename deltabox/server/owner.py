"""What a session's owner answers: the protocol on one socket, deltabox-sh on another.

Joins the methods' tables. Must not know what any of them does.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from deltabox.config import Places
from deltabox.server import socket
from deltabox.server.host import Host, Live
from deltabox.session import coordinator
from deltabox.session.workspace import Workspace
from deltabox.store import Store

# The protocol is imported when somebody connects: most commands of `run` end before that, and
# would have paid 20 ms for it.
if TYPE_CHECKING:
    from deltabox.server.dispatch import Method


def table() -> "Mapping[str, Method]":
    """Every method of this version."""
    from deltabox.server import (
        events,
        fs_methods,
        review_methods,
        session_methods,
        shell_methods,
    )

    return {
        **session_methods.METHODS,
        **shell_methods.METHODS,
        **review_methods.METHODS,
        **fs_methods.METHODS,
        **events.METHODS,
    }


@asynccontextmanager
async def sockets(host: Host, live: Live) -> AsyncIterator[None]:
    """The session's two sockets, for the life of the context."""

    async def serve(peer: trio.socket.SocketType) -> None:
        from deltabox.server.connection import Connection

        await Connection(host, trio.SocketStream(peer), table()).serve()

    async def shell(peer: trio.socket.SocketType) -> None:
        from deltabox.server import shell_socket

        await shell_socket.serve(live, peer)

    path = coordinator.socket_of(host.where, live.id)
    async with (
        socket.listening(path, serve),
        socket.listening(shell_path(path), shell, kind=trio.socket.SOCK_SEQPACKET),
    ):
        yield


def shell_path(path: Path) -> Path:
    """deltabox-sh's socket beside the protocol's."""
    return path.with_suffix(".sh")


@asynccontextmanager
async def answering(store: Store, where: Places, workspace: Workspace) -> AsyncIterator[Live]:
    """Answer for a workspace that the caller owns and for no other (`deltabox run`)."""
    host = Host(store, where, None)
    async with host.adopt(workspace) as live, sockets(host, live):
        yield live
