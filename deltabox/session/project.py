"""What concerns a project or the whole state: the state folder, locks, desks, undo, recovery, gc.

Synchronous, so that the verbs need no event loop. The project's lock is held whenever its files
are written; a plan found unfinished while nobody holds it belongs to a dead process.
"""

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltabox.config import Places, Trash
from deltabox.errors import Failed, Refused
from deltabox.paths import display
from deltabox.session.folder import (
    Folder,
    is_locked,
    locked,
    make_private,
    process_start,
    remove_tree,
)
from deltabox.store import Commit, Session, SessionId, Store, new_id

DAY_NS = 86_400 * 10**9


@contextmanager
def open_state(where: Places) -> Iterator[Store]:
    """The state folder (made 0700 at the first use) and its database; finishes what a dead process left.

    Raises: Refused when others could write the folder, or it lies where SQLite cannot lock.
    """
    make_private(where.state, (where.uid, where.gid))
    st = os.stat(where.state)
    if st.st_uid not in (os.geteuid(), where.uid) or st.st_mode & 0o077:
        raise Refused(
            f"The state directory {where.state} belongs to uid {st.st_uid} with mode "
            f"{stat.S_IMODE(st.st_mode):o}; it must be yours with mode 700 (chmod 700 it)."
        )
    make_private(where.sessions, (where.uid, where.gid))
    with Store.open(where.database) as store:
        _give_to_owner(where)
        recover(store, where)
        yield store


def _give_to_owner(where: Places) -> None:
    """Under sudo the invoking user must be able to open the database without sudo next time."""
    if os.geteuid() != 0 or where.uid == 0:
        return
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.chown(f"{where.database}{suffix}", where.uid, where.gid)


def folder_of(where: Places, session: SessionId) -> Folder:
    return Folder(where.sessions / session)


@contextmanager
def writing(where: Places, project: Path) -> Iterator[None]:
    """Hold the project's lock: nobody else commits, undoes or recovers on it meanwhile."""
    folder = where.state / "projects"
    make_private(folder, (where.uid, where.gid))
    tag = hashlib.sha256(os.fsencode(project)).hexdigest()[:24]
    what = f"The project {display(os.fsencode(project))}"
    with locked(folder / f"{tag}.lock", what=what):
        yield


def undo_folder(where: Places, commit: str) -> Path:
    """Where a commit's displaced files go; made here, so that it is the user's under sudo too."""
    folder = where.state / "undo" / commit
    make_private(folder, (where.uid, where.gid))
    return folder


@contextmanager
def desk(
    store: Store,
    where: Places,
    session: Session,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> Iterator[Any]:
    """Where decisions on a session's changes go: its live owner, or its folder under our lock.

    progress: called with steps done and steps in all while a commit of ours runs.
    """
    from deltabox.session import checkpoint, pending

    folder = folder_of(where, session.id)
    if is_locked(folder.lock):
        yield OwnerDesk.of(session)
        return
    with locked(folder.lock, what=f"Session {session.id}"):
        store.update_session(session.id, state="idle", pid=None, pid_start=None, socket=None)
        checkpoint.settle(store, where, session)
        yield pending.Pending(store, where, session.id, progress=progress)
    pending.tidy(store, where, session.id)


class OwnerDesk:
    """The same verbs, answered by the session's owner over its socket."""

    def __init__(self, socket: Path, session: Session) -> None:
        self._socket = socket
        self._session = session

    @classmethod
    def of(cls, session: Session) -> "OwnerDesk":
        return cls(Path(session.socket or ""), session)

    def checkpoint(self, label: str) -> dict[str, Any]:
        return self._call("checkpoint.create", label=label)

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        from deltabox.protocol import client

        found = client.call(self._socket, method, {"session": self._session.id, **params})
        if not isinstance(found, dict):
            raise Failed("The session's owner sent no object; update both to one version.")
        return found

    def diff(self, *, detail: str = "stat", paths: Any = ()) -> dict[str, Any]:
        return self._call("review.diff", detail=detail, pathsB64=_coded(paths))

    def commit(
        self,
        *,
        paths: Any = (),
        digest: str | None = None,
        on_conflict: str = "fail",
        allow: Any = (),
        keep_mtime: bool = False,
    ) -> dict[str, Any]:
        return self._call(
            "review.commit",
            pathsB64=_coded(paths),
            digest=digest,
            onConflict=on_conflict,
            allowB64=_coded(allow),
            keepMtime=keep_mtime,
        )

    def abort(self, *, paths: Any = ()) -> dict[str, Any]:
        return self._call("review.abort", pathsB64=_coded(paths))


def _coded(paths: Any) -> list[str]:
    import base64

    return [base64.b64encode(path).decode() for path in paths]


# listings


def overview(
    store: Store, where: Places, project: Path | None, *, closed: bool
) -> list[dict[str, Any]]:
    """One row for each session, oldest first."""
    rows = []
    for session in store.sessions(project, closed=closed):
        folder = folder_of(where, session.id)
        turns = store.turns(session.id)
        review = store.review_of(session.id)
        alive = session.state == "running" and is_locked(folder.lock)
        rows.append(
            {
                "session": session.id,
                "project": str(session.project),
                "state": session.state if alive or session.state != "running" else "orphaned",
                "engine": session.engine,
                "isolation": session.isolation,
                "network": session.network,
                "generation": session.generation,
                "review": review.id if review else None,
                "pid": session.pid if alive else None,
                "lastCommand": list(turns[-1].argv) if turns else None,
                "createdNs": session.created_ns,
                "updatedNs": session.updated_ns,
                "bytes": disk_usage(folder.root),
            }
        )
    return rows


def disk_usage(folder: Path) -> int:
    """Bytes on disk below a folder; what cannot be read counts nothing."""
    total = 0
    for directory, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(directory, name)).st_blocks * 512
    return total


# undo and recovery


def undo(store: Store, where: Places, project: Path, named: str | None) -> dict[str, Any]:
    """Take back a commit (or an undo: that brings it again); all of it or nothing.

    Raises: NotFound, ReviewConflict when the project moved since, SessionBusy.
    """
    from deltabox.session import pending

    return pending.undo(store, where, project, named)


def recover(store: Store, where: Places) -> None:
    """Finish or reverse plans whose process is dead, and mark sessions whose owner is gone."""
    unfinished = store.unfinished()
    if unfinished:
        from deltabox.session import pending

        for commit in unfinished:
            with contextlib.suppress(_Busy), _if_free(where, commit.project):
                pending.recover(store, where, commit)
    for session in store.sessions():
        if session.state != "running" or _owner_lives(session):
            continue
        folder = folder_of(where, session.id)
        if folder.root.is_dir() and is_locked(folder.lock):
            continue
        _orphan(store, session)


class _Busy(Exception):
    """Somebody alive holds the lock; what it does is not ours to recover."""


@contextmanager
def _if_free(where: Places, project: Path) -> Iterator[None]:
    from deltabox.errors import SessionBusy

    try:
        context = writing(where, project)
        context.__enter__()
    except SessionBusy as exc:
        raise _Busy from exc
    try:
        yield
    finally:
        context.__exit__(None, None, None)


def _owner_lives(session: Session) -> bool:
    return session.pid is not None and process_start(session.pid) == session.pid_start


def _orphan(store: Store, session: Session) -> None:
    """The owner died without a word: the sandbox died with it, the changes stay for review."""
    with store.transaction():
        for turn in store.turns(session.id):
            if turn.ended_ns is None:
                store.end_turn(turn.id, code=None, signal=None)
        store.update_session(session.id, state="idle", pid=None, pid_start=None, socket=None)
        store.open_review(session.id)
        sentence = (
            f"The owner of session {session.id} (process {session.pid}) ended without closing it; "
            "its changes are kept for review."
        )
        store.note("recovered", session=session.id, project=session.project, sentence=sentence)


def recovered(store: Store) -> list[str]:
    """What recovery did in the last day, in words."""
    import time

    horizon = time.time_ns() - DAY_NS
    return [
        event["sentence"]
        for event in store.journal()
        if event["kind"] == "recovered" and event["atNs"] >= horizon
    ]


def leftovers(store: Store, where: Places) -> list[str]:
    """Things on disk that no session owns, with owner and age; `gc` removes them."""
    return [item.what for item in garbage(store, where, Trash()) if item.is_stray]


# garbage


@dataclass(frozen=True)
class Garbage:
    """One thing that may go: what in words, its size, and how."""

    what: str
    bytes: int
    remove: Callable[[], None]
    is_stray: bool = False

    def as_dict(self) -> dict[str, Any]:
        return {"what": self.what, "bytes": self.bytes}


def garbage(store: Store, where: Places, limits: Trash) -> list[Garbage]:
    """Closed sessions' folders, trash and undo copies past their age or the size limit, strays.

    Nothing undecided: an open review's session is never among them.
    """
    import time

    found: list[Garbage] = []
    horizon = time.time_ns() - limits.keep_days * DAY_NS
    rows = store.trash()
    kept = sum(row.bytes for row in rows)
    for row in rows:  # oldest first
        if row.at_ns < horizon or kept > limits.keep_bytes:
            kept -= row.bytes
            days = (time.time_ns() - row.at_ns) // DAY_NS

            def drop(trash: str = row.id, folder: str = row.folder) -> None:
                remove_tree(Path(folder))
                store.drop_trash(trash)

            what = f"trash {row.id}: {row.paths} discarded paths, {days} days old"
            found.append(Garbage(what, row.bytes, drop))
    found += _old_undo(store, where, horizon)
    found += _strays(store, where)
    return found


def _old_undo(store: Store, where: Places, horizon: int) -> list[Garbage]:
    found = []
    for commit in store.all_commits():
        folder = where.state / "undo" / commit.id
        if not folder.is_dir() or commit.state == "planned" or commit.at_ns >= horizon:
            continue

        def drop(commit: Commit = commit, folder: Path = folder) -> None:
            store.finish_commit(commit.id, "expired")
            remove_tree(folder)

        what = f"undo copies of commit {commit.id} (it can then no longer be taken back)"
        found.append(Garbage(what, disk_usage(folder), drop))
    return found


def _strays(store: Store, where: Places) -> list[Garbage]:
    """Folders of sessions that are closed or unknown, by name and age."""
    import time

    known = {s.id: s for s in store.sessions(closed=True)}
    found = []
    with os.scandir(where.sessions) as entries:
        for entry in entries:
            session = known.get(SessionId(entry.name))
            if session is not None and session.state != "closed":
                continue
            path = Path(entry.path)
            if is_locked(path / "lock"):
                continue
            hours = int((time.time() - entry.stat(follow_symlinks=False).st_mtime) // 3600)
            what = f"folder of {'closed' if session else 'unknown'} session {entry.name}, {hours} h old"
            found.append(
                Garbage(what, disk_usage(path), lambda path=path: remove_tree(path), is_stray=True)  # type: ignore[misc]
            )
    return found


def close_session(store: Store, where: Places, session: Session) -> None:
    """The session is over: everything of it was decided. Its folder goes with it."""
    store.note("session.close", session=session.id, project=session.project)
    store.update_session(session.id, state="closed", pid=None, pid_start=None, socket=None)
    store.drop_touches(session.id)
    folder_of(where, session.id).remove()


def trash_folder(where: Places) -> tuple[str, Path]:
    """A fresh name in the trash, and where it is."""
    name = new_id("t")
    folder = where.state / "trash" / name
    make_private(folder, (where.uid, where.gid))
    return name, folder


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free
