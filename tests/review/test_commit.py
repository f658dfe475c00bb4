"""Commit, undo, abort and prune against ordinary directories, by a state machine and by hand."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from typing_extensions import override

from deltabox.engines.delta import Fingerprint, prune
from deltabox.errors import BadUsage, Failed, NotFound, ReviewChanged, ReviewConflict
from deltabox.paths import Tree, WorkspacePath, is_within
from deltabox.review import abort, undo
from deltabox.review.commit import commit, plan
from deltabox.review.steps import Committed, Plan, Step
from tests.review.kit import Bench, Model, read_merged, read_tree, write_tree

P = WorkspacePath
ODD = b"new\nline \xff " + b"x" * 240
BASE: Model = {
    b"a": ("file", 0o644, b"one\n"),
    b"d": ("dir", 0o755),
    b"d/x": ("file", 0o644, b"x"),
    b"d/sub": ("dir", 0o755),
    b"d/sub/y": ("file", 0o600, b"y"),
    b"l": ("symlink", b"a"),
    b"tofile": ("dir", 0o755),
    b"tofile/in": ("file", 0o644, b"in"),
    b"todir": ("file", 0o644, b"todir"),
    b"old": ("file", 0o755, b"same content\n"),
    b"mode": ("file", 0o644, b"mode"),
    b"dm": ("dir", 0o755),
}
# One of everything: each kind of change, each change of type, odd names, locked directories.
VIEW: Model = {
    b"a": ("file", 0o640, b"two\n"),
    b"l": ("symlink", b"/nowhere"),
    b"tofile": ("file", 0o644, b"now a file"),
    b"todir": ("dir", 0o700),
    b"todir/n": ("file", 0o644, b"n"),
    b"moved": ("dir", 0o755),
    b"moved/old": ("file", 0o755, b"same content\n"),
    b"mode": ("file", 0o755, b"mode"),
    b"dm": ("dir", 0o711),
    b"locked": ("dir", 0o555),
    b"locked/deep": ("dir", 0o755),
    b"locked/deep/f": ("file", 0o400, b"f"),
    ODD: ("file", 0o644, b"odd"),
    b"empty": ("dir", 0o750),
}


def run(bench: Bench, review: Any = None, **options: Any) -> Committed:
    return commit(
        bench.base,
        bench.layers,
        review or bench.review(),
        commit=f"c{bench.count}",
        undo_dir=bench.new_dir("undo"),
        **options,
    )


def back(bench: Bench, done: Committed) -> Committed:
    return undo.undo(
        bench.base, done.undo, commit=f"u{bench.count}", undo_dir=bench.new_dir("undo")
    )


def prune_after(bench: Bench, done: Committed) -> None:
    paths = {P(o.path): o.source for o in done.paths}
    prune(bench.base, bench.layers[0], bench.layers[1:], paths)


@pytest.fixture
def full(bench: Bench) -> Bench:
    write_tree(bench.base_path, BASE)
    bench.stack(VIEW)
    return bench


def test_commit_makes_the_project_equal_the_view_and_undo_and_redo_go_back_and_forth(
    full: Bench,
) -> None:
    done = run(full)
    assert read_tree(full.base_path) == VIEW
    assert full.review().changes == []
    first = back(full, done)
    assert read_tree(full.base_path) == BASE
    back(full, first)
    assert read_tree(full.base_path) == VIEW


def test_commit_reports_the_fingerprints_that_the_project_now_has(full: Bench) -> None:
    done = run(full)
    for outcome in done.paths:
        st_now = full.base.lstat_or_none(P(outcome.path))
        assert outcome.fingerprint == (None if st_now is None else Fingerprint.of(st_now))


def test_pruned_delta_shows_the_same_and_holds_nothing(full: Bench) -> None:
    prune_after(full, run(full))
    assert read_merged(full.merged) == VIEW
    # Below a read-only directory an ordinary user's entries stay, equal as they are.
    assert full.layers[0].names() == ([] if os.geteuid() == 0 else [b"locked"])
    assert full.review().changes == []


def test_read_only_folders_of_the_project_are_locked_again(bench: Bench) -> None:
    base: Model = {
        b"r": ("dir", 0o555),
        b"r/x": ("file", 0o644, b"x"),
        b"r/gone": ("dir", 0o500),
        b"r/gone/y": ("file", 0o400, b"y"),
    }
    view: Model = {
        b"r": ("dir", 0o555),
        b"r/x": ("file", 0o644, b"changed"),
        b"r/n": ("file", 0o444, b"new"),
    }
    write_tree(bench.base_path, base)
    bench.stack(view)
    done = run(bench)
    assert read_tree(bench.base_path) == view
    back(bench, done)
    assert read_tree(bench.base_path) == base


def test_abort_below_a_read_only_folder(bench: Bench) -> None:
    bench.stack({b"r": ("dir", 0o555), b"r/x": ("dir", 0o555), b"r/y": ("file", 0o644, b"")})
    trash = discard(bench, b"r/x")
    assert read_merged(bench.merged) == {b"r": ("dir", 0o555), b"r/y": ("file", 0o644, b"")}
    assert read_tree(trash)[b"r/x"] == ("dir", 0o555)


def test_plan_and_its_parts_survive_json(full: Bench) -> None:
    review = full.review()
    assert msgspec.json.decode(msgspec.json.encode(review), type=type(review)) == review
    planned = plan(review, commit="c1")
    assert msgspec.json.decode(msgspec.json.encode(planned), type=Plan) == planned
    done = run(full)
    assert msgspec.json.decode(msgspec.json.encode(done), type=Committed) == done


def test_modification_times_follow_the_views_order_one_nanosecond_apart(bench: Bench) -> None:
    bench.stack({n: ("file", 0o644, n) for n in (b"a", b"b", b"c")})
    for at, child in enumerate("cab"):
        os.utime(bench.layer_paths[0] / child, ns=(0, 1000 + at))
    run(bench)
    times = [os.lstat(bench.base_path / child).st_mtime_ns for child in "cab"]
    assert times[1:] == [times[0] + 1, times[0] + 2]
    assert times[0] > 10**18


def test_keep_mtime_keeps_the_views_times(bench: Bench) -> None:
    bench.stack({b"a": ("file", 0o644, b"")})
    os.utime(bench.layer_paths[0] / "a", ns=(0, 12345))
    run(bench, keep_mtime=True)
    assert os.lstat(bench.base_path / "a").st_mtime_ns == 12345


@pytest.mark.parametrize(
    "chosen", [b"todir", b"todir/n", b"tofile", b"d", b"moved/old", b"old", b"locked/deep"]
)
def test_a_path_takes_itself_what_is_below_and_the_folders_above(
    full: Bench, chosen: bytes
) -> None:
    run(full, selection=[P(chosen)])
    now = read_tree(full.base_path)
    both = {chosen} | ({b"moved/old", b"old"} if chosen in (b"moved/old", b"old") else set())
    above = {b"locked", b"moved", b"todir"} & {p.rpartition(b"/")[0] for p in both}
    for path in BASE.keys() | VIEW.keys():
        is_chosen = path in above or any(is_within(path, c) for c in both)
        assert now.get(path) == (VIEW if is_chosen else BASE).get(path), path


def test_unknown_path_is_named(full: Bench) -> None:
    with pytest.raises(NotFound, match="nothere"):
        run(full, selection=[P(b"nothere")])


def test_digest_of_another_review_is_refused_and_nothing_applied(full: Bench) -> None:
    with pytest.raises(ReviewChanged):
        run(full, digest="0" * 64)
    assert read_tree(full.base_path) == BASE
    run(full, digest=full.review().digest)


def test_content_written_after_the_review_is_refused_and_nothing_applied(full: Bench) -> None:
    review = full.review()
    (full.layer_paths[0] / "todir/n").write_bytes(b"evil")
    with pytest.raises(ReviewChanged, match="todir/n"):
        run(full, review)
    assert read_tree(full.base_path) == BASE


def test_symlink_retargeted_after_the_review_is_refused(full: Bench) -> None:
    review = full.review()
    (full.layer_paths[0] / "l").unlink()
    (full.layer_paths[0] / "l").symlink_to("/etc")
    with pytest.raises(ReviewChanged):
        run(full, review)
    assert read_tree(full.base_path) == BASE


# -- the agent's descriptors and links never reach the project


def test_open_descriptor_shared_mapping_and_hard_link_of_the_delta_change_nothing_after_commit(
    full: Bench,
) -> None:
    import mmap

    upper = full.layer_paths[0]
    os.link(upper / "a", full.root / "elsewhere")
    with open(upper / "a", "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        run(full)
        mapped[0:3] = b"MAP"
        mapped.flush()
        file.seek(0, 2)
        file.write(b"more\n")
        file.flush()
        with (full.root / "elsewhere").open("ab") as link:
            link.write(b"link\n")
    assert (upper / "a").read_bytes() == b"MAP\nmore\nlink\n"  # the control: these writes do land
    assert (full.base_path / "a").read_bytes() == b"two\n"


def test_users_hard_link_of_a_replaced_file_cannot_spoil_the_undo(full: Bench) -> None:
    os.link(full.base_path / "a", full.root / "users-link")
    done = run(full)
    (full.root / "users-link").write_bytes(b"written through the link\n")
    back(full, done)
    assert (full.base_path / "a").read_bytes() == b"one\n"


def test_set_id_bits_stay_out(bench: Bench) -> None:
    bench.stack({b"s": ("file", 0o6755, b"#!"), b"t": ("file", 0o755, b"")})
    review = bench.review()
    assert [c.notes for c in review.changes] == [
        ["set-user-id and set-group-id bits stay out"],
        [],
    ]
    run(bench, review)
    assert read_tree(bench.base_path) == {b"s": ("file", 0o755, b"#!"), b"t": ("file", 0o755, b"")}


def test_fifos_are_refused_without_hanging_and_the_rest_is_committed(bench: Bench) -> None:
    bench.stack({b"f": ("file", 0o644, b"")})
    os.mkfifo(bench.layer_paths[0] / "pipe")
    done = run(bench)
    assert [o.path for o in done.left_out] == [b"pipe"]
    assert read_tree(bench.base_path) == {b"f": ("file", 0o644, b"")}


def test_users_attributes_stay_and_the_agents_stay_out(full: Bench) -> None:
    os.setxattr(full.base_path / "a", "user.mine", b"1")
    os.setxattr(full.layer_paths[0] / "a", "user.agents", b"1")
    os.setxattr(full.layer_paths[0] / "a", "user.overlay.origin", b"1")
    review = full.review()
    assert [c.notes for c in review.changes if c.path == b"a"] == [
        ["extended attributes stay out: user.agents"]
    ]
    run(full, review)
    assert os.listxattr(full.base_path / "a") == ["user.mine"]


# -- conflicts: the user was there


def fingerprints(bench: Bench) -> dict[WorkspacePath, Fingerprint | None]:
    """As at first touch: of every path of base and view."""
    with Tree.open(bench.base_path) as tree:
        known: dict[WorkspacePath, Fingerprint | None] = {
            p: Fingerprint.of(s) for p, s in tree.walk()
        }
    for path in VIEW:
        known.setdefault(P(path), None)
    return known


def edit(path: Path) -> None:
    path.write_bytes(b"the user's\n")


def add_below(path: Path) -> None:
    (path / "users").write_bytes(b"the user's\n")


def replace_by_link(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.symlink_to("/tmp")


CONFLICTS = {
    "both edited": ("a", edit, b"a"),
    "mode changed": ("a", lambda p: p.chmod(0o600), b"a"),
    "edited what the agent deleted": ("d/x", edit, b"d/x"),
    "deleted what the agent edited": ("a", lambda p: p.unlink(), b"a"),
    "added what the agent added": ("empty", edit, b"empty"),
    "edited what the agent renamed": ("old", edit, b"old"),
    "folder mode changed by both": ("dm", lambda p: p.chmod(0o700), b"dm"),
    "link changed by both": ("l", replace_by_link, b"l"),
    "file became a folder on one side": ("todir", edit, b"todir"),
    "edited below what became a file": ("tofile/in", edit, b"tofile/in"),
}


@pytest.mark.parametrize("case", CONFLICTS)
def test_conflict_names_both_sides_and_nothing_is_applied(full: Bench, case: str) -> None:
    place, act, path = CONFLICTS[case]
    known = fingerprints(full)
    act(full.base_path / place)
    theirs = read_tree(full.base_path)
    review = full.review(fingerprints=known)
    with pytest.raises(ReviewConflict) as raised:
        run(full, review)
    found = {c["path"]: c for c in raised.value.data["conflicts"]}
    entry = found[os.fsdecode(path)]
    assert entry["agent"]
    assert entry["project"]
    assert read_tree(full.base_path) == theirs


@pytest.mark.parametrize("case", CONFLICTS)
def test_skip_commits_the_rest_and_leaves_the_users_side(full: Bench, case: str) -> None:
    place, act, path = CONFLICTS[case]
    known = fingerprints(full)
    act(full.base_path / place)
    theirs = read_tree(full.base_path)
    done = run(full, full.review(fingerprints=known), on_conflict="skip")
    now = read_tree(full.base_path)
    assert now.get(path) == theirs.get(path)
    assert path in {c.path for c in done.skipped}
    assert now[ODD] == VIEW[ODD]
    assert now[b"mode"] == VIEW[b"mode"]
    for p, entry in now.items():
        assert entry in (theirs.get(p), VIEW.get(p))


@pytest.mark.parametrize("case", CONFLICTS)
def test_edit_between_review_and_commit_is_a_conflict_too(full: Bench, case: str) -> None:
    place, act, _ = CONFLICTS[case]
    review = full.review(fingerprints=fingerprints(full))
    act(full.base_path / place)
    theirs = read_tree(full.base_path)
    with pytest.raises(ReviewConflict):
        run(full, review)
    assert read_tree(full.base_path) == theirs
    done = run(full, review, on_conflict="skip")
    assert done.skipped
    assert read_tree(full.base_path)[ODD] == VIEW[ODD]


def test_equal_change_on_both_sides_is_no_change(full: Bench) -> None:
    known = fingerprints(full)
    (full.base_path / "a").write_bytes(b"two\n")
    (full.base_path / "a").chmod(0o640)
    review = full.review(fingerprints=known)
    assert b"a" not in [c.path for c in review.changes]
    run(full, review)
    assert read_tree(full.base_path) == VIEW


def test_user_file_below_a_directory_the_agent_deleted_is_kept(full: Bench) -> None:
    known = fingerprints(full)
    add_below(full.base_path / "d/sub")
    since = os.lstat(full.base_path / "d/sub/users").st_ctime_ns - 1
    review = full.review(fingerprints=known, since_ns=since)
    assert [c.path for c in review.conflicts()] == [b"d/sub/users"]
    done = run(full, review, on_conflict="skip")
    now = read_tree(full.base_path)
    assert b"d/sub/users" in now
    assert b"d/x" not in now
    assert {o.path for o in done.left_out} >= {b"d", b"d/sub"}


def test_user_file_added_below_after_the_review_stops_the_commit(full: Bench) -> None:
    review = full.review()
    add_below(full.base_path / "d/sub")
    theirs = read_tree(full.base_path)
    with pytest.raises(ReviewConflict):
        run(full, review)
    assert read_tree(full.base_path) == theirs


def test_drift_flag_of_the_first_touch_is_a_conflict(full: Bench) -> None:
    known = fingerprints(full)
    with pytest.raises(ReviewConflict):
        run(full, full.review(fingerprints=known, drifted={P(b"a")}))


def test_folder_gone_from_the_project_is_a_conflict_for_what_was_added_in_it(bench: Bench) -> None:
    write_tree(bench.base_path, {b"d": ("dir", 0o755)})
    known: dict[WorkspacePath, Fingerprint | None] = {
        P(b"d"): Fingerprint.of(os.lstat(bench.base_path / "d")),
        P(b"d/n"): None,
    }
    bench.stack({b"d": ("dir", 0o755), b"d/n": ("file", 0o644, b"n"), b"e": ("file", 0o644, b"e")})
    (bench.base_path / "d").rmdir()
    done = run(bench, bench.review(fingerprints=known), on_conflict="skip")
    assert read_tree(bench.base_path) == {b"e": ("file", 0o644, b"e")}
    assert [c.path for c in done.skipped] == [b"d"]
    assert [o.path for o in done.left_out] == [b"d/n"]


@pytest.mark.parametrize("is_swapped", [True, False])
def test_parent_swapped_for_a_link_between_plan_and_publish_never_writes_outside(
    bench: Bench, is_swapped: bool
) -> None:
    write_tree(bench.base_path, {b"d": ("dir", 0o755), b"d/x": ("file", 0o644, b"x")})
    bench.stack(
        {b"d": ("dir", 0o755), b"d/x": ("file", 0o644, b"changed"), b"d/n": ("file", 0o644, b"n")}
    )
    outside = bench.root / "outside"
    outside.mkdir()
    (outside / "x").write_bytes(b"x")

    def swap(step: Step) -> None:
        if is_swapped and step.op == "make" and not (bench.base_path / "d").is_symlink():
            (bench.base_path / "d").rename(bench.root / "aside")
            (bench.base_path / "d").symlink_to(outside)

    if is_swapped:
        with pytest.raises(ReviewConflict):
            run(bench, on_step=swap)
    else:  # the control: without the swap the same commit writes
        run(bench, on_step=swap)
        assert (bench.base_path / "d/n").read_bytes() == b"n"
    assert {p.name: p.read_bytes() for p in outside.iterdir()} == {"x": b"x"}


def test_commit_put_back_half_way_hands_out_fingerprints_that_work_for_the_next(
    full: Bench,
) -> None:
    known = fingerprints(full)

    def disturb(step: Step) -> None:
        if step.op == "put":
            (full.base_path / "l").unlink(missing_ok=True)

    with pytest.raises(ReviewConflict, match="l "):
        run(full, full.review(fingerprints=known), on_step=disturb, restored=known.update)
    assert read_tree(full.base_path) == {p: e for p, e in BASE.items() if p != b"l"}
    done = run(full, full.review(fingerprints=known), on_conflict="skip")
    assert [c.path for c in done.skipped] == [b"l"]
    assert read_tree(full.base_path) == {p: e for p, e in VIEW.items() if p != b"l"}


def test_skip_meets_a_conflict_half_way_and_commits_the_rest(full: Bench) -> None:
    def disturb(step: Step) -> None:
        if step.op == "put":
            (full.base_path / "l").unlink(missing_ok=True)

    done = run(
        full, full.review(fingerprints=fingerprints(full)), on_step=disturb, on_conflict="skip"
    )
    assert [c.path for c in done.skipped] == [b"l"]
    assert read_tree(full.base_path) == {p: e for p, e in VIEW.items() if p != b"l"}


def test_undo_put_back_half_way_hands_out_a_record_that_works_later(full: Bench) -> None:
    done = run(full)
    kept = [done.undo]

    def stop(step: Step) -> None:
        if step.op == "take":
            raise InterruptedError

    with pytest.raises(Failed):
        undo.undo(
            full.base,
            done.undo,
            commit="u1",
            undo_dir=full.new_dir("undo"),
            on_step=stop,
            restored=kept.append,
        )
    assert read_tree(full.base_path) == VIEW
    assert len(kept) == 2
    undo.undo(full.base, kept[-1], commit="u2", undo_dir=full.new_dir("undo"))
    assert read_tree(full.base_path) == BASE


def test_two_undos_in_a_row_need_the_older_record_to_follow(bench: Bench) -> None:
    bench.stack({b"a": ("file", 0o644, b"1")})
    first = run(bench)
    bench.stack({b"a": ("file", 0o644, b"2")})
    second = run(bench)
    undone = back(bench, second)
    with pytest.raises(ReviewConflict):  # the control: without following it looks like the user's
        back(bench, first)
    first.undo = undo.follow(first.undo, second.undo, undone)
    back(bench, first)
    assert read_tree(bench.base_path) == {}


def test_older_record_does_not_follow_what_the_user_had_changed_in_between(bench: Bench) -> None:
    bench.stack({b"a": ("file", 0o644, b"1")})
    first = run(bench)
    edit(bench.base_path / "a")
    bench.stack({b"a": ("file", 0o644, b"2")})
    second = run(bench)
    first.undo = undo.follow(first.undo, second.undo, back(bench, second))
    with pytest.raises(ReviewConflict):
        back(bench, first)
    assert (bench.base_path / "a").read_bytes() == b"the user's\n"


def test_undo_refuses_when_the_project_moved_on_and_changes_nothing(full: Bench) -> None:
    done = run(full)
    edit(full.base_path / "todir/n")
    theirs = read_tree(full.base_path)
    with pytest.raises(ReviewConflict, match="todir/n"):
        back(full, done)
    assert read_tree(full.base_path) == theirs


# -- abort


def listing(root: Path) -> dict[bytes, tuple[Any, ...]]:
    with Tree.open(root) as tree:
        return {
            p: (s.st_ino, s.st_mode, s.st_mtime_ns, s.st_ctime_ns, s.st_size)
            for p, s in tree.walk()
        }


def test_abort_of_everything_leaves_the_base_as_it_was_and_the_delta_in_the_trash(
    full: Bench,
) -> None:
    before = listing(full.base_path)
    trash = full.root / "trash"
    abort.discard_all(full.base, str(full.layer_paths[0]), str(trash))
    with Tree.open(full.layer_paths[0]) as upper:
        full.layers = [upper]
        assert read_merged(full.merged) == BASE
        full.layers = []
    assert listing(full.base_path) == before
    assert (trash / "todir/n").read_bytes() == b"n"


def discard(bench: Bench, *paths: bytes) -> Path:
    trash = Path(bench.new_dir("trash"))
    trash.mkdir()
    with Tree.open(trash) as tree:
        abort.discard(bench.base, bench.layers[0], bench.layers[1:], [P(p) for p in paths], tree)
    return trash


@pytest.mark.parametrize("is_opaque", [True, False])
@pytest.mark.parametrize("layers", [1, 2])
def test_abort_by_path_brings_back_one_file_of_a_deleted_or_remade_folder(
    bench: Bench, is_opaque: bool, layers: int
) -> None:
    write_tree(bench.base_path, BASE)
    view = {p: e for p, e in BASE.items() if not is_within(p, b"d")}
    if is_opaque:
        view |= {b"d": ("dir", 0o755), b"d/other": ("file", 0o644, b"o")}
    mid = [view] if layers == 2 else []
    bench.stack(*mid, view, opaque=frozenset([b"d"]))
    before = listing(bench.base_path)
    discard(bench, b"d/sub/y")
    expected = view | {p: BASE[p] for p in (b"d", b"d/sub", b"d/sub/y")}
    assert read_merged(bench.merged) == expected
    assert listing(bench.base_path) == before


names = st.sampled_from([b"a", b"b", b"c", b"n\n\xff"])
paths = st.lists(names, min_size=1, max_size=3).map(b"/".join)


class ReviewMachine(RuleBasedStateMachine):
    """A view that any program might leave, against a plain dictionary of what must come out."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(Path(tempfile.mkdtemp()))
        self.view: Model = {}
        self.undos: list[tuple[Committed, Model]] = []

    @override
    def teardown(self) -> None:
        self.bench.close()
        shutil.rmtree(self.bench.root)

    def has_room(self, path: bytes) -> bool:
        above = path.rpartition(b"/")[0]
        return not above or self.view.get(above, ("",))[0] == "dir"

    def drop(self, path: bytes) -> None:
        self.view = {p: e for p, e in self.view.items() if not is_within(p, path)}

    @rule(
        path=paths,
        mode=st.sampled_from([0o644, 0o755]),
        data=st.sampled_from([b"", b"1\n", b"2\n"]),
    )
    def write(self, path: bytes, mode: int, data: bytes) -> None:
        if self.has_room(path):
            self.drop(path)
            self.view[path] = ("file", mode, data)

    @rule(path=paths, mode=st.sampled_from([0o755, 0o700]))
    def mkdir(self, path: bytes, mode: int) -> None:
        if self.has_room(path):
            if self.view.get(path, ("",))[0] != "dir":
                self.drop(path)
            self.view[path] = ("dir", mode)

    @rule(path=paths, to=names)
    def symlink(self, path: bytes, to: bytes) -> None:
        if self.has_room(path):
            self.drop(path)
            self.view[path] = ("symlink", to)

    @rule(path=paths)
    def delete(self, path: bytes) -> None:
        self.drop(path)

    @rule(old=paths, new=paths)
    def rename(self, old: bytes, new: bytes) -> None:
        if old in self.view and self.has_room(new) and not is_within(new, old):
            moved = {new + p[len(old) :]: e for p, e in self.view.items() if is_within(p, old)}
            self.drop(old)
            if self.has_room(new):
                self.drop(new)
                self.view |= moved

    def stack(self, opaque: bool) -> None:
        self.bench.stack(self.view, opaque=frozenset(self.view) if opaque else frozenset())

    @rule(opaque=st.booleans())
    def commit_all(self, opaque: bool) -> None:
        before = read_tree(self.bench.base_path)
        self.stack(opaque)
        done = run(self.bench)
        assert read_tree(self.bench.base_path) == self.view
        prune_after(self.bench, done)
        assert read_merged(self.bench.merged) == self.view
        self.undos.append((done, before))

    @rule(path=paths, opaque=st.booleans())
    def commit_one(self, path: bytes, opaque: bool) -> None:
        before = read_tree(self.bench.base_path)
        self.stack(opaque)
        review = self.bench.review()
        try:
            done = run(self.bench, review, selection=[P(path)])
        except NotFound:
            assert {p: e for p, e in before.items() if is_within(p, path)} == {
                p: e for p, e in self.view.items() if is_within(p, path)
            }
            return
        now = read_tree(self.bench.base_path)
        for p, entry in now.items():
            assert entry in (self.view.get(p), before.get(p))
        for p in self.view:
            if is_within(p, path):
                assert now[p] == self.view[p]
        prune_after(self.bench, done)
        assert read_merged(self.bench.merged) == self.view
        self.undos.append((done, before))

    @rule(path=paths, opaque=st.booleans(), is_split=st.booleans())
    def abort_one(self, path: bytes, opaque: bool, is_split: bool) -> None:
        base = read_tree(self.bench.base_path)
        if is_split:
            half = {p: e for p, e in self.view.items() if not is_within(p, b"a")}
            self.bench.stack(
                half, self.view, opaque=frozenset(self.view) if opaque else frozenset()
            )
        else:
            self.stack(opaque)
        before = listing(self.bench.base_path)
        try:
            discard(self.bench, path)
        except BadUsage:
            return
        now = read_merged(self.bench.merged)
        for p in base.keys() | self.view.keys() | now.keys():
            if is_within(p, path):
                assert now.get(p) == base.get(p)
            elif not is_within(path, p):
                assert now.get(p) == self.view.get(p)
        assert listing(self.bench.base_path) == before
        self.view = now

    @precondition(lambda self: self.undos)
    @rule()
    def undo_last(self) -> None:
        done, before = self.undos.pop()
        undone = back(self.bench, done)
        for older, _ in self.undos:
            older.undo = undo.follow(older.undo, done.undo, undone)
        assert read_tree(self.bench.base_path) == before

    @invariant()
    def nothing_temporary_is_left(self) -> None:
        assert not any(b".deltabox-" in p for p in read_tree(self.bench.base_path))


TestReviewMachine = ReviewMachine.TestCase
TestReviewMachine.settings = settings(
    max_examples=60, stateful_step_count=20, deadline=None, database=None
)
