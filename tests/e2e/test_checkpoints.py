"""Checkpoints and the trash by the command line: going back, and going back on going back."""

import stat

from tests.e2e.driver import Box


def test_restored_by_the_command_line_and_gone_back_on(box: Box) -> None:
    box.keep("echo one > f; rm README.md").ok()
    kept = box.deltabox("checkpoint", "--json", "good").ok().json["checkpoint"]
    view = box.view()
    box.keep("rm -rf f src; echo two > README.md").ok()
    after = box.view()
    back = box.deltabox("restore", "good", "--json").ok().json["before"]["checkpoint"]
    assert box.view() == view
    box.deltabox("restore", back).ok()
    assert box.view() == after
    box.deltabox("restore", kept, "src").ok()
    assert box.changes() == {"README.md": "modified"}
    assert kept in box.deltabox("checkpoint", "--list").ok().out


def test_work_that_the_agent_destroyed_itself_can_be_restored(box: Box) -> None:
    """Nothing is pending then, and still nothing is lost: a checkpoint was made before the run."""
    box.keep("echo precious > f").ok()
    box.keep("rm f").ok()
    assert box.changes() == {}
    rows = box.deltabox("checkpoint", "--list", "--json").ok().json["checkpoints"]
    box.deltabox("restore", rows[-1]["checkpoint"]).ok()
    assert box.changes() == {"f": "added"}
    box.deltabox("abort").ok()
    assert box.sessions() == []


def test_refused_commit_costs_no_checkpoint(box: Box) -> None:
    box.keep("echo agent > README.md").ok()
    kept = box.deltabox("checkpoint", "--json").ok().json["checkpoint"]
    box.write("README.md", "the user's\n")
    box.deltabox("commit").ended(3)
    assert kept in box.deltabox("checkpoint", "--list").ok().out
    box.deltabox("restore", kept).ok()
    assert box.read("README.md") == "the user's\n"


def test_abort_is_taken_back_whole_and_by_path(box: Box) -> None:
    box.keep("echo one > f; rm src/util.py; echo x >> README.md; chmod 755 src/main.py").ok()
    pending = box.changes()
    part = box.deltabox("abort", "--json", "f", "src/util.py").ok().json["trash"]
    whole = box.deltabox("abort", "--json").ok().json["trash"]
    assert box.sessions() == []
    listed = box.deltabox("gc", "--dry-run").ok().out
    assert part in listed
    assert whole in listed
    first = box.deltabox("undo", part, "--json").ok().json["session"]
    second = box.deltabox("undo", whole, "--json").ok().json["session"]
    assert box.changes("--session", first) | box.changes("--session", second) == pending
    assert box.changes("--session", first) == {"f": "added", "src/util.py": "deleted"}
    box.deltabox("commit", "--session", first).ok()
    box.deltabox("commit", "--session", second).ok()
    assert box.read("f") == "one\n"
    assert stat.S_IMODE((box.project / "src/main.py").stat().st_mode) == 0o755


def test_aborted_change_of_a_file_that_the_user_edited_since_is_a_conflict(box: Box) -> None:
    box.keep("echo agent > README.md").ok()
    trash = box.deltabox("abort", "--json").ok().json["trash"]
    box.write("README.md", "the user's\n")
    box.deltabox("undo", trash).ok()
    refused = box.deltabox("commit").ended(3)
    assert "README.md" in refused.err
    assert box.read("README.md") == "the user's\n"


def test_aborting_a_rename_brings_the_old_name_back(box: Box) -> None:
    box.keep("mv src/util.py src/tool.py").ok()
    assert box.changes() == {"src/tool.py": "renamed"}
    box.deltabox("abort", "src/tool.py").ok()
    assert box.sessions() == []
    assert "util.py" in box.git("ls-files", "src")
    trash = box.deltabox("gc", "--dry-run", "--json").ok().json["trash"][-1]["trash"]
    box.deltabox("undo", trash).ok()
    assert box.changes() == {"src/tool.py": "renamed"}
