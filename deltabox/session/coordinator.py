"""Finds, opens and ends sessions: which one a `run` continues, who owns it, what is left of it.

The translator between a Config (wishes) and a session (facts); below here nobody sees a Config
but the recipe of the view.
"""

import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from deltabox import config
from deltabox.config import Config, Places
from deltabox.errors import BadUsage, SessionBusy
from deltabox.session import checkpoint, recovery
from deltabox.session import project as projects
from deltabox.session.folder import (
    Folder,
    is_locked,
    locked,
    make_private,
    process_start,
    remove_tree,
)
from deltabox.session.pending import Pending, stamp, tidy
from deltabox.session.recipe import owner_of
from deltabox.session.turn import SessionState, next_session
from deltabox.session.workspace import Workspace, open_workspace
from deltabox.store import Session, SessionId, Store, new_id


def choose(
    store: Store, where: Places, project: Path, settings: Config, *, named: str | None, new: bool
) -> tuple[Session, bool]:
    """The session a run works in, and whether it continues one.

    named: by `--session`. Else the project's only idle session with an open review, unless `new`;
    with several, a new one is not guessed for the user.
    Raises: NotFound, SessionBusy, BadUsage, Ambiguous.
    """
    config.check_project(project, where)
    if named is not None:
        session = store.session(named)
        if session.project != project:
            raise BadUsage(
                f"Session {session.id} belongs to {session.project}; go there or give --project."
            )
        if is_locked(projects.folder_of(where, session.id).lock):
            raise SessionBusy(
                f"Session {session.id} is in use by process {session.pid}; "
                "wait for it or start another with --new."
            )
        return session, True
    if not new:
        idle = [s for s in store.sessions(project) if s.state == "idle" and store.review_of(s.id)]
        idle = [s for s in idle if not is_locked(projects.folder_of(where, s.id).lock)]
        if len(idle) == 1:
            return idle[0], True
        if len(idle) > 1:
            from deltabox.errors import Ambiguous

            listed = ", ".join(s.id for s in idle)
            raise Ambiguous(
                f"{len(idle)} sessions have open reviews here: {listed}; "
                "continue one with --session ID or start another with --new."
            )
    return create(store, where, project, settings), False


def create(store: Store, where: Places, project: Path, settings: Config) -> Session:
    """A new idle session with its folder."""
    now = time.time_ns()
    session = Session(
        id=SessionId(new_id("s")),
        project=project,
        engine="overlay" if settings.engine == "auto" else settings.engine,
        isolation=settings.isolation,
        network=settings.network,
        state="idle",
        generation=0,
        created_ns=now,
        updated_ns=now,
        since_ns=stamp(),
        pid=os.getpid(),  # until it is owned: killed before that, the next start removes it
        pid_start=process_start(os.getpid()),
        socket=None,
        settings=msgspec.json.encode(settings).decode(),
        stack="[]",
    )
    with store.transaction():
        store.add_session(session)
        store.note(
            "session.start",
            session=session.id,
            project=project,
            engine=session.engine,
            isolation=session.isolation,
            network=session.network,
        )
        # Inside: whoever sees the folder can see the row, once the database is free.
        projects.folder_of(where, session.id).create(owner_of(where, project))
    return session


@asynccontextmanager
async def owning(
    store: Store,
    where: Places,
    session: Session,
    settings: Config,
    *,
    argv: Sequence[str] = (),
    cwd: Path | None = None,
) -> AsyncIterator[Workspace]:
    """Own the session for the context: lock held, view mounted, row says who and where.

    On exit the view is gone, the session idle, and its changes are judged once: a review in which
    everything cancelled out closes, a session with nothing pending ends. Raises: SessionBusy,
    EngineUnavailable, IsolationUnavailable.
    """
    folder: Folder = projects.folder_of(where, session.id)
    state: SessionState = next_session("running" if session.state == "running" else "idle", "own")
    make_private(where.runtime, (where.uid, where.gid))
    is_ours = False
    try:
        with locked(folder.lock, what=f"Session {session.id}"):
            is_ours = True
            recovery.resume(store, where, session.id)
            if not checkpoint.is_empty(folder.upper):
                # What earlier commands left can be gone back to, whatever the next one does.
                checkpoint.create(store, where, session.id, label="before the next command")
            store.update_session(
                session.id,
                state=state,
                pid=os.getpid(),
                pid_start=process_start(os.getpid()),
                socket=str(socket_of(where, session.id)),
                isolation=settings.isolation,
                network=settings.network,
                settings=msgspec.json.encode(settings).decode(),
            )
            try:
                async with open_workspace(
                    store, where, store.session(session.id), settings, folder, argv=argv, cwd=cwd
                ) as workspace:
                    yield workspace
            finally:
                # Overlay's own folder: under sudo it is root's, and nobody else could remove it.
                remove_tree(folder.work)
                store.update_session(
                    session.id,
                    state=next_session(state, "rest"),
                    pid=None,
                    pid_start=None,
                    socket=None,
                )
                Pending(store, where, session.id).settle()
    finally:
        # Also after a refusal: a session that never ran anything is not left behind. Not after
        # SessionBusy: it is somebody else's.
        if is_ours:
            tidy(store, where, session.id)


def socket_of(where: Places, session: SessionId) -> Path:
    return where.runtime / f"{session}.sock"
