"""What a dead process left, finished or put back: plans on a project, and what hangs on a session.

Runs at every start, before anything else looks. Takes only what nobody alive holds; says what it
did in the journal. Cheap when there is nothing: three queries and two listings.
"""

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from deltabox.config import Places
from deltabox.engines.delta import Fingerprint
from deltabox.errors import DeltaboxError, SessionBusy
from deltabox.paths import Tree, WorkspacePath, display
from deltabox.session import project as projects
from deltabox.session.folder import is_locked, locked, process_start
from deltabox.store import Commit, Session, SessionId, Store


def recover(store: Store, where: Places) -> None:
    """Everything that can be recovered now. What cannot stays as it is, and is tried next time."""
    for commit in store.unfinished():
        with _unless_busy(), projects.writing(where, commit.project):
            if store.commit(commit.id).state == "planned":  # nobody finished it meanwhile
                _recover_plan(store, where, commit)
    waiting = {_session_of(row.state, row.session) for row in store.trash() if row.state != "kept"}
    for session in store.sessions():
        folder = projects.folder_of(where, session.id)
        is_dead = session.pid is not None and not _owner_lives(session)
        if not (is_dead or session.id in waiting or session.state == "running"):
            continue
        if not folder.root.is_dir() or is_locked(folder.lock):
            continue
        if session.state == "running" and not is_dead and _owner_lives(session):
            continue
        with _unless_busy(), locked(folder.lock, what=f"Session {session.id}"):
            _recover_session(store, where, store.session(session.id))
    _remove_closed(store, where)


def resume(store: Store, where: Places, session: SessionId) -> None:
    """Bring a session's folder to rest; whoever has locked it calls this before the first look."""
    from deltabox.session import checkpoint, pending, trash

    trash.finish_taking(store, where, session)
    checkpoint.settle(store, where, store.session(session))
    for row in store.trash(session=session):
        if row.state == "begun":
            pending.Pending(store, where, session).finish_abort(row)


def _session_of(state: str, session: SessionId | None) -> str | None:
    return state.removeprefix("taken:") if state.startswith("taken:") else session


@contextmanager
def _unless_busy() -> Iterator[None]:
    """Somebody alive holds the lock; what it does is not ours to recover."""
    with contextlib.suppress(SessionBusy):
        yield


def _owner_lives(session: Session) -> bool:
    return session.pid is not None and process_start(session.pid) == session.pid_start


def _recover_session(store: Store, where: Places, session: Session) -> None:
    from deltabox.session import pending

    if session.state == "running":
        _orphan(store, session)
    elif session.pid is not None:
        store.update_session(session.id, pid=None, pid_start=None, socket=None)
    try:
        resume(store, where, session.id)
        if store.review_of(session.id) is None:
            # Killed between its birth and its first command.
            pending.Pending(store, where, session.id).settle()
            pending.tidy(store, where, session.id)
    except (OSError, DeltaboxError) as exc:
        _say(
            store,
            session,
            f"Session {session.id} was cut short and cannot be brought to rest yet: {exc}",
        )


def _orphan(store: Store, session: Session) -> None:
    """The owner died without a word: the sandbox died with it, the changes stay for review."""
    with store.transaction():
        for turn in store.turns(session.id):
            if turn.ended_ns is None:
                store.end_turn(turn.id, code=None, signal=None)
        store.update_session(session.id, state="idle", pid=None, pid_start=None, socket=None)
        store.open_review(session.id)
        _say(
            store,
            session,
            f"The owner of session {session.id} (process {session.pid}) ended without closing it; "
            "its changes are kept for review.",
        )
    if session.socket:
        # Ours to remove: we hold the session's lock, so nobody listens there.
        with contextlib.suppress(OSError):
            os.unlink(session.socket)


def _say(store: Store, session: Session | Commit, sentence: str) -> None:
    """Once: a recovery that fails again at every start says so no second time."""
    known = [e for e in store.journal(session.project) if e["kind"] == "recovered"]
    if known and known[-1]["sentence"] == sentence:
        return
    of = session.id if isinstance(session, Session) else session.session
    store.note("recovered", session=of, project=session.project, sentence=sentence)


def _recover_plan(store: Store, where: Places, commit: Commit) -> None:
    """Finish or reverse one plan; the caller holds the project's lock."""
    from deltabox.review.executor import Executor
    from deltabox.review.steps import Committed, Plan, Progress
    from deltabox.session import pending

    what = f"{commit.kind} {commit.id} on {display(os.fsencode(commit.project))}"
    done: Committed | None
    try:
        plan = msgspec.json.decode(commit.plan, type=Plan)
        progress = (
            msgspec.json.decode(commit.progress, type=Progress) if commit.progress else Progress()
        )
        with Tree.open(commit.project) as base:
            executor = Executor(
                base,
                plan,
                undo_dir=str(projects.undo_folder(where, commit.id)),
                progress=progress,
                record=lambda p: store.set_progress(commit.id, msgspec.json.encode(p)),
            )
            done = executor.recover()
            moved = {} if done else _moved(base, plan)
    except (OSError, DeltaboxError, msgspec.DecodeError) as exc:
        _say(store, commit, f"The {what} was cut short and cannot be recovered yet: {exc}.")
        return
    with store.transaction():
        if done is None:
            store.finish_commit(commit.id, "reversed")
            _renew(store, commit, moved)
            sentence = (
                f"The {what} had been cut short; it was reversed, the project is as before it."
            )
        else:
            store.finish_commit(
                commit.id,
                "done",
                record=msgspec.json.encode(done.undo),
                summary=pending.summary_of(done),
            )
            if commit.undoes is not None:
                store.finish_commit(commit.undoes, "undone")
            elif commit.session is not None:
                pending.remember(store, commit.session, done)
                session = store.session(commit.session)
                store.update_session(session.id, generation=session.generation + 1)
            sentence = f"The {what} had been cut short; it was finished."
        _say(store, commit, " ".join([sentence, *executor.notices]))


def _moved(base: Tree, plan: object) -> dict[bytes, Fingerprint]:
    """What the plan moved aside and recovery put back: the same but for its ctime. Looked up, not
    remembered, since the process that put it back may have been killed as well."""
    from deltabox.review.steps import Plan

    assert isinstance(plan, Plan)
    found = {}
    for action in plan.actions:
        st = base.lstat_or_none(WorkspacePath(action.path))
        if st is None or action.expect is None:
            continue
        now = Fingerprint.of(st)
        if now != action.expect and now.moved_from(action.expect):
            found[action.path] = now
    return found


def _renew(store: Store, commit: Commit, moved: dict[bytes, Fingerprint]) -> None:
    """Whoever remembers fingerprints of what was put back must remember the new ones."""
    from deltabox.review import undo
    from deltabox.review.steps import UndoRecord
    from deltabox.session import pending

    if commit.undoes is not None:
        record = store.commit(commit.undoes).record
        if record is not None and moved:
            fresh = undo.renew(msgspec.json.decode(record, type=UndoRecord), moved)
            store.finish_commit(commit.undoes, "done", record=msgspec.json.encode(fresh))
    elif commit.session is not None:
        store.renew_touches(
            commit.session, (pending.as_touch(path, print_) for path, print_ in moved.items())
        )


def _remove_closed(store: Store, where: Places) -> None:
    """Folders of sessions that were closed, and whose closing process did not get to remove them."""
    open_ones = {session.id for session in store.sessions()}
    left = [name for name in os.listdir(where.sessions) if name not in open_ones]
    if not left:
        return
    closed = {session.id for session in store.sessions(closed=True)} - open_ones
    for name in left:
        folder = projects.folder_of(where, SessionId(name))
        # One without a row may be in the making; `gc` asks before it removes such.
        if name in closed and not is_locked(folder.lock):
            with contextlib.suppress(DeltaboxError):
                folder.remove()


def stale_sockets(store: Store, where: Places) -> list[Path]:
    """Sockets of owners that are gone."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for name in sorted(os.listdir(where.runtime)):
            stem, dot, suffix = name.rpartition(".")
            lock = projects.folder_of(where, SessionId(stem)).lock
            if dot and suffix == "sock" and stem.startswith("s") and not is_locked(lock):
                found.append(where.runtime / name)
    return found
