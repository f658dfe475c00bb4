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
from pathlib import Path
from typing import Any

from deltabox.config import Places
from deltabox.errors import Failed, Refused
from deltabox.paths import display
from deltabox.session.folder import (
    Folder,
    is_locked,
    locked,
    make_private,
)
from deltabox.store import Session, SessionId, Store

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
    from deltabox.session import recovery

    with Store.open(where.database) as store:
        _give_to_owner(where)
        recovery.recover(store, where)
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
    from deltabox.session import pending, recovery

    folder = folder_of(where, session.id)
    if is_locked(folder.lock):
        yield OwnerDesk.of(session)
        return
    with locked(folder.lock, what=f"Session {session.id}"):
        store.update_session(session.id, state="idle", pid=None, pid_start=None, socket=None)
        recovery.resume(store, where, session.id)
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


# undo, and what recovery said


def undo(store: Store, where: Places, project: Path, named: str | None) -> dict[str, Any]:
    """Take back a commit (or an undo: that brings it again); all of it or nothing.

    Raises: NotFound, ReviewConflict when the project moved since, SessionBusy.
    """
    from deltabox.session import pending

    return pending.undo(store, where, project, named)


def recovered(store: Store) -> list[str]:
    """What recovery did in the last day, in words."""
    import time

    horizon = time.time_ns() - DAY_NS
    return [
        event["sentence"]
        for event in store.journal()
        if event["kind"] == "recovered" and event["atNs"] >= horizon
    ]


def close_session(store: Store, where: Places, session: Session) -> None:
    """The session is over: everything of it was decided. Its folder goes with it."""
    with store.transaction():
        store.note("session.close", session=session.id, project=session.project)
        store.update_session(session.id, state="closed", pid=None, pid_start=None, socket=None)
        store.drop_touches(session.id)
        store.drop_checkpoints(session.id)
    folder_of(where, session.id).remove()


def trash_path(where: Places, trash: str) -> Path:
    return where.state / "trash" / trash


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free
