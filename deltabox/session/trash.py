"""What aborts put aside: rows, folders, and the way back into a review.

<state>/trash/<id>/upper   a whole delta, as it was             /paths  chosen paths of one, each under its
own name below folders made for them. A row says `begun` before anything is moved and `kept` when
all of it is there; whoever finds it begun finishes the abort. Decides nothing about a review.
"""

import base64
import json
import os
import stat
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from deltabox.config import Places
from deltabox.errors import Failed
from deltabox.paths import Tree, WorkspacePath, is_within, name
from deltabox.review import layers
from deltabox.session import project
from deltabox.session.folder import locked, make_private, remove_tree
from deltabox.store import Session, SessionId, Store, Touch, TrashRow, new_id


def begin(
    store: Store,
    where: Places,
    session: Session,
    chosen: Sequence[WorkspacePath] | None,
    touches: Sequence[Touch],
) -> TrashRow:
    """Write down what is to go, then make the place for it. Raises: Failed, with nothing changed."""
    trash = new_id("t")
    row = TrashRow(
        trash,
        session.id,
        session.project,
        time.time_ns(),
        str(project.trash_path(where, trash)),
        paths=len(touches),
        bytes=0,
        state="begun",
        chosen=None if chosen is None else json.dumps([_coded(p) for p in chosen]),
        touches=msgspec.json.encode(touches).decode(),
    )
    store.add_trash(row)
    try:
        make_folder(where, row)
    except OSError as exc:
        store.drop_trash(trash)
        raise Failed(
            f"The trash at {row.folder} cannot be made ({exc.strerror}), so nothing was discarded;"
            " free some space there and try again."
        ) from exc
    return row


def make_folder(where: Places, row: TrashRow) -> None:
    make_private(Path(row.folder), (where.uid, where.gid))


def keep(store: Store, row: TrashRow) -> None:
    """All of it is there now."""
    store.update_trash(row.id, state="kept", bytes=project.disk_usage(Path(row.folder)))


def chosen_of(row: TrashRow) -> list[WorkspacePath] | None:
    """The paths that were named, or None for everything."""
    if row.chosen is None:
        return None
    return [WorkspacePath(base64.b64decode(word)) for word in json.loads(row.chosen)]


def touches_of(row: TrashRow) -> list[Touch]:
    return msgspec.json.decode(row.touches, type=list[Touch])


def take_back(store: Store, where: Places, named: str) -> dict[str, Any]:
    """Undo of an abort: what it discarded is pending again, in a session of its own.

    Held against what the project was when the agent touched it, so the user's edits since are
    conflicts. Costs O(entries), no copies. Raises: NotFound, Failed.
    """
    from deltabox.session import coordinator, pending

    row = store.trash_row(named)
    if row.state == "begun":
        raise Failed(f"The abort into {row.id} is still under way; try again when it has ended.")
    old = store.session(row.session or "")
    session = coordinator.create(store, where, row.project, pending.settings_of(old))
    folder = project.folder_of(where, session.id)
    with locked(folder.lock, what=f"Session {session.id}"):
        _build(row, folder.fresh_upper)
        with store.transaction():
            review = store.open_review(session.id)
            store.add_touches(session.id, touches_of(row))
            store.update_session(session.id, since_ns=row.at_ns, pid=None, pid_start=None)
            store.update_trash(row.id, state=f"taken:{session.id}")
            store.note("undo.abort", session=session.id, project=row.project, trash=row.id)
        finish_taking(store, where, session.id)
    return {"trash": row.id, "session": session.id, "review": review.id, "paths": row.paths}


def finish_taking(store: Store, where: Places, session: SessionId) -> bool:
    """The rest of a `take_back` once its row says so; True when there was something to do.

    The caller holds the session's lock. Safe to repeat.
    """
    rows = [row for row in store.trash() if row.state == f"taken:{session}"]
    folder = project.folder_of(where, session)
    for row in rows:
        if folder.fresh_upper.exists() and not folder.upper.exists():
            folder.fresh_upper.rename(folder.upper)
        drop(store, row)
    return bool(rows)


def drop(store: Store, row: TrashRow) -> None:
    """For good. The row goes first: half removed, it could not be taken back."""
    store.drop_trash(row.id)
    remove_tree(Path(row.folder))


def _build(row: TrashRow, into: Path) -> None:
    """One layer of what lies there. An abort that was finished after a crash may have both forms;
    `paths` were saved from the delta before it was changed, so they are on top."""
    remove_tree(into)
    found = [p for p in (Path(row.folder, "paths"), Path(row.folder, "upper")) if p.is_dir()]
    if not found:
        raise Failed(f"Nothing is left in the trash as {row.id}; `deltabox gc` removes its row.")
    with ExitStack() as opened:
        base = opened.enter_context(Tree.open(row.project))
        trees = [opened.enter_context(Tree.open(path)) for path in found]
        layers.squash(trees, into, like=os.stat(row.project), share=True)
        if found[0].name == "paths":
            named = {*(chosen_of(row) or ()), *(t.path for t in touches_of(row))}
            _mend_parents(base, opened.enter_context(Tree.open(into)), named)


def _mend_parents(base: Tree, layer: Tree, named: Iterable[bytes]) -> None:
    """Folders made only to hold what was discarded look like the project's own."""
    closed = tuple(named)
    for path, st in list(layer.walk()):
        if not stat.S_ISDIR(st.st_mode) or any(is_within(path, n) for n in closed):
            continue
        like = base.lstat_or_none(path)
        mode = 0o755 if like is None or not stat.S_ISDIR(like.st_mode) else like.st_mode
        os.chmod(name(path), stat.S_IMODE(mode), dir_fd=layer.parent_fd(path))


def listing(store: Store) -> list[dict[str, Any]]:
    """What is kept, oldest first, with size and age in nanoseconds."""
    now = time.time_ns()
    return [
        {
            "trash": row.id,
            "session": row.session,
            "project": str(row.project),
            "paths": row.paths,
            "bytes": row.bytes,
            "ageNs": now - row.at_ns,
        }
        for row in store.trash()
        if row.state == "kept"
    ]


def _coded(path: bytes) -> str:
    return base64.b64encode(path).decode()
