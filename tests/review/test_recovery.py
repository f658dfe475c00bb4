"""Killed after any step, also while recovering, the project is as before or as committed."""

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from deltabox.errors import Failed
from deltabox.paths import WorkspacePath
from deltabox.review import undo
from deltabox.review.commit import plan
from deltabox.review.executor import Executor
from deltabox.review.steps import Committed, Plan, Progress, Step
from tests.review.kit import Bench, read_tree, write_tree
from tests.review.test_commit import BASE as PLAIN_BASE
from tests.review.test_commit import VIEW as PLAIN_VIEW
from tests.review.test_commit import listing


class Stored:
    """Plan and progress the way a store keeps them: durable when `record` returns, not before."""

    def __init__(self, bench: Bench, planned: Plan) -> None:
        self.bench, self.path = bench, bench.root / "progress"
        self.plan = msgspec.json.encode(planned)
        self.undo_dir = bench.new_dir("undo")

    def record(self, progress: Progress) -> None:
        self.path.with_suffix(".new").write_bytes(msgspec.json.encode(progress))
        self.path.with_suffix(".new").rename(self.path)

    def executor(self, on_step: Callable[[Step], None] | None = None) -> Executor:
        progress = None
        if self.path.exists():
            progress = msgspec.json.decode(self.path.read_bytes(), type=Progress)
        return Executor(
            self.bench.base,
            msgspec.json.decode(self.plan, type=Plan),
            layers=self.bench.layers,
            undo_dir=self.undo_dir,
            progress=progress,
            record=self.record,
            on_step=on_step,
        )

    def run(self, on_step: Callable[[Step], None]) -> Committed:
        return self.executor(on_step).run()

    def recover(self, on_step: Callable[[Step], None]) -> Committed | None:
        return self.executor(on_step).recover()


def killed_after(steps: int, work: Callable[[Callable[[Step], None]], object]) -> bool:
    """Run in a child that kills itself after so many steps; False when it came to the end."""
    child = os.fork()
    if child == 0:
        left = [steps]

        def count(_step: Step) -> None:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1

        try:
            work(count)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


# Read-only folders that have to be unlocked for the time of the commit.
BASE = PLAIN_BASE | {
    b"ro": ("dir", 0o555),
    b"ro/x": ("file", 0o644, b"x"),
    b"ro/s": ("dir", 0o500),
}
VIEW = PLAIN_VIEW | {b"ro": ("dir", 0o555), b"ro/x": ("file", 0o644, b"new x")}


def started(bench: Bench) -> tuple[Stored, int]:
    write_tree(bench.base_path, BASE)
    bench.stack(VIEW)
    planned = plan(bench.review(), commit="c1")
    return Stored(bench, planned), len(planned.steps)


def no_temporaries(root: Path) -> bool:
    return not any(b".deltabox-" in p for p in read_tree(root))


STEPS = 60  # more than the plan has; the test ends where the plan does


def test_killed_after_any_step_recovery_finishes_or_reverses(
    tmp_path: Path,
) -> None:
    outcomes = []
    for at in range(STEPS):
        (tmp_path / str(at)).mkdir()
        bench = Bench(tmp_path / str(at))
        stored, steps = started(bench)
        assert steps < STEPS
        was_killed = killed_after(at, stored.run)
        assert was_killed == (at < steps)
        done = stored.executor().recover()
        if done is None:
            assert read_tree(bench.base_path) == BASE
        else:
            assert read_tree(bench.base_path) == VIEW
            undo.undo(bench.base, done.undo, commit="u1", undo_dir=bench.new_dir("undo"))
            assert read_tree(bench.base_path) == BASE
        outcomes.append(done is not None)
        bench.close()
        if not was_killed:
            break
    assert outcomes[0] is False
    assert outcomes[-1] is True
    assert sorted(outcomes) == outcomes  # once it finishes, every later kill finishes too


@pytest.mark.parametrize("at", [5, 14, 22, 30, 38])
def test_killed_again_while_recovering_the_next_recovery_does_it(tmp_path: Path, at: int) -> None:
    for again in range(STEPS):
        (tmp_path / str(again)).mkdir()
        bench = Bench(tmp_path / str(again))
        stored, _ = started(bench)
        assert killed_after(at, stored.run)
        was_killed = killed_after(again, stored.recover)
        done = stored.executor().recover()
        assert read_tree(bench.base_path) == (BASE if done is None else VIEW)
        bench.close()
        if not was_killed:
            break
    else:
        pytest.fail("recovery never came to its end")


def test_killed_undo_is_reversed_or_finished(tmp_path: Path) -> None:
    for at in range(STEPS):
        (tmp_path / str(at)).mkdir()
        bench = Bench(tmp_path / str(at))
        stored, _ = started(bench)
        done: Committed = stored.executor().run()
        stored.path.unlink()
        stored.plan = msgspec.json.encode(undo.plan(done.undo, commit="u1"))
        stored.undo_dir = bench.new_dir("undo")
        was_killed = killed_after(at, stored.run)
        back = stored.executor().recover()
        assert read_tree(bench.base_path) == (VIEW if back is None else BASE)
        bench.close()
        if not was_killed:
            break


def test_stopped_by_an_error_after_any_step_before_done_the_project_is_untouched(
    bench: Bench,
) -> None:
    stored, _ = started(bench)
    planned = msgspec.json.decode(stored.plan, type=Plan)
    last = max(i for i, s in enumerate(planned.steps) if s.op != "keep")

    class Stop(Exception):
        pass

    for at in range(last + 1):
        stored.path.unlink(missing_ok=True)
        stored.plan = msgspec.json.encode(plan(bench.review(), commit="c1"))
        left = [at]

        def stop(_step: Step, left: list[int] = left) -> None:
            if left[0] == 0:
                raise Stop
            left[0] -= 1

        with pytest.raises(Stop):
            stored.executor(stop).run()
        assert read_tree(bench.base_path) == BASE


def test_full_disk_while_copying_leaves_the_project_as_it_was(bench: Bench) -> None:
    write_tree(bench.base_path, BASE)
    bench.stack(
        BASE | {b"a": ("file", 0o644, b"2\n"), b"big": ("file", 0o644, bytes(range(256)) * 4096)}
    )
    planned = plan(bench.review(), commit="c1")
    before = listing(bench.base_path)

    def with_limit(on_step: Callable[[Step], None]) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, 1 << 19))
        try:
            Executor(bench.base, planned, layers=bench.layers, undo_dir=bench.new_dir("u")).run()
        except Failed:
            os.kill(os.getpid(), signal.SIGTERM)

    assert killed_after(STEPS, with_limit)
    assert listing(bench.base_path) == before
    Executor(bench.base, planned, layers=bench.layers, undo_dir=bench.new_dir("u")).run()
    assert (bench.base_path / "big").stat().st_size == 1 << 20


def test_file_the_user_changed_after_the_crash_is_never_taken_back(bench: Bench) -> None:
    stored, steps = started(bench)
    planned = msgspec.json.decode(stored.plan, type=Plan)
    last = max(i for i, s in enumerate(planned.steps) if s.op == "put")
    assert steps > last
    assert killed_after(last, stored.run)
    (bench.base_path / "a").write_bytes(b"the user's, after the crash\n")
    (bench.base_path / "empty/users").write_bytes(b"in a new folder\n")
    executor = stored.executor()
    assert executor.recover() is None
    now = read_tree(bench.base_path)
    assert now[b"a"][2] == b"the user's, after the crash\n"
    assert now[b"empty/users"][2] == b"in a new folder\n"
    assert any("a stays as committed" in n for n in executor.notices)
    copies = [p.read_bytes() for p in Path(stored.undo_dir).iterdir()]
    assert b"one\n" in copies
    rest = {p: e for p, e in now.items() if p not in (b"a", b"empty", b"empty/users")}
    assert rest == {p: e for p, e in BASE.items() if p != b"a"}
    assert WorkspacePath(b"a") in now
    assert no_temporaries(bench.base_path)
