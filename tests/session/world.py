"""A project, a state folder and one quiet session whose delta is made by hand; and how to be killed.

The layers are real ones on disk, read by the real session code; nothing is mounted here.
"""

import functools
import json
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from deltabox import config
from deltabox import store as stores
from deltabox.config import Config, Places
from deltabox.engines.delta import Merged, remove_layers
from deltabox.paths import Tree
from deltabox.review import executor
from deltabox.session import checkpoint, coordinator, pending
from deltabox.session import project as projects
from deltabox.session.folder import Folder
from deltabox.session.touch import fingerprint
from deltabox.store import SessionId, Store
from tests.review.kit import Model, make_upper, read_merged, read_tree, write_tree


@dataclass(frozen=True)
class State:
    """What a person can see: the project, the view, what is pending, what can be gone back to."""

    project: tuple[tuple[bytes, Any], ...]
    view: tuple[tuple[bytes, Any], ...]
    pending: tuple[tuple[str, str], ...]
    checkpoints: tuple[tuple[tuple[bytes, Any], ...], ...]


def frozen(model: Model) -> tuple[tuple[bytes, Any], ...]:
    return tuple(sorted(model.items()))


class World:
    """Everything below `root`; made anew in the same place for each try."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.project = root / "home" / "project"
        self.session = SessionId("")
        environ = {
            "HOME": str(root / "home"),
            "DELTABOX_STATE_DIR": str(root / "state"),
            "PATH": os.environ["PATH"],
        }
        (root / "home").mkdir(exist_ok=True)
        self.where: Places = config.places(environ)

    def begin(self, base: Model, **settings: Any) -> None:
        if self.project.exists():
            remove_layers(self.project)
        if self.where.state.exists():
            remove_layers(self.where.state)
        self.project.mkdir()
        write_tree(self.project, base)
        newest = max(p.lstat().st_ctime_ns for p in (self.project, *self.project.rglob("*")))
        while pending.stamp() <= newest:
            pass  # the coarse clock ticks every few milliseconds; then nothing looks like drift
        with self.store() as store:
            made = coordinator.create(store, self.where, self.project, Config(**settings))
            store.update_session(made.id, pid=None, pid_start=None)
            store.open_review(made.id)
        self.session = made.id

    @contextmanager
    def store(self) -> Iterator[Store]:
        with projects.open_state(self.where) as store:
            yield store

    @contextmanager
    def desk(self) -> Iterator[pending.Pending]:
        with (
            self.store() as store,
            projects.desk(store, self.where, store.session(self.session)) as desk,
        ):
            assert isinstance(desk, pending.Pending)
            yield desk

    @property
    def folder(self) -> Folder:
        return projects.folder_of(self.where, self.session)

    def change(self, view: Model, *, opaque: frozenset[bytes] = frozenset()) -> None:
        """The agent's work: a new upper that turns what the view shows now into `view`."""
        with self.store() as store:
            below = self.view(store)
            if self.folder.upper.exists():
                if not checkpoint.is_empty(self.folder.upper):
                    checkpoint.create(store, self.where, self.session, label="between")
                remove_layers(self.folder.upper)
            make_upper(self.folder.upper, below, view, opaque=opaque)
            session = store.session(self.session)
            with Tree.open(self.project) as base, Tree.open(self.folder.upper) as upper:
                paths = [path for path, _ in upper.walk()]
                store.add_touches(
                    self.session,
                    [fingerprint(base, path, since_ns=session.since_ns) for path in paths],
                )

    def view(self, store: Store, stack: str | None = None) -> Model:
        session = store.session(self.session)
        names = json.loads(session.stack if stack is None else stack)
        paths = [self.folder.layers / name for name in names]
        if stack is None and self.folder.upper.exists():
            paths.insert(0, self.folder.upper)
        with ExitStack() as opened:
            base = opened.enter_context(Tree.open(self.project))
            layers = [opened.enter_context(Tree.open(path)) for path in paths]
            return read_merged(Merged(base, layers))

    def state(self) -> State:
        """After a start: recovery has run, the session is at its desk."""
        project = frozen(read_tree(self.project))
        with self.store() as store:
            project = frozen(read_tree(self.project))
            if store.session(self.session).state == "closed":
                assert not self.folder.root.exists(), "a closed session's folder stayed"
                return State(project, project, (), ())
            with projects.desk(store, self.where, store.session(self.session)) as desk:
                view = frozen(self.view(store))
                rows = [
                    row
                    for row in store.checkpoints(self.session)
                    if row.generation == store.session(self.session).generation
                ]
                points = tuple(frozen(self.view(store, row.stack)) for row in rows)
                files = desk.diff()["files"]
            kinds = tuple(sorted((f["path"], f["kind"]) for f in files))
            strays = [p.name for p in self.folder.root.glob("*") if p.suffix == ".new"]
            strays += [p.name for p in self.folder.root.glob("layers/*.*")]
            assert not strays, f"left behind: {strays}"
        return State(project, view, kinds, points)


# being killed

_CALLS = {
    os: "rename mkdir unlink rmdir link symlink mknod chmod fchmod setxattr removexattr write utime"
    " copy_file_range replace chown fchown",
    executor: "renameat2",
}


def killed_at(step: int, work: Callable[[], object]) -> bool:
    """Run `work` in a child that is killed just before its n-th deed on files or database.

    False when it came to its end. An error in it fails the test here.
    """
    child = os.fork()
    if child == 0:
        try:
            with _counted(step):
                work()
        except BaseException:  # noqa: BLE001 - the child ends here, whatever it was
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "the work failed by itself"
    return False


@contextmanager
def _counted(step: int) -> Iterator[None]:
    left = [step]

    def deed() -> None:
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1

    def counting(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def counted(*args: Any, **named: Any) -> Any:
            deed()
            return call(*args, **named)

        return counted

    opening = os.open

    def open_counted(path: Any, flags: int, *args: Any, **named: Any) -> int:
        if flags & (os.O_CREAT | os.O_TRUNC):
            deed()
        return opening(path, flags, *args, **named)

    with ExitStack() as patches:
        for module, names in _CALLS.items():
            for name in names.split():
                patches.enter_context(
                    mock.patch.object(module, name, counting(getattr(module, name)))
                )
        patches.enter_context(mock.patch.object(os, "open", open_counted))
        connection = stores._Connection
        for name in ("execute", "executemany"):
            patches.enter_context(
                mock.patch.object(connection, name, _writes(getattr(connection, name), deed))
            )
        yield


def _writes(call: Callable[..., Any], deed: Callable[[], None]) -> Callable[..., Any]:
    def counted(self: Any, sql: str, *args: Any) -> Any:
        if not sql.lstrip().startswith(("SELECT", "PRAGMA")):
            deed()
        return call(self, sql, *args)

    return counted
