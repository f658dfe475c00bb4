"""The user works on the project while the agent does: their edit always survives, and is named."""

from typing import Any

import pytest

from tests.e2e.driver import Box
from tests.e2e.listing import listing, timed_listing

BEFORE = "the user edits before the agent"
AFTER = "the user edits after the agent"

# name → (what the agent does, what the user does, the path in conflict); each in a folder of its own
CLASHES: dict[str, tuple[str, str, str]] = {
    "both edit": ("echo agent >> f", "echo user >> f", "f"),
    "agent deletes, user edits": ("rm f", "echo user >> f", "f"),
    "agent chmods, user edits": ("chmod 755 f", "echo user >> f", "f"),
    "agent edits, user renames over": ("echo agent >> f", "echo user > g; mv g f", "f"),
    "agent removes folder, user adds in it": ("rm -r d", "echo user > d/new", "d/new"),
    "agent retargets, user retargets": ("ln -sfn agent l", "ln -sfn user l", "l"),
    "agent turns file to folder": ("rm f; mkdir f; echo agent > f/x", "echo user >> f", "f"),
}
# What the agent sees of the user's side before it acts would make it do something else.
ONLY_AFTER: dict[str, tuple[str, str, str]] = {
    "agent edits, user deletes": ("echo agent >> f", "rm f", "f"),
    "both add": ("echo agent > new", "echo user > new", "new"),
    "agent adds file, user adds folder": (
        "echo agent > new",
        "mkdir new; echo user > new/x",
        "new",
    ),
    "agent adds folder, user adds file": (
        "mkdir new; echo agent > new/x",
        "echo user > new",
        "new",
    ),
    "agent edits in it, user removes folder": ("echo agent >> d/one", "rm -r d", "d/one"),
}


def make(box: Box, where: str = ".") -> None:
    box.write(f"{where}/f", "base\n")
    box.write(f"{where}/d/one", "one\n")
    (box.project / where / "l").symlink_to("base")
    box.write(f"{where}/calm", "calm\n")


def conflicts(box: Box) -> dict[str, dict[str, Any]]:
    found = box.deltabox("diff", "--json").ok().json["conflicts"]
    return {c["path"]: c for c in found}


@pytest.mark.parametrize("order", [BEFORE, AFTER])
def test_users_side_survives_each_clash_and_the_rest_goes_in(box: Box, order: str) -> None:
    clashes = CLASHES if order == BEFORE else CLASHES | ONLY_AFTER
    for name in clashes:
        make(box, name)
    agents = "".join(f"(cd '{name}'; {c[0]})\n" for name, c in clashes.items())
    users = "".join(f"(cd '{name}'; {c[1]})\n" for name, c in clashes.items())
    fine = "".join(f"echo agent > '{n}/calm'; echo x > '{n}/fresh'\n" for n in clashes)
    with box.agent(f"meet started\n{agents}{fine}meet done") as agent:
        agent.reaches("started")
        if order == BEFORE:
            box.native("sh", "-euc", users).ok()
        agent.goes_on()
        agent.reaches("done")
        if order == AFTER:
            box.native("sh", "-euc", users).ok()
        agent.goes_on()
        agent.ends()
    theirs = timed_listing(box.project)
    expected = {f"{name}/{c[2]}" for name, c in clashes.items()}

    refused = box.deltabox("commit").ended(3)
    assert timed_listing(box.project) == theirs
    assert any(path in refused.err for path in expected)
    assert "--on-conflict skip" in refused.err

    found = conflicts(box)
    # A folder in the way can bring what lies in it or above it along; what nobody else touched, never.
    assert expected <= set(found)
    assert not {path for path in found if path.endswith(("calm", "fresh"))}
    assert all(c["agent"] and c["project"] and c["agent"] != c["project"] for c in found.values())

    done = box.deltabox("commit", "--on-conflict", "skip", "--json").ok().json
    assert {c["path"] for c in done["conflicts"]} == set(found)
    after = listing(box.project)
    changed = {n for n, e in after.items() if e != theirs.get(n, (0,) * 5)[:3]}
    went_in = {f"{name}/{file}" for name in clashes for file in ("calm", "fresh")}
    also = {"agent removes folder, user adds in it/d/one"}  # gone, and nobody else touched it
    assert changed == went_in
    assert theirs.keys() - after.keys() == also
    assert {(box.read(f"{n}/calm"), box.read(f"{n}/fresh")) for n in clashes} == {
        ("agent\n", "x\n")
    }
    # The agent's sides are not lost either: they wait for a decision.
    assert set(conflicts(box)) == set(found)


def test_agent_builds_on_what_the_user_did_before_it_looked(box: Box) -> None:
    make(box)
    with box.agent("meet started; ls; echo agent >> new; meet done") as agent:
        agent.reaches("started")
        box.write("new", "user\n")
        agent.goes_on()
        agent.reaches("done")
        agent.goes_on()
        agent.ends()
    box.deltabox("commit", "--on-conflict", "skip").ok()
    assert "user\n" in box.read("new")


def test_files_the_agent_never_touched_stay_the_users(box: Box) -> None:
    make(box)
    with box.agent("echo agent > calm; meet done") as agent:
        agent.reaches("done")
        box.write("f", "the user's\n")
        box.write("d/two", "the user's too\n")
        (box.project / "d/one").unlink()
        agent.goes_on()
        agent.ends()
    assert box.changes() == {"calm": "modified"}
    box.deltabox("commit").ok()
    assert (box.read("f"), box.read("d/two")) == ("the user's\n", "the user's too\n")
    assert not (box.project / "d/one").exists()
    assert box.read("calm") == "agent\n"


def test_edit_after_the_diff_was_shown_refuses_the_whole_commit(box: Box) -> None:
    make(box)
    box.keep("echo agent >> f; echo agent > calm").ok()
    shown = box.deltabox("diff", "--json").ok().json["digest"]
    box.write("f", "the user's\n")
    refused = box.deltabox("commit", "--digest", shown).ended(3)
    assert "f" in refused.err
    assert (box.read("f"), box.read("calm")) == ("the user's\n", "calm\n")


def test_same_edit_on_both_sides_is_no_conflict(box: Box) -> None:
    make(box)
    with box.agent("echo same > f; echo x > fresh; meet done") as agent:
        agent.reaches("done")
        box.write("f", "same\n")
        agent.goes_on()
        agent.ends()
    assert conflicts(box) == {}
    box.deltabox("commit").ok()
    assert (box.read("f"), box.read("fresh")) == ("same\n", "x\n")


def test_commit_of_other_paths_leaves_the_conflict_alone(box: Box) -> None:
    make(box)
    box.keep("echo agent >> f; echo agent > calm").ok()
    box.write("f", "the user's\n")
    box.deltabox("commit", "f").ended(3)
    box.deltabox("commit", "calm").ok()
    assert (box.read("f"), box.read("calm")) == ("the user's\n", "agent\n")
    box.deltabox("abort", "f").ok()
    assert box.read("f") == "the user's\n"


def test_undo_refuses_over_a_later_edit_and_changes_nothing(box: Box) -> None:
    make(box)
    box.keep("echo agent >> f; echo agent > calm").ok()
    box.deltabox("commit").ok()
    box.write("f", "later\n")
    before = listing(box.project)
    refused = box.deltabox("undo").ended(3)
    assert "f" in refused.err
    assert listing(box.project) == before


def test_project_that_is_gone_is_named_and_the_review_stays(box: Box) -> None:
    box.keep("echo agent > new").ok()
    aside = box.project.with_name("aside")
    box.project.rename(aside)
    refused = box.deltabox("commit", cwd=box.home, env={}).status
    assert refused == 2, "no project stands at the current folder"
    named = box.deltabox("diff", "--session", session_of(box), cwd=box.home).ended(1)
    assert str(box.project) in named.err
    aside.rename(box.project)
    box.deltabox("commit").ok()
    assert box.read("new") == "agent\n"


def session_of(box: Box) -> str:
    rows = box.deltabox("sessions", "--all", "--json", cwd=box.home).ok().json["sessions"]
    return str(rows[-1]["session"])


def test_a_tracked_file_deleted_before_the_agent_touches_it_does_not_come_back(box: Box) -> None:
    make(box)
    box.make_repository()
    with box.agent("cat f; ls; meet started; echo agent >> f; echo x > fresh; meet done") as agent:
        agent.reaches("started")
        (box.project / "f").unlink()
        agent.goes_on()
        agent.reaches("done")
        agent.goes_on()
        agent.ends()
    box.deltabox("commit").ended(3)
    # Not a word about the new file, though its folder has changed as well: git never knew it.
    assert list(conflicts(box)) == ["f"]
    box.deltabox("commit", "--on-conflict", "skip").ok()
    assert not (box.project / "f").exists()
    assert box.read("fresh") == "x\n"
