"""Carries out a plan on the base, reverses it, and finishes or reverses it after a crash.

Dumb on purpose: every decision is in the plan. Works by directory descriptors beneath the base,
follows no link, crosses no mount. Never moves an inode from a delta into the project.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence

import msgspec

from deltabox.engines.delta import Fingerprint, kind_of
from deltabox.errors import Failed, ReviewChanged, ReviewConflict
from deltabox.paths import (
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    Tree,
    WorkspacePath,
    display,
    join,
    name,
    renameat2,
)
from deltabox.review.inode import Changed, Copier, copy_entry
from deltabox.review.model import Conflict
from deltabox.review.steps import (
    Action,
    Attributes,
    Committed,
    Outcome,
    Plan,
    Progress,
    Step,
    UndoEntry,
    UndoRecord,
    copy_name,
    temporary_path,
)

_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


class _Moved(Exception):
    """The base is not what the action expects; carries the words of the project's side."""


class Executor:
    """One plan on one base. `run` once, or `recover` once.

    base, layers: borrowed. undo_dir: made if missing. record: gets the progress at each stage's
    end and returns when it is stored. on_step: called after each step (progress display; tests
    stop there). conflicts: what `run` met, after it raised ReviewConflict. restored: paths that
    were moved aside and put back; a rename changes ctime, so whoever remembers their fingerprints
    must remember these instead.
    """

    def __init__(
        self,
        base: Tree,
        plan: Plan,
        *,
        layers: Sequence[Tree] = (),
        undo_dir: str,
        progress: Progress | None = None,
        record: Callable[[Progress], None] = lambda _progress: None,
        on_step: Callable[[Step], None] | None = None,
    ) -> None:
        self.plan, self.layers, self.undo_dir = plan, layers, undo_dir
        self.progress = progress or Progress()
        self.conflicts: list[Conflict] = []
        self.notices: list[str] = []
        self.restored: dict[bytes, Fingerprint] = {}
        self._record, self._on_step = record, on_step
        self._base = base
        self._copier = Copier(is_strict=plan.durability == "strict")

    @contextlib.contextmanager
    def _trees(self) -> Iterator[None]:
        """Two walks of the base, since a rename needs two parents at once."""
        with (
            Tree(os.dup(self._base.fd), one_filesystem=True) as self.at,
            Tree(os.dup(self._base.fd), one_filesystem=True) as self.home,
        ):
            yield

    # -- forward

    def run(self) -> Committed:
        """All steps, or none. Raises: ReviewConflict, ReviewChanged, Failed (base as it was); an
        error after the stage `done` is Failed with `data["unfinished"]`: the plan must stay in the
        store, and `recover` does the rest."""
        with self._trees():
            try:
                self._check_all()
                self._unlock()
                self._steps("make", "chmod")
                self._reach("made")
                self._steps("take", "put", "chmod")
                self._after()
                self._reach("done")
            except _Moved as moved:
                self._put_back()
                raise self._conflict_error() from moved
            except Changed as changed:
                self._put_back()
                raise ReviewChanged(
                    f"{display(changed.path)} was changed after it was shown, so nothing was"
                    " applied; look at the diff again.",
                    path=os.fsdecode(changed.path),
                ) from None
            except OSError as exc:
                self._put_back()
                raise Failed(
                    f"The commit stopped at {display(_of(exc))} ({os.strerror(exc.errno or 0)});"
                    " the project is as it was before."
                ) from exc
            except BaseException:
                self._put_back()
                raise
            try:
                return self._finish()
            except OSError as exc:
                raise Failed(
                    f"The changes are in the project, but the undo copies could not all be put away"
                    f" ({os.strerror(exc.errno or 0)}); the next start finishes it.",
                    unfinished=True,
                ) from exc

    def _put_back(self) -> None:
        self._on_step = None  # whoever stopped the way forward does not stop the way back
        self._reverse()

    def _steps(self, *ops: str) -> None:
        """The plan's next steps, up to the first of another kind."""
        while self._next < len(self.plan.steps) and self.plan.steps[self._next].op in ops:
            step = self.plan.steps[self._next]
            action = self.plan.actions[step.action]
            try:
                getattr(self, "_" + step.op)(step, action)
            except _Moved as moved:
                self._met(action, str(moved))
                raise
            except OSError as exc:
                if exc.errno in _GONE:
                    self._met(action, "its folder was moved or removed in the project")
                    raise _Moved from exc
                raise
            self._next += 1
            if self._on_step is not None:
                self._on_step(step)

    _next = 0

    def _reach(self, stage: str) -> None:
        if self.plan.durability == "strict":
            self._sync_folders()
        self.progress.stage = stage  # type: ignore[assignment]
        self._record(self.progress)

    def _check_all(self) -> None:
        """Every expectation before the first write; gathers all conflicts, not only the first."""
        for n, action in enumerate(self.plan.actions):
            try:
                st = self.at.lstat_or_none(WorkspacePath(action.path))
            except OSError as exc:
                if exc.errno != errno.EXDEV:
                    raise
                self._met(action, "is on another file system in the project")
                continue
            now = None if st is None else Fingerprint.of(st)
            if now is None or st is None:
                if action.expect is not None:
                    self._met(action, "is gone from the project")
                continue
            if not now.same_as(action.expect):
                self._met(
                    action,
                    "was changed in the project" if action.expect else "exists in the project now",
                )
            self.progress.before[n] = Attributes(
                now.type, stat.S_IMODE(st.st_mode), st.st_uid, st.st_gid, st.st_mtime_ns
            )
        if self.conflicts:
            raise _Moved

    def _unlock(self) -> None:
        """Write permission on the user's own read-only folders that get or lose an entry, and on
        those that are moved away (a rename changes their `..`). Recorded before it is done."""
        if os.geteuid() == 0:
            return
        folders = {step.home for step in self.plan.steps if step.op != "chmod"}
        folders |= {a.path.rpartition(b"/")[0] for a in self.plan.actions if a.op != "chmod"}
        folders |= {a.path for a in self.plan.actions if a.op != "chmod"}
        locked = []
        for folder in sorted(folders):
            st = self.at.lstat_or_none(WorkspacePath(folder))
            if st is None or not stat.S_ISDIR(st.st_mode) or st.st_uid != os.geteuid():
                continue
            if st.st_mode & 0o300 != 0o300:
                locked.append((folder, stat.S_IMODE(st.st_mode)))
        if not locked:
            return
        self.progress.unlocked = locked
        self._record(self.progress)
        for folder, mode in locked:
            self._set_mode(folder, mode, mode | 0o700)

    def _lock_again(self, *, is_forward: bool) -> None:
        chosen = {a.path for a in self.plan.actions if a.op == "chmod"} if is_forward else set()
        for folder, mode in reversed(self.progress.unlocked):
            if folder not in chosen:
                self._set_mode(folder, mode | 0o700, mode)

    def _set_mode(self, folder: bytes, old: int, new: int) -> None:
        try:
            fd = self.at.open_at(WorkspacePath(folder), os.O_PATH | os.O_DIRECTORY)
        except OSError as exc:
            if exc.errno in _GONE:
                return
            raise
        try:
            if stat.S_IMODE(os.fstat(fd).st_mode) == old:
                os.chmod(f"/proc/self/fd/{fd}", new)
        finally:
            os.close(fd)

    def _expected(self, action: Action) -> Fingerprint | None:
        """What must stand there now: what the action expects, but for a folder that we unlocked."""
        expect = action.expect
        if expect is not None and expect.type == "dir":
            for folder, mode in self.progress.unlocked:
                if folder == action.path and mode == expect.mode:
                    return msgspec.structs.replace(expect, mode=mode | 0o700)
        return expect

    def _met(self, action: Action, project: str) -> None:
        agent = {"put": "changed it", "take": "deleted it", "chmod": "changed its mode"}[action.op]
        self.conflicts.append(Conflict(action.path, agent, project))

    def _conflict_error(self) -> ReviewConflict:
        first = self.conflicts[0]
        return ReviewConflict(
            f"{display(first.path)} {first.project}, so nothing was applied; look at the diff again,"
            " or commit the other paths with --on-conflict skip.",
            conflicts=[
                {"path": os.fsdecode(c.path), "agent": c.agent, "project": c.project}
                for c in self.conflicts
            ],
        )

    def _make(self, step: Step, action: Action) -> None:
        temp = temporary_path(self.plan, step)
        folder = self.home.parent_fd(temp)
        replaced = self.at if action.expect is not None and action.type == "file" else None
        self.progress.made[step.n] = self._copier.make(
            folder, name(temp), action, self.layers, replaced, self.progress.before.get(step.n)
        )

    def _put(self, step: Step, action: Action) -> None:
        temp, path = temporary_path(self.plan, step), WorkspacePath(action.path)
        self.at.forget()
        self.home.forget()
        folder, home = self.at.parent_fd(path), self.home.parent_fd(temp)
        if action.expect is None:
            try:
                renameat2(home, name(temp), folder, name(path), RENAME_NOREPLACE)
            except FileExistsError:
                raise _Moved("exists in the project now") from None
            return
        now = Fingerprint.of(os.stat(name(path), dir_fd=folder, follow_symlinks=False))
        if not now.same_as(self._expected(action)):
            raise _Moved("was changed in the project")
        renameat2(home, name(temp), folder, name(path), RENAME_EXCHANGE)
        if not self._is_ours(home, name(temp), now):
            # Somebody was faster than the two calls above: theirs goes back, untouched.
            renameat2(home, name(temp), folder, name(path), RENAME_EXCHANGE)
            raise _Moved("was changed in the project")

    def _take(self, step: Step, action: Action) -> None:
        temp, path = temporary_path(self.plan, step), WorkspacePath(action.path)
        self.at.forget()
        self.home.forget()
        folder, home = self.at.parent_fd(path), self.home.parent_fd(temp)
        now = Fingerprint.of(os.stat(name(path), dir_fd=folder, follow_symlinks=False))
        if not now.same_as(self._expected(action)):
            raise _Moved("was changed in the project")
        renameat2(folder, name(path), home, name(temp), RENAME_NOREPLACE)
        if not self._is_ours(home, name(temp), now):
            renameat2(home, name(temp), folder, name(path), RENAME_NOREPLACE)
            raise _Moved("was changed or got new files in the project")

    @staticmethod
    def _is_ours(home: int, temp: bytes, was: Fingerprint) -> bool:
        """True when the entry moved aside is the one that was judged; a directory must be empty."""
        if not Fingerprint.of(os.stat(temp, dir_fd=home, follow_symlinks=False)).moved_from(was):
            return False
        return was.type != "dir" or _is_empty(home, temp)

    def _chmod(self, step: Step, action: Action) -> None:
        path = WorkspacePath(action.path)
        self.at.forget()
        fd = self.at.open_at(path, os.O_PATH)
        try:
            st = os.fstat(fd)
            now = Fingerprint.of(st)
            made = self.progress.made.get(step.n)
            if not (
                now.moved_from(made) if made is not None else now.same_as(self._expected(action))
            ):
                raise _Moved("was changed in the project")
            os.chmod(f"/proc/self/fd/{fd}", _with_setgid(step.mode or 0, st))
        finally:
            os.close(fd)

    def _after(self) -> None:
        """What the base holds now, at the paths of the plan. An entry that somebody changed since
        keeps the fingerprint of what was made, which will never match again: undo then sees it."""
        for n, action in enumerate(self.plan.actions):
            if action.op == "take":
                self.progress.after[n] = None
                continue
            st = self.at.lstat_or_none(WorkspacePath(action.path))
            made = self.progress.made.get(n)
            now = None if st is None else Fingerprint.of(st)
            if (
                made is not None
                and now is not None
                and action.type != "dir"
                and not now.moved_from(made)
            ):
                now = made
            self.progress.after[n] = now or made

    def _finish(self) -> Committed:
        """From `done` to the end; safe to repeat. Undo copies first, then the last record."""
        os.makedirs(self.undo_dir, mode=0o700, exist_ok=True)
        folder = os.open(self.undo_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            for step in self.plan.steps:
                if step.op == "keep" and step.n not in self.progress.kept:
                    self._keep(step, folder)
                    if self._on_step is not None:
                        self._on_step(step)
            if self.plan.durability == "strict":
                os.fsync(folder)
        finally:
            os.close(folder)
        self._lock_again(is_forward=True)
        self._reach("kept")
        return self._result()

    def _keep(self, step: Step, undo: int) -> None:
        temp = temporary_path(self.plan, step)
        copy = copy_name(step.n).encode()
        try:
            home = self.home.parent_fd(temp)
            st = os.stat(name(temp), dir_fd=home, follow_symlinks=False)
        except OSError as exc:
            if exc.errno not in _GONE:
                raise
            # Kept before the crash: the record of it was lost, the copy was not.
            with contextlib.suppress(FileNotFoundError):
                kept = os.stat(copy, dir_fd=undo, follow_symlinks=False)
                self.progress.kept[step.n] = Fingerprint.of(kept)
            return
        if stat.S_ISDIR(st.st_mode):
            try:
                os.rmdir(name(temp), dir_fd=home)
            except OSError as exc:
                if exc.errno != errno.ENOTEMPTY:
                    raise
                self._give_back(step, home, name(temp))
            return
        self.progress.kept[step.n] = self._store_copy(home, name(temp), st, undo, copy)

    def _store_copy(
        self, home: int, temp: bytes, st: os.stat_result, undo: int, copy: bytes
    ) -> Fingerprint:
        """Move the user's displaced entry to the undo folder; copy it when it has further links
        (somebody may write through them) or when the folder is on another file system."""
        if st.st_nlink == 1:
            try:
                os.rename(temp, copy, src_dir_fd=home, dst_dir_fd=undo)
                return Fingerprint.of(os.stat(copy, dir_fd=undo, follow_symlinks=False))
            except OSError as exc:
                if exc.errno != errno.EXDEV:
                    raise
        with contextlib.suppress(FileNotFoundError):
            os.unlink(copy, dir_fd=undo)  # half a copy from before a crash
        kept = copy_entry(home, temp, undo, copy, is_strict=self.plan.durability == "strict")
        os.unlink(temp, dir_fd=home)
        return kept

    def _give_back(self, step: Step, home: int, temp: bytes) -> None:
        """A removed directory in which somebody still made a file: it returns to its name."""
        path = WorkspacePath(self.plan.actions[step.action].path)
        try:
            renameat2(home, temp, self.at.parent_fd(path), name(path), RENAME_NOREPLACE)
            self.notices.append(f"{display(path)} stays: a file was made in it meanwhile.")
        except OSError:
            at = display(join(WorkspacePath(step.home), temp))
            self.notices.append(f"What was made in {display(path)} meanwhile lies in {at}.")

    def _result(self) -> Committed:
        progress = self.progress
        entries, paths = [], []
        for n, action in enumerate(self.plan.actions):
            after = progress.after.get(n)
            kept = progress.kept.get(n)
            entries.append(
                UndoEntry(
                    path=action.path,
                    expect=action.expect,
                    before=progress.before.get(n) if action.expect is not None else None,
                    after=after,
                    copy=copy_name(n) if kept is not None else None,
                    copy_print=kept,
                )
            )
            paths.append(Outcome(action.path, after, action.source))
        return Committed(
            paths=paths,
            undo=UndoRecord(commit=self.plan.commit, copies=self.undo_dir, entries=entries),
            skipped=self.plan.skipped,
            left_out=self.plan.left_out,
            notices=self.notices,
        )

    # -- backward

    def recover(self) -> Committed | None:
        """After a crash: finish a plan whose stage is `done`, reverse any other; safe to repeat.

        Returns: the result when finished, None when reversed. `notices` says what could not be
        put back because somebody changed it meanwhile; nothing of theirs is ever removed.
        """
        with self._trees():
            if self.progress.stage in ("done", "kept"):
                return self._finish()
            self._reverse()
            return None

    def _reverse(self) -> None:
        for step in reversed(self.plan.steps):
            action = self.plan.actions[step.action]
            undo = getattr(self, "_un" + step.op, None)
            if undo is None:
                continue
            self.at.forget()
            self.home.forget()
            try:
                undo(step, action)
            except OSError as exc:
                if exc.errno not in _GONE:
                    self.notices.append(
                        f"{display(action.path)} could not be put back: {os.strerror(exc.errno or 0)}."
                    )
            if self._on_step is not None:
                self._on_step(step)
        self._lock_again(is_forward=False)
        if self.plan.durability == "strict":
            self._sync_folders()

    def _unchmod(self, step: Step, action: Action) -> None:
        path = WorkspacePath(action.path)
        fd = self.at.open_at(path, os.O_PATH)
        try:
            st = os.fstat(fd)
            made = self.progress.made.get(step.n)
            if made is not None:
                if st.st_ino == made.ino:
                    os.chmod(f"/proc/self/fd/{fd}", made.mode)
            elif action.expect is not None and action.op == "chmod":
                is_ours = st.st_ino == action.expect.ino or action.type == "dir"
                if is_ours and stat.S_IMODE(st.st_mode) == _with_setgid(step.mode or 0, st):
                    os.chmod(f"/proc/self/fd/{fd}", action.expect.mode)
                    self._is_restored(action)
        finally:
            os.close(fd)

    def _is_restored(self, action: Action) -> None:
        st = self.at.lstat_or_none(WorkspacePath(action.path))
        if st is None or action.expect is None:
            return
        now = Fingerprint.of(st)
        if now.moved_from(action.expect) and now != action.expect:
            self.restored[action.path] = now

    def _untake(self, step: Step, action: Action) -> None:
        temp, path = temporary_path(self.plan, step), WorkspacePath(action.path)
        home = self.home.parent_fd(temp)
        os.stat(name(temp), dir_fd=home, follow_symlinks=False)
        try:
            renameat2(home, name(temp), self.at.parent_fd(path), name(path), RENAME_NOREPLACE)
        except OSError as exc:
            if exc.errno not in (errno.EEXIST, *_GONE):
                raise
            self._rescue(step, action, home, name(temp))
        else:
            self._is_restored(action)

    def _unput(self, step: Step, action: Action) -> None:
        made = self.progress.made.get(step.n)
        if made is None:
            return
        temp, path = temporary_path(self.plan, step), WorkspacePath(action.path)
        folder = self.at.parent_fd(path)
        st = os.stat(name(path), dir_fd=folder, follow_symlinks=False)
        if st.st_ino != made.ino or kind_of(st.st_mode) != made.type:
            self._rescue_displaced(step, action, temp, made)
            return
        home = self.home.parent_fd(temp)
        flag = RENAME_NOREPLACE if action.expect is None else RENAME_EXCHANGE
        renameat2(folder, name(path), home, name(temp), flag)
        if not self._is_ours(home, name(temp), made):
            renameat2(home, name(temp), folder, name(path), flag)
            self.notices.append(f"{display(path)} stays as committed: it was changed meanwhile.")
            if action.expect is not None:
                self._rescue(step, action, home, name(temp))
        else:
            self._is_restored(action)

    def _rescue_displaced(
        self, step: Step, action: Action, temp: WorkspacePath, made: Fingerprint
    ) -> None:
        """Our file is no longer at its name; if the displaced one still has the temporary name, the
        user replaced ours: theirs stays, the displaced one is saved."""
        if action.expect is None:
            return
        home = self.home.parent_fd(temp)
        if os.stat(name(temp), dir_fd=home, follow_symlinks=False).st_ino != made.ino:
            self._rescue(step, action, home, name(temp))

    def _rescue(self, step: Step, action: Action, home: int, temp: bytes) -> None:
        os.makedirs(self.undo_dir, mode=0o700, exist_ok=True)
        folder = os.open(self.undo_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        copy = copy_name(step.n)
        try:
            st = os.stat(temp, dir_fd=home, follow_symlinks=False)
            if stat.S_ISDIR(st.st_mode):
                os.rmdir(temp, dir_fd=home)
                return
            self._store_copy(home, temp, st, folder, copy.encode())
        finally:
            os.close(folder)
        self.notices.append(
            f"What {display(action.path)} held before lies in {self.undo_dir}/{copy}."
        )

    def _unmake(self, step: Step, _action: Action) -> None:
        temp = temporary_path(self.plan, step)
        home = self.home.parent_fd(temp)
        st = os.stat(name(temp), dir_fd=home, follow_symlinks=False)
        made = self.progress.made.get(step.n)
        if made is not None and st.st_ino != made.ino:
            return  # not what we made: never removed
        if stat.S_ISDIR(st.st_mode):
            os.rmdir(name(temp), dir_fd=home)
        else:
            os.unlink(name(temp), dir_fd=home)

    def _sync_folders(self) -> None:
        """fsync each folder that got or lost a name."""
        folders = {step.home for step in self.plan.steps}
        folders |= {a.path.rpartition(b"/")[0] for a in self.plan.actions}
        for folder in folders:
            try:
                fd = self.at.open_at(WorkspacePath(folder), os.O_RDONLY | os.O_DIRECTORY)
            except OSError as exc:
                if exc.errno in _GONE:
                    continue
                raise
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def _with_setgid(mode: int, st: os.stat_result) -> int:
    """A directory keeps its set-group-id bit: it says who owns new files, it runs nothing."""
    return mode | (st.st_mode & stat.S_ISGID) if stat.S_ISDIR(st.st_mode) else mode


def _is_empty(folder: int, directory: bytes) -> bool:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
    try:
        return not os.listdir(fd)
    finally:
        os.close(fd)


def _of(exc: OSError) -> bytes:
    return os.fsencode(exc.filename) if isinstance(exc.filename, str | bytes) else b""
