"""What git did in the view, as one unit: judged by real git on both sides."""

import os
import shutil
import subprocess  # noqa: TID251 - git itself is the judge
import time
from pathlib import Path

import pytest

from deltabox.engines.delta import Fingerprint
from deltabox.errors import ReviewConflict
from deltabox.paths import WorkspacePath
from deltabox.review.commit import commit
from deltabox.review.gitunit import parse_index
from deltabox.review.model import Review
from deltabox.review.steps import Committed
from tests.review.kit import Bench, read_tree

P = WorkspacePath


def git(folder: Path, *args: str) -> str:
    who = ["-c", "user.name=Somebody", "-c", "user.email=somebody@example.org"]
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_SYSTEM": "/dev/null",
    }
    command = ["git", *who, *args]
    return subprocess.run(
        command, cwd=folder, env=env, check=True, capture_output=True, text=True
    ).stdout


class Repository:
    """A base under git, and a copy in which the agent's git commands run; the delta is made of both."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.base, self.view = bench, bench.base_path, bench.root / "view"
        git(self.base, "init", "-q", "-b", "main")
        (self.base / "a").write_text("one\n")
        (self.base / "b").write_text("b\n")
        git(self.base, "add", ".")
        git(self.base, "commit", "-q", "-m", "first")
        shutil.copytree(self.base, self.view, symlinks=True)
        self.since = self.now()

    def now(self) -> int:
        """By the clock of the file system itself: the ctime of a file made now, and the clock has
        moved on when this returns, so what follows is newer."""
        probe = self.bench.root / "probe"
        probe.write_bytes(b"")
        first = os.lstat(probe).st_ctime_ns
        while True:
            probe.write_bytes(b"x")
            if os.lstat(probe).st_ctime_ns > first:
                return first
            os.sched_yield()

    def review(self, ours: dict[WorkspacePath, Fingerprint] | None = None) -> Review:
        self.bench.stack(read_tree(self.view))
        return self.bench.review(since_ns=self.since, ours=ours or {})

    def commit(self, review: Review, **options: object) -> Committed:
        return commit(
            self.bench.base,
            self.bench.layers,
            review,
            commit=f"c{self.bench.count}",
            undo_dir=self.bench.new_dir("undo"),
            **options,  # type: ignore[arg-type]
        )


@pytest.fixture
def repository(bench: Bench) -> Repository:
    return Repository(bench)


def test_commit_and_branch_of_the_agent_arrive_whole(repository: Repository) -> None:
    (repository.view / "a").write_text("two\n")
    git(repository.view, "checkout", "-q", "-b", "feature/x")
    git(repository.view, "commit", "-q", "-a", "-m", "agent's")
    review = repository.review()
    assert [u.path for u in review.units] == [b".git"]
    assert "new refs/heads/feature/x" in review.units[0].words
    assert [c.path for c in review.shown()] == [b"a"]
    repository.commit(review)
    base = repository.base
    assert git(base, "log", "--format=%s", "feature/x").split("\n")[:2] == ["agent's", "first"]
    assert git(base, "rev-parse", "--abbrev-ref", "HEAD").strip() == "feature/x"
    assert git(base, "status", "--porcelain") == ""
    git(base, "fsck", "--strict")


def test_publish_order_is_objects_logs_refs_head_index(repository: Repository) -> None:
    (repository.view / "a").write_text("two\n")
    git(repository.view, "checkout", "-q", "-b", "x")
    git(repository.view, "commit", "-q", "-a", "-m", "agent's")
    review = repository.review()
    seen: list[bytes] = []
    plan_paths: list[bytes] = []

    def note(plan: object) -> None:
        plan_paths.extend(a.path for a in plan.actions)  # type: ignore[attr-defined]

    repository.commit(
        review,
        store=note,
        on_step=lambda s: seen.append(plan_paths[s.action]) if s.op == "put" else None,
    )
    files = [p for p in seen if (repository.base / os.fsdecode(p)).is_file()]
    order = [
        next(i for i, p in enumerate(files) if p.startswith(prefix))
        for prefix in (b".git/objects", b".git/logs", b".git/refs", b".git/HEAD", b".git/index")
    ]
    assert order == sorted(order)
    assert files[-1] == b".git/index"


def test_index_refreshed_by_status_is_no_change_and_a_staged_file_is(
    repository: Repository,
) -> None:
    os.utime(repository.view / "a", ns=(1, 1))
    before = (repository.view / ".git/index").read_bytes()
    git(repository.view, "status")
    assert (
        repository.view / ".git/index"
    ).read_bytes() != before  # the control: git did rewrite it
    assert repository.review().changes == []
    (repository.view / "n").write_text("n\n")
    git(repository.view, "add", "n")
    assert "staged files" in repository.review().units[0].words


@pytest.mark.parametrize("version", ["2", "3", "4"])
def test_index_parser_agrees_with_git(repository: Repository, version: str) -> None:
    folder = repository.view
    (folder / "dir with space").mkdir()
    for child in ("dir with space/x", "dir with space/xy", "z" * 200):
        (folder / child).write_text(child)
    git(folder, "add", ".")
    if version == "3":
        (folder / "later").write_text("")
        git(folder, "add", "-N", "later")
    else:
        git(folder, "update-index", "--index-version", version)
    data = (folder / ".git/index").read_bytes()
    assert data[4:8] == int(version).to_bytes(4, "big")
    entries = parse_index(data)
    assert entries is not None
    shown = [f"{mode:06o} {oid.hex()} 0\t{os.fsdecode(path)}" for path, mode, oid, _ in entries]
    assert shown == git(folder, "ls-files", "--stage").splitlines()


@pytest.mark.parametrize(
    "data", [b"", b"DIRC", b"DIRC\0\0\0\2\xff\xff\xff\xff" + b"\0" * 40, b"x" * 99]
)
def test_index_parser_refuses_what_is_none(data: bytes) -> None:
    assert parse_index(data) is None


def test_users_commit_meanwhile_is_a_conflict_and_the_files_can_go_without_it(
    repository: Repository,
) -> None:
    (repository.view / "a").write_text("two\n")
    git(repository.view, "commit", "-q", "-a", "-m", "agent's")
    (repository.base / "b").write_text("user's\n")
    git(repository.base, "commit", "-q", "-a", "-m", "user's")
    review = repository.review()
    assert review.units[0].conflict is not None
    head = git(repository.base, "rev-parse", "HEAD")
    with pytest.raises(ReviewConflict):
        repository.commit(review)
    known = [c for c in review.changes if c.path == b"b"]
    assert known[0].conflict is not None  # the user's edit of b is not the agent's to undo
    done = repository.commit(review, on_conflict="skip")
    assert {c.path for c in done.skipped} == {b".git", b"b"}
    assert git(repository.base, "rev-parse", "HEAD") == head
    assert (repository.base / "a").read_text() == "two\n"
    assert (repository.base / "b").read_text() == "user's\n"


def test_what_an_earlier_commit_of_ours_wrote_is_not_the_users(repository: Repository) -> None:
    (repository.view / "a").write_text("two\n")
    git(repository.view, "commit", "-q", "-a", "-m", "agent's")
    done = repository.commit(repository.review())
    ours = {P(o.path): o.fingerprint for o in done.paths if o.fingerprint is not None}
    git(repository.view, "commit", "-q", "--allow-empty", "-m", "again")
    assert repository.review().units[0].conflict is not None  # the control
    prints: dict[WorkspacePath, Fingerprint | None] = {}
    prints.update(ours)
    repository.bench.stack(read_tree(repository.view))
    review = repository.bench.review(since_ns=repository.since, ours=ours, fingerprints=prints)
    assert review.units[0].conflict is None
    repository.commit(review)
    assert git(repository.base, "log", "-1", "--format=%s") == "again\n"
    git(repository.base, "fsck", "--strict")


def test_lock_files_and_deleted_objects_never_reach_the_project(repository: Repository) -> None:
    (repository.view / "a").write_text("two\n")
    git(repository.view, "commit", "-q", "-a", "-m", "agent's")
    git(repository.view, "gc", "-q", "--prune=now")
    (repository.view / ".git/index.lock").write_bytes(b"")
    objects = {p for p in read_tree(repository.base) if p.startswith(b".git/objects/")}
    repository.commit(repository.review())
    now = read_tree(repository.base)
    assert objects <= now.keys()
    assert b".git/index.lock" not in now
    assert git(repository.base, "log", "-1", "--format=%s") == "agent's\n"
    assert git(repository.base, "status", "--porcelain") == ""
    git(repository.base, "fsck", "--strict")


def test_hook_and_program_key_stay_out_unless_named(repository: Repository) -> None:
    hook = repository.view / ".git/hooks/post-checkout"
    hook.write_text("#!/bin/sh\n")
    hook.chmod(0o755)
    git(repository.view, "config", "core.fsmonitor", "/tmp/evil")
    git(repository.view, "branch", "x")
    review = repository.review()
    assert review.units[0].risk is not None
    assert review.units[0].risk.tier == "refused"
    done = repository.commit(review)
    assert {o.path for o in done.left_out} == {b".git/config", b".git/hooks/post-checkout"}
    assert "fsmonitor" not in (repository.base / ".git/config").read_text()
    assert not (repository.base / ".git/hooks/post-checkout").exists()
    assert "x" in git(repository.base, "branch")
    again = repository.bench.review()
    repository.commit(again, allow=[b".git/hooks/post-checkout"])
    assert (repository.base / ".git/hooks/post-checkout").exists()
    assert "fsmonitor" not in (repository.base / ".git/config").read_text()


def test_new_and_deleted_repositories_go_whole(repository: Repository) -> None:
    (repository.view / "sub").mkdir()
    git(repository.view / "sub", "init", "-q", "-b", "main")
    git(repository.view / "sub", "commit", "-q", "--allow-empty", "-m", "inner")
    review = repository.review()
    assert [(u.path, u.kind) for u in review.units] == [(b"sub/.git", "added")]
    repository.commit(review)
    git(repository.base / "sub", "fsck", "--strict")
    repository.since = time.time_ns() + 10**12
    shutil.rmtree(repository.view / "sub")
    review = repository.review()
    assert [(u.path, u.kind) for u in review.units] == [(b"sub/.git", "deleted")]
    repository.commit(review)
    assert not (repository.base / "sub").exists()
