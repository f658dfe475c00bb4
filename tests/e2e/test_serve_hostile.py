"""What a broken or hostile client can do to a coordinator: get errors, never hang it or kill others."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import trio

from deltabox.server.stdio import Stdio
from tests.e2e.serving import HANG_S, Raw, World, until_gone
from tests.places import run_python

pytestmark = [pytest.mark.overlay, pytest.mark.bwrap]

MIB = 1 << 20


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World.make(tmp_path)


def error(found: Any) -> tuple[Any, int, str]:
    return found["id"], found["error"]["code"], found["error"].get("data", {}).get("code", "")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"garbage", (None, -32700, "")),
        (b'{"id":1,"method":', (None, -32700, "")),
        (b"\xff\xfe\x00", (None, -32700, "")),
        (b'{"id":"\\ud800","method":"session.list"}', (None, -32700, "")),
        (b"[]", (None, -32600, "")),
        (b"7", (None, -32600, "")),
        (b'{"id":{},"method":"session.list"}', (None, -32600, "")),
        (b'{"id":1,"method":7}', (1, -32600, "")),
        (b'{"id":1,"method":"session.list","params":[1]}', (1, -32602, "")),
        (b'{"id":1,"method":"no.such","params":{}}', (1, -32601, "METHOD_NOT_FOUND")),
        (b'{"id":1,"method":"session.exec","params":{}}', (1, -32602, "INVALID_PARAMS")),
        (
            b'{"id":1,"method":"session.exec","params":{"session":"s","argv":"ls"}}',
            (1, -32602, "INVALID_PARAMS"),
        ),
        (
            b'{"id":1,"method":"session.exec","params":{"session":"s","timeoutMs":1e99,"command":""}}',
            (1, -32602, "INVALID_PARAMS"),
        ),
        (
            b'{"id":1,"method":"session.exec","params":{"session":"../..","command":"true"}}',
            (1, -32012, "SESSION_NOT_FOUND"),
        ),
        (
            b'{"id":1,"method":"x","params":' + b'{"a":' * 100 + b"1" + b"}" * 101,
            (None, -32600, "TOO_DEEP"),
        ),
        (b"[" * 3_000_000, (None, -32600, "TOO_DEEP")),
        (b'{"id":1,"method":"' + b"x" * (16 * MIB) + b'"}', (None, -32600, "LINE_TOO_LONG")),
    ],
)
def test_a_bad_line_is_answered_and_the_stream_goes_on(
    world: World, line: bytes, expected: tuple[Any, int, str]
) -> None:
    with world.raw() as raw:
        raw.send(line + b"\n")
        assert error(raw.line()) == expected
        assert raw.call("session.list") == {"sessions": []}
        assert raw.ends() == (0, b"")


def test_a_line_of_100_mib_costs_no_memory(world: World) -> None:
    with world.raw() as raw:
        raw.call("session.list")
        before = _peak_kib(raw)
        for _ in range(100):
            raw.send(b"x" * MIB)
        raw.send(b"\n")
        assert error(raw.line())[2] == "LINE_TOO_LONG"
        assert raw.call("session.list") == {"sessions": []}
        assert _peak_kib(raw) - before < 40 * 1024  # one line of the limit, twice


def _peak_kib(raw: Raw) -> int:
    for line in Path(f"/proc/{raw.child.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1])
    raise AssertionError("no VmHWM")


def test_lines_in_halves_and_many_at_once_are_the_same(world: World) -> None:
    with world.raw() as raw:
        line = b'{"id":"h\xc3\xa9","method":"session.list"}\n'
        for at in range(len(line)):
            raw.send(line[at : at + 1])
        assert raw.line()["id"] == "hé"
        raw.send(line.replace(b"h", b"1") + line.replace(b"h", b"2") + b"\n\n  \n")
        assert {raw.line()["id"], raw.line()["id"]} == {"1é", "2é"}
        # The half of a line at the end of everything is no line.
        raw.send(b'{"id":9,"method":"session.list"}')
        assert raw.ends() == (0, b"")


def test_an_id_in_use_is_refused_and_the_first_request_goes_on(world: World) -> None:
    with world.raw() as raw:
        session = raw.call("session.start", projectRoot=str(world.project))["session"]
        params = {
            "session": session,
            "command": "read line; echo done",
            "stdin": "pipe",
            "execId": "x",
        }
        raw.send(
            json.dumps({"id": 50, "method": "session.exec", "params": params}).encode() + b"\n"
        )
        raw.send(b'{"id":50,"method":"session.list"}\n')
        assert error(raw.line()) == (50, -32600, "DUPLICATE_ID")
        assert len(raw.call("exec.list", session=session)["execs"]) == 1
        ident = raw.post("exec.write", session=session, execId="x", data="\n")
        answers = [raw.line(), raw.line()]
        assert {a["id"] for a in answers} == {50, ident}
        assert next(a for a in answers if a["id"] == 50)["result"]["stdout"] == "done\n"
        raw.send(b'{"id":50,"method":"session.list"}\n')
        assert "result" in raw.line()


def test_more_requests_than_allowed_are_refused_and_can_still_be_cancelled(world: World) -> None:
    with world.raw() as raw:
        session = raw.call("session.start", projectRoot=str(world.project))["session"]
        raw.post("session.exec", session=session, command="sleep 7301")
        first = raw._ids
        while "running" not in str(raw.call("exec.list", session=session)):
            pass
        others = raw._ids + 1
        for _ in range(255):
            raw.post("session.exec", session=session, command="touch never")
        refused = raw.post("session.list")
        assert error(raw.line()) == (refused, -32000, "TOO_MANY_REQUESTS")
        asked = [first, *range(others, others + 255)]
        for ident in reversed(asked):
            raw.send(b'{"method":"$/cancel","params":{"id":%d}}\n' % ident)
        answers = [raw.line() for _ in range(256)]
        assert {a["id"] for a in answers} == set(asked)
        assert [a["result"]["cancelled"] for a in answers if "result" in a] == [True]
        assert {error(a)[2] for a in answers if "error" in a} == {"CANCELLED"}
        assert (
            raw.call("session.exec", session=session, command="ls")["stdout"] == "a.txt\nb.txt\n"
        )


def test_a_host_that_stops_reading_holds_its_own_commands_up_and_costs_no_memory(
    world: World,
) -> None:
    with world.raw() as raw:
        session = raw.call("session.start", projectRoot=str(world.project))["session"]
        command = "head -c 200000000 /dev/zero | tr '\\0' x"
        before = _peak_kib(raw)
        raw.post("session.exec", session=session, command=command, stream=True)
        size = 0
        assert _until_blocked(raw)
        assert _peak_kib(raw) - before < 16 * 1024
        # It goes on where it stood, and nothing is missing.
        while (found := raw.line()).get("method") != "exec.exit":
            size += len(found.get("params", {}).get("data", ""))
        assert size == found["params"]["bytes"]["stdout"] == 200_000_000
        assert _peak_kib(raw) - before < 16 * 1024


def _until_blocked(raw: Raw) -> bool:
    """Wait until the pipe to us is full: a pipe of 64 KiB holds that many bytes unread."""
    import fcntl
    import struct
    import termios

    assert raw.child.stdout
    size = fcntl.fcntl(raw.child.stdout, fcntl.F_GETPIPE_SZ)
    unread = 0
    while unread < size - 4096:
        unread = struct.unpack("i", fcntl.ioctl(raw.child.stdout, termios.FIONREAD, b"\0" * 4))[0]
    return True


async def test_a_host_that_closes_only_its_reading_end_ends_the_coordinator(world: World) -> None:
    with world.raw() as raw:
        session = raw.call("session.start", projectRoot=str(world.project))["session"]
        raw.post("session.exec", session=session, command="yes 7302", stream=True)
        raw.line()
        assert raw.child.stdout
        raw.child.stdout.close()
        assert raw.child.wait(HANG_S) == 0
    await until_gone("7302")


async def test_a_second_signal_ends_a_stop_that_takes_its_time(world: World) -> None:
    with world.raw() as raw:
        session = raw.call("session.start", projectRoot=str(world.project))["session"]
        raw.post(
            "session.exec",
            session=session,
            command="trap '' TERM; echo on; sleep 7303",
            stream=True,
        )
        while raw.line().get("method") != "exec.output":
            pass
        raw.child.send_signal(signal.SIGTERM)
        raw.child.send_signal(signal.SIGTERM)
        assert raw.child.wait(HANG_S) == 0
    await until_gone("7303")


def test_stray_prints_never_reach_the_wire() -> None:
    code = (
        "import os, trio\n"
        "from deltabox.server.stdio import Stdio\n"
        "async def main():\n"
        "    async with Stdio() as wire:\n"
        "        print('stray', flush=True)\n"
        "        os.write(1, b'stray')\n"
        "        os.system('echo stray')\n"
        "        await wire.send_all(b'the wire')\n"
        "trio.run(main)\n"
    )
    assert Stdio.__doc__
    assert run_python(code) == "the wire"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may look into everything")
async def test_other_processes_of_the_user_cannot_look_into_the_coordinator(world: World) -> None:
    with world.raw() as raw:
        raw.call("session.list")
        with pytest.raises(PermissionError):
            Path(f"/proc/{raw.child.pid}/environ").read_bytes()
        with pytest.raises(PermissionError):
            os.listdir(f"/proc/{raw.child.pid}/fd")
        assert os.listdir("/proc/self/fd")  # the control: ordinary processes can be looked into
        session = raw.call("session.start", projectRoot=str(world.project))["session"]
        assert (
            raw.call("session.exec", session=session, command="echo works")["stdout"] == "works\n"
        )


async def test_a_socket_client_that_goes_ends_its_foreground_commands_alone(world: World) -> None:
    async with world.session() as session:
        path = world.state / "run" / f"{session.id}.sock"

        async with await trio.open_unix_socket(str(path)) as stream:
            for line in (
                {"command": "echo f; sleep 7304", "stream": True},
                {"command": "echo b; sleep 7305", "background": True, "execId": "stays"},
            ):
                params = {"session": session.id, **line}
                request = {"id": 1 + len(line), "method": "session.exec", "params": params}
                await stream.send_all(json.dumps(request).encode() + b"\n")
            while True:
                states = {
                    e["execId"]: e["state"] for e in (await session.call("exec.list"))["execs"]
                }
                if list(states.values()) == ["running", "running"]:
                    break
        await until_gone("7304")
        left = {e["execId"]: e["state"] for e in (await session.call("exec.list"))["execs"]}
        assert left["stays"] == "running"
    await until_gone("7305")
