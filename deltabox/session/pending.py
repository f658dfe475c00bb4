"""The pending changes of one session: diff, commit, abort; and a project's undo.

Synchronous, and without a mount: it reads the layers on disk. The caller holds the session's lock
and says in `live` whether a mount stands over the upper; then nothing under it is touched:
commits copy out of it, discards are written back through the view.
"""

import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from deltabox.config import Config, Places
from deltabox.engines.delta import Fingerprint, Merged, prune
from deltabox.errors import BadUsage, DeltaboxError, Failed, NotFound
from deltabox.paths import Tree, WorkspacePath, display, is_within, parent, parse
from deltabox.review import abort as discarding
from deltabox.review import commit as committing
from deltabox.review import diff, text
from deltabox.review import undo as undoing
from deltabox.review.model import Change, Review
from deltabox.review.steps import Committed, Plan, Step, UndoRecord
from deltabox.session import checkpoint, present, project, trash, writeback
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
        if self._live is None and not review.changes and not self._holds_checkpoints():
            self._settle("settle", review)
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
        row = self._store.review_of(self._id)
        shown = digest or (row.shown if row else None)

        def check(_look: "_Look", review: Review) -> None:
            committing.plan(
                review,
                commit="check",
                selection=[WorkspacePath(p) for p in paths] or None,
                on_conflict=cast(committing.OnConflict, on_conflict),
                allow=allow,
                digest=shown,
            )

        self._flatten(check)
        session = self._session
        with project.writing(self._where, session.project), self._looking() as look:
            review = look.review("bare")
            if not review.changes:
                if self._live is None:
                    self._settle("settle", review)
                return self._committed(None, review, left=0)
            row = row or self._store.open_review(self._id)
            next_review("open", "commit")
            done, commit, left = self._apply(
                look, review, row.id, paths, shown, on_conflict, allow, keep_mtime
            )
            if self._live is None:
                # Only now: what the base holds already is equal, pruned or not.
                sources = {WorkspacePath(o.path): o.source for o in done.paths}
                prune(look.base, look.layers[0], look.layers[1:], sources)
        result = self._committed(commit, review, left=left, done=done)
        result["viewStale"] = []
        return result

    def abort(self, *, paths: Sequence[bytes] = ()) -> dict[str, Any]:
        """Discard all or `paths` into the trash; the project is not touched at all.

        Cut short, the next start finishes it. Raises: NotFound when a path has no change, BadUsage
        when a folder above one has to go first, Failed.
        """
        self._flatten(lambda look, review: self._selected(look, review, paths))
        session = self._session
        with self._looking() as look:
            review = look.review("bare")
            gone = self._selected(look, review, paths)
            if not review.changes:
                if self._live is None:
                    self._settle("settle", review)
                return {"discarded": 0, "trash": None, "generation": self._session.generation}
            chosen = _with_both_ends(paths, gone)
            row = trash.begin(
                self._store, self._where, session, chosen, [_judged(c) for c in gone]
            )
            try:
                if self._live is None:
                    self._discard(look, chosen, Path(row.folder))
                else:
                    whole = sorted({c.path for c in gone} | {c.origin for c in gone if c.origin})
                    with Tree(os.dup(self._live.root_fd)) as view:
                        writeback.discard(look.merged, view, whole, Path(row.folder))
            except OSError as exc:
                raise Failed(
                    f"The abort stopped half-way ({exc.strerror or exc}); nothing is lost: what it "
                    f"took is in the trash as {row.id}, and the next start finishes it."
                ) from exc
        with self._store.transaction():
            self._discarded(row, review, {c.path for c in gone})
        shown = sum(1 for c in gone if c.is_shown)
        return {"discarded": shown, "trash": row.id, "generation": self._session.generation}

    def finish_abort(self, row: TrashRow) -> None:
        """What a dead process began to discard goes too; for a quiet session, safe to repeat."""
        chosen = trash.chosen_of(row)
        trash.make_folder(self._where, row)
        with self._looking() as look:
            self._discard(look, chosen, Path(row.folder))
        with self._looking() as look:
            review = look.review("bare")
        with self._store.transaction():
            gone = {t.path for t in trash.touches_of(row)}
            self._discarded(row, review, {*gone, *(chosen or ())})
            self._store.note(
                "recovered",
                session=self._id,
                project=row.project,
                sentence=f"The abort in session {self._id} had been cut short; it was finished, "
                f"what it discarded lies in the trash as {row.id}.",
            )

    def _discarded(self, row: TrashRow, review: Review, taken: set[bytes]) -> None:
        trash.keep(self._store, row)
        self._store.note(
            "review.abort",
            session=self._id,
            project=row.project,
            trash=row.id,
            paths=row.paths,
        )
        self._decided(review, taken, "abort")

    def _selected(self, look: "_Look", review: Review, paths: Sequence[bytes]) -> list[Change]:
        """The changes that an abort of `paths` takes. Raises: NotFound, BadUsage."""
        chosen = [WorkspacePath(p) for p in paths] or None
        gone = [c for c in review.changes if diff.selects(chosen, c)]
        if paths and not gone:
            raise NotFound(
                f"{display(paths[0])} has no pending change; `deltabox diff` lists them."
            )
        # Asked before the first deed, so that no abort stops half-way at it.
        for path in chosen or ():
            at = path
            while at := parent(at):
                base, shown = look.base.lstat_or_none(at), look.merged.lookup(at)
                is_blocked = base is not None and stat.S_ISDIR(base.st_mode)
                is_blocked = is_blocked and shown is not None and shown.kind != "dir"
                if is_blocked and at not in (chosen or ()):
                    raise BadUsage(
                        f"{display(path)} cannot come back while {display(at)} is no folder; "
                        f"abort {display(at)}."
                    )
        return gone

    def _discard(self, look: "_Look", chosen: list[WorkspacePath] | None, folder: Path) -> None:
        """From a quiet delta into the trash: by renames, whatever its size; again is fine."""
        if chosen is None:
            if look.upper.is_dir() and not (folder / "upper").exists():
                discarding.discard_all(look.base, str(look.upper), str(folder / "upper"))
            return
        kept = folder / "paths"
        kept.mkdir(mode=0o700, exist_ok=True)
        with Tree.open(look.upper) as upper, Tree.open(kept) as target:
            discarding.discard(look.base, upper, look.layers[1:], chosen, target)

    def settle(self) -> bool:
        """Close a review in which everything cancelled out; True when nothing is pending.

        It stays open while a checkpoint holds what the view no longer shows: that is undecided too.
        """
        with self._looking() as look:
            review = look.review("bare")
        if review.changes:
            self._store.open_review(self._id)
            return False
        if self._holds_checkpoints():
            self._store.open_review(self._id)
            return True
        self._settle("settle", review)
        return True

    # inside

    def _holds_checkpoints(self) -> bool:
        return checkpoint.holds_something(self._store, self._session)

    def _flatten(self, check: Callable[["_Look", Review], object]) -> None:
        """A quiet delta is decided on as one layer; its checkpoints end with the decision.

        check: raises what the decision will raise, so that a refused one costs no checkpoint.
        """
        if self._live is not None:
            return
        if not (checkpoint.stack_of(self._session) or self._store.checkpoints(self._id)):
            return
        with self._looking() as look:
            check(look, look.review("bare"))
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
    ) -> tuple[Committed, CommitId, int]:
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
                    restored=self._renew,
                    selection=[WorkspacePath(p) for p in paths] or None,
                    on_conflict=cast(committing.OnConflict, on_conflict),
                    allow=allow,
                    digest=shown,
                    keep_mtime=keep_mtime,
                    durability=cast(Literal["fast", "strict"], settings.durability),
                )
            except BaseException as exc:
                _close_plan(self._store, commit, exc)
                raise
            # One transaction: a kill leaves the plan for recovery, or everything decided.
            with self._store.transaction():
                self._store.finish_commit(
                    commit, "done", record=msgspec.json.encode(done.undo), summary=summary_of(done)
                )
                self._store.note(
                    "review.commit",
                    session=self._id,
                    project=session.project,
                    commit=commit,
                    digest=review.digest,
                    paths=len(done.paths),
                )
                if self._live is not None:
                    remember(self._store, self._id, done)
                left = self._decided(review, {o.path for o in done.paths}, "commit")
        return done, commit, left

    def _renew(self, prints: Mapping[bytes, Fingerprint]) -> None:
        """A commit that was put back has changed ctimes of the base; they do not count as drift."""
        self._store.renew_touches(self._id, (as_touch(p, f) for p, f in prints.items()))

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

    def review(self, detail: Literal["bare", "stat", "full"]) -> Review:
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
    """A moment by which everything before it has a smaller or equal ctime, everything after a later.

    File times come from a clock that ticks every few milliseconds, or from the exact one where the
    kernel was asked for a file's time before (6.13 and later). So the exact time is taken, and
    waited until the ticking clock has passed it: at most one tick, 1 to 10 ms.
    """
    now = time.time_ns()
    while time.clock_gettime_ns(_CLOCK_REALTIME_COARSE) <= now:
        time.sleep(0.0005)
    return now


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


def summary_of(done: Committed) -> str:
    first = [display(o.path) for o in done.paths[:3]]
    more = len(done.paths) - len(first)
    return ", ".join(first) + (f" and {more} more" if more > 0 else "")


def remember(store: Store, session: SessionId, done: Committed) -> None:
    """What a commit left in the base is what the delta builds on from now on."""
    store.drop_touches(session, (o.path for o in done.paths))
    store.add_touches(session, (as_touch(o.path, o.fingerprint) for o in done.paths))
    store.add_ours(
        session,
        (
            (o.path, msgspec.json.encode(o.fingerprint))
            for o in done.paths
            if o.fingerprint is not None
        ),
    )


def _close_plan(store: Store, commit: CommitId, exc: BaseException) -> None:
    """The executor has put everything back, unless it says that recovery has to do the rest."""
    if isinstance(exc, DeltaboxError) and exc.data.get("unfinished"):
        return
    with contextlib.suppress(DeltaboxError):  # a full disk: the next start finds it reversed
        store.finish_commit(commit, "reversed")


def _with_both_ends(paths: Sequence[bytes], gone: Sequence[Change]) -> list[WorkspacePath] | None:
    """What to discard: a renamed file goes with the name that it came from. None: everything."""
    if not paths:
        return None
    ends = {p for c in gone if c.origin is not None for p in (c.path, c.origin)}
    return sorted(WorkspacePath(p) for p in {*paths, *ends})


def as_touch(path: bytes, print_: Fingerprint | None, *, drifted: bool = False) -> Touch:
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
    return as_touch(change.path, change.base, drifted=change.conflict is not None)


def tidy(store: Store, where: Places, session_id: SessionId) -> None:
    """End a session in which nothing is pending any more; its folder goes."""
    session = store.session(session_id)
    if session.state == "idle" and store.review_of(session_id) is None:
        project.close_session(store, where, session)


# undo of whole projects


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
                restored=lambda r: store.finish_commit(
                    commit.id, "done", record=msgspec.json.encode(r)
                ),
            )
        except BaseException as exc:
            _close_plan(store, fresh, exc)
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
