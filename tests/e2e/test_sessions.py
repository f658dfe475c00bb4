"""Several runs on one project, one run after another, and owners that die."""

import os
import re
import signal

from tests.e2e.driver import Agent, Box, descendants, dying
from tests.e2e.listing import timed_listing


def session_of(agent: Agent) -> str:
    """The session that a running command announced."""
    assert agent.process.stderr is not None
    line = agent.process.stderr.readline().decode()
    found = re.search(r"session (s\w+)", line)
    assert found, line
    return found[1]


def test_two_runs_at_once_do_not_see_each_other(box: Box) -> None:
    with (
        box.agent("echo one > f; meet wrote; cat f") as one,
        box.second("two").agent("echo two > f; meet wrote; cat f") as two,
    ):
        one.reaches("wrote")
        two.reaches("wrote")
        first, second = session_of(one), session_of(two)
        assert first != second
        assert {row["session"] for row in box.sessions()} == {first, second}
        one.goes_on()
        two.goes_on()
        assert (one.ends().out, two.ends().out) == ("one\n", "two\n")
    for verb in ("diff", "commit", "abort", "review"):
        refused = box.deltabox(verb).ended(2)
        assert first in refused.err
        assert second in refused.err
        assert "--session" in refused.err
    box.deltabox("commit", "--session", first).ok()
    assert box.read("f") == "one\n"
    # The other one now meets a project that moved.
    assert "f" in box.deltabox("commit").ended(3).err
    box.deltabox("abort").ok()
    assert box.read("f") == "one\n"


def test_next_run_continues_the_open_review_and_says_so(box: Box) -> None:
    first = box.keep("echo one > f; echo home > ~/kept").ok()
    session = box.sessions()[0]["session"]
    assert "continuing" not in first.err
    second = box.keep("cat f ~/kept; echo two >> f").ok()
    assert f"continuing session {session}" in second.err
    assert "--new" in second.err
    assert second.out == "one\nhome\n"
    assert [row["session"] for row in box.sessions()] == [session]
    turns = box.deltabox("diff", "--json").ok().json["turns"]
    assert [turn["code"] for turn in turns] == [0, 0]
    box.deltabox("commit").ok()
    assert box.read("f") == "one\ntwo\n"


def test_new_and_session_choose_instead(box: Box) -> None:
    box.keep("echo one > f").ok()
    one = box.sessions()[0]["session"]
    fresh = box.keep("cat f || echo absent; echo two > g", "--new").ok()
    assert fresh.out == "absent\n"
    two = next(row["session"] for row in box.sessions() if row["session"] != one)
    asked = box.keep("true").ended(125)
    assert one in asked.err
    assert two in asked.err
    assert box.keep("cat f", "--session", one).ok().out == "one\n"
    assert box.keep("cat g", "--session", two).ok().out == "two\n"
    assert box.changes("--session", one) == {"f": "added"}


def test_run_that_changed_nothing_leaves_no_session(box: Box) -> None:
    before = timed_listing(box.project)
    box.keep("cat README.md; echo x > f; rm f; touch src; ls > ~/x").ok()
    assert box.sessions() == []
    assert box.deltabox("commit").status == 2
    assert timed_listing(box.project) == before


def test_session_in_use_is_refused_to_another_run(box: Box) -> None:
    with box.agent("echo x > f; meet here") as agent:
        agent.reaches("here")
        session = session_of(agent)
        busy = box.deltabox("run", "--session", session, "--", "true").ended(125)
        assert str(agent.process.pid) in busy.err
        agent.goes_on()
        agent.ends()


def test_killed_owner_takes_its_sandbox_along_and_leaves_the_review_whole(box: Box) -> None:
    script = "echo one > f; rm README.md; (trap '' TERM INT HUP; exec sleep 1000) & meet here"
    with box.agent(script) as agent:
        agent.reaches("here")
        session = session_of(agent)
        below = descendants(agent.process.pid)
        assert len(below) >= 3, "a sandbox, a shell and a sleep"
        with dying(below) as survivors:
            os.kill(agent.process.pid, signal.SIGKILL)
            assert survivors() == []
    recovered = box.deltabox("sessions", "--json").ok().json
    assert session in " ".join(recovered["recovered"])
    row = recovered["sessions"][0]
    assert (row["session"], row["state"], row["pid"]) == (session, "idle", None)
    assert session in box.deltabox("sessions").ok().out
    assert box.changes() == {"README.md": "deleted", "f": "added"}
    assert box.keep("cat f").ok().out == "one\n"
    box.deltabox("commit").ok()
    assert box.read("f") == "one\n"
    assert not (box.project / "README.md").exists()


def test_owner_killed_before_any_change_leaves_a_review_that_closes_at_the_first_look(
    box: Box,
) -> None:
    with box.agent("meet here") as agent:
        agent.reaches("here")
        with dying(descendants(agent.process.pid)) as survivors:
            os.kill(agent.process.pid, signal.SIGKILL)
            assert survivors() == []
    assert "nothing is pending" in box.deltabox("review").ok().out
    assert box.sessions() == []


def test_log_tells_what_ran_and_what_was_decided(box: Box) -> None:
    box.keep("echo x > f").ok()
    commit = box.deltabox("commit", "--json").ok().json["commit"]
    box.deltabox("undo").ok()
    kinds = [event["kind"] for event in box.deltabox("log", "--json").ok().json["events"]]
    for kind in ("session.start", "turn.start", "turn.end", "review.commit", "undo"):
        assert kind in kinds
    shown = box.deltabox("log").ok().out
    assert commit in shown
    assert "echo x > f" in shown


def test_gc_says_what_goes_and_keeps_what_is_undecided(box: Box) -> None:
    box.keep("echo x > f").ok()
    box.deltabox("abort").ok()
    box.keep("echo y > g").ok()
    dry = box.deltabox("gc", "--dry-run").ok()
    assert "undecided reviews stay" in dry.out
    box.deltabox("gc", "--yes").ok()
    assert box.changes() == {"g": "added"}
