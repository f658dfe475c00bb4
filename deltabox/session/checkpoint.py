"""Checkpoints of a session's files: set the top layer aside, go back to a set of layers.

A checkpoint of a quiet session costs two renames and a row, whatever the project's size; beside
live processes the top layer is copied instead. A session's stack names its frozen layers, top
first; the row is written before the folder is renamed, and `settle` finishes what a kill left.
Synchronous; the caller holds the session's lock. A decision (commit, abort) ends the checkpoints.

Names in layers/: `lX` stands or fell out of use, `lX.new` is being made (whole, once a row names
lX), `X.old` is being removed.
"""

import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from deltabox.config import Places
from deltabox.engines.delta import Merged, create_layer
from deltabox.errors import NotFound, Refused
from deltabox.paths import Tree, WorkspacePath
from deltabox.review import abort
from deltabox.review import layers as folding
from deltabox.session import project
from deltabox.session.folder import Folder, make_private, remove_tree
from deltabox.store import Checkpoint, Session, SessionId, Store, TrashRow, new_id

# The kernel takes 500 layers, but each costs a look-up for every missing name, and a restack grows
# from 1.0 ms with one layer to 1.5 with 32, 2.8 with 100 and 9 with 400. With this limit a restore
# stays within 3 ms; folding costs O(entries) once for so many checkpoints.
MAX_LAYERS = 32
# A copy beside live processes without clones: 256 MiB take about a third of a second.
CLONE_BUDGET = 256 << 20


def stack_of(session: Session) -> list[str]:
    names: list[str] = json.loads(session.stack)
    return names


def settle(store: Store, where: Places, session: Session) -> None:
    """Finish what a kill interrupted, and remove layers that nothing names any more."""
    folder = project.folder_of(where, session.id)
    stack = stack_of(session)
    named = set(stack)
    for row in store.checkpoints(session.id):
        named.update(json.loads(row.stack))
    for name in named:
        _publish(folder, name)
    if stack and not (folder.layers / stack[0]).exists() and folder.upper.exists():
        folder.upper.rename(folder.layers / stack[0])
    for rest in (folder.fresh_upper, folder.scrap):
        remove_tree(rest)
    doomed = set(json.loads(session.doomed))
    if folder.layers.is_dir():
        for entry in folder.layers.iterdir():
            if entry.name in named:
                continue
            if entry.suffix or entry.name in doomed:
                remove_tree(entry)
            else:
                _keep_unnamed(store, where, session, entry)
    if doomed:
        store.update_session(session.id, doomed="[]")


def _publish(folder: Folder, name: str) -> None:
    fresh, layer = folder.layers / f"{name}.new", folder.layers / name
    if fresh.exists() and not layer.exists():
        fresh.rename(layer)


def _keep_unnamed(store: Store, where: Places, session: Session, layer: Path) -> None:
    """A whole layer whose row a power cut took back: it may hold what nobody has decided on."""
    trash = new_id("t")
    target = project.trash_path(where, trash)
    with store.transaction():
        store.add_trash(
            TrashRow(
                trash,
                session.id,
                session.project,
                time.time_ns(),
                str(target),
                paths=0,
                bytes=project.disk_usage(layer),
                touches=msgspec.json.encode([*store.touches(session.id).values()]).decode(),
            )
        )
        store.note(
            "recovered",
            session=session.id,
            project=session.project,
            sentence=f"A layer of session {session.id} had lost its row in a crash; "
            f"it lies in the trash as {trash}.",
        )
    make_private(target, (where.uid, where.gid))
    layer.rename(target / "upper")


def create(
    store: Store,
    where: Places,
    session_id: SessionId,
    *,
    label: str = "",
    turn: int | None = None,
) -> Checkpoint:
    """Remember the files as they are now; the session is quiet and unmounted.

    An unchanged top layer is not set aside again. Costs well under a millisecond.
    """
    session = store.session(session_id)
    folder = project.folder_of(where, session_id)
    stack = stack_of(session)
    if not is_empty(folder.upper):
        name = new_id("l")
        stack = [name, *stack]
        with store.transaction():
            row = _remember(store, session, stack, label, "frozen", turn)
            store.update_session(session_id, stack=json.dumps(stack))
        folder.upper.rename(folder.layers / name)
        _fold_if_long(store, where, session_id)
        return row
    return _remember(store, session, stack, label, "frozen", turn)


def clone(
    store: Store,
    where: Places,
    session_id: SessionId,
    *,
    label: str = "",
    turn: int | None = None,
    budget: int | None = None,
) -> Checkpoint | None:
    """Remember the files while a mount stands over the upper (its processes frozen, if they can be).

    budget: None copies whatever it costs; else nothing is done when the layer holds more bytes than
    that, and None comes back. The mounted upper is only read.
    """
    session = store.session(session_id)
    folder = project.folder_of(where, session_id)
    if budget is not None and project.disk_usage(folder.upper) > budget:
        return None
    name = new_id("l")
    fresh = folder.layers / f"{name}.new"
    with Tree.open(folder.upper) as upper:
        folding.squash([upper], fresh, like=os.stat(folder.upper), share=False)
    row = _remember(store, session, [name, *stack_of(session)], label, "cloned", turn)
    _publish(folder, name)
    return row


def restore(
    store: Store,
    where: Places,
    session_id: SessionId,
    named: str,
    paths: Sequence[WorkspacePath] = (),
) -> Checkpoint:
    """Make the view show what it showed at a checkpoint, wholly or at `paths`; quiet, unmounted.

    The present state becomes a checkpoint first, which is returned: going back can be gone back on.
    Raises: NotFound, Refused for a checkpoint from before the last decision.
    """
    target = find(store, session_id, named)
    before = create(store, where, session_id, label=f"before restore of {target.id}")
    if not paths:
        store.update_session(session_id, stack=target.stack)
        return before
    _restore_paths(store, where, session_id, target, paths)
    return before


def find(store: Store, session_id: SessionId, named: str) -> Checkpoint:
    """By id, a beginning of one, or a label. Raises: NotFound, Refused."""
    session = store.session(session_id)
    found = store.named_checkpoints(session_id, named)
    if not found:
        rows = store.checkpoints(session_id)
        known = ", ".join(r.id for r in rows[-5:]) or "none"
        raise NotFound(
            f"There is no checkpoint {named!r} in session {session_id}; the latest are {known}."
        )
    if found[-1].generation != session.generation:
        raise Refused(
            f"Checkpoint {found[-1].id} is from before the last commit or abort; "
            "use `deltabox undo` to go back behind that."
        )
    return found[-1]


def holds_something(store: Store, session: Session) -> bool:
    """Whether a checkpoint to go back to shows more than the bare project."""
    rows = store.checkpoints(session.id)
    return any(r.generation == session.generation and json.loads(r.stack) for r in rows)


def flatten(store: Store, where: Places, session_id: SessionId) -> None:
    """Make the delta one writable layer again, for a decision; ends the session's checkpoints.

    Each step leaves a session that shows the same: a folded layer below the upper it contains, the
    upper alone gone, the folded layer in the upper's place. Costs O(entries) where there are
    checkpoints, else nothing.
    """
    session = store.session(session_id)
    stack = stack_of(session)
    rows = store.checkpoints(session_id)
    if not stack and not rows:
        return
    folder = project.folder_of(where, session_id)
    doomed = {*stack, *(name for row in rows for name in json.loads(row.stack))}
    if not stack:
        _end_all(store, session, doomed)
        settle(store, where, store.session(session_id))
        return
    if len(stack) == 1 and is_empty(folder.upper):
        name = stack[0]
    else:
        name = _fold(folder, stack, with_upper=True, share=True)
    _end_all(store, session, doomed - {name}, stack=json.dumps([name]))
    _publish(folder, name)
    if folder.upper.exists():
        # Out of sight by one rename: half removed, an opaque folder of it would hide files below.
        folder.upper.rename(folder.layers / f"{new_id('l')}.old")
    # The old layers go before anybody can write the new one, whose files are links to theirs.
    settle(store, where, store.session(session_id))
    (folder.layers / name).rename(folder.upper)
    store.update_session(session_id, stack="[]")


def _end_all(store: Store, session: Session, doomed: set[str], **values: str) -> None:
    with store.transaction():
        store.drop_checkpoints(session.id)
        known = set(json.loads(session.doomed))
        store.update_session(session.id, doomed=json.dumps(sorted(doomed | known)), **values)


def is_empty(layer: Path) -> bool:
    """True when a layer holds nothing, or is not there yet."""
    try:
        with os.scandir(layer) as entries:
            return next(entries, None) is None
    except FileNotFoundError:
        return True


def _remember(
    store: Store, session: Session, stack: list[str], label: str, mode: str, turn: int | None
) -> Checkpoint:
    row = Checkpoint(
        id=new_id("k"),
        session=session.id,
        at_ns=time.time_ns(),
        label=label,
        mode=mode,
        generation=session.generation,
        turn=turn,
        stack=json.dumps(stack),
    )
    with store.transaction():
        store.add_checkpoint(row)
        store.note(
            "checkpoint",
            session=session.id,
            project=session.project,
            checkpoint=row.id,
            label=label,
            mode=mode,
        )
    return row


def _fold(folder: Folder, stack: Sequence[str], *, with_upper: bool, share: bool) -> str:
    """One new frozen layer out of `stack`, and of the upper above it; to be published when a row
    names it."""
    name = new_id("l")
    fresh = folder.layers / f"{name}.new"
    paths = [folder.layers / n for n in stack]
    if with_upper and folder.upper.exists():
        paths.insert(0, folder.upper)
    with ExitStack() as opened:
        trees = [opened.enter_context(Tree.open(path)) for path in paths]
        folding.squash(trees, fresh, like=os.stat(paths[0]), share=share)
    return name


def _fold_if_long(store: Store, where: Places, session_id: SessionId) -> None:
    """Keep the present stack short; checkpoints go on naming the layers they were made of."""
    session = store.session(session_id)
    stack = stack_of(session)
    if len(stack) <= MAX_LAYERS:
        return
    folder = project.folder_of(where, session_id)
    # Frozen layers are never written, so links are right here.
    name = _fold(folder, stack, with_upper=False, share=True)
    store.update_session(session_id, stack=json.dumps([name]))
    _publish(folder, name)


def _restore_paths(
    store: Store,
    where: Places,
    session_id: SessionId,
    target: Checkpoint,
    paths: Sequence[WorkspacePath],
) -> None:
    """Discard `paths` to what the base has, then lay the checkpoint's changes of them on top.

    In a fresh upper that takes the old one's (empty) place by one rename. It shares no inode with
    what checkpoints name.
    """
    session = store.session(session_id)
    folder = project.folder_of(where, session_id)
    for rest in (folder.fresh_upper, folder.scrap):
        remove_tree(rest)
    with ExitStack() as opened:
        base = opened.enter_context(Tree.open(session.project))
        create_layer(folder.fresh_upper, os.stat(session.project))
        upper = opened.enter_context(Tree.open(folder.fresh_upper))
        lowers = [opened.enter_context(Tree.open(folder.layers / n)) for n in stack_of(session)]
        folder.scrap.mkdir(mode=0o700)
        trash = opened.enter_context(Tree.open(folder.scrap))
        abort.discard(base, upper, lowers, list(paths), trash)
        then = [
            opened.enter_context(Tree.open(folder.layers / n)) for n in json.loads(target.stack)
        ]
        folding.lay(Merged(base, then), Merged(base, [upper, *lowers]), paths)
    folder.fresh_upper.rename(folder.upper)
    remove_tree(folder.scrap)
