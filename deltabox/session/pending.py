"""The pending changes of one session: diff, commit, abort; and a project's undo and recovery.

Synchronous, and without a mount: it reads the layers on disk. The caller holds the session's lock
and says in `live` whether a mount stands over the upper; then nothing under it is touched:
commits copy out of it, discards are written back through the view.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from deltabox.config import Config, Places
from deltabox.engines.delta import Fingerprint, Merged, prune
from deltabox.errors import DeltaboxError, Failed, NotFound
from deltabox.paths import Tree, WorkspacePath, display, is_within, parse
from deltabox.review import abort as discarding
from deltabox.review import commit as committing
from deltabox.review import diff, text
from deltabox.review import undo as undoing
from deltabox.review.model import Review
from deltabox.review.steps import Committed, Plan, Progress, Step, UndoRecord
from deltabox.session import checkpoint, present, project, writeback
from deltabox.session.touch import ABSENT, recorded
from deltabox.session.turn import next_review
from deltabox.store import Commit, CommitId, Session, SessionId, Store, Touch, TrashRow, new_id

_CLOCK_REALTIME_COARSE = 5  # linux/time.h; the time module does not name it
Detail = Literal["stat", "full", "patch", "exact"]


@dataclass(frozen=True, slots=True)
class Live:
    """A mount stands over the upper. root_fd: the view's project, borrowed; frozen: whether the
    session's processes were stopped while we look."""

    root_fd: int
    frozen: bool


class Pending:
    """Decisions on one session (the `Desk` of the card). One at a time; make it and use it at once."""

    def __init__(
        self,
        store: Store,
        where: Places,
        session: SessionId,
        *,
        live: Live | None = None,
        progress: Callable[[int, int], None] = lambda _done, _all: None,
    ) -> None:
        self._store = store
        self._where = where
        self._id = session
        self._live = live
        self._progress = progress

    @property
    def _session(self) -> Session:
        return self._store.session(self._id)

    def diff(self, *, detail: Detail = "stat", paths: Sequence[bytes] = ()) -> dict[str, Any]:
        """What is pending, as `review.diff` has it; remembers its digest as what was shown.

        Only a look at everything counts as shown: a part's digest would stand for the rest too.
        detail: `patch` adds coloured-to-be text for a person, `exact` a patch for git apply.
        """
        with self._looking() as look:
            review = look.review("stat" if detail == "stat" else "full")
            found = self._result(review, paths, hunks=detail == "full")
            if detail in ("patch", "exact"):
                chosen = [WorkspacePath(p) for p in paths] or None
                changes = [c for c in review.shown() if diff.selects(chosen, c)]
                if detail == "exact":
                    parts = [text.patch(look.merged, c) for c in changes if not c.refused]
                    found["patch"] = os.fsdecode(b"".join(parts))
                else:
                    lines = [line for c in changes for line in text.unified(look.merged, c)]
                    found["patch"] = "".join(f"{line}\n" for line in lines)
        row = self._store.review_of(self._id)
        if row is not None and not paths:
            self._store.set_shown(row.id, review.digest)
        return found

    def commit(
        self,
        *,
        paths: Sequence[bytes] = (),
        digest: str | None = None,
        on_conflict: str = "fail",
        allow: Sequence[bytes] = (),
        keep_mtime: bool = False,
    ) -> dict[str, Any]:
        """Apply all or `paths` to the project: exactly what was shown, or nothing.

        digest: what was shown; the last one shown when None. Raises: ReviewChanged,
        ReviewConflict, NotFound, SessionBusy (another commit on the project), Failed.
        """
        self._flatten()
        session = self._session
        row = self._store.review_of(self._id)
        shown = digest or (row.shown if row else None)
        with project.writing(self._where, session.project), self._looking() as look:
            review = look.review("stat")
            if not review.changes:
                if self._live is None:
                    self._settle("settle", review)
                return self._committed(None, review, left=0)
            row = row or self._store.open_review(self._id)
            next_review("open", "commit")
            done, commit = self._apply(
                look, review, row.id, paths, shown, on_conflict, allow, keep_mtime
            )
            viewStale = self._after_commit(look, done)  # noqa: N806 - the protocol's name
        left = self._left(done, review)
        result = self._committed(commit, review, left=left, done=done)
        result["viewStale"] = viewStale
        return result

    def abort(self, *, paths: Sequence[bytes] = ()) -> dict[str, Any]:
        """Discard all or `paths` into the trash; the project is not touched at all.

        Raises: NotFound when a path has no change.
        """
        self._flatten()
        session = self._session
        with self._looking() as look:
            review = look.review("stat")
            chosen = [WorkspacePath(p) for p in paths] or None
            gone = [c for c in review.changes if diff.selects(chosen, c)]
            if paths and not gone:
                raise NotFound(
                    f"{display(paths[0])} has no pending change; `deltabox diff` lists them."
                )
            trash, folder = project.trash_folder(self._where)
            if self._live is None:
                self._discard(look, chosen, folder)
            else:
                with Tree(os.dup(self._live.root_fd)) as view:
                    writeback.discard(look.merged, view, [c.path for c in gone], folder)
            size = project.disk_usage(folder)
            shown = [c for c in gone if c.is_shown]
            self._store.add_trash(
                TrashRow(
                    trash, self._id, session.project, time.time_ns(), str(folder), len(gone), size
                )
            )
        with self._store.transaction():
            self._store.note(
                "review.abort",
                session=self._id,
                project=session.project,
                trash=trash,
                paths=len(shown),
            )
            self._decided(review, {c.path for c in gone}, "abort")
        return {"discarded": len(shown), "trash": trash, "generation": self._session.generation}

    def _discard(self, look: "_Look", chosen: list[WorkspacePath] | None, trash: Path) -> None:
        """From a quiet delta into the trash: by renames, whatever its size."""
        if chosen is None:
            if look.upper.is_dir():
                discarding.discard_all(look.base, str(look.upper), str(trash / "upper"))
            return
        kept = trash / "paths"
        kept.mkdir(mode=0o700)
        with Tree.open(look.upper) as upper, Tree.open(kept) as target:
            discarding.discard(look.base, upper, look.layers[1:], chosen, target)

    def settle(self) -> bool:
        """Close a review in which everything cancelled out; True when nothing is pending."""
        with self._looking() as look:
            review = look.review("stat")
        if review.changes:
            self._store.open_review(self._id)
            return False
        self._settle("settle", review)
        return True

    # inside

    def _flatten(self) -> None:
        """A quiet delta is decided on as one layer; its checkpoints end with the decision."""
        if self._live is None:
            checkpoint.flatten(self._store, self._where, self._id)

    @contextmanager
    def _looking(self) -> Iterator["_Look"]:
        with _open_look(self._store, self._where, self._session, self._live) as look:
            yield look

    def _apply(
        self,
        look: "_Look",
        review: Review,
        review_id: str,
        paths: Sequence[bytes],
        shown: str | None,
        on_conflict: str,
        allow: Sequence[bytes],
        keep_mtime: bool,
    ) -> tuple[Committed, CommitId]:
        session = self._session
        settings = settings_of(session)
        commit = CommitId(new_id("c"))
        steps = [0, 0]  # done, all

        def on_step(_step: Step) -> None:
            steps[0] += 1
            self._progress(*steps)

        def store(plan: Plan) -> None:
            steps[:] = 0, len(plan.steps)
            self._store.plan_commit(
                commit,
                session=self._id,
                review=review_id,
                project=session.project,
                kind="commit",
                plan=msgspec.json.encode(plan),
                digest=review.digest,
            )

        with self._store.durable(strict=settings.durability == "strict"):
            try:
                done = committing.commit(
                    look.base,
                    look.layers,
                    review,
                    commit=commit,
                    undo_dir=str(project.undo_folder(self._where, commit)),
                    store=store,
                    record=lambda p: self._store.set_progress(commit, msgspec.json.encode(p)),
                    on_step=on_step,
                    selection=[WorkspacePath(p) for p in paths] or None,
                    on_conflict=cast(committing.OnConflict, on_conflict),
                    allow=allow,
                    digest=shown,
                    keep_mtime=keep_mtime,
                    durability=cast(Literal["fast", "strict"], settings.durability),
                )
            except BaseException:
                self._store.finish_commit(commit, "reversed")
                raise
            with self._store.transaction():
                self._store.finish_commit(
                    commit, "done", record=msgspec.json.encode(done.undo), summary=_summary(done)
                )
                self._store.note(
                    "review.commit",
                    session=self._id,
                    project=session.project,
                    commit=commit,
                    digest=review.digest,
                    paths=len(done.paths),
                )
        return done, commit

    def _after_commit(self, look: "_Look", done: Committed) -> list[dict[str, Any]]:
        """Bring the delta up to date: dropped where quiet, remembered as equal under a live mount.

        Returns: what a live view may still show as it was (nothing for a quiet one).
        """
        outcomes = {WorkspacePath(o.path): o for o in done.paths}
        if self._live is None:
            sources = {p: o.source for p, o in outcomes.items()}
            prune(look.base, look.layers[0], look.layers[1:], sources)
            return []
        self._store.drop_touches(self._id, outcomes)
        self._store.add_touches(
            self._id, (_as_touch(p, o.fingerprint) for p, o in outcomes.items())
        )
        self._store.add_ours(
            self._id,
            (
                (p, msgspec.json.encode(o.fingerprint))
                for p, o in outcomes.items()
                if o.fingerprint is not None
            ),
        )
        return []

    def _left(self, done: Committed, review: Review) -> int:
        """Record what was decided; how many shown changes stay pending."""
        taken = {o.path for o in done.paths}
        with self._store.transaction():
            return self._decided(review, taken, "commit")

    def _decided(
        self, review: Review, taken: set[bytes], event: Literal["commit", "abort"]
    ) -> int:
        """The generation grows; the review closes when nothing is left."""
        session = self._session
        left = [c for c in review.changes if c.path not in taken and c.origin not in taken]
        row = self._store.review_of(self._id) or self._store.open_review(self._id)
        if self._live is None:
            # Fingerprints of the undecided are kept as they were judged, before the stamp is
            # renewed; those decided begin anew.
            self._store.add_touches(self._id, (_judged(c) for c in left))
            self._store.drop_touches(self._id, taken)
            self._store.drop_ours(self._id)
            self._store.update_session(self._id, since_ns=stamp())
        if left:
            next_review("open", "decide-part")
            # What was shown held the decided paths too; the rest has to be looked at again.
            self._store.set_shown(row.id, _digest_of(left))
        else:
            self._store.close_review(row.id, next_review("open", event))
        self._store.update_session(self._id, generation=session.generation + 1)
        return sum(1 for c in left if c.is_shown) + len({c.unit for c in left if c.unit})

    def _settle(self, event: Literal["settle"], review: Review) -> None:
        row = self._store.review_of(self._id)
        if row is not None:
            with self._store.transaction():
                self._store.close_review(row.id, next_review("open", event))
                self._store.drop_touches(self._id)

    def _result(self, review: Review, paths: Sequence[bytes], *, hunks: bool) -> dict[str, Any]:
        session = self._session
        row = self._store.review_of(self._id)
        return {
            "review": row.id if row else None,
            "session": session.id,
            "generation": session.generation,
            "project": str(session.project),
            "engine": session.engine,
            "liveBase": session.engine == "git",
            "isolation": session.isolation,
            "network": session.network,
            "turns": [
                {
                    "id": t.id,
                    "argv": list(t.argv),
                    "code": t.code,
                    "signal": t.signal,
                    "durationNs": t.ended_ns - t.started_ns if t.ended_ns else None,
                }
                for t in self._store.turns(self._id)
            ],
            **present.result(review, paths=paths, hunks=hunks),
            "notes": notes(session, review),
        }

    def _committed(
        self, commit: str | None, review: Review, *, left: int, done: Committed | None = None
    ) -> dict[str, Any]:
        by_path = {c.path: c for c in review.changes}
        taken = [] if done is None else [by_path[o.path] for o in done.paths if o.path in by_path]
        units = sorted({c.unit for c in taken if c.unit is not None})
        return {
            "commit": commit,
            "generation": self._session.generation,
            "digest": review.digest,
            "committed": [present.named(c.path) for c in taken if c.is_shown and c.unit is None]
            + [present.named(u) for u in units],
            "conflicts": [present.conflict(c) for c in done.skipped] if done else [],
            "refused": [
                {
                    **present.named(o.path),
                    "display": display(o.path),
                    "reason": o.why,
                    "follows": o.follows,
                }
                for o in (done.left_out if done else ())
            ],
            "notes": done.notices if done else [],
            "left": left,
            "viewStale": [],
        }


@dataclass(slots=True)
class _Look:
    """The base and the layers, open; and the review made of them."""

    store: Store
    session: Session
    base: Tree
    layers: list[Tree]
    merged: Merged
    live: Live | None
    upper: Path

    def review(self, detail: Literal["stat", "full"]) -> Review:
        settings = settings_of(self.session)
        touches = self.store.touches(self.session.id)
        prints: dict[WorkspacePath, Fingerprint | None] = {
            WorkspacePath(p): recorded(t) for p, t in touches.items()
        }
        authors = {WorkspacePath(p): by for p, by in self.store.authors(self.session.id).items()}
        ours = {
            WorkspacePath(p): msgspec.json.decode(f, type=Fingerprint)
            for p, f in self.store.ours(self.session.id).items()
        }
        review = diff.build(
            self.merged,
            fingerprints=prints,
            since_ns=self.session.since_ns,
            drifted={WorkspacePath(p) for p, t in touches.items() if t.drifted},
            authors=authors,
            ours=ours,
            detail=detail,
            text_limit_bytes=settings.limits.diff,
            is_moving=self.live is not None and not self.live.frozen,
        )
        for word, why in (
            *((d, "is denied") for d in settings.deny),
            *((r, "is read-only") for r in settings.ro),
        ):
            closed = parse(word)
            for change in review.changes:
                if is_within(change.path, closed) and not change.refused:
                    change.refused = f"{why} by this session's settings"
        return review


@contextmanager
def _open_look(
    store: Store, where: Places, session: Session, live: Live | None
) -> Iterator[_Look]:
    folder = project.folder_of(where, session.id)
    with ExitStack() as stack:
        try:
            base = stack.enter_context(Tree.open(session.project))
        except OSError as exc:
            raise Failed(
                f"The project {display(os.fsencode(session.project))} cannot be opened "
                f"({exc.strerror}); bring it back, or `deltabox abort` the session."
            ) from exc
        names = msgspec.json.decode(session.stack, type=list[str])
        paths = [folder.layers / name for name in names]
        if folder.upper.is_dir():  # made by the first mount
            paths.insert(0, folder.upper)
        layers = [stack.enter_context(Tree.open(path)) for path in paths]
        yield _Look(store, session, base, layers, Merged(base, layers), live, folder.upper)


def stamp() -> int:
    """Now, by the coarse clock that file times are taken from: a later change is never older."""
    return time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)


def settings_of(session: Session) -> Config:
    """The Config a session was started with."""
    return msgspec.json.decode(session.settings, type=Config)


def notes(session: Session, review: Review) -> list[str]:
    """What the card must say about cover and protection."""
    found = []
    if review.is_moving:
        found.append("processes are still running: files may change while you read this")
    if session.network == "host":
        found.append(
            "network host: the command could reach the network and this machine's servers"
        )
    return found


def _digest_of(changes: Sequence[Any]) -> str:
    from deltabox.review.digest import digest

    return digest(changes)


def _summary(done: Committed) -> str:
    first = [display(o.path) for o in done.paths[:3]]
    more = len(done.paths) - len(first)
    return ", ".join(first) + (f" and {more} more" if more > 0 else "")


def _as_touch(path: bytes, print_: Fingerprint | None, *, drifted: bool = False) -> Touch:
    if print_ is None:
        return Touch(path, ABSENT, 0, 0, 0, 0, 0, drifted, None)
    return Touch(
        path,
        print_.type,
        print_.ino,
        print_.size,
        print_.mtime_ns,
        print_.ctime_ns,
        print_.mode,
        drifted,
        None,
    )


def _judged(change: Any) -> Touch:
    return _as_touch(change.path, change.base, drifted=change.conflict is not None)


def tidy(store: Store, where: Places, session_id: SessionId) -> None:
    """End a session in which nothing is pending any more; its folder goes."""
    session = store.session(session_id)
    if session.state == "idle" and store.review_of(session_id) is None:
        project.close_session(store, where, session)


# undo and recovery of whole projects


def undo(store: Store, where: Places, root: Path, named: str | None) -> dict[str, Any]:
    """See project.undo."""
    commit = _undoable(store, root, named)
    if commit.record is None:
        raise Failed(f"Commit {commit.id} has no undo record; it was never finished.")
    record = msgspec.json.decode(commit.record, type=UndoRecord)
    fresh = CommitId(new_id("c"))

    def keep(plan: Plan) -> None:
        store.plan_commit(
            fresh,
            session=commit.session,
            review=commit.review,
            project=commit.project,
            kind="undo",
            plan=msgspec.json.encode(plan),
            undoes=commit.id,
        )

    with project.writing(where, commit.project), Tree.open(commit.project) as base:
        try:
            done = undoing.undo(
                base,
                record,
                commit=fresh,
                undo_dir=str(project.undo_folder(where, fresh)),
                store=keep,
                record_progress=lambda p: store.set_progress(fresh, msgspec.json.encode(p)),
            )
        except BaseException:
            with contextlib.suppress(NotFound):
                store.commit(fresh)
                store.finish_commit(fresh, "reversed")
            raise
    with store.transaction():
        store.finish_commit(
            fresh, "done", record=msgspec.json.encode(done.undo), summary=f"undo of {commit.id}"
        )
        store.finish_commit(commit.id, "undone")
        store.note(
            "undo", session=commit.session, project=commit.project, undone=commit.id, commit=fresh
        )
    live = [s.id for s in store.sessions(commit.project) if s.state == "running"]
    return {
        "undone": commit.id,
        "commit": fresh,
        "paths": len(done.paths),
        "notes": done.notices,
        # A live overlay may go on showing what it has looked up before.
        "viewStale": [present.named(o.path) for o in done.paths] if live else [],
        "liveSessions": live,
    }


def _undoable(store: Store, root: Path, named: str | None) -> Commit:
    if named is not None:
        commit = store.commit(named)
        if commit.state != "done":
            raise NotFound(
                f"Commit {commit.id} is {commit.state}; only one in force can be undone."
            )
        return commit
    for commit in store.commits(root, state="done"):
        # The latest *commit*: an undo is taken back by naming it.
        if commit.kind == "commit":
            return commit
    raise NotFound(
        f"No commit is in force in {display(os.fsencode(root))}; `deltabox log` lists what happened."
    )


def recover(store: Store, where: Places, commit: Commit) -> None:
    """Finish or reverse one plan that a dead process left; the caller holds the project's lock."""
    from deltabox.review.executor import Executor

    plan = msgspec.json.decode(commit.plan, type=Plan)
    progress = (
        msgspec.json.decode(commit.progress, type=Progress) if commit.progress else Progress()
    )
    what = f"{commit.kind} {commit.id} on {display(os.fsencode(commit.project))}"
    try:
        with Tree.open(commit.project) as base:
            executor = Executor(
                base,
                plan,
                undo_dir=str(project.undo_folder(where, commit.id)),
                progress=progress,
                record=lambda p: store.set_progress(commit.id, msgspec.json.encode(p)),
            )
            done = executor.recover()
    except (OSError, DeltaboxError) as exc:
        sentence = f"The {what} was cut short and cannot be recovered yet: {exc}."
        store.note("recovered", session=commit.session, project=commit.project, sentence=sentence)
        return
    with store.transaction():
        if done is None:
            store.finish_commit(commit.id, "reversed")
            sentence = (
                f"The {what} had been cut short; it was reversed, the project is as before it."
            )
        else:
            store.finish_commit(
                commit.id, "done", record=msgspec.json.encode(done.undo), summary=_summary(done)
            )
            if commit.undoes is not None:
                store.finish_commit(commit.undoes, "undone")
            sentence = f"The {what} had been cut short; it was finished."
        words = " ".join([sentence, *executor.notices])
        store.note("recovered", session=commit.session, project=commit.project, sentence=words)
