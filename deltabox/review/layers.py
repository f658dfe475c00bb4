"""Layers of a quiet delta: one made of several, or a copy of one. Reads layers, writes a new folder.

For checkpoints and for decisions, which want a delta of one layer. Must not touch a mounted upper
except to read it, and never a base.
"""

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from deltabox.engines.delta import (
    Merged,
    create_layer,
    is_opaque,
    is_whiteout,
    make_whiteout,
    set_opaque,
)
from deltabox.paths import ROOT, Tree, WorkspacePath, is_within, join, name, parent
from deltabox.review.inode import copy_entry, copy_xattrs


def squash(layers: Sequence[Tree], into: Path, *, like: os.stat_result, share: bool) -> int:
    """A new layer that shows, over any base, what `layers` (top first) show together.

    share: hard links to the layers' files instead of copies; right only while nobody writes either
    (a frozen layer), or when the old ones are removed before anybody does. Costs O(entries), and
    O(bytes) without `share` where the file system cannot clone. Special files are linked or left
    out. Returns: entries made. Raises: OSError; a half-made folder is left for the caller to remove.
    """
    create_layer(into, like)
    with Tree.open(into) as out:
        return _Squash(layers, out, share=share).run()


class _Squash:
    def __init__(self, layers: Sequence[Tree], out: Tree, *, share: bool) -> None:
        self._layers = layers
        self._out = out
        self._share = share
        self._made = 0
        self._is_root = os.geteuid() == 0

    def run(self) -> int:
        """Folders are made on the way down, and get their mode, times and mark on the way up."""
        todo: list[tuple[WorkspacePath, tuple[int, ...]]] = [
            (ROOT, tuple(range(len(self._layers))))
        ]
        finish: list[tuple[WorkspacePath, os.stat_result, int, bool]] = []
        while todo:
            directory, stack = todo.pop()
            for child, entries in sorted(self._entries(directory, stack).items()):
                path = join(directory, child)
                index, st = entries[0]
                self._made += 1
                if is_whiteout(self._layers[index], path, st):
                    make_whiteout(self._out, path)
                elif not stat.S_ISDIR(st.st_mode):
                    self._take(path, index, st)
                else:
                    below, opaque = self._folders(path, entries)
                    os.mkdir(child, 0o700, dir_fd=self._out.parent_fd(path))
                    finish.append((path, st, index, opaque))
                    todo.append((path, below))
        for path, st, index, opaque in reversed(finish):
            self._finish(path, st, index, opaque)
        return self._made

    def _entries(
        self, directory: WorkspacePath, stack: Sequence[int]
    ) -> dict[bytes, list[tuple[int, os.stat_result]]]:
        found: dict[bytes, list[tuple[int, os.stat_result]]] = {}
        for index in stack:
            fd = self._layers[index].open_at(directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                with os.scandir(fd) as entries:
                    for entry in entries:
                        st = entry.stat(follow_symlinks=False)
                        found.setdefault(os.fsencode(entry.name), []).append((index, st))
            finally:
                os.close(fd)
        return found

    def _folders(
        self, path: WorkspacePath, entries: Sequence[tuple[int, os.stat_result]]
    ) -> tuple[tuple[int, ...], bool]:
        """The layers that merge into a folder, and whether anything below them is hidden."""
        merged: list[int] = []
        for index, st in entries:
            if not stat.S_ISDIR(st.st_mode):
                # A whiteout or a file under a folder hides what the base has there.
                return tuple(merged), True
            merged.append(index)
            fd = self._layers[index].open_at(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                if is_opaque(fd):
                    return tuple(merged), True
            finally:
                os.close(fd)
        return tuple(merged), False

    def _take(self, path: WorkspacePath, index: int, st: os.stat_result) -> None:
        source, target = self._layers[index].parent_fd(path), self._out.parent_fd(path)
        leaf = name(path)
        if self._share:
            os.link(leaf, leaf, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
        elif stat.S_ISREG(st.st_mode) or stat.S_ISLNK(st.st_mode):
            copy_entry(source, leaf, target, leaf, is_strict=False)
        # Fifos, sockets and devices stay out: no review could take them anyway.

    def _finish(self, path: WorkspacePath, st: os.stat_result, index: int, opaque: bool) -> None:
        fd = self._out.open_at(path, os.O_RDONLY | os.O_DIRECTORY)
        source = self._layers[index].open_at(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            copy_xattrs(source, fd)
            if self._is_root:
                os.fchown(fd, st.st_uid, st.st_gid)
            if opaque:
                set_opaque(self._out, path, opaque=True)
            elif is_opaque(fd):
                set_opaque(self._out, path, opaque=False)
            os.fchmod(fd, stat.S_IMODE(st.st_mode))
            os.utime(fd, ns=(st.st_atime_ns, st.st_mtime_ns))
        finally:
            os.close(source)
            os.close(fd)


def lay(then: Merged, now: Merged, paths: Sequence[WorkspacePath]) -> None:
    """Make the view `now` show at `paths` what `then` shows, where that differs from the base.

    Both have one base, and `now` shows the base's own state at `paths` already; its top layer is
    written, and quiet. Costs the changes that `then` has. Raises: OSError.
    """
    upper = now.layers[0]
    modes: dict[WorkspacePath, int] = {}  # given last: a folder may be closed to its owner
    for touched in then.changed():
        path = touched.path
        if not any(is_within(path, chosen) for chosen in paths):
            continue
        _parents(then, now, path, modes)
        after = touched.after
        hid = _clear(upper, path, keep_dir=after is not None and after.kind == "dir")
        if after is None:
            if Merged(now.base, now.layers).lookup(path) is not None:
                make_whiteout(upper, path)
        elif after.kind == "dir":
            _open_folder(upper, path, after.st, modes)
            if hid:
                # A whiteout or a file stood there and hid what lower layers have below.
                set_opaque(upper, path, opaque=True)
        elif after.kind != "special":
            copy_entry(
                after.tree.parent_fd(path),
                name(path),
                upper.parent_fd(path),
                name(path),
                is_strict=False,
            )
    for path, mode in sorted(modes.items(), reverse=True):
        if upper.lstat_or_none(path) is not None:
            os.chmod(name(path), mode, dir_fd=upper.parent_fd(path))


def _parents(
    then: Merged, now: Merged, path: WorkspacePath, modes: dict[WorkspacePath, int]
) -> None:
    """Every folder above `path` in the top layer, as the view shows it now, else as it did then."""
    upper = now.layers[0]
    missing = []
    at = parent(path)
    while at and upper.lstat_or_none(at) is None:
        missing.append(at)
        at = parent(at)
    for folder in reversed(missing):
        node = Merged(now.base, now.layers).lookup(folder) or then.lookup(folder)
        if node is not None:
            _open_folder(upper, folder, node.st, modes)


def _clear(upper: Tree, path: WorkspacePath, *, keep_dir: bool) -> bool:
    """Remove what the layer has at `path`; True when that was an entry which hid a lower one."""
    st = upper.lstat_or_none(path)
    if st is None or (keep_dir and stat.S_ISDIR(st.st_mode)):
        return False
    if stat.S_ISDIR(st.st_mode):
        for below, child in reversed(list(upper.walk(path))):
            act = os.rmdir if stat.S_ISDIR(child.st_mode) else os.unlink
            act(name(below), dir_fd=upper.parent_fd(below))
        os.rmdir(name(path), dir_fd=upper.parent_fd(path))
        upper.forget()  # it may hold one of those folders open, and a new one gets the name
    else:
        os.unlink(name(path), dir_fd=upper.parent_fd(path))
    return True


def _open_folder(
    upper: Tree, path: WorkspacePath, like: os.stat_result, modes: dict[WorkspacePath, int]
) -> None:
    """A folder that its owner may write for now; `modes` remembers what it is to have."""
    folder = upper.parent_fd(path)
    if upper.lstat_or_none(path) is None:
        os.mkdir(name(path), 0o700, dir_fd=folder)
    else:
        os.chmod(name(path), 0o700, dir_fd=folder)
    if os.geteuid() == 0:
        os.chown(name(path), like.st_uid, like.st_gid, dir_fd=folder, follow_symlinks=False)
    modes[path] = stat.S_IMODE(like.st_mode)
