"""`checkpoint restore`: remember the workspace's files, go back to what was remembered."""

import argparse
import time

from deltabox.cli import text
from deltabox.cli.review import pick, selection, setting, show_json
from deltabox.errors import SessionRunning
from deltabox.paths import WorkspacePath
from deltabox.session import checkpoint as checkpoints
from deltabox.session import project as projects
from deltabox.session import recovery
from deltabox.session.folder import is_locked, locked
from deltabox.session.pending import Pending, tidy
from deltabox.store import Checkpoint


def checkpoint(args: argparse.Namespace) -> int:
    """Make one, or with --list show them."""
    where, project = setting(args)
    with projects.open_state(where) as store:
        session = pick(store, project, args.session)
        if args.list:
            rows = store.checkpoints(session.id)
            current = [r for r in rows if r.generation == session.generation]
            if args.json:
                show_json({"checkpoints": [_as_dict(r) for r in current]})
                return 0
            for row in current:
                age = text.age(time.time_ns() - row.at_ns)
                print(f"{row.id}  {age:<12} {row.mode:<7} {row.label}")
            if not current:
                print("no checkpoints since the last decision")
            return 0
        folder = projects.folder_of(where, session.id)
        if is_locked(folder.lock):
            found = projects.OwnerDesk.of(session).checkpoint(args.label)
        else:
            with locked(folder.lock, what=f"Session {session.id}"):
                recovery.resume(store, where, session.id)
                found = _as_dict(checkpoints.create(store, where, session.id, label=args.label))
    if args.json:
        show_json(found)
    else:
        print(f"checkpoint {found['checkpoint']} ({found['mode']})")
    return 0


def restore(args: argparse.Namespace) -> int:
    """The present state becomes a checkpoint first, so a restore can be gone back on."""
    where, project = setting(args)
    with projects.open_state(where) as store:
        session = pick(store, project, args.session)
        folder = projects.folder_of(where, session.id)
        if is_locked(folder.lock):
            raise SessionRunning(
                f"Session {session.id} is in use by process {session.pid}; "
                "wait until its command has ended, then restore."
            )
        paths = selection(args, session.project)
        with locked(folder.lock, what=f"Session {session.id}"):
            recovery.resume(store, where, session.id)
            chosen = [WorkspacePath(p) for p in paths]
            before = checkpoints.restore(store, where, session.id, args.id, chosen)
            Pending(store, where, session.id).settle()
        tidy(store, where, session.id)
    if args.json:
        show_json({"restored": args.id, "before": _as_dict(before)})
    else:
        print(f"restored {args.id}; `deltabox restore {before.id}` goes back on it")
    return 0


def _as_dict(row: Checkpoint) -> dict[str, object]:
    return {
        "checkpoint": row.id,
        "session": row.session,
        "atNs": row.at_ns,
        "label": row.label,
        "mode": row.mode,
        "turn": row.turn,
    }
