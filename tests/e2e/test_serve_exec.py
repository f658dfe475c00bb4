"""session.exec and exec.* through a real coordinator: output, input, order, ends."""

from pathlib import Path
from typing import Any

import pytest
import trio

from deltabox import client
from deltabox.errors import BadUsage, DeltaboxError, NotFound, Refused, StaleVersion
from deltabox.protocol import jsonrpc
from tests.e2e.serving import World, until_gone

pytestmark = [pytest.mark.overlay, pytest.mark.bwrap]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World.make(tmp_path)


async def test_a_plain_command_tells_everything_in_its_reply(world: World) -> None:
    async with world.session() as session:
        done = await session.run("echo out; echo err >&2; echo more >> a.txt; exit 3")
    assert (done["code"], done["signal"], done["stdout"], done["stderr"]) == (
        3,
        None,
        "out\n",
        "err\n",
    )
    assert done["changed"] == [{"path": "a.txt"}]
    assert not done["shared"]
    assert not done["truncated"]
    assert (world.project / "a.txt").read_text() == "one\ntwo\n"


async def test_output_is_exact_and_in_order_whatever_its_bytes(world: World) -> None:
    code = (
        "import os, hashlib\n"
        "for n in range(400):\n"
        "    os.write(1, bytes((n + i) % 256 for i in range(1000)))\n"
        "    os.write(2, b'%d\\n' % n)\n"
    )
    seqs: dict[str, list[int]] = {"stdout": [], "stderr": []}
    found = {"stdout": b"", "stderr": b""}
    async with world.session() as session, session.client.notifications("execId", "mine") as told:
        await session.call(
            "session.exec", argv=["python3", "-c", code], stream=True, execId="mine"
        )
        async for method, params in told:
            if method == "exec.exit":
                break
            seqs[params["channel"]].append(params["seq"])
            found[params["channel"]] += client.content(params, "data")
    assert found["stdout"] == b"".join(
        bytes((n + i) % 256 for i in range(1000)) for n in range(400)
    )
    assert found["stderr"] == b"".join(b"%d\n" % n for n in range(400))
    for name in ("stdout", "stderr"):
        assert seqs[name] == list(range(len(seqs[name])))
    assert params["bytes"] == {"stdout": 400_000, "stderr": len(found["stderr"])}


async def test_a_bare_argv_is_run_without_a_shell(world: World) -> None:
    async with world.session() as session:
        done = await session.run(["printf", "%s|", "a b", "$HOME", "*"])
        assert done["stdout"] == "a b|$HOME|*|"
        missing = await session.run(["no-such-program"])
        assert (missing["code"], bool(missing["reason"])) == (127, True)
        with pytest.raises(BadUsage):
            await session.call("session.exec", command="true", argv=["true"])
        with pytest.raises(BadUsage):
            await session.call("session.exec")


async def test_input_is_given_whole_or_piece_by_piece(world: World) -> None:
    every = bytes(range(256)) * 1000
    async with world.session() as session:
        done = await session.run("cat", input=every)
        assert client.content(done, "stdout") == every
        assert (await session.run("cat"))["stdout"] == ""  # nothing to read, not a hang
        async with session.exec("read a; echo got $a; read b; echo got $b", stdin="pipe") as cat:
            await cat.write("first\n")
            assert await anext(cat) == ("stdout", b"got first\n")
            await cat.write(b"second\n", close=True)
            assert await anext(cat) == ("stdout", b"got second\n")
            assert (await cat.wait())["code"] == 0
            with pytest.raises(NotFound):
                await cat.write("third")


async def test_a_deadline_ends_what_ignores_the_polite_way(world: World) -> None:
    async with world.session() as session:
        done = await session.run(
            "trap '' TERM; echo on; sleep 7101 & wait; sleep 7101", timeoutMs=300
        )
    assert done["timedOut"]
    assert done["stdout"] == "on\n"
    assert (done["code"], done["signal"]) == (None, 9)
    await until_gone("7101")


async def test_a_deadline_lets_a_polite_command_finish(world: World) -> None:
    async with world.session() as session:
        done = await session.run(
            "trap 'echo bye; exit 4' TERM; while :; do sleep 0.02; done", timeoutMs=300
        )
    assert (done["timedOut"], done["code"], done["stdout"]) == (True, 4, "bye\n")


async def test_cancelling_the_request_ends_the_command_and_the_queue_goes_on(world: World) -> None:
    async with world.session() as session:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.run, "sleep 7102")
            while "running" not in await _states(session):
                pass
            nursery.cancel_scope.cancel()
        done = await session.run("echo next")
        assert done["stdout"] == "next\n"
        first = await session.call("exec.wait", execId="e1")
        assert (first["cancelled"], first["signal"]) == (True, 15)
    await until_gone("7102")


async def test_cancelled_before_its_turn_it_never_runs(world: World) -> None:
    async with world.session() as session:
        async with session.exec("read line", stdin="pipe") as first:
            async with trio.open_nursery() as nursery:
                failure: list[DeltaboxError] = []

                async def second() -> None:
                    with pytest.raises(DeltaboxError) as caught:
                        await session.run("touch ran", execId="second")
                    failure.append(caught.value)

                nursery.start_soon(second)
                while "queued" not in await _states(session):
                    pass
                await session.call("exec.cancel", execId="second")
            await first.write("\n")
            await first.wait()
        assert failure[0].data.get("code", "CANCELLED") == "CANCELLED"
        assert (await session.run("ls"))["stdout"] == "a.txt\nb.txt\n"


async def _states(session: client.Session) -> list[str]:
    return [one["state"] for one in (await session.call("exec.list"))["execs"]]


async def test_foreground_commands_run_in_the_order_they_were_asked(world: World) -> None:
    async with world.session() as session:
        # All are sent before any is answered; each appends its number.
        lines = b"".join(
            b'{"id":%d,"method":"session.exec","params":{"session":"%s","command":"echo %d >> order"}}\n'
            % (1000 + n, session.id.encode(), n)
            for n in range(20)
        )
        await session.client._send(lines)
        done = await session.run("cat order")
    assert done["stdout"].split() == [str(n) for n in range(20)]


async def test_file_mutations_and_commands_wait_for_each_other(world: World) -> None:
    async with world.session() as session:
        write = {"session": session.id, "path": "late.txt", "data": "x"}
        async with session.exec("read line; ls", stdin="pipe") as first:
            await session.client._send(jsonrpc.request(9000, "fs.write", write))
            # Asked later and not held up: it tells that the write has had its chance.
            assert await session.read("b.txt") == b"b\n"
            await first.write("\n")
            assert (await anext(first))[1] == b"a.txt\nb.txt\n"
            await first.wait()
        assert "late.txt" in (await session.run("ls"))["stdout"]


async def test_a_background_command_runs_beside_and_marks_what_is_shared(world: World) -> None:
    async with world.session() as session:
        started = await session.call(
            "session.exec",
            command="until [ -e go ]; do sleep 0.02; done; echo bg > bg.txt; echo told",
            background=True,
        )
        done = await session.run("echo fg > fg.txt; touch go")
        assert done["shared"]
        assert {"path": "fg.txt"} in done["changed"]
        settled = await session.call("exec.wait", execId=started["execId"])
        assert settled["stdout"] == "told\n"
        assert settled["shared"]
        assert {"path": "bg.txt"} in settled["changed"]
        alone = await session.run("true")
        assert not alone["shared"]


async def test_too_much_output_is_cut_in_the_reply_and_whole_in_a_file(world: World) -> None:
    async with world.session() as session:
        done = await session.run("seq 1 200000; echo short >&2", maxBytes=1000)
        want = "".join(f"{n}\n" for n in range(1, 200_001))
        assert done["truncated"]
        assert done["stdout"] == want[:1000]
        assert done["stdoutBytes"] == len(want)
        assert Path(done["stdoutFile"]).read_text() == want
        assert (done["stderr"], done["stderrFile"]) == ("short\n", None)


async def test_secrets_of_the_hosts_environment_stay_out(world: World) -> None:
    async with world.session(env={"FROM_START": "1"}) as session:
        done = await session.run(
            "env; cat /proc/*/environ | tr '\\0' '\\n'", env={"FROM_EXEC": "2"}
        )
        assert "FROM_START=1\n" in done["stdout"]
        assert "FROM_EXEC=2\n" in done["stdout"]
        assert "hunter2" in world.env.values()
        assert "hunter2" not in done["stdout"]
        for risky in ("LD_PRELOAD", "BASH_ENV", "GIT_SSH_COMMAND"):
            with pytest.raises(Refused):
                await session.run("true", env={risky: "x"})


async def test_a_profile_holds_for_one_command(world: World) -> None:
    async with world.session() as session:
        closed = await session.run("touch new", profile="read-only")
        assert closed["code"] != 0
        opened = await session.run("touch new")
        assert opened["code"] == 0
        with pytest.raises(Refused):
            await session.run("true", profile="read-write")
        with pytest.raises(BadUsage, match="profile"):
            await session.run("true", profile="everything")


async def test_a_terminal_has_job_control_and_a_size(world: World) -> None:
    async with world.session() as session:
        terminal: dict[str, Any] = {"rows": 11, "columns": 33}
        async with session.exec(["bash", "--norc", "-i"], terminal=terminal) as shell:
            await shell.write("PS1=; stty size; tty; echo end1\n")
            seen = await _until(shell, b"\r\nend1\r\n")
            assert b"11 33\r\n" in seen
            assert b"/dev/pts/" in seen
            await shell.resize(22, 44)
            await shell.write("stty size; python3 -c 'print(3 * 7, flush=True); input()'\n")
            seen = await _until(shell, b"\r\n21\r\n")
            assert b"22 44\r\n" in seen
            await shell.write(b"\x03")  # Ctrl-C ends the program, not the shell
            await _until(shell, b"KeyboardInterrupt")
            await shell.write("echo still$((1+1))\n")
            await _until(shell, b"still2")
            # A terminal does not hold the queue up.
            assert (await session.run("echo beside"))["stdout"] == "beside\n"
            await shell.write("exit 6\n")
            assert (await shell.wait())["code"] == 6


async def _until(shell: client.Exec, words: bytes) -> bytes:
    seen = b""
    while words not in seen:
        channel, data = await anext(shell)
        assert channel == "terminal"
        seen += data
    return seen


async def test_signals_by_name_and_number(world: World) -> None:
    # One process: the signal goes to the whole group, and a shell would tell of its child's death.
    script = [
        "python3",
        "-c",
        "import os, signal, sys\n"
        "signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b'usr\\n'))\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(0))\n"
        "os.write(1, b'ready\\n')\n"
        "while True: signal.pause()\n",
    ]
    async with world.session() as session, session.exec(script) as running:
        assert await anext(running) == ("stdout", b"ready\n")
        await running.signal("USR1")
        assert await anext(running) == ("stdout", b"usr\n")
        with pytest.raises(BadUsage):
            await running.signal("NOPE")
        await running.signal(2)
        assert (await running.wait())["code"] == 0


async def test_a_window_holds_one_command_until_it_is_acknowledged(world: World) -> None:
    async with world.session() as session, session.client.notifications("execId", "w") as told:
        await session.call(
            "session.exec",
            command="head -c 4000000 /dev/zero",
            stream=True,
            background=True,
            execId="w",
            window=100_000,
        )
        size = 0
        while size < 4_000_000:
            method, params = await told.receive()
            assert method == "exec.output"
            size += len(params["data"])
            if size <= 200_000:
                # The others are unharmed, and it stands while nothing is given.
                assert (await session.run("echo on"))["stdout"] == "on\n"
                state = (await session.call("exec.list"))["execs"][0]["state"]
                assert state == "running"
            await session.call("exec.ack", execId="w", bytes=len(params["data"]))
        assert (await told.receive())[0] == "exec.exit"


async def test_a_stale_generation_runs_nothing(world: World) -> None:
    async with world.session() as session:
        await session.run("echo 1 > new")
        await session.diff()
        assert (await session.commit())["generation"] == 1
        with pytest.raises(StaleVersion):
            await session.run("touch ran", generation=0)
        assert "ran" not in (await session.run("ls", generation=1))["stdout"]


async def test_an_exec_id_can_be_chosen_and_used_again_when_free(world: World) -> None:
    async with world.session() as session:
        async with session.client.notifications("execId", "x") as told:
            await session.call(
                "session.exec", command="read l", stdin="pipe", stream=True, execId="x"
            )
            with pytest.raises(BadUsage):
                await session.run("true", execId="x", background=True)
            await session.call("exec.write", execId="x", data="\n")
            assert (await told.receive())[0] == "exec.exit"
        done = await session.run("echo again", execId="x")
        assert (done["execId"], done["stdout"]) == ("x", "again\n")
        with pytest.raises(NotFound):
            await session.call("exec.cancel", execId="never")


async def test_a_folder_that_is_not_there_is_told_and_nothing_runs(world: World) -> None:
    async with world.session() as session:
        (await session.run("mkdir sub"))["code"]
        assert (await session.run("pwd", cwd="sub"))["stdout"] == f"{world.project}/sub\n"
        with pytest.raises(NotFound):
            await session.run("pwd", cwd="absent")
        assert (await session.run("pwd"))["stdout"] == f"{world.project}\n"
