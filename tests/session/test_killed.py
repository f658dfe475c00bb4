"""Killed before any single deed, the next start shows what was, or what was decided: never a mixture."""

import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deltabox.config import Config, Trash
from deltabox.engines.delta import remove_layers
from deltabox.paths import WorkspacePath
from deltabox.session import checkpoint, coordinator, garbage, recovery, trash
from deltabox.session import project as projects
from deltabox.store import MIGRATIONS
from tests.review.kit import Model, read_tree
from tests.session.world import State, World, frozen, killed_at

BASE: Model = {
    b"a": ("file", 0o644, b"one\n"),
    b"d": ("dir", 0o755),
    b"d/x": ("file", 0o644, b"x\n"),
    b"d/y": ("file", 0o600, b"y\n"),
    b"gone": ("file", 0o644, b"gone\n"),
    b"l": ("symlink", b"a"),
}
VIEW: Model = {
    b"a": ("file", 0o640, b"two\n"),
    b"d": ("dir", 0o755),
    b"d/x": ("file", 0o644, b"other x\n"),
    b"l": ("symlink", b"d/x"),
    b"n": ("dir", 0o700),
    b"n/new": ("file", 0o755, b"new\n"),
}
LATER: Model = {p: e for p, e in VIEW.items() if p not in (b"n", b"n/new")} | {
    b"a": ("file", 0o644, b"three\n"),
    b"o": ("file", 0o644, b"o\n"),
}
OPAQUE = frozenset({b"d"})  # the agent removed the folder and made it again

Step = Callable[[World], object]
MAX_STEPS = 400
# Every deed by night; by day every third, at another one in each case.
STRIDE = 1 if os.environ.get("DELTABOX_NIGHTLY") else 3


def steps(case: int = 0) -> range:
    return range(case % STRIDE, MAX_STEPS, STRIDE)


def plain(world: World) -> None:
    world.begin(BASE)
    world.change(VIEW, opaque=OPAQUE)


def stacked(world: World) -> None:
    plain(world)
    world.change(LATER)


def put_aside(world: World) -> None:
    """Two checkpoints, and nothing above."""
    stacked(world)
    create(world)


def committed(world: World) -> None:
    plain(world)
    commit(world)


def discarded(world: World) -> None:
    plain(world)
    abort(world)


def create(world: World) -> None:
    with world.store() as store:
        checkpoint.create(store, world.where, world.session, label="mine")


def fold(world: World) -> None:
    checkpoint.MAX_LAYERS = 1  # in a child, or given back by the fixture
    create(world)


def clone(world: World) -> None:
    with world.store() as store:
        checkpoint.clone(store, world.where, world.session, label="mine")


def restore(world: World, *paths: bytes) -> None:
    with world.store() as store:
        first = store.checkpoints(world.session)[0]
        checkpoint.restore(
            store, world.where, world.session, first.id, [WorkspacePath(p) for p in paths]
        )


def restore_some(world: World) -> None:
    restore(world, b"a", b"n")


def commit(world: World) -> None:
    with world.desk() as desk:
        desk.commit()


def commit_some(world: World) -> None:
    with world.desk() as desk:
        desk.commit(paths=[b"a", b"d"])


def abort(world: World) -> None:
    with world.desk() as desk:
        desk.abort()


def abort_some(world: World) -> None:
    with world.desk() as desk:
        desk.abort(paths=[b"a", b"d", b"gone"])


def undo(world: World) -> None:
    with world.store() as store:
        projects.undo(store, world.where, world.project, None)


def redo(world: World) -> None:
    with world.store() as store:
        last = store.commits(world.project, state="done")[0]
        projects.undo(store, world.where, world.project, last.id)


def undone(world: World) -> None:
    committed(world)
    undo(world)


CASES: list[tuple[str, Step, Step]] = [
    ("checkpoint", plain, create),
    ("checkpoint on checkpoints", stacked, create),
    ("checkpoint that folds", stacked, fold),
    ("clone", stacked, clone),
    ("restore", stacked, restore),
    ("restore with nothing above", put_aside, restore),
    ("restore of paths", stacked, restore_some),
    ("restore of paths with nothing above", put_aside, restore_some),
    ("commit", plain, commit),
    ("commit with checkpoints", stacked, commit),
    ("commit of paths", stacked, commit_some),
    ("abort", plain, abort),
    ("abort with checkpoints", stacked, abort),
    ("abort of paths", plain, abort_some),
    ("undo", committed, undo),
    ("undo of an undo", undone, redo),
]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(checkpoint, "MAX_LAYERS", checkpoint.MAX_LAYERS)
    memory = Path("/dev/shm")  # SQLite's fsyncs would take most of the time on a disk
    root = Path(tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else None))
    yield World(root)
    remove_layers(root)


@pytest.mark.parametrize("case", range(len(CASES)), ids=[c[0] for c in CASES])
def test_killed_at_any_deed_the_next_start_shows_one_side(world: World, case: int) -> None:
    _, prepare, act = CASES[case]
    prepare(world)
    before = world.state()
    prepare(world)
    act(world)
    after = world.state()
    assert before != after
    seen = set()
    for step in steps(case):
        prepare(world)
        was_killed = killed_at(step, lambda: act(world))
        now = world.state()
        side = which(now, before, after)
        assert side, f"killed before deed {step}: {now}\n\nbefore {before}\n\nafter {after}"
        seen.add(side)
        if side == "before":
            act(world)  # nothing stands in the way of doing it now
            again = world.state()
            assert (again.project, again.view, again.pending) == (
                after.project,
                after.view,
                after.pending,
            )
        if not was_killed:
            break
    else:
        pytest.fail("it never came to its end")
    assert step > 3
    assert "after" in seen
    assert "before" in seen


def which(now: State, before: State, after: State) -> str:
    """Which side a state is on. Checkpoints may have been made or ended already; those there are
    must show what one of the sides showed."""
    known = {*before.checkpoints, *after.checkpoints, before.view, after.view}
    if not set(now.checkpoints) <= known:
        return ""
    seen = (now.project, now.view, now.pending)
    if seen == (after.project, after.view, after.pending) and (
        seen != (before.project, before.view, before.pending)
        or len(now.checkpoints) == len(after.checkpoints)
    ):
        return "after"
    if seen == (before.project, before.view, before.pending):
        return "before"
    return ""


@pytest.mark.parametrize("first", [9, 20, 31])
def test_killed_again_while_recovering_a_commit_the_next_start_does_it(
    world: World, first: int
) -> None:
    both = {frozen(BASE), frozen(VIEW)}
    for step in steps(first):
        plain(world)
        assert killed_at(first, lambda: commit(world))
        was_killed = killed_at(step, lambda: world.state())
        now = world.state()
        assert now.project in both
        assert now.view == frozen(VIEW)
        commit(world)
        assert frozen(read_tree(world.project)) == frozen(VIEW)
        if not was_killed:
            break


def test_killed_while_finishing_an_abort_the_next_start_finishes_it(world: World) -> None:
    plain(world)
    abort_some(world)
    after = world.state()

    def cut_short(at: int) -> bool:
        plain(world)
        assert killed_at(at, lambda: abort_some(world))
        with sqlite3.connect(world.where.database) as raw:
            found = raw.execute("SELECT count(*) FROM trash WHERE state='begun'").fetchone()[0]
        raw.close()
        return bool(found)

    first = next(at for at in range(MAX_STEPS) if cut_short(at))
    for step in steps():
        assert cut_short(first + 2)
        was_killed = killed_at(step, lambda: world.state())
        now = world.state()
        assert (now.project, now.view, now.pending) == (after.project, after.view, after.pending)
        if not was_killed:
            break
    with world.store() as store:
        assert any("abort" in words for words in projects.recovered(store))


def test_without_recovery_a_kill_shows(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: these tests can fail."""
    monkeypatch.setattr(recovery, "resume", lambda *_: None)
    stacked(world)
    before = world.state()
    broken = 0
    for step in range(12):
        stacked(world)
        killed_at(step, lambda: create(world))
        try:
            broken += not set(world.state().checkpoints) <= {*before.checkpoints, before.view}
        except (OSError, AssertionError):
            broken += 1
    assert broken


def test_killed_while_taking_an_abort_back_it_is_in_the_trash_or_pending(world: World) -> None:
    def take(world: World) -> None:
        with world.store() as store:
            trash.take_back(store, world.where, store.trash()[0].id)

    ends = set()
    for step in steps(1):
        discarded(world)
        was_killed = killed_at(step, lambda: take(world))
        with world.store() as store:
            rows, sessions = store.trash(), store.sessions(world.project)
            assert len(rows) + len(sessions) == 1, "in one place, and nothing beside it"
            ends.add(bool(rows))
            if rows:
                trash.take_back(store, world.where, rows[0].id)
            world.session = store.sessions(world.project)[0].id
            left = [w for w in garbage.leftovers(store, world.where) if "rest of trash" in w]
            assert len(left) == len(os.listdir(world.where.state / "trash"))
        assert world.state().view == frozen(VIEW)
        commit(world)
        assert frozen(read_tree(world.project)) == frozen(VIEW)
        if not was_killed:
            break
    assert ends == {True, False}


def test_killed_while_removing_trash_nothing_half_removed_can_be_taken_back(world: World) -> None:
    everything = Trash(keep_days=-1, keep_bytes=0)

    def collect(world: World) -> None:
        with world.store() as store:
            for item in garbage.garbage(store, world.where, everything):
                item.remove()

    discarded(world)
    with world.store() as store:
        whole = listing(Path(store.trash()[0].folder))
    for step in steps(2):
        discarded(world)
        plain_again(world)
        was_killed = killed_at(step, lambda: collect(world))
        with world.store() as store:
            rows = store.trash()
            for row in rows:
                assert listing(Path(row.folder)) == whole
            left = garbage.leftovers(store, world.where)
            folders = os.listdir(world.where.state / "trash")
            assert len(left) == len(folders) - len(rows)
        assert world.state().view == frozen(LATER), "the undecided session stays"
        collect(world)
        assert not os.listdir(world.where.state / "trash")
        assert world.state().view == frozen(LATER)
        if not was_killed:
            break


def listing(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def plain_again(world: World) -> None:
    """A second session, undecided, beside what was decided."""
    with world.store() as store:
        made = coordinator.create(store, world.where, world.project, Config())
        store.update_session(made.id, pid=None, pid_start=None)
        store.open_review(made.id)
    world.session = made.id
    world.change(LATER)


def test_killed_while_a_session_is_born_nothing_is_left_of_it(world: World) -> None:
    world.begin(BASE)
    for step in steps():
        was_killed = killed_at(step, lambda: born(world))
        with world.store() as store:
            kept = [s.id for s in store.sessions()]
            assert kept == [world.session]
            strays = garbage.leftovers(store, world.where)
            assert len(strays) == len(os.listdir(world.where.sessions)) - 1
            for item in garbage.garbage(store, world.where, Trash()):
                item.remove()
            assert os.listdir(world.where.sessions) == [world.session]
        if not was_killed:
            break


def born(world: World) -> None:
    with world.store() as store:
        coordinator.create(store, world.where, world.project, Config())
    os._exit(0)  # its process ends before it is owned


def test_killed_while_a_session_closes_its_folder_is_gone_at_the_next_start(world: World) -> None:
    def leave(world: World) -> None:
        with world.desk():
            pass

    for step in steps(1):
        world.begin(BASE)
        world.change(BASE | {b"n": ("file", 0o644, b"n")})
        with world.store() as store:  # the agent took it back
            (world.folder.upper / "n").unlink()
        was_killed = killed_at(step, lambda: leave(world))
        leave(world)
        with world.desk() as desk:
            assert not desk.diff()["files"]
        with world.store() as store:
            assert store.sessions() == []
        assert os.listdir(world.where.sessions) == []
        if not was_killed:
            break


def test_killed_while_the_schema_is_brought_up_the_next_start_does_it(world: World) -> None:
    assert len(MIGRATIONS) > 1
    for step in steps(2):
        world.begin(BASE)
        old = world.where.database
        for path in old.parent.glob("deltabox.db*"):
            path.unlink()
        with sqlite3.connect(old) as raw:
            raw.executescript(MIGRATIONS[0])
            raw.execute("PRAGMA user_version=1")
            raw.execute(
                "INSERT INTO trash VALUES ('t1', NULL, ?, 1, '/nowhere', 3, 4)",
                (os.fsencode(world.project),),
            )
        raw.close()

        def start() -> None:
            with world.store():
                pass

        was_killed = killed_at(step, start)
        with world.store() as store:
            row = store.trash_row("t1")
            assert (row.paths, row.state, row.chosen) == (3, "kept", None)
        if not was_killed:
            break
