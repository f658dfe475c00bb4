"""Drops changes from a quiescent, unmounted delta, so that the view equals the base there again.

What is dropped is moved into a trash folder, nothing is lost. Never writes to the base.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence

from deltabox.engines.delta import (
    Merged,
    create_layer,
    drop_plain_dir,
    holds_opaque,
    is_whiteout,
    make_whiteout,
    set_opaque,
)
from deltabox.errors import BadUsage
from deltabox.paths import ROOT, Tree, WorkspacePath, display, join, name, parent
from deltabox.review.inode import copy_entry


def discard_all(base: Tree, upper_path: str, trash: str) -> None:
    """The whole upper goes to `trash` (a new name on the same file system) and an empty one takes
    its place: two renames, whatever its size. Lower layers are the caller's to leave out.

    Killed in between, the upper is missing; `create_layer` makes it.
    """
    os.rename(upper_path, trash)
    create_layer(upper_path, os.fstat(base.fd))


def discard(
    base: Tree,
    upper: Tree,
    lowers: Sequence[Tree],
    paths: Sequence[WorkspacePath],
    trash: Tree,
) -> list[WorkspacePath]:
    """Make the view equal the base at `paths` and below them; everything else stays as shown.

    trash: an empty folder on the upper's file system; entries land there under their own paths.
    Costs one rename for each path, and a listing of the base folder where the agent had removed or
    remade a folder above. Returns: the paths that had something to discard.
    Raises: BadUsage when a folder above is now a file or a link in the delta: that has to go first.
    """
    done = []
    touched: set[WorkspacePath] = set()
    for path in sorted(set(paths)):
        if not path:
            for child in upper.names():
                _move(upper, trash, join(ROOT, child))
            done.append(path)
            for lower in lowers:
                for child in lower.names():
                    _mirror(base, upper, lowers, join(ROOT, child))
            continue
        if not _expose(base, upper, lowers, path):
            continue
        if upper.lstat_or_none(path) is not None:
            _move(upper, trash, path)
            done.append(path)
        if lowers and _mirror(base, upper, lowers, path):
            done.append(path)
        at = path
        while at := parent(at):
            touched.add(at)
    for path in sorted(touched, key=lambda p: p.count(b"/"), reverse=True):
        drop_plain_dir(base, upper, lowers, path)
    return sorted(set(done))


def _expose(base: Tree, upper: Tree, lowers: Sequence[Tree], path: WorkspacePath) -> bool:
    """Make every folder above `path` transparent without changing what else the view shows.

    False when neither the view nor the base has that folder: nothing to discard below it.
    """
    at = ROOT
    for part in path.split(b"/")[:-1]:
        at = join(at, part)
        base_st = base.lstat_or_none(at)
        is_base_dir = base_st is not None and stat.S_ISDIR(base_st.st_mode)
        st = upper.lstat_or_none(at)
        if st is None:
            if not lowers:
                return False  # nothing of the upper is below
            shown = Merged(base, lowers).lookup(at)
            if shown is None:
                if base_st is None or not is_base_dir:
                    return False
                _make_like(upper, at, base_st)
                set_opaque(upper, at, opaque=True)
            elif shown.kind != "dir":
                raise _blocked(path, at)
            else:
                _make_like(upper, at, shown.st)
        elif is_whiteout(upper, at, st):
            if base_st is None or not is_base_dir:
                return False
            os.unlink(name(at), dir_fd=upper.parent_fd(at))
            _make_like(upper, at, base_st)
            set_opaque(upper, at, opaque=True)
        elif not stat.S_ISDIR(st.st_mode):
            if is_base_dir:
                raise _blocked(path, at)
            return False
        if is_base_dir and not lowers:
            _make_transparent(base, upper, at)
    return True


def _blocked(path: WorkspacePath, at: WorkspacePath) -> BadUsage:
    return BadUsage(
        f"{display(path)} cannot come back while {display(at)} is no folder; abort {display(at)}."
    )


def _make_transparent(base: Tree, upper: Tree, directory: WorkspacePath) -> None:
    """Trade an opaque mark for a whiteout of each base name that it hid.

    The whiteouts come first, so a kill in between leaves a view that looks the same.
    """
    if not holds_opaque(upper, directory):
        return
    for child in base.names(directory):
        at = join(directory, child)
        st = upper.lstat_or_none(at)
        if st is None:
            make_whiteout(upper, at)
        elif stat.S_ISDIR(st.st_mode):
            set_opaque(upper, at, opaque=True)
    set_opaque(upper, directory, opaque=False)


def _make_like(upper: Tree, path: WorkspacePath, like: os.stat_result) -> None:
    folder = upper.parent_fd(path)
    os.mkdir(name(path), 0o700, dir_fd=folder)
    if os.geteuid() == 0:
        os.chown(name(path), like.st_uid, like.st_gid, dir_fd=folder, follow_symlinks=False)
    fd = upper.open_at(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fchmod(fd, stat.S_IMODE(like.st_mode))
    finally:
        os.close(fd)


def _move(upper: Tree, trash: Tree, path: WorkspacePath) -> None:
    """One rename into the trash; folders above are made there as needed."""
    missing = []
    at = parent(path)
    while at and trash.lstat_or_none(at) is None:
        missing.append(at)
        at = parent(at)
    for folder in reversed(missing):
        os.mkdir(name(folder), 0o700, dir_fd=trash.parent_fd(folder))
    with contextlib.ExitStack() as stack:
        stack.enter_context(_writable(upper, parent(path)))
        # A directory that its owner may not write cannot be moved either: its `..` changes.
        stack.enter_context(_writable(upper, path, moves_to=trash))
        os.rename(
            name(path),
            name(path),
            src_dir_fd=upper.parent_fd(path),
            dst_dir_fd=trash.parent_fd(path),
        )


@contextlib.contextmanager
def _writable(tree: Tree, path: WorkspacePath, *, moves_to: Tree | None = None) -> Iterator[None]:
    """Write permission on a directory of the delta for a moment; nothing for other entries."""
    st = tree.lstat(path)
    if not stat.S_ISDIR(st.st_mode) or st.st_mode & 0o300 == 0o300 or os.geteuid() == 0:
        yield
        return
    _chmod(tree, path, st.st_mode | 0o700)
    try:
        yield
    finally:
        _chmod(moves_to or tree, path, st.st_mode)


def _chmod(tree: Tree, path: WorkspacePath, mode: int) -> None:
    fd = tree.open_at(path, os.O_PATH)
    try:
        os.chmod(f"/proc/self/fd/{fd}", stat.S_IMODE(mode))
    finally:
        os.close(fd)


def _mirror(base: Tree, upper: Tree, lowers: Sequence[Tree], path: WorkspacePath) -> bool:
    """Cover what lower layers show at `path` by the base's own state: whiteout, copy, opaque copy."""
    st = base.lstat_or_none(path)
    shown = Merged(base, [upper, *lowers]).lookup(path)
    if shown is None and st is None:
        return False
    if st is None:
        make_whiteout(upper, path)
        return True
    if shown is not None and shown.layer == -1:
        return False
    _copy_tree(base, upper, path, st)
    return True


def _copy_tree(base: Tree, upper: Tree, path: WorkspacePath, st: os.stat_result) -> None:
    if not stat.S_ISDIR(st.st_mode):
        if not (stat.S_ISREG(st.st_mode) or stat.S_ISLNK(st.st_mode)):
            raise OSError(errno.EOPNOTSUPP, "special files are not copied", path)
        copy_entry(
            base.parent_fd(path), name(path), upper.parent_fd(path), name(path), is_strict=False
        )
        return
    _make_like(upper, path, st)
    set_opaque(upper, path, opaque=True)
    for child in base.names(path):
        at = join(path, child)
        _copy_tree(base, upper, at, base.lstat(at))
