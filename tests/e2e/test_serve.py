"""`deltabox serve` through real child processes: sessions, reviews, events, examples, the page itself."""

import json
import os
import shutil
import subprocess  # noqa: TID251 - the test is the host
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

from deltabox import client
from deltabox.errors import (
    Ambiguous,
    BadUsage,
    DeltaboxError,
    EngineUnavailable,
    IsolationUnavailable,
    NotFound,
    Refused,
    ReviewChanged,
    SessionBusy,
    SessionRunning,
)
from deltabox.server import schema
from tests.e2e.serving import HANG_S, World, alive, until_gone
from tests.places import REPOSITORY, listing

pytestmark = [pytest.mark.overlay, pytest.mark.bwrap]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World.make(tmp_path)


# the page and the examples


def test_the_page_is_what_the_source_says() -> None:
    page = (REPOSITORY / "docs" / "protocol.md").read_text("utf-8")
    assert schema.spliced(page) == page, "run: python -m deltabox.server.schema docs/protocol.md"


def test_every_method_is_described_and_every_reference_leads_somewhere() -> None:
    whole = schema.schema()
    assert all(method["description"] for method in whole["methods"].values())

    def refs(value: Any) -> list[str]:
        if isinstance(value, dict):
            own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
            return own + [r for v in value.values() for r in refs(v)]
        return [r for v in value for r in refs(v)] if isinstance(value, list) else []

    assert {r.rpartition("/")[2] for r in refs(whole)} <= set(whole["$defs"])


def test_the_schema_is_printed_as_json(world: World) -> None:
    assert json.loads(world.cli("serve", "--schema"))["version"] == "1"


@pytest.mark.parametrize("language", ["python", "node"])
def test_an_example_drives_a_whole_turn(world: World, language: str) -> None:
    (world.project / "b.txt").unlink()
    serve = [sys.executable, "-m", "deltabox", "serve"]
    if language == "python":
        argv = [sys.executable, str(REPOSITORY / "examples" / "turn.py"), str(world.project)]
    else:
        node = shutil.which("node")
        if node is None:
            pytest.skip("node is not installed")
        argv = [node, str(REPOSITORY / "examples" / "turn.mjs"), str(world.project), *serve]
    done = subprocess.run(
        argv, env=world.env, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("the turn is done\n")
    assert (world.project / "a.txt").read_text() == "ONE\ntwo\n"
    assert os.listdir(world.project) == ["a.txt"]


# sessions


async def test_initialize_says_what_there_is(world: World) -> None:
    async with world.coordinator() as made:
        told = await made.call("initialize", protocolVersion="99", futureThing={"x": 1})
        assert told["protocolVersion"] == "1"
        assert {"session.exec", "fs.read", "review.commit"} <= set(told["methods"])
        assert told["limits"]["lineBytes"] == 16 * 1024 * 1024
        with pytest.raises(BadUsage, match="protocolVersion"):
            await made.call("initialize", protocolVersion=1)


async def test_names_of_other_hosts_are_taken_and_impossible_ones_refused(world: World) -> None:
    async with world.coordinator() as made:
        session = await world.start(
            made, fsMode="overlay", isolation="deltabox", transport="stdio", unknown=1
        )
        assert (session.info["engine"], session.info["isolation"]) == ("overlay", "bubblewrap")
        assert session.info["network"] == "off"
        for wish, error in (
            ({"engine": "no-such"}, BadUsage),
            ({"fsMode": "git-ghost"}, EngineUnavailable),
            ({"isolation": "chroot"}, IsolationUnavailable),
            ({"transport": "native"}, EngineUnavailable),
            ({"projectRoot": "relative"}, Refused),
            ({"projectRoot": "/"}, Refused),
            ({"projectRoot": str(world.project / "absent")}, NotFound),
            ({"env": {"LD_PRELOAD": "x"}}, Refused),
            ({"durability": "sometimes"}, BadUsage),
        ):
            with pytest.raises(error):
                await world.start(made, **wish)
        listed = await made.call("session.list")
        assert [row["session"] for row in listed["sessions"]] == [session.id]


async def test_a_request_can_narrow_what_the_configuration_says_and_open_nothing(
    world: World,
) -> None:
    (world.project / "deltabox.toml").write_text(
        '[deny]\npaths = ["b.txt"]\n[network]\nmode = "off"\n'
    )
    async with world.coordinator() as made:
        with pytest.raises(Refused):
            await world.start(made, network="host")
        session = await world.start(made, policy={"deny": ["a.txt"]})
        done = await session.run("cat a.txt b.txt")
    assert done["stdout"] == ""
    assert done["stderr"].count("Permission denied") == 2


async def test_a_stopped_session_keeps_its_changes_and_an_unchanged_one_is_gone(
    world: World,
) -> None:
    async with world.coordinator() as made:
        kept, empty = await world.start(made), await world.start(made)
        await kept.run("echo new > new")
        assert (await empty.stop())["state"] == "closed"
        ended = await kept.stop()
        assert ended["state"] == "idle"
        assert ended["review"]
        with pytest.raises(NotFound) as caught:
            await kept.run("true")
        assert caught.value.data["code"] == "SESSION_NOT_FOUND"
        # Its review can be looked at and decided without a mount, and its work be continued.
        assert [f["path"] for f in (await kept.diff())["files"]] == ["new"]
        again = await world.start(made, session=kept.id)
        assert (await again.run("cat new"))["stdout"] == "new\n"
    assert [f["path"] for f in json.loads(world.cli("diff", "--json"))["files"]] == ["new"]
    world.cli("commit")
    assert (world.project / "new").read_text() == "new\n"


async def test_a_parked_session_is_taken_by_the_next_agent_and_old_handles_are_stale(
    world: World,
) -> None:
    async with world.coordinator() as made:
        first = await world.start(made, owner="one")
        parked = await first.call("session.park")
        assert parked["state"] == "parked"
        with pytest.raises(NotFound):
            await first.run("true")
        other = await world.start(made, policy={"deny": ["a.txt"]})  # other settings: another
        assert other.id != first.id
        second = await world.start(made, owner="two")
        assert (second.id, second.info["reused"]) == (first.id, True)
        assert second.info["generation"] == first.info["generation"] + 1
        with pytest.raises(DeltaboxError) as caught:
            await second.run("true", generation=first.info["generation"])
        assert caught.value.host_code == "FS_STALE_VERSION"
        fresh = await world.start(made, reuse=False)
        assert not fresh.info["reused"]


async def test_parking_with_open_changes_keeps_or_aborts_them_as_told(world: World) -> None:
    async with world.coordinator() as made:
        keeps, aborts = await world.start(made), await world.start(made)
        await keeps.run("echo 1 > kept")
        await aborts.run("echo 1 > dropped")
        assert (await keeps.call("session.park"))["state"] == "idle"
        parked = await aborts.call("session.park", review="abort")
        assert (parked["state"], parked["review"]) == ("parked", None)
        busy = await world.start(made)
        assert busy.id == aborts.id
        assert (await busy.run("ls"))["stdout"] == "a.txt\nb.txt\n"
        await busy.call("session.exec", command="sleep 7201", background=True)
        with pytest.raises(SessionRunning):
            await busy.call("session.park")
    await until_gone("7201")


# reviews


async def test_commit_applies_what_was_shown_and_nothing_else(world: World) -> None:
    before = listing(world.project)
    async with world.session() as session:
        await session.run("echo more >> a.txt; rm b.txt; mkdir d; echo x > d/x")
        shown = await session.diff()
        kinds = {f["path"]: f["kind"] for f in shown["files"]}
        assert kinds == {"b.txt": "deleted", "a.txt": "modified", "d/x": "added"}
        assert listing(world.project) == before
        await session.run("echo sneaked >> a.txt")
        with pytest.raises(ReviewChanged):
            await session.commit(digest=shown["digest"])
        with pytest.raises(ReviewChanged):
            await session.commit()
        with pytest.raises(Refused):
            await session.commit(hunks=["abc"])
        assert listing(world.project) == before
        done = await session.commit("d", digest=(await session.diff())["digest"])
        assert [c["path"] for c in done["committed"]] == ["d/x"]
        assert (done["generation"], done["left"]) == (1, 2)
        dropped = await session.abort()
        assert (dropped["generation"], dropped["discarded"]) == (2, 2)
        assert (await session.run("cat a.txt b.txt d/x"))["stdout"] == "one\ntwo\nb\nx\n"
        undo = await session.client.call("undo.list", projectRoot=str(world.project))
        assert [row["commit"] for row in undo["commits"]] == [done["commit"]]
        await session.client.call("undo.apply", projectRoot=str(world.project))
    assert sorted(os.listdir(world.project)) == ["a.txt", "b.txt"]


async def test_reads_open_no_review_and_an_empty_one_commits_silently(world: World) -> None:
    async with world.session() as session:
        await session.read("a.txt")
        await session.call("fs.listDir", path=".")
        assert (await session.call("review.status"))["review"] is None
        await session.diff()
        assert (await session.call("review.status"))["review"] is None
        await session.write("a.txt", "other")
        assert (await session.call("review.status"))["review"]
        await session.write("a.txt", "one\ntwo\n")  # net zero
        done = await session.commit()
        assert (done["commit"], done["committed"]) == (None, [])


@pytest.mark.parametrize(
    ("answer", "outcome", "in_project"),
    [
        ({"outcome": "allowed-once"}, "committed", ["a.txt", "b.txt", "n1", "n2"]),
        ({"outcome": "partial", "paths": ["n2"]}, "committed", ["a.txt", "b.txt", "n2"]),
        ({"outcome": "partial", "paths": []}, "kept", ["a.txt", "b.txt"]),
        ({"outcome": "rejected"}, "aborted", ["a.txt", "b.txt"]),
        ({"outcome": "cancelled"}, "kept", ["a.txt", "b.txt"]),
        ({"outcome": "whatever"}, "kept", ["a.txt", "b.txt"]),
        (None, "kept", ["a.txt", "b.txt"]),
    ],
)
async def test_the_persons_answer_decides_the_review(
    world: World, answer: Any, outcome: str, in_project: list[str]
) -> None:
    asked = []

    async def person(params: client.Result) -> Any:
        asked.append(params)
        return answer

    answers = {} if answer is None else {"approval.request": person}
    async with world.coordinator(answers) as made:
        session = await world.start(made)
        await session.run("echo 1 > n1; echo 2 > n2")
        decided = await session.call("review.request")
        assert decided["outcome"] == outcome
    assert sorted(os.listdir(world.project)) == in_project
    if asked:
        assert asked[0]["toolName"] == "deltabox-review"
        assert "n1" in asked[0]["reason"]


async def test_when_nobody_can_be_asked_the_configured_answer_holds(world: World) -> None:
    async with world.session() as session:
        await session.run("echo 1 > n1")
        assert (await session.call("review.request"))["outcome"] == "kept"
        assert (await session.call("review.request", otherwise="abort"))["outcome"] == "aborted"
        await session.run("echo 2 > n2")
        assert (await session.call("review.request", otherwise="commit"))["outcome"] == "committed"
        assert (await session.call("review.request"))["outcome"] == "empty"
    assert sorted(os.listdir(world.project)) == ["a.txt", "b.txt", "n2"]


# events


async def test_events_come_once_in_order_and_can_be_taken_up_again(world: World) -> None:
    async with world.session() as session:
        seen: list[client.Result] = []
        async with session.client.events(after=0) as told:
            await session.run("echo 1 > n1")
            while not seen or seen[-1]["kind"] != "turn.end":
                seen.append((await told.receive())[1])
        kinds = [e["kind"] for e in seen]
        assert kinds == ["session.start", "turn.start", "turn.end"]
        last = seen[-1]["seq"]
        await session.diff()
        await session.commit()
        async with session.client.events(after=last, session=session.id) as told:
            # Another process's deed is in the same journal.
            world.cli("undo")
            later = [(await told.receive())[1] for _ in range(2)]
        assert [e["kind"] for e in later] == ["review.commit", "undo"]
        assert later[0]["seq"] > last


# many


async def test_fifty_sessions_on_one_coordinator(world: World) -> None:
    async with world.coordinator() as made:
        started: list[client.Session] = []

        async def one(number: int) -> None:
            session = await world.start(made, reuse=False)
            started.append(session)
            done = await session.run(f"echo {number} > mine; cat mine; ls")
            assert done["stdout"] == f"{number}\na.txt\nb.txt\nmine\n"
            assert done["changed"] == [{"path": "mine"}]

        async with trio.open_nursery() as nursery:
            for number in range(50):
                nursery.start_soon(one, number)
        assert len({s.id for s in started}) == 50
        async with trio.open_nursery() as nursery:
            for session in started[:49]:
                nursery.start_soon(session.abort)
        last = started[49]
        await last.diff()
        await last.commit()
    assert (world.project / "mine").exists()


async def test_two_sessions_commit_to_one_project_one_after_the_other(world: World) -> None:
    async with world.coordinator() as made:
        both = [await world.start(made, reuse=False) for _ in range(2)]
        for number, session in enumerate(both):
            await session.run(f"for i in $(seq 50); do echo {number} > f{number}-$i; done")
            await session.diff()
        async with trio.open_nursery() as nursery:
            for session in both:
                nursery.start_soon(session.commit)
    assert len(os.listdir(world.project)) == 102


async def test_one_sessions_flood_and_hung_commands_leave_the_others_alone(world: World) -> None:
    async with world.coordinator() as made:
        flood = await world.start(made, reuse=False)
        hung = await world.start(made, reuse=False)
        calm = await world.start(made, reuse=False)
        async with flood.exec("cat /dev/zero", window=1 << 20, background=True):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(hung.run, "trap '' TERM INT; sleep 7202 & wait; sleep 7202")
                for number in range(10):
                    assert (await calm.run(f"echo {number}"))["stdout"] == f"{number}\n"
                nursery.cancel_scope.cancel()
            with pytest.raises(SessionRunning):
                await flood.call("session.park")
    await until_gone("7202")


# other processes


async def test_verbs_of_another_terminal_reach_a_live_session(world: World) -> None:
    async with world.session() as session:
        await session.run("echo 1 > n1; echo 2 > n2")
        live = json.loads(world.cli("diff", "--json"))
        direct = await session.diff()
        assert live["digest"] == direct["digest"]
        assert live["files"] == direct["files"]
        assert world.cli("exec", "--", "cat", "n1") == "1\n"
        world.cli("exec", "--", "sh", "-c", "cat > n3; exit 9", stdin="from outside", status=9)
        assert await session.read("n3") == b"from outside"
        world.cli("diff", "--stat")
        world.cli("commit", "n1")
        with pytest.raises(DeltaboxError):
            await session.run("true", generation=0)
        world.cli("abort")
        assert (await session.run("ls"))["stdout"] == "a.txt\nb.txt\nn1\n"
        assert session.id in world.cli("sessions")
    assert sorted(os.listdir(world.project)) == ["a.txt", "b.txt", "n1"]


async def test_the_same_verbs_do_the_same_when_nobody_owns_the_session(world: World) -> None:
    async with world.session() as session:
        await session.run("echo 1 > n1; echo 2 > n2")
        owned = json.loads(world.cli("diff", "--json"))
    alone = json.loads(world.cli("diff", "--json"))
    assert alone["digest"] == owned["digest"]
    assert alone["files"] == owned["files"]
    assert world.cli("exec", "--", "cat", "n1") == "1\n"
    world.cli("exec", "--", "sh", "-c", "cat > n3; exit 9", stdin="from outside", status=9)
    world.cli("diff", "--stat")
    world.cli("commit", "n1")
    world.cli("abort")
    assert sorted(os.listdir(world.project)) == ["a.txt", "b.txt", "n1"]


async def test_two_coordinators_work_on_one_project_and_own_their_sessions(world: World) -> None:
    async with world.coordinator() as one, world.coordinator() as two:
        mine, theirs = await world.start(one), await world.start(two)
        await mine.run("echo mine >> a.txt")
        await theirs.run("echo theirs >> b.txt")
        rows = (await one.call("session.list", projectRoot=str(world.project)))["sessions"]
        assert {r["session"]: r["here"] for r in rows} == {mine.id: True, theirs.id: False}
        with pytest.raises((SessionBusy, SessionRunning)):
            await world.start(one, session=theirs.id)
        with pytest.raises(NotFound):
            await client.Session(one, theirs.info).run("true")
        world.cli("diff", status=2)  # two are open: it lists them
        # A decision goes to whoever owns the session.
        other = client.Session(one, theirs.info)
        assert [f["path"] for f in (await other.diff())["files"]] == ["b.txt"]
        await other.commit()
        assert (world.project / "b.txt").read_text() == "b\ntheirs\n"
        assert Ambiguous.exit_status == 2


# ends


async def test_a_killed_coordinator_leaves_no_process_and_the_whole_review(world: World) -> None:
    with world.raw() as raw:
        started = raw.call("session.start", projectRoot=str(world.project))
        raw.post(
            "session.exec",
            session=started["session"],
            command="echo n > new; echo on; exec sleep 7203",
            stream=True,
        )
        while raw.line().get("method") != "exec.output":
            pass
        assert alive("7203")
        raw.child.kill()
    await until_gone("7203")
    assert [f["path"] for f in json.loads(world.cli("diff", "--json"))["files"]] == ["new"]
    world.cli("abort")


@pytest.mark.parametrize("end", ["eof", "SIGTERM", "SIGINT"])
async def test_a_graceful_stop_ends_commands_keeps_reviews_and_is_no_error(
    world: World, end: str
) -> None:
    with world.raw() as raw:
        started = raw.call("session.start", projectRoot=str(world.project))
        raw.post(
            "session.exec",
            session=started["session"],
            command="trap 'echo term > new; exit' TERM; echo on; while :; do sleep 0.05; done",
            stream=True,
        )
        while raw.line().get("method") != "exec.output":
            pass
        if end == "eof":
            assert raw.child.stdin
            raw.child.stdin.close()
        else:
            raw.child.send_signal(getattr(__import__("signal"), end))
        rest = raw.child.stdout.read() if raw.child.stdout else b""
        assert raw.child.wait(HANG_S) == 0
        for line in rest.splitlines():
            json.loads(line)
    assert [f["path"] for f in json.loads(world.cli("diff", "--json"))["files"]] == ["new"]
    assert not list(world.state.glob("run/*"))
