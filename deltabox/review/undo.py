"""Reverses a commit on the base from its record; the reversal is a commit like any other.

Never overwrites what the user did since: a path that is not what the commit left is a conflict,
and then nothing is undone. The result has its own record, so an undo can be undone.
"""

import os
import time
from collections.abc import Callable, Mapping

import msgspec

from deltabox.engines.delta import Fingerprint
from deltabox.errors import Refused, ReviewConflict
from deltabox.paths import Tree, WorkspacePath, display
from deltabox.review import gitunit
from deltabox.review.executor import Executor
from deltabox.review.steps import Action, Committed, Plan, Progress, Step, UndoRecord, arrange


def plan(
    record: UndoRecord, *, commit: str, now_ns: int | None = None, durability: str = "fast"
) -> Plan:
    """The steps back, as data. commit: the id of the undo itself. Files get new modification times:
    a build that saw the committed version must see that this one is another."""
    now = time.time_ns() if now_ns is None else now_ns
    actions = []
    for order, entry in enumerate(record.entries):
        before, after = entry.before, entry.after
        if before is None:
            if after is not None:
                actions.append(Action(op="take", path=entry.path, type=after.type, expect=after))
            continue
        is_put = entry.copy is not None or after is None or after.type != before.type
        actions.append(
            Action(
                op="put" if is_put else "chmod",
                path=entry.path,
                type=before.type,
                expect=after,
                mode=before.mode if before.type != "symlink" else None,
                copy=entry.copy,
                copy_print=entry.copy_print,
                copies=record.copies,
                owner=(before.uid, before.gid),
                mtime_ns=None if before.type == "dir" else now + order,
            )
        )
    ordered, steps = arrange(actions)
    return Plan(
        commit=commit,
        actions=ordered,
        steps=steps,
        durability="strict" if durability == "strict" else "fast",
    )


def undo(
    base: Tree,
    record: UndoRecord,
    *,
    commit: str,
    undo_dir: str,
    store: Callable[[Plan], None] = lambda _plan: None,
    record_progress: Callable[[Progress], None] = lambda _progress: None,
    on_step: Callable[[Step], None] | None = None,
    restored: Callable[[UndoRecord], None] = lambda _record: None,
    durability: str = "fast",
) -> Committed:
    """All paths of the commit back, or none. The record's copies stay until the caller drops them.

    restored: gets the record to keep instead when the undo failed half-way and was put back, which
    changes ctimes.
    Raises: ReviewConflict when the project is no longer what the commit left, Refused when an undo
    copy was written to since, Failed.
    """
    for entry in record.entries:
        if entry.copy is None or entry.copy_print is None:
            continue
        try:
            st = os.lstat(os.path.join(record.copies, entry.copy))
        except FileNotFoundError:
            raise Refused(
                f"The undo copy of {display(entry.path)} is gone, so this commit cannot be undone."
            ) from None
        if not Fingerprint.of(st).moved_from(entry.copy_print):
            raise Refused(
                f"The undo copy of {display(entry.path)} was written to after the commit (a program"
                f" held the old file open); it lies in {record.copies}."
            )
    planned = plan(_refreshed(base, record), commit=commit, durability=durability)
    store(planned)
    executor = Executor(base, planned, undo_dir=undo_dir, record=record_progress, on_step=on_step)
    try:
        return with_indexes(base, executor.run())
    except ReviewConflict as exc:
        first = executor.conflicts[0]
        more = f" (and {len(executor.conflicts) - 1} more)" if len(executor.conflicts) > 1 else ""
        raise ReviewConflict(
            f"{display(first.path)}{more} {first.project} since that commit, so nothing was undone;"
            " put it back as the commit left it, or take the change back by hand.",
            **exc.data,
        ) from exc
    finally:
        if executor.restored:
            restored(renew(record, executor.restored))


def with_indexes(base: Tree, done: Committed) -> Committed:
    """`done` whose record knows git indexes by their entries too, while they are what was put there."""
    entries = []
    for entry in done.undo.entries:
        path = WorkspacePath(entry.path)
        if entry.after is not None and gitunit.unit_of(path) is not None:
            digest = gitunit.index_digest(base, path)
            st = base.lstat_or_none(path)
            if digest is not None and st is not None and Fingerprint.of(st) == entry.after:
                entry = msgspec.structs.replace(entry, index=digest)
        entries.append(entry)
    done.undo.entries = entries
    return done


def _refreshed(base: Tree, record: UndoRecord) -> UndoRecord:
    """The record with the present fingerprints of indexes that git rewrote with the same entries."""
    prints = {}
    for entry in record.entries:
        path = WorkspacePath(entry.path)
        if entry.index is None or (st := base.lstat_or_none(path)) is None:
            continue
        # The fingerprint first: an index rewritten after it no longer has it, and is a conflict.
        if gitunit.index_digest(base, path) == entry.index:
            prints[entry.path] = Fingerprint.of(st)
    return _with_after(record, prints)


def renew(record: UndoRecord, prints: Mapping[bytes, Fingerprint]) -> UndoRecord:
    """A record after something was moved aside and put back: the very same entries have new ctimes.

    To be stored for each record in force, with whatever `restored` handed out.
    """
    same = {
        e.path: now
        for e in record.entries
        if (now := prints.get(e.path)) is not None
        and e.after is not None
        and now.moved_from(e.after)
    }
    return _with_after(record, same)


def follow(record: UndoRecord, undone: UndoRecord, done: Committed) -> UndoRecord:
    """An older record in force after a newer commit was undone.

    The undo made new inodes for what the older commit had left, so the older record would see them
    as the user's. Where the undone commit had found exactly what the older one left, the older
    record now names what the undo made. To be stored for each commit of the project still in force.
    """
    found = {e.path: e.expect for e in undone.entries}
    made = {o.path: o.fingerprint for o in done.paths}
    same = {
        e.path: made[e.path]
        for e in record.entries
        if e.path in found and e.path in made and _is_same(e.after, found[e.path])
    }
    return _with_after(record, same)


def _with_after(record: UndoRecord, prints: Mapping[bytes, Fingerprint | None]) -> UndoRecord:
    entries = [
        msgspec.structs.replace(e, after=prints[e.path]) if e.path in prints else e
        for e in record.entries
    ]
    return UndoRecord(commit=record.commit, copies=record.copies, entries=entries)


def _is_same(left: Fingerprint | None, right: Fingerprint | None) -> bool:
    return right is None if left is None else left.same_as(right)
