"""Review plus a choice → plan, and the one call that carries a plan out.

Decides which changes go and which stay out, and why. Never touches a file itself: `executor` does.
"""

import os
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

from deltabox.engines.delta import Fingerprint
from deltabox.errors import BadUsage, NotFound, ReviewChanged, ReviewConflict
from deltabox.paths import Tree, WorkspacePath, display, is_within, parent
from deltabox.review import undo as undoing
from deltabox.review.diff import selects
from deltabox.review.executor import Executor
from deltabox.review.model import Change, Conflict, Review
from deltabox.review.steps import Action, Committed, LeftOut, Plan, Progress, Step, arrange

OnConflict = Literal["fail", "skip"]
# How often a `skip` commit may meet a fresh conflict, leave that path out and start again.
MAX_ROUNDS = 8


def plan(
    review: Review,
    *,
    commit: str,
    selection: Collection[WorkspacePath] | None = None,
    on_conflict: OnConflict = "fail",
    allow: Collection[bytes] = (),
    digest: str | None = None,
    now_ns: int | None = None,
    keep_mtime: bool = False,
    durability: Literal["fast", "strict"] = "fast",
    met: Collection[Conflict] = (),
) -> Plan:
    """What a commit will do, as data; reads no file.

    Args:
        commit: the commit's id, letters and digits; it names temporary entries.
        selection: None for everything; a path stands for itself, what is below it, and the new
            folders above it. A path below a `.git` directory stands for the whole unit.
        allow: refused-tier paths that the person named, themselves or a folder above them.
        digest: what was shown. now_ns: the modification time of the first file; the others follow
            1 ns apart in the order in which the view has them. met: conflicts found by trying.
    Raises: ReviewChanged when the digest differs, NotFound when a selected path has no change,
        ReviewConflict under `fail`.
    """
    if not re.fullmatch("[A-Za-z0-9]{1,64}", commit):
        raise BadUsage("A commit's id is 1 to 64 letters and digits; give another.")
    if digest is not None and digest != review.digest:
        raise ReviewChanged(
            "The changes differ from what was shown, so nothing was applied; look at the diff again.",
            shown=digest,
            now=review.digest,
        )
    chosen = _choose(review, selection)
    left_out: list[LeftOut] = []
    conflicts = {c.path: c for c in met}
    for unit in review.units:
        if unit.conflict is not None and any(c.unit == unit.path for c in chosen.values()):
            conflicts[unit.path] = unit.conflict
    for path, change in list(chosen.items()):
        why = _refusal(change, allow)
        if why is not None:
            left_out.append(LeftOut(path, why))
            del chosen[path]
        elif change.conflict is not None and change.unit is None:
            conflicts[path] = change.conflict
    conflicts = {
        p: c
        for p, c in conflicts.items()
        if p in chosen
        or any(x.unit == p for x in chosen.values())
        or p in {x.origin for x in chosen.values()}
    }
    if conflicts and on_conflict == "fail":
        raise conflict_error(list(conflicts.values()))
    for path, change in list(chosen.items()):
        if path in conflicts or change.unit in conflicts or change.origin in conflicts:
            del chosen[path]
    dropped = _drop_dependents(review, chosen)
    left_out += [entry for entry in dropped if entry.path not in conflicts]
    actions, steps = arrange(
        _actions(list(chosen.values()), time.time_ns() if now_ns is None else now_ns, keep_mtime)
    )
    return Plan(
        commit=commit,
        actions=actions,
        steps=steps,
        durability=durability,
        skipped=list(conflicts.values()),
        left_out=left_out,
    )


def conflict_error(conflicts: Sequence[Conflict]) -> ReviewConflict:
    """Both sides of each path, in the error's data as the protocol has them."""
    first = conflicts[0]
    more = f" and {len(conflicts) - 1} more" if len(conflicts) > 1 else ""
    return ReviewConflict(
        f"{display(first.path)}{more}: the agent {first.agent}, but it {first.project};"
        " nothing was applied. Commit the other paths, or with --on-conflict skip.",
        conflicts=[
            {"path": os.fsdecode(c.path), "agent": c.agent, "project": c.project}
            for c in conflicts
        ],
    )


def _choose(review: Review, selection: Collection[WorkspacePath] | None) -> dict[bytes, Change]:
    chosen = {c.path: c for c in review.changes if selects(selection, c)}
    units = {c.unit for c in chosen.values() if c.unit is not None}
    if selection is not None:
        for path in selection:
            if not any(selects([path], c) for c in chosen.values()):
                raise NotFound(
                    f"{display(path)} has no pending change; `deltabox diff` lists them."
                )
    by_path = {c.path: c for c in review.changes}
    chosen.update((c.path, c) for c in review.changes if c.unit in units and c.unit is not None)
    for change in list(chosen.values()):
        if change.kind == "deleted":
            continue
        at = WorkspacePath(change.path)
        while at := parent(at):
            above = by_path.get(at)
            if above is not None and above.type == "dir" and above.kind in ("added", "type"):
                chosen[at] = above
    return dict(sorted(chosen.items()))


def _refusal(change: Change, allow: Collection[bytes]) -> str | None:
    if change.refused is not None:
        return change.refused
    if change.risk is None or change.risk.tier != "refused":
        return None
    if any(entry and is_within(change.path, entry) for entry in allow):
        return None
    return f"{change.risk.reason}; name it to take it"


def _drop_dependents(review: Review, chosen: dict[bytes, Change]) -> list[LeftOut]:
    """Leave out what cannot stand alone: entries of a folder that stays out, folders that stay full."""
    dropped: list[LeftOut] = []
    made_dirs = {c.path for c in review.changes if c.type == "dir" and c.kind in ("added", "type")}
    for path, change in list(chosen.items()):  # parents come first
        at = WorkspacePath(path)
        if change.kind == "deleted":
            continue
        while at := parent(at):
            if at in made_dirs and at not in chosen:
                dropped.append(LeftOut(path, f"its folder {display(at)} stays out", True))
                del chosen[path]
                break
    staying: set[bytes] = set()

    def stays(path: bytes) -> None:
        at = WorkspacePath(path)
        while at and (at := parent(at)) not in staying:
            staying.add(at)

    for change in review.changes:
        if change.path not in chosen and change.old_type is not None:
            stays(change.path if change.origin is None else change.origin)
    for path in sorted(chosen, reverse=True):
        change = chosen[path]
        leaves = change.old_type == "dir" and change.kind in ("deleted", "type")
        if leaves and path in staying:
            dropped.append(LeftOut(path, "something in it stays", True))
            del chosen[path]
            stays(path)
    return dropped


def _actions(changes: Sequence[Change], now_ns: int, keep_mtime: bool) -> list[Action]:
    actions = []
    for order, change in enumerate(sorted(changes, key=lambda c: (c.mtime_ns, c.path))):
        if change.kind == "deleted":
            if change.old_type is not None:
                actions.append(
                    Action(op="take", path=change.path, type=change.old_type, expect=change.base)
                )
            continue
        if change.type is None:
            continue
        actions.append(
            Action(
                op="chmod" if change.kind == "mode" else "put",
                path=change.path,
                type=change.type,
                expect=change.base,
                mode=change.mode,
                link=change.link,
                sha256=change.sha256,
                layer=change.layer,
                mtime_ns=change.mtime_ns if keep_mtime else now_ns + order,
                source=change.source,
            )
        )
        if change.origin is not None:
            actions.append(
                Action(op="take", path=change.origin, type="file", expect=change.origin_base)
            )
    return actions


def commit(
    base: Tree,
    layers: Sequence[Tree],
    review: Review,
    *,
    commit: str,
    undo_dir: str,
    store: Callable[[Plan], None] = lambda _plan: None,
    record: Callable[[Progress], None] = lambda _progress: None,
    on_step: Callable[[Step], None] | None = None,
    restored: Callable[[Mapping[bytes, Fingerprint]], None] = lambda _prints: None,
    selection: Collection[WorkspacePath] | None = None,
    on_conflict: OnConflict = "fail",
    allow: Collection[bytes] = (),
    digest: str | None = None,
    keep_mtime: bool = False,
    durability: Literal["fast", "strict"] = "fast",
) -> Committed:
    """Plan and carry out, all or nothing; with `skip`, all but the conflicting paths or nothing.

    store: called with the plan before its first step (again for each new round), record: with the
    progress at each stage's end; both must be durable when they return. undo_dir: must not exist
    yet or be empty; the undo copies land there. restored: gets, when something failed half-way
    and was put back, the new fingerprints of what was moved (a rename changes ctime); they replace
    the ones that the caller remembers from first touch.
    Raises: ReviewChanged, ReviewConflict, Failed; the base is then as it was.
    """
    met: dict[bytes, Conflict] = {}
    rounds = 0
    while True:
        planned = plan(
            review,
            commit=commit,
            selection=selection,
            on_conflict=on_conflict,
            allow=allow,
            digest=digest,
            keep_mtime=keep_mtime,
            durability=durability,
            met=tuple(met.values()),
        )
        store(planned)
        executor = Executor(
            base, planned, layers=layers, undo_dir=undo_dir, record=record, on_step=on_step
        )
        try:
            return undoing.with_indexes(base, executor.run())
        except ReviewConflict:
            fresh = {c.path: c for c in executor.conflicts if c.path not in met}
            rounds += 1
            if on_conflict == "fail" or not fresh or rounds > MAX_ROUNDS:
                raise
            met.update(fresh)
        finally:
            if executor.restored:
                for change in review.changes:
                    change.base = executor.restored.get(change.path, change.base)
                    if change.origin is not None:
                        change.origin_base = executor.restored.get(
                            change.origin, change.origin_base
                        )
                restored(executor.restored)
