"""The owner's socket: who may come in, what a client can break, and what is left behind."""

import os
import resource
import socket
import stat
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from deltabox.config import places
from deltabox.errors import NotFound, Refused
from deltabox.protocol import jsonrpc
from deltabox.protocol.jsonrpc import Decoder, Frame, Response
from deltabox.protocol.messages import MAX_IN_FLIGHT
from deltabox.server import socket as server
from deltabox.server.connection import Connection
from deltabox.server.dispatch import Method
from deltabox.server.host import Host
from deltabox.store import Store
from tests.places import run_python


class Params(msgspec.Struct):
    value: Any = None


Handle = Callable[[Any, Params], Awaitable[Any]]


async def echo(call: Any, params: Params) -> Any:
    return params.value


async def hang_up(peer: trio.socket.SocketType) -> None:
    return


@asynccontextmanager
async def serving(path: Path, **handles: Handle) -> AsyncIterator[None]:
    """The owner's socket with methods of our own making behind the real connection."""
    home = next(folder for folder in path.parents if folder.is_dir())
    where = places({"HOME": str(home), "DELTABOX_STATE_DIR": str(home / "state")})
    where.state.mkdir(exist_ok=True)
    methods = {name: Method(Params, handle, is_read=True) for name, handle in handles.items()}
    with Store.open(where.database) as store:
        host = Host(store, where, None)

        async def serve(peer: trio.socket.SocketType) -> None:
            await Connection(host, trio.SocketStream(peer), methods).serve()

        async with server.listening(path, serve):
            yield


def ask(ident: str | int, method: str, value: Any = None) -> bytes:
    return jsonrpc.request(ident, method, {"value": value})


class Client:
    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._decoder = Decoder()
        self._frames: list[Frame] = []

    async def send(self, *lines: bytes) -> None:
        await self.stream.send_all(b"".join(lines))

    async def answer(self) -> Response:
        while not self._frames:
            chunk = await self.stream.receive_some()
            assert chunk, "the owner closed the connection"
            self._frames += self._decoder.feed(bytes(chunk))
        frame = self._frames.pop(0)
        assert isinstance(frame, Response)
        return frame

    async def error(self) -> dict[str, Any]:
        error = (await self.answer()).error
        assert error is not None
        return error


@asynccontextmanager
async def connected(path: Path) -> AsyncIterator[Client]:
    async with await trio.open_unix_socket(str(path)) as stream:
        yield Client(stream)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


# the file


async def test_the_socket_is_its_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        async with server.listening(tmp_path / "run" / "s", hang_up):
            assert stat.S_IMODE(os.stat(tmp_path / "run" / "s").st_mode) == 0o600
            assert stat.S_IMODE(os.stat(tmp_path / "run").st_mode) == 0o700
            # The control: a socket made without care is everybody's.
            with socket.socket(socket.AF_UNIX) as plain:
                plain.bind(str(tmp_path / "plain"))
            assert stat.S_IMODE(os.stat(tmp_path / "plain").st_mode) == 0o777
    finally:
        os.umask(before)


async def test_nothing_is_left_after_the_context(tmp_path: Path) -> None:
    before = open_fds()
    async with serving(tmp_path / "s", echo=echo), connected(tmp_path / "s") as client:
        await client.send(ask(1, "echo"))
        await client.answer()
    assert not os.path.lexists(tmp_path / "s")
    assert open_fds() == before


async def test_a_socket_left_by_a_dead_owner_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "s"))
    with pytest.raises(ConnectionRefusedError):
        await trio.open_unix_socket(str(tmp_path / "s"))
    async with serving(tmp_path / "s", echo=echo), connected(tmp_path / "s") as client:
        await client.send(ask(1, "echo", "here"))
        assert await client.answer() == Response(1, "here")


async def test_a_link_in_the_sockets_place_is_replaced_and_its_target_stays(
    tmp_path: Path,
) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "s").symlink_to("precious")
    async with server.listening(tmp_path / "s", hang_up):
        assert stat.S_ISSOCK(os.lstat(tmp_path / "s").st_mode)
    assert (tmp_path / "precious").read_text() == "kept"


async def test_a_folder_deeper_than_sun_path_serves(tmp_path: Path) -> None:
    path = tmp_path.joinpath(*["d" * 50] * 4) / "s12345678.sock"
    assert len(str(path)) > 200
    before = open_fds()
    async with server.listening(path, hang_up):
        with socket.socket(socket.AF_UNIX) as plain, pytest.raises(OSError, match="too long"):
            plain.connect(str(path))
        assert stat.S_ISSOCK(path.lstat().st_mode)
    assert not path.exists()
    assert open_fds() == before


async def test_an_error_of_the_body_comes_out_as_it_is(tmp_path: Path) -> None:
    # Not in an ExceptionGroup: the command line would show a traceback for it.
    with pytest.raises(Refused):
        async with server.listening(tmp_path / "s", hang_up):
            raise Refused("No.")


async def test_a_cancelled_body_ends_the_context(tmp_path: Path) -> None:
    with trio.CancelScope() as scope:
        async with server.listening(tmp_path / "s", hang_up):
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert not os.path.lexists(tmp_path / "s")


async def test_more_connections_than_are_served_at_once_wait_for_their_turn(
    tmp_path: Path,
) -> None:
    most = now = served = 0

    async def serve(peer: trio.socket.SocketType) -> None:
        nonlocal most, now
        now += 1
        most = max(most, now)
        await peer.send(await peer.recv(1))
        now -= 1

    def connect() -> socket.socket:
        plain = socket.socket(socket.AF_UNIX)
        plain.connect(str(tmp_path / "s"))
        return plain

    async def one(plain: socket.socket) -> None:
        nonlocal served
        async with trio.SocketStream(trio.socket.from_stdlib_socket(plain)) as stream:
            await stream.send_all(b"x")
            assert await stream.receive_some() == b"x"
            served += 1

    many = server.MAX_CONNECTIONS + 20
    async with server.listening(tmp_path / "s", serve), trio.open_nursery() as nursery:
        # All are there before the first is answered.
        clients = [await trio.to_thread.run_sync(connect) for _ in range(many)]
        await trio.testing.wait_all_tasks_blocked(0.01)
        for plain in clients:
            nursery.start_soon(one, plain)
    assert served == many
    assert most == server.MAX_CONNECTIONS


async def test_when_descriptors_run_out_the_session_goes_on(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with serving(tmp_path / "s", echo=echo):
        with socket.socket(socket.AF_UNIX) as waiting:
            waiting.settimeout(20)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            try:
                with pytest.raises(OSError, match="Too many open files"):
                    os.dup(0)  # the control: there is no descriptor left for accept()
                waiting.connect(str(tmp_path / "s"))
                await trio.testing.wait_all_tasks_blocked(0.01)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            waiting.sendall(ask(1, "echo", "late"))
            reply = await trio.to_thread.run_sync(waiting.recv, 1000)
    assert list(Decoder().feed(reply)) == [Response(1, "late")]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
async def test_another_user_is_not_served_even_where_the_mode_lets_them_in() -> None:
    served = []

    async def serve(peer: trio.socket.SocketType) -> None:
        served.append(await peer.recv(100))
        await peer.send(b"served")

    code = (
        "import os, socket\n"
        "uid = int(sys.argv[2])\n"
        "os.setgid(uid); os.setuid(uid)\n"
        "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])\n"
        "try:\n s.sendall(b'%d' % uid)\n print(s.recv(1000).decode())\n"
        "except OSError as exc: print(exc)\n"
    )
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own is closed to others
        os.chmod(folder, 0o755)
        async with server.listening(Path(folder, "s"), serve):
            os.chmod(Path(folder, "s"), 0o666)
            us = await trio.to_thread.run_sync(run_python, code, Path(folder, "s"), 0)
            them = await trio.to_thread.run_sync(run_python, code, Path(folder, "s"), 65534)
    assert us == "served"
    assert them != "served"
    assert served == [b"0"]


# the protocol on it


async def test_requests_run_side_by_side_and_answers_name_theirs(tmp_path: Path) -> None:
    gate = trio.Event()

    async def slow(call: Any, params: Params) -> Any:
        await gate.wait()
        return "slow"

    async with (
        serving(tmp_path / "s", slow=slow, echo=echo),
        connected(tmp_path / "s") as client,
    ):
        await client.send(ask("s", "slow"), ask("f", "echo", "fast"))
        assert await client.answer() == Response("f", "fast")
        gate.set()
        assert await client.answer() == Response("s", "slow")


async def test_a_notification_is_handled_and_not_answered(tmp_path: Path) -> None:
    seen = []

    async def note(call: Any, params: Params) -> Any:
        seen.append(params.value)
        return "unheard"

    async with serving(tmp_path / "s", note=note), connected(tmp_path / "s") as client:
        await client.send(jsonrpc.notification("note", {"value": 1}), ask(7, "note", 2))
        assert await client.answer() == Response(7, "unheard")
    assert sorted(seen) == [1, 2]


async def test_a_deliberate_error_is_an_answer_with_its_facts(tmp_path: Path) -> None:
    async def refuse(call: Any, params: Params) -> Any:
        raise NotFound("Nothing there.", path="x")

    async with serving(tmp_path / "s", refuse=refuse), connected(tmp_path / "s") as client:
        await client.send(ask(1, "refuse"))
        error = await client.error()
    assert (error["code"], error["message"]) == (NotFound.rpc_code, "Nothing there.")
    assert error["data"]["path"] == "x"


@pytest.mark.parametrize(
    "defect",
    [
        KeyError("x"),
        OSError(5, "Input/output error"),
        ExceptionGroup("several", [TypeError("t"), ValueError("v")]),
        NotFound("a name that is no text: \udcff", path="\udcff"),
        ValueError("\udcff"),
    ],
)
async def test_a_defect_fails_its_request_and_neither_the_connection_nor_the_session(
    tmp_path: Path, defect: Exception
) -> None:
    async def bad(call: Any, params: Params) -> Any:
        raise defect

    async with serving(tmp_path / "s", bad=bad, echo=echo):
        async with connected(tmp_path / "s") as client:
            await client.send(ask(1, "bad"))
            await client.error()
            await client.send(ask(2, "echo", "good"))
            assert await client.answer() == Response(2, "good")
        async with connected(tmp_path / "s") as client:
            await client.send(ask(3, "echo", "still"))
            assert await client.answer() == Response(3, "still")


async def test_a_result_that_is_no_json_fails_its_request_alone(tmp_path: Path) -> None:
    async def bad(call: Any, params: Params) -> Any:
        return object()

    async with serving(tmp_path / "s", bad=bad, echo=echo), connected(tmp_path / "s") as client:
        await client.send(ask(1, "bad"))
        assert (await client.error())["code"] == jsonrpc.INTERNAL_ERROR
        await client.send(ask(2, "echo", "good"))
        assert await client.answer() == Response(2, "good")


async def test_garbage_and_huge_frames_are_answered_and_the_connection_goes_on(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path / "s", echo=echo), connected(tmp_path / "s") as client:
        await client.send(b"\xff\xfe{]\n")
        assert (await client.error())["code"] == jsonrpc.PARSE_ERROR
        await client.send(b"x" * (jsonrpc.MAX_LINE + 1), b"\n")
        limit = {"code": "LINE_TOO_LONG", "limit": jsonrpc.MAX_LINE}
        assert (await client.error())["data"] == limit
        await client.send(ask(1, "echo", "on"))
        assert await client.answer() == Response(1, "on")


async def test_a_client_that_goes_away_cancels_what_it_asked_for(tmp_path: Path) -> None:
    begun, cancelled = trio.Event(), trio.Event()

    async def endless(call: Any, params: Params) -> Any:
        begun.set()
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()

    async with serving(tmp_path / "s", endless=endless):
        async with connected(tmp_path / "s") as client:
            await client.send(ask(1, "endless"))
            await begun.wait()
            assert not cancelled.is_set()
        with trio.fail_after(20):
            await cancelled.wait()


async def test_a_client_that_does_not_read_cannot_pile_up_answers(tmp_path: Path) -> None:
    answered = 0

    async def large(call: Any, params: Params) -> Any:
        nonlocal answered
        answered += 1
        return "x" * 20_000

    # More than can be in flight, and more bytes of answers than the kernel keeps for a client.
    many = MAX_IN_FLIGHT * 4
    found: dict[int, bool] = {}
    async with (
        serving(tmp_path / "s", large=large),
        connected(tmp_path / "s") as client,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(client.send, *(ask(n, "large") for n in range(many)))
        await trio.testing.wait_all_tasks_blocked(0.05)
        piled = answered
        for _ in range(many):
            reply = await client.answer()
            assert isinstance(reply.id, int)
            found[reply.id] = reply.error is None
    assert 0 < piled <= MAX_IN_FLIGHT + 50  # and what fits into the kernel's buffer
    assert sorted(found) == list(range(many))
    assert sum(found.values()) == answered
