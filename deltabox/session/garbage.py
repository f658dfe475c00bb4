"""What may be removed, in words before it goes: old trash and undo copies, and things nobody owns.

Nothing undecided is ever among it: an open review's session, its checkpoints and its layers stay.
What is listed is looked at again when it is removed, since a person may think in between.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltabox.config import Places, Trash
from deltabox.session import recovery, trash
from deltabox.session.folder import is_locked, remove_tree
from deltabox.session.project import DAY_NS, disk_usage, folder_of
from deltabox.store import Commit, SessionId, Store, TrashRow

# `doctor` makes a trial view in the state folder and removes it within a second.
TRIAL_S = 600


@dataclass(frozen=True)
class Garbage:
    """One thing that may go: what in words, its size, and how. is_stray: nobody owns it."""

    what: str
    bytes: int
    remove: Callable[[], None]
    is_stray: bool = False

    def as_dict(self) -> dict[str, Any]:
        return {"what": self.what, "bytes": self.bytes}


def garbage(store: Store, where: Places, limits: Trash) -> list[Garbage]:
    """Trash and undo copies past their age or the size limit, and strays."""
    horizon = time.time_ns() - limits.keep_days * DAY_NS
    return [
        *_old_trash(store, limits.keep_bytes, horizon),
        *_old_undo(store, where, horizon),
        *strays(store, where),
    ]


def leftovers(store: Store, where: Places) -> list[str]:
    """Things on disk that no session owns, with owner and age; `gc` removes them."""
    return [item.what for item in strays(store, where)]


def strays(store: Store, where: Places) -> Iterator[Garbage]:
    yield from _session_folders(store, where)
    yield from _folders_without_row(store, where)
    yield from _trials(where)
    for path in recovery.stale_sockets(store, where):
        what = f"socket of session {path.stem}, whose owner is gone, {_age(path)}"
        yield Garbage(what, 0, lambda path=path: path.unlink(missing_ok=True), is_stray=True)  # type: ignore[misc]


def _old_trash(store: Store, keep_bytes: int, horizon: int) -> Iterator[Garbage]:
    rows = [row for row in store.trash() if row.state == "kept"]
    kept = sum(row.bytes for row in rows)
    for row in rows:  # oldest first
        if row.at_ns >= horizon and kept <= keep_bytes:
            continue
        kept -= row.bytes
        days = (time.time_ns() - row.at_ns) // DAY_NS

        def drop(row: TrashRow = row) -> None:
            with store.transaction():
                if any(r.id == row.id and r.state == "kept" for r in store.trash()):
                    store.drop_trash(row.id)
                else:
                    return
            remove_tree(Path(row.folder))

        yield Garbage(
            f"trash {row.id}: {row.paths} discarded paths, {days} days old", row.bytes, drop
        )


def _old_undo(store: Store, where: Places, horizon: int) -> Iterator[Garbage]:
    for commit in store.all_commits():
        folder = where.state / "undo" / commit.id
        if not folder.is_dir() or commit.state == "planned" or commit.at_ns >= horizon:
            continue

        def drop(commit: Commit = commit, folder: Path = folder) -> None:
            store.finish_commit(commit.id, "expired")
            remove_tree(folder)

        what = f"undo copies of commit {commit.id} (it can then no longer be taken back)"
        yield Garbage(what, disk_usage(folder), drop)


def _session_folders(store: Store, where: Places) -> Iterator[Garbage]:
    """Folders of sessions that are closed or unknown."""
    known = {s.id: s for s in store.sessions(closed=True)}
    for name in sorted(os.listdir(where.sessions)):
        session = known.get(SessionId(name))
        path = folder_of(where, SessionId(name)).root
        if (session is not None and session.state != "closed") or is_locked(path / "lock"):
            continue

        def drop(name: str = name, path: Path = path) -> None:
            # Inside a transaction, since a session's row and folder are made in one.
            with store.transaction():
                if any(s.id == name for s in store.sessions()):
                    return
            remove_tree(path)

        what = f"folder of {'closed' if session else 'unknown'} session {name}, {_age(path)}"
        yield Garbage(what, disk_usage(path), drop, is_stray=True)


def _folders_without_row(store: Store, where: Places) -> Iterator[Garbage]:
    """What a removal that was cut short left."""
    for word, known in (
        ("trash", {row.id for row in store.trash()}),
        ("undo", {commit.id for commit in store.all_commits()}),
    ):
        with contextlib.suppress(FileNotFoundError):
            for name in sorted(os.listdir(where.state / word)):
                path = where.state / word / name
                if name in known:
                    continue

                def drop(word: str = word, name: str = name, path: Path = path) -> None:
                    rows = store.trash() if word == "trash" else store.all_commits()
                    if all(row.id != name for row in rows):
                        remove_tree(path)

                what = f"rest of {word} {name}, {_age(path)}"
                yield Garbage(what, disk_usage(path), drop, is_stray=True)


def _trials(where: Places) -> Iterator[Garbage]:
    for path in sorted(where.state.glob("trial-*")):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.lstat().st_mtime > TRIAL_S:
                what = f"trial view {path.name} of a `doctor` that was killed, {_age(path)}"
                yield Garbage(
                    what,
                    disk_usage(path),
                    lambda path=path: remove_tree(path),  # type: ignore[misc]
                    is_stray=True,
                )


def stays(store: Store) -> list[dict[str, Any]]:
    """What the trash keeps, for a person to look at and to take back."""
    return trash.listing(store)


def _age(path: Path) -> str:
    with contextlib.suppress(OSError):
        return f"{int((time.time() - path.lstat().st_mtime) // 3600)} h old"
    return "gone by now"
