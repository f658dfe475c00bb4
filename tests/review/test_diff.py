"""What counts as a change, how it is counted, named, rated and written down."""

import os
import subprocess  # noqa: TID251 - git is the judge of our patches
from pathlib import Path
from typing import Any

import pytest

from deltabox.engines.delta import Fingerprint
from deltabox.paths import WorkspacePath
from deltabox.review import risk, text
from deltabox.review.digest import digest
from deltabox.review.model import Change, Review
from tests.review.kit import Bench, Model, read_tree, write_tree

P = WorkspacePath


def by_path(review: Review) -> dict[bytes, Change]:
    return {c.path: c for c in review.changes}


def only(bench: Bench, **options: Any) -> Change:
    changes = bench.review(**options).changes
    assert len(changes) == 1
    return changes[0]


def test_touched_but_equal_is_no_change(bench: Bench) -> None:
    base: Model = {b"f": ("file", 0o644, b"same"), b"l": ("symlink", b"x"), b"d": ("dir", 0o755)}
    write_tree(bench.base_path, base)
    bench.stack(base)
    write_tree(bench.layer_paths[0], base)
    assert bench.review().changes == []
    (bench.layer_paths[0] / "f").write_bytes(b"else")  # same size: only the content tells
    assert only(bench).kind == "modified"


def test_lines_are_counted_for_modified_added_and_deleted(bench: Bench) -> None:
    write_tree(
        bench.base_path, {b"m": ("file", 0o644, b"1\n2\n3\n"), b"gone": ("file", 0o644, b"a\nb")}
    )
    bench.stack({b"m": ("file", 0o644, b"1\n3\n4\n5\n"), b"new": ("file", 0o644, b"x\ny\n")})
    seen = {p: (c.kind, c.added, c.removed) for p, c in by_path(bench.review()).items()}
    assert seen == {
        b"gone": ("deleted", 0, 2),
        b"m": ("modified", 2, 1),
        b"new": ("added", 2, 0),
    }


def test_binary_and_large_files_have_no_line_counts(bench: Bench) -> None:
    bench.stack({b"b": ("file", 0o644, b"\0\n"), b"big": ("file", 0o644, b"x\n" * 50)})
    seen = by_path(bench.review(text_limit_bytes=64))
    assert (seen[b"b"].binary, seen[b"b"].added) == (True, None)
    assert (seen[b"big"].large, seen[b"big"].added) == (True, None)
    exact = by_path(bench.review())
    assert exact[b"big"].sha256 == seen[b"big"].sha256  # streamed and read whole hash the same


def test_large_equal_files_are_no_change(bench: Bench) -> None:
    base: Model = {b"big": ("file", 0o644, b"x\n" * 50)}
    write_tree(bench.base_path, base)
    bench.stack(base)
    write_tree(bench.layer_paths[0], base)
    assert bench.review(text_limit_bytes=10).changes == []


def test_rename_prefers_the_same_name_and_empty_files_never_pair(bench: Bench) -> None:
    same = ("file", 0o644, b"content\n")
    write_tree(
        bench.base_path,
        {b"d": ("dir", 0o755), b"d/a": same, b"d/b": same, b"e": ("file", 0o644, b"")},
    )
    bench.stack({b"n": ("dir", 0o755), b"n/b": same, b"n/z": same, b"f": ("file", 0o644, b"")})
    seen = by_path(bench.review())
    assert (seen[b"n/b"].kind, seen[b"n/b"].origin) == ("renamed", b"d/b")
    assert (seen[b"n/z"].kind, seen[b"n/z"].origin) == ("renamed", b"d/a")
    assert (seen[b"e"].kind, seen[b"f"].kind) == ("deleted", "added")
    assert [c.path for c in bench.review().shown()] == [b"e", b"f", b"n/b", b"n/z"]


def test_new_directories_are_shown_only_when_empty_but_are_in_the_digest(bench: Bench) -> None:
    bench.stack({b"e": ("dir", 0o755), b"d": ("dir", 0o755), b"d/f": ("file", 0o644, b"")})
    review = bench.review()
    assert [c.path for c in review.shown()] == [b"d/f", b"e"]
    (bench.layer_paths[0] / "d").chmod(0o700)
    assert bench.review().digest != review.digest


def test_deletions_come_first(bench: Bench) -> None:
    write_tree(bench.base_path, {b"z": ("file", 0o644, b"z")})
    bench.stack({b"a": ("file", 0o644, b"a")})
    assert [c.path for c in bench.review().shown()] == [b"z", b"a"]


def test_hunk_ids_live_while_their_lines_do(bench: Bench) -> None:
    lines = [b"%d\n" % n for n in range(60)]
    write_tree(bench.base_path, {b"f": ("file", 0o644, b"".join(lines))})
    first = [b"one\n", *lines[1:50], b"two\n", *lines[51:]]
    bench.stack({b"f": ("file", 0o644, b"".join(first))})
    before = only(bench, detail="full").hunks
    (bench.layer_paths[0] / "f").write_bytes(
        b"".join([b"one\n", *lines[1:50], b"2\n", *lines[51:]])
    )
    after = only(bench, detail="full").hunks
    assert [h.n for h in before] == [1, 2]
    assert before[0].id == after[0].id
    assert before[1].id != after[1].id
    assert (before[1].old_start, before[1].old_lines) == (48, 7)


def test_authors_are_named(bench: Bench) -> None:
    bench.stack({b"f": ("file", 0o644, b"")})
    assert only(bench, authors={P(b"f"): ["exec 3", "fs.write 1"]}).by == ["exec 3", "fs.write 1"]


def test_unreadable_file_is_refused_with_a_reason(bench: Bench) -> None:
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    bench.stack({b"f": ("file", 0o000, b"x")})
    assert only(bench).refused == "cannot be read, so it cannot be shown"


VECTOR = [
    Change(
        path=b"gone", kind="deleted", old_type="file", base=Fingerprint("file", 7, 3, 5, 6, 0o644)
    ),
    Change(
        path=b"docs/new\xff\n.txt",
        kind="added",
        type="file",
        mode=0o644,
        size_after=6,
        sha256="5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03",
    ),
    Change(path=b"link", kind="added", type="symlink", link=b"docs"),
    Change(
        path=b"docs",
        kind="mode",
        type="dir",
        mode=0o700,
        base=Fingerprint("dir", 1, 2, 3, 4, 0o755),
    ),
    Change(
        path=b"to",
        kind="renamed",
        type="file",
        mode=0o755,
        size_after=0,
        sha256="e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        origin=b"from",
        origin_base=Fingerprint("file", 9, 0, 1, 2, 0o755),
    ),
]


def test_digest_vector_is_the_one_in_the_document() -> None:
    value = digest(VECTOR)
    assert value == digest(reversed(VECTOR))
    assert value in Path("docs/delta.md").read_text()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("path", b"x"),
        ("kind", "type"),
        ("type", "symlink"),
        ("mode", 0o600),
        ("size_after", 7),
        ("sha256", "0" * 64),
        ("link", b"x"),
        ("origin", b"x"),
        ("base", Fingerprint("file", 1, 1, 1, 1, 1)),
    ],
)
def test_digest_changes_with_every_field(field: str, value: Any) -> None:
    import copy

    changed = copy.deepcopy(VECTOR)
    setattr(changed[1], field, value)
    assert digest(changed) != digest(VECTOR)


def git(folder: Path, *args: str, data: bytes = b"") -> bytes:
    command = ["git", "-c", "core.quotepath=off", *args]
    return subprocess.run(command, cwd=folder, input=data, check=True, capture_output=True).stdout


def test_patch_makes_the_view_of_the_base_by_git_apply(bench: Bench) -> None:
    base: Model = {
        b"m": ("file", 0o644, b"1\n2\n3"),
        b"x": ("file", 0o644, b"run\n"),
        b"old": ("file", 0o644, b"content\n"),
        b"bin": ("file", 0o644, b"\0\1" * 99),
        b"t": ("file", 0o644, b"becomes a link"),
        b"l": ("symlink", b"a"),
        b"gone": ("file", 0o755, b"gone\n"),
        b'q"\\': ("file", 0o644, b"q\n"),
    }
    view: Model = {
        b"m": ("file", 0o644, b"1\ntwo\n3\n"),
        b"x": ("file", 0o755, b"run\n"),
        b"new name\n\xff": ("file", 0o644, b"content\n"),
        b"bin": ("file", 0o644, bytes(range(256)) * 3),
        b"t": ("symlink", b"m"),
        b"l": ("symlink", b"b c"),
        b"empty": ("file", 0o644, b""),
        b'q"\\': ("file", 0o644, b"Q\r\n"),
    }
    write_tree(bench.base_path, base)
    bench.stack(view)
    patches = b"".join(text.patches(bench.merged, bench.review()))
    git(bench.base_path, "init", "-q")
    git(bench.base_path, "apply", "--whitespace=nowarn", "-", data=patches)
    now = {p: e for p, e in read_tree(bench.base_path).items() if not p.startswith(b".git")}
    assert now == view


def test_text_for_a_person_has_no_control_or_bidi_characters(bench: Bench) -> None:
    evil = "x = 1 \u202e# safe\x1b[31m\r\n\x07".encode() + b"\xff\n"
    bench.stack({"na\u202eme\x1b".encode(): ("file", 0o644, evil)})
    lines = text.unified(bench.merged, only(bench))
    assert "+x = 1 \\u{202e}# safe\\x1b[31m\\x0d" in lines
    assert "+\\x07\\xff" in lines
    assert all(line.replace("\t", "").isprintable() for line in lines)


def test_json_has_the_documented_fields_and_exact_bytes(bench: Bench) -> None:
    bench.stack({b"a\xff": ("file", 0o644, b"1\n")})
    found = text.as_json(bench.review(detail="full"), review_id="r1", session="s1")
    assert found["files"][0]["pathB64"] == "Yf8="
    assert found["files"][0]["hunks"][0]["n"] == 1
    assert {"kind", "added", "removed", "binary", "sizeBefore", "sizeAfter", "by"} <= found[
        "files"
    ][0].keys()
    assert found["digest"] == bench.review().digest


# -- risk


@pytest.mark.parametrize(
    ("path", "before", "after", "tier"),
    [
        (b".git/hooks/post-checkout", None, b"#!/bin/sh\n", "refused"),
        (b"sub/.git/modules/x/hooks/pre-push", None, b"#!/bin/sh\n", "refused"),
        (b".git/hooks/pre-commit.sample", None, b"#!/bin/sh\n", None),
        (b".git/config", b"", b"[core]\n\tfsmonitor = /tmp/x\n", "refused"),
        (b".git/config", b"", b"[core]\n\tfsmonitor = true\n", None),
        (
            b".git/config",
            b"[core] sshCommand = x",
            b'[core]\nsshcommand=x\n[branch "a"]\nremote=o\n',
            None,
        ),
        (b".git/config", b"", b'[filter "l"] smudge = x', "refused"),
        (b".git/config", b"", b'[filter "a]b"]\nclean = "x', "refused"),
        (b".git/config", b"", b"[include]\n path=\\\n x", "refused"),
        (b".git/config", b"", b"[alias]\n st = status\n", None),
        (b".git/config", b"", b"[alias]\n st = !sh\n", "refused"),
        (b".git/config", b"", b"# [core] pager = x\n", None),
        (b"bare/config", b"", b"[core]\nbare=true\n[Diff]\nExternal=x", "refused"),
        (b".gitmodules", b"", b'[submodule "a"]\nupdate = !x\n', "refused"),
        (b"vendor/.git", None, b"gitdir: ../evil", "refused"),
        (b".envrc", b"", b"x", "refused"),
        (b"home/.bashrc", None, b"x", "refused"),
        (b".vscode/tasks.json", None, b"{}", "warned"),
        (b".mcp.json", b"{}", b'{"a":1}', "warned"),
        (b".claude/settings.json", b"{}", b'{"hooks":{"Stop":[]}}', "warned"),
        (b".claude/settings.json", b"{}", b'{"theme":"dark"}', None),
        (b"package.json", b'{"scripts":{"a":"b"}}', b'{"scripts":{"a":"b"},"version":"2"}', None),
        (b"package.json", b'{"scripts":{"a":"b"}}', b'{"scripts":{"a":"c"}}', "noted"),
        (b".github/workflows/ci.yml", None, b"on: push", "noted"),
        (b"Makefile", b"a:", b"b:", "noted"),
        (b"src/main.c", b"a", b"b", None),
        (b"venv/x.pth", None, b"import os", "warned"),
    ],
)
def test_risk_is_judged_by_what_changed(
    path: bytes, before: bytes | None, after: bytes, tier: str | None
) -> None:
    found = risk.assess(P(path), before, after)
    assert (found.tier if found else None) == tier
