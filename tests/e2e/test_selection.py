"""Part of a review: files taken, undone, taken again; risks that stay out; exact data and patches."""

import json
import shutil
from pathlib import Path

from tests.e2e.driver import Box
from tests.e2e.listing import listing

FIVE = "echo 1 > one; echo 2 >> README.md; rm src/util.py; mkdir d; echo 4 > d/four; chmod 755 src/main.py"


def test_two_of_five_taken_undone_and_taken_again(box: Box) -> None:
    start = listing(box.project)
    box.keep(FIVE).ok()
    assert len(box.changes()) == 5
    done = box.deltabox("commit", "one", "src/util.py").ok()
    assert "3 changes still pending" in done.out
    taken = listing(box.project)
    assert taken.keys() - start.keys() == {"one"}
    assert start.keys() - taken.keys() == {"src/util.py"}
    assert len(box.changes()) == 3

    undone = box.deltabox("undo").ok()
    assert listing(box.project) == start
    # An undo is a commit itself: taken back by its name, it brings the changes again.
    undo = undone.out.split("(as ")[1].split(")")[0]
    assert f"deltabox undo {undo}" in undone.out
    box.deltabox("undo", undo).ok()
    assert listing(box.project) == taken

    box.deltabox("commit").ok()
    assert box.read("README.md").endswith("2\n")
    assert box.read("d/four") == "4\n"
    assert (box.project / "src/main.py").stat().st_mode & 0o777 == 0o755


def test_selection_is_relative_to_the_current_folder(box: Box) -> None:
    box.keep("echo x >> src/main.py; echo x > src/new; echo x > new").ok()
    box.deltabox("commit", "new", cwd=box.project / "src").ok()
    assert (box.project / "src/new").exists()
    assert not (box.project / "new").exists()
    box.deltabox("commit", "../new", box.project / "src", cwd=box.project / "src").ok()
    assert (box.project / "new").exists()
    assert box.read("src/main.py").endswith("x\n")


def test_path_with_nothing_pending_is_refused_by_name(box: Box) -> None:
    box.keep("echo x > new").ok()
    for verb in ("commit", "abort"):
        assert "README.md" in box.deltabox(verb, "README.md").ended(2).err
    assert box.changes() == {"new": "added"}


def test_what_runs_without_a_persons_act_stays_out_unless_named(box: Box) -> None:
    script = """
    echo 'touch /tmp/pwned' > .envrc; echo x > fine
    printf '#!/bin/sh\\ntouch pwned\\n' > .git/hooks/post-checkout; chmod +x .git/hooks/post-checkout
    git config core.pager 'touch pwned'
    """
    box.keep(script).ok()
    hook, config = box.project / ".git/hooks/post-checkout", box.project / ".git/config"
    shown = box.deltabox("diff", "--json").ok().json["files"]
    tiers = {file["path"]: file.get("risk", {}).get("tier") for file in shown}
    assert tiers == {".envrc": "refused", "fine": None, ".git": "refused"}

    left = box.deltabox("commit").ended(3)
    assert box.read("fine") == "x\n"
    assert ".envrc" in left.out
    assert not (box.project / ".envrc").exists()
    assert not hook.exists()
    assert "pager" not in config.read_text()

    box.deltabox("commit", ".envrc").ended(3)
    assert not (box.project / ".envrc").exists()
    box.deltabox("commit", "--allow", ".envrc").ended(3)
    assert (box.project / ".envrc").exists()
    assert not hook.exists()
    box.deltabox("commit", "--allow", ".git").ok()
    assert hook.exists()
    assert "pager" in config.read_text()


def test_yes_does_not_let_refused_risks_in(box: Box) -> None:
    script = "echo evil > .envrc; echo x > fine"
    box.deltabox("run", "--yes", "--", "sh", "-c", script).ok()
    assert box.read("fine") == "x\n"
    assert not (box.project / ".envrc").exists()


def test_aborted_paths_lie_in_the_trash(box: Box) -> None:
    before = listing(box.project)
    box.keep(FIVE).ok()
    done = box.deltabox("abort", "one", "d", "--json").ok().json
    assert done["discarded"] >= 2
    assert len(box.changes()) == 3
    trash = box.state / "trash" / done["trash"]
    kept = {path.name: path.read_text() for path in trash.rglob("*") if path.is_file()}
    assert kept == {"one": "1\n", "four": "4\n"}
    box.deltabox("abort").ok()
    assert listing(box.project) == before


def test_diff_json_has_the_documented_shape(box: Box) -> None:
    box.write("old-name", "".join(f"line {n}\n" for n in range(40)))
    script = r"""
    sed -i 's/First/Second/' README.md; mv old-name new-name; rm src/util.py
    printf '\0\1\2' > binary; touch "$(printf 'odd\377name')"; chmod +x src/main.py
    """
    box.keep(script).ok()
    found = box.deltabox("diff", "--json").ok().json
    assert {"review", "session", "digest", "files"} <= found.keys()
    assert len(found["digest"]) == 64
    files = {file["path"]: file for file in found["files"]}
    for file in files.values():
        wanted = {"path", "kind", "added", "removed", "binary", "sizeBefore", "sizeAfter", "by"}
        assert wanted | {"hunks"} <= file.keys()
        for number, hunk in enumerate(file["hunks"], 1):
            assert {"id", "oldStart", "oldLines", "newStart", "newLines"} < hunk.keys()
            assert hunk["n"] == number
    kinds = {path: file["kind"] for path, file in files.items()}
    odd = next(path for path in files if path.startswith("odd"))
    assert kinds == {
        "README.md": "modified",
        "new-name": "renamed",
        "src/util.py": "deleted",
        "binary": "added",
        odd: "added",
        "src/main.py": "mode",
    }
    assert files["new-name"]["from"] == "old-name"
    assert files[odd]["pathB64"] == "b2Rk/25hbWU="
    assert files["binary"]["binary"] is True
    readme = files["README.md"]
    assert (readme["added"], readme["removed"], readme["binary"]) == (1, 1, False)
    assert (readme["sizeBefore"], readme["sizeAfter"]) == (23, 24)
    assert len(readme["hunks"]) == 1
    assert readme["by"], "which command did it"
    assert found["files"][0]["kind"] == "deleted", "deletions come first"


def test_patch_applied_by_git_gives_the_views_bytes(box: Box) -> None:
    box.write("old-name", "".join(f"line {n}\n" for n in range(40)))
    box.write("no-newline", "a\nb")
    box.write("bytes", bytes(range(256)) * 9)
    (box.project / "link").symlink_to("README.md")
    box.git("add", "-A")
    box.git("commit", "-q", "-m", "more")
    plain = box.project.with_name("plain")
    shutil.copytree(box.project, plain, symlinks=True)
    script = r"""
    sed -i 's/First/Second/' README.md; mv old-name new-name; sed -i 's/line 7$/seven/' new-name
    rm src/util.py; printf 'a\nc' > no-newline; printf '\0\1\2\n' > 'with space'; chmod +x src/main.py
    dd if=/dev/zero of=bytes bs=1 seek=100 count=50 conv=notrunc status=none
    ln -sfn src link; : > empty; printf 'caf\303\251\r\n' > "caf$(printf '\303\251')"
    """
    box.keep(script).ok()
    view = {n: e for n, e in box.view().items() if not n.startswith(".git/") and e[0] != "d"}
    patch = box.deltabox("diff", "--patch").ok().raw
    box.native("git", "apply", "--whitespace=nowarn", "-", stdin=patch, cwd=plain).ok()
    applied = {
        n: e for n, e in listing(plain).items() if not n.startswith(".git/") and e[0] != "d"
    }
    assert applied == view


def test_stat_and_plain_diff_escape_hostile_names(box: Box) -> None:
    box.keep(r"""touch "$(printf 'a\033[31m\nb')"; printf 'x\033]0;title\007\n' > text""").ok()
    for flags in (["--stat"], [], ["--json"]):
        shown = box.deltabox("diff", *flags).ok().raw
        assert b"\x1b" not in shown, flags
    card = box.deltabox("review").ok().raw
    assert b"\x1b" not in card
    assert json.loads(box.deltabox("diff", "--json").raw)["files"]


def test_commit_of_a_deep_path_brings_its_new_folders(box: Box) -> None:
    box.keep("mkdir -p a/b/c; echo x > a/b/c/f; echo y > a/b/other; chmod 750 a/b").ok()
    box.deltabox("commit", "a/b/c/f").ok()
    assert box.read("a/b/c/f") == "x\n"
    assert not (box.project / "a/b/other").exists()
    assert (box.project / "a/b").stat().st_mode & 0o777 == 0o750
    assert box.changes() == {"a/b/other": "added"}


def test_owner_and_times_of_committed_files(box: Box) -> None:
    box.keep("echo a > a; echo b > b; touch -d @1000000000 a").ok()
    box.deltabox("commit", "a", "--keep-mtime").ok()
    box.deltabox("commit").ok()
    parent = box.project.stat()
    for name in ("a", "b"):
        st = Path(box.project, name).stat()
        assert (st.st_uid, st.st_gid) == (parent.st_uid, parent.st_gid)
    assert (box.project / "a").stat().st_mtime == 1_000_000_000
