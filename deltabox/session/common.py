"""Common versions: what a base file was when the agent first touched it, for a later three-way merge.

A merge needs the text both sides started from; once the user saves over the base it is gone. Kept
as a clone where the file system can, else as a copy within a bound. Only files count, and only
while they are still what the fingerprint says. Losing one loses nothing but a merge.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from deltabox.engines.delta import Fingerprint
from deltabox.paths import Tree, WorkspacePath
from deltabox.session.touch import recorded
from deltabox.store import Touch

_FICLONE = 0x40049409
_CANNOT_CLONE = (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY)
CHUNK = 1 << 20


def keep(base: Tree, folder: Path, touches: Iterable[Touch], *, budget: int) -> dict[bytes, str]:
    """Keep what `touches` describe; returns path → where (`copy:NAME`) for those that were kept.

    budget: bytes that copies may still take; clones cost none. Costs O(bytes) where files must be
    copied, so callers run it in a thread. What cannot be read or has changed is left out.
    """
    kept: dict[bytes, str] = {}
    for touch in touches:
        if touch.type != "file" or touch.drifted:
            continue
        name = hashlib.sha256(touch.path).hexdigest()[:32]
        with contextlib.suppress(OSError):
            spent = _keep_one(base, folder / name, touch, budget)
            if spent is not None:
                budget -= spent
                kept[touch.path] = f"copy:{name}"
    return kept


def read(folder: Path, common: str) -> bytes:
    """The content that `common` names. Raises: OSError, ValueError for an unknown kind."""
    kind, _, name = common.partition(":")
    if kind != "copy" or "/" in name:
        raise ValueError(f"unknown kind of common version: {common}")
    return (folder / name).read_bytes()


def _keep_one(base: Tree, target: Path, touch: Touch, budget: int) -> int | None:
    source = base.open_file(WorkspacePath(touch.path))
    try:
        if Fingerprint.of(os.fstat(source)) != recorded(touch):
            return None
        fresh = target.with_suffix(".new")
        sink = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            if os.geteuid() == 0:  # under sudo the session is the user's
                above = os.stat(target.parent)
                os.fchown(sink, above.st_uid, above.st_gid)
            spent = _copy(source, sink, touch.size, budget)
        finally:
            os.close(sink)
        # Looked at again: a writer in between would leave a mix of old and new.
        if spent is None or Fingerprint.of(os.fstat(source)) != recorded(touch):
            fresh.unlink()
            return None
        fresh.rename(target)
        return spent
    finally:
        os.close(source)


def _copy(source: int, sink: int, size: int, budget: int) -> int | None:
    """Bytes spent, or None when the budget does not allow it."""
    try:
        fcntl.ioctl(sink, _FICLONE, source)
    except OSError as exc:
        if exc.errno not in _CANNOT_CLONE:
            raise
    else:
        return 0
    if size > budget:
        return None
    while os.copy_file_range(source, sink, CHUNK):
        pass
    return size
