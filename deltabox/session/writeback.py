"""Discards under a live mount: writes the base's content back *through the view*, path by path.

Changing a mounted upper from outside loses data, so while processes live a discarded path is made
equal to the base by ordinary file operations in the view. What it held goes to the trash first.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from deltabox.engines.delta import Merged, make_whiteout
from deltabox.paths import Tree, WorkspacePath, name, parent
from deltabox.review.inode import copy_entry

_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
CHUNK = 1 << 20


def discard(merged: Merged, view: Tree, paths: Iterable[bytes], trash: Path) -> None:
    """Make each path in the view what the base has; its present content is copied below `trash`.

    Deletes children before parents, then makes parents before children. A process that rewrites a
    path meanwhile simply has a new change pending. Raises: OSError.
    """
    ordered = sorted(WorkspacePath(p) for p in paths)
    kept = trash / "paths"
    kept.mkdir(mode=0o700, exist_ok=True)
    with Tree.open(kept) as layer:
        _save(merged, ordered, layer)
    for path in reversed(ordered):
        _clear(merged.base, view, path)
    for path in ordered:
        st = merged.base.lstat_or_none(path)
        if st is not None:
            _restore(merged.base, view, path, st)


def _save(merged: Merged, ordered: Sequence[WorkspacePath], layer: Tree) -> None:
    """A layer that shows over the base what the view shows at these paths (parents come first)."""
    modes: dict[WorkspacePath, int] = {}
    for path in ordered:
        node = merged.lookup(path)
        if not _make_parents(merged, path, layer, modes):
            continue  # below what is a file or a link now: that one speaks for it
        if node is None:
            if merged.base.lstat_or_none(path) is not None:
                make_whiteout(layer, path)
        elif node.kind == "dir":
            with contextlib.suppress(FileExistsError):
                os.mkdir(name(path), 0o700, dir_fd=layer.parent_fd(path))
            modes[path] = stat.S_IMODE(node.st.st_mode)
        elif node.kind != "special":
            copy_entry(
                node.tree.parent_fd(path),
                name(path),
                layer.parent_fd(path),
                name(path),
                is_strict=False,
            )
    for path, mode in sorted(modes.items(), reverse=True):
        os.chmod(name(path), mode, dir_fd=layer.parent_fd(path))


def _make_parents(
    merged: Merged, path: WorkspacePath, layer: Tree, modes: dict[WorkspacePath, int]
) -> bool:
    missing = []
    at = parent(path)
    while at and layer.lstat_or_none(at) is None:
        missing.append(at)
        at = parent(at)
    if at and not stat.S_ISDIR(layer.lstat(at).st_mode):
        return False
    for folder in reversed(missing):
        node = merged.lookup(folder)
        if node is None or node.kind != "dir":
            # Its folder is gone from the view too, and stands for all that was in it.
            return False
        os.mkdir(name(folder), 0o700, dir_fd=layer.parent_fd(folder))
        modes[folder] = stat.S_IMODE(node.st.st_mode)
    return True


def _clear(base: Tree, view: Tree, path: WorkspacePath) -> None:
    """Remove what stands in the view, unless it is the directory that the base has."""
    now = view.lstat_or_none(path)
    if now is None:
        return
    want = base.lstat_or_none(path)
    folder = view.parent_fd(path)
    if not stat.S_ISDIR(now.st_mode):
        os.unlink(name(path), dir_fd=folder)
    elif want is None or not stat.S_ISDIR(want.st_mode):
        with contextlib.suppress(OSError):  # a child that was not discarded keeps its folder
            os.rmdir(name(path), dir_fd=folder)


def _restore(base: Tree, view: Tree, path: WorkspacePath, st: os.stat_result) -> None:
    view.forget()
    try:
        folder = view.parent_fd(path)
    except OSError as exc:
        if exc.errno not in _GONE:
            raise
        _restore_parents(base, view, path)
        folder = view.parent_fd(path)
    leaf = name(path)
    mode = stat.S_IMODE(st.st_mode)
    if stat.S_ISDIR(st.st_mode):
        with contextlib.suppress(FileExistsError):
            os.mkdir(leaf, 0o700, dir_fd=folder)
        os.chmod(leaf, mode, dir_fd=folder)
    elif stat.S_ISLNK(st.st_mode):
        os.symlink(base.readlink(path), leaf, dir_fd=folder)
    elif stat.S_ISREG(st.st_mode):
        source = base.open_file(path)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            sink = os.open(leaf, flags, 0o600, dir_fd=folder)
            try:
                _copy(source, sink)
                os.fchmod(sink, mode & 0o1777)
                os.utime(sink, ns=(st.st_atime_ns, st.st_mtime_ns))
            finally:
                os.close(sink)
        finally:
            os.close(source)


def _restore_parents(base: Tree, view: Tree, path: WorkspacePath) -> None:
    missing = []
    at = parent(path)
    while at and view.lstat_or_none(at) is None:
        missing.append(at)
        at = parent(at)
    for folder in reversed(missing):
        st = base.lstat_or_none(folder)
        if st is not None:
            _restore(base, view, folder, st)


def _copy(source: int, sink: int) -> None:
    """Plain reads and writes: copy_file_range between an overlay and its own lower is refused by
    some kernels, and these are single files that a person waits for."""
    while data := os.read(source, CHUNK):
        left = memoryview(data)
        while left:
            left = left[os.write(sink, left) :]
