"""The command line's call against a real owner's socket, and against peers that misbehave."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from deltabox import errors
from deltabox.errors import DeltaboxError, Failed, ReviewConflict, SessionBusy
from deltabox.protocol import client, jsonrpc
from tests.server.test_socket import Params, echo, serving


@contextmanager
def peer(path: Path, act: Callable[[socket.socket], None]) -> Iterator[None]:
    """A peer of one connection that does `act` with it."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)

        def run() -> None:
            stream, _ = listener.accept()
            with stream:
                act(stream)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            thread.join(10)
            assert not thread.is_alive()


async def called(path: Path, method: str, value: Any = None) -> Any:
    return await trio.to_thread.run_sync(client.call, path, method, {"value": value})


async def test_a_call_brings_the_owners_result(tmp_path: Path) -> None:
    asked = {"path": "a\nb", "n": [1, None], "text": "é" * 100_000}
    async with serving(tmp_path / "s", echo=echo):
        assert await called(tmp_path / "s", "echo", asked) == asked


async def test_the_owners_error_comes_back_as_the_class_it_had_with_its_facts(
    tmp_path: Path,
) -> None:
    conflicts = [{"path": "a", "agent": "edited", "project": "deleted"}]

    async def refuse(call: Any, params: Params) -> Any:
        raise ReviewConflict("The project moved.", conflicts=conflicts)

    async with serving(tmp_path / "s", refuse=refuse):
        with pytest.raises(ReviewConflict, match=r"The project moved\.") as found:
            await called(tmp_path / "s", "refuse")
    assert found.value.data == {"conflicts": conflicts}


every_error = [
    cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, DeltaboxError) and cls is not DeltaboxError
]


@pytest.mark.parametrize("cls", every_error)
def test_every_error_survives_the_wire(cls: type[DeltaboxError]) -> None:
    sent = cls("What; what next.", path="x", sentence="a fact of this name")
    (frame,) = jsonrpc.Decoder().feed(jsonrpc.error_of(1, sent))
    assert isinstance(frame, jsonrpc.Response)
    assert frame.error is not None
    back = client.error_from(frame.error)
    assert (type(back), back.sentence, back.data) == (cls, sent.sentence, sent.data)


@pytest.mark.parametrize("data", [None, [], "text", 5, {"code": ["x"]}, {"code": "NEWER_THAN_US"}])
def test_an_error_of_another_version_is_still_told(data: Any) -> None:
    told = client.error_from({"code": -1, "message": "A sentence.", "data": data})
    assert type(told) is Failed
    assert told.sentence == "A sentence."


def test_nobody_there_is_said_with_the_place(tmp_path: Path) -> None:
    with pytest.raises(SessionBusy, match=str(tmp_path)):
        client.call(tmp_path / "none.sock", "m", {})


def test_a_socket_left_by_a_dead_owner_does_not_hang(tmp_path: Path) -> None:
    path = tmp_path / "stale.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    assert path.exists()
    with pytest.raises(SessionBusy, match="does not answer"):
        client.call(path, "m", {})


def test_an_owner_that_goes_away_in_the_middle_of_its_answer_is_said(tmp_path: Path) -> None:
    def act(stream: socket.socket) -> None:
        stream.recv(1 << 16)
        stream.sendall(jsonrpc.result(1, "x" * 1000)[:500])

    with peer(tmp_path / "s", act), pytest.raises(SessionBusy, match="went away"):
        client.call(tmp_path / "s", "m", {})


def test_answers_to_others_and_notifications_are_passed_over(tmp_path: Path) -> None:
    def act(stream: socket.socket) -> None:
        stream.recv(1 << 16)
        stream.sendall(b"garbage\n" + jsonrpc.notification("exec.output", {}))
        stream.sendall(jsonrpc.result(2, "another's") + jsonrpc.result(None, "nobody's"))
        for byte in jsonrpc.result(1, "mine"):
            stream.sendall(bytes([byte]))

    with peer(tmp_path / "s", act):
        assert client.call(tmp_path / "s", "m", {}) == "mine"


async def test_a_request_too_long_for_the_owner_is_refused_at_once_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ten minutes in earnest; here what would wait fails soon.
    monkeypatch.setattr(client, "CALL_TIMEOUT_S", 20)
    async with serving(tmp_path / "s", echo=echo):
        with pytest.raises(DeltaboxError, match="longer than") as found:
            await called(tmp_path / "s", "echo", "x" * jsonrpc.MAX_LINE)
    assert not isinstance(found.value, SessionBusy)


async def test_a_method_of_another_version_is_said_with_its_name(tmp_path: Path) -> None:
    async with serving(tmp_path / "s", echo=echo):
        with pytest.raises(DeltaboxError, match=r"newer\.method") as found:
            await called(tmp_path / "s", "newer.method")
    assert not isinstance(found.value, SessionBusy)


async def test_a_socket_deeper_than_sun_path_is_reached(tmp_path: Path) -> None:
    path = tmp_path.joinpath(*["d" * 50] * 4) / "s12345678.sock"
    assert len(str(path)) > 200
    async with serving(path, echo=echo):
        with socket.socket(socket.AF_UNIX) as plain, pytest.raises(OSError, match="too long"):
            plain.connect(str(path))
        assert await called(path, "echo", "here") == "here"
