"""Decisions from a second terminal while a command runs, and programs that go on writing after a commit."""

import os

from tests.e2e.driver import Box

# Holds the file open and mapped over the commit, and writes on demand through all three.
WRITER = r"""
import mmap, os, sys
meeting, project = sys.argv[1:]
def meet(word):
    with open(meeting + "/said", "w") as said:
        print(word, file=said)
    with open(meeting + "/heard") as heard:
        heard.readline()
os.chdir(project)
opened = os.open("opened", os.O_RDWR)
os.pwrite(opened, b"first", 0)
fresh = os.open("fresh", os.O_RDWR | os.O_CREAT, 0o644)
os.write(fresh, b"first")
file = os.open("mapped", os.O_RDWR)
view = mmap.mmap(file, 5, mmap.MAP_SHARED)
view[:] = b"first"
os.mkdir("outside")
with open("linked", "w") as f:
    f.write("first")
os.link("linked", "outside/other")
meet("written")
for n, word in enumerate((b"again", b"third")):
    os.pwrite(opened, word, 0)
    os.pwrite(fresh, word, 0)
    view[:] = word
    view.flush()
    with open("outside/other", "r+b") as f:
        f.write(word)
    meet("more")
"""
WRITTEN = ("opened", "fresh", "mapped", "linked")


def test_second_terminal_looks_commits_and_discards_while_the_command_goes_on(box: Box) -> None:
    box.write("a", "base a\n")
    box.write("b", "base b\n")
    box.write("c", "base c\n")
    script = """
    echo agent > a; echo agent > b; rm c; mkdir -p new/deep; echo x > new/deep/file
    meet changed
    cat a b c; ls new 2>&1 || true
    meet looked
    echo later > a; echo later > d
    """
    with box.agent(script) as agent:
        agent.reaches("changed")
        everything = {"a": "modified", "b": "modified", "c": "deleted", "new/deep/file": "added"}
        assert box.changes().items() >= everything.items()
        assert "+agent" in box.deltabox("diff").ok().out
        row = box.sessions()[0]
        assert (row["state"], row["pid"]) == ("running", agent.process.pid)

        box.deltabox("commit", "a").ok()
        assert (box.read("a"), box.read("b"), box.read("c")) == ("agent\n", "base b\n", "base c\n")
        box.deltabox("abort", "b", "c", "new").ok()
        assert box.changes() == {}
        assert (box.read("a"), box.read("b")) == ("agent\n", "base b\n")

        agent.goes_on()
        agent.reaches("looked")
        agent.goes_on()
        done = agent.ends()
    # The command saw the discarded paths as the project has them, and no folder of its own.
    assert done.out.startswith("agent\nbase b\nbase c\n")
    assert "No such file" in done.out
    assert box.changes() == {"a": "modified", "d": "added"}
    box.deltabox("commit").ok()
    assert (box.read("a"), box.read("d")) == ("later\n", "later\n")
    assert box.sessions() == []


def test_commit_of_everything_while_running_then_nothing_is_left(box: Box) -> None:
    script = "echo one > one; mkdir sub; echo two > sub/two; meet changed; cat one sub/two; git status -s"
    with box.agent(script) as agent:
        agent.reaches("changed")
        box.deltabox("commit").ok()
        assert (box.read("one"), box.read("sub/two")) == ("one\n", "two\n")
        agent.goes_on()
        done = agent.ends()
    assert done.out.startswith("one\ntwo\n")
    assert "M " not in done.out
    assert box.deltabox("diff").ended(2).out == ""
    box.deltabox("undo").ok()
    assert not (box.project / "one").exists()
    assert not (box.project / "sub").exists()


def test_abort_of_everything_while_running_shows_the_base_again(box: Box) -> None:
    script = """
    rm -rf src; echo x > README.md; ln -s x l
    meet changed
    cat README.md; ls src; readlink l || echo gone
    """
    with box.agent(script) as agent:
        agent.reaches("changed")
        box.deltabox("abort").ok()
        agent.goes_on()
        done = agent.ends()
    assert done.out == "# Project\n\nFirst line.\nmain.py\nutil.py\ngone\n"
    assert box.deltabox("diff").status == 2


def test_commit_refuses_what_changed_since_it_was_shown(box: Box) -> None:
    with box.agent("echo one > f; meet one; echo two > f; meet two") as agent:
        agent.reaches("one")
        shown = box.deltabox("diff", "--json").ok().json["digest"]
        agent.goes_on()
        agent.reaches("two")
        refused = box.deltabox("commit", "--digest", shown).ended(3)
        assert "look at the diff again" in refused.err
        # Without a digest the last one shown counts, and that is the same one.
        box.deltabox("commit").ended(3)
        assert not (box.project / "f").exists()
        box.deltabox("diff", "--stat").ok()
        box.deltabox("commit").ok()
        assert box.read("f") == "two\n"
        agent.goes_on()
        agent.ends()


def test_digest_is_the_same_for_the_same_changes_and_no_other(box: Box) -> None:
    box.keep("echo one > f").ok()
    first = box.deltabox("diff", "--json").ok().json["digest"]
    assert box.deltabox("diff", "--json").ok().json["digest"] == first
    box.keep("chmod 600 f").ok()
    assert box.deltabox("diff", "--json").ok().json["digest"] != first
    box.deltabox("commit", "--digest", first).ended(3)
    box.deltabox("commit", "--digest", "0" * 64).ended(3)
    assert not (box.project / "f").exists()


def test_writers_that_live_over_a_commit_change_nothing_in_the_project(box: Box) -> None:
    box.write("opened", "base.")
    box.write("mapped", "base.")
    script = f"exec python3 -c '{WRITER}' \"$M\" '{box.project}'"
    with box.agent(script) as agent:
        agent.reaches("written")
        box.deltabox("diff", "--stat").ok()
        box.deltabox("commit", *WRITTEN).ok()
        inodes = {name: os.stat(box.project / name).st_ino for name in WRITTEN}
        assert {box.read(name) for name in WRITTEN} == {"first"}
        assert not (box.project / "outside").exists()
        agent.goes_on()
        agent.reaches("more")
        assert {box.read(name) for name in WRITTEN} == {"first"}
        # They are changes for a new decision, not lost and not let in.
        assert dict.fromkeys(WRITTEN, "modified").items() <= box.changes().items()
        agent.goes_on()
        agent.reaches("more")
        agent.goes_on()
        agent.ends()
    assert {box.read(name) for name in WRITTEN} == {"first"}
    assert {name: os.stat(box.project / name).st_ino for name in WRITTEN} == inodes
    box.deltabox("commit").ok()
    assert {box.read(name) for name in (*WRITTEN, "outside/other")} == {"third"}
