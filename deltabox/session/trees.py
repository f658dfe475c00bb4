"""Whole directories through a view: emptied, or made anew under another name.

On one paths.Tree, so nothing is followed out of it. Decides nothing and journals nothing.
"""

import os
import stat

from deltabox.errors import NotRegularFile
from deltabox.paths import Tree, WorkspacePath, display, name
from deltabox.session.content import CHUNK


def remove_below(tree: Tree, path: WorkspacePath) -> None:
    """Empty a directory, children before parents; links are deleted, never followed."""
    for child, st in reversed(list(tree.walk(path))):
        if stat.S_ISDIR(st.st_mode):
            os.rmdir(name(child), dir_fd=tree.parent_fd(child))
        else:
            os.unlink(name(child), dir_fd=tree.parent_fd(child))


def copy_tree(tree: Tree, source: WorkspacePath, target: WorkspacePath) -> None:
    """A directory anew under another name: contents, modes, times, links.

    Raises: NotRegularFile for a fifo, socket or device in it, with a part of the copy made.
    """
    folders = [(source, tree.lstat(source))]
    os.mkdir(name(target), 0o700, dir_fd=tree.parent_fd(target))
    for child, st in tree.walk(source):
        to = WorkspacePath(target + child[len(source) :])
        if stat.S_ISDIR(st.st_mode):
            folders.append((child, st))
            os.mkdir(name(to), 0o700, dir_fd=tree.parent_fd(to))
        elif stat.S_ISLNK(st.st_mode):
            os.symlink(tree.readlink(child), name(to), dir_fd=tree.parent_fd(to))
        elif stat.S_ISREG(st.st_mode):
            _copy_file(tree, child, to, st)
        else:
            raise NotRegularFile(
                f"{display(child)} is a fifo, a socket or a device, which cannot be moved here."
            )
    for child, st in reversed(
        folders
    ):  # times and modes last, when nothing is made in them any more
        to = WorkspacePath(target + child[len(source) :])
        fd = tree.open_at(to, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.utime(fd, ns=(st.st_atime_ns, st.st_mtime_ns))
            os.fchmod(fd, stat.S_IMODE(st.st_mode))
        finally:
            os.close(fd)


def _copy_file(tree: Tree, path: WorkspacePath, to: WorkspacePath, st: os.stat_result) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    source = tree.open_file(path)
    try:
        sink = os.open(name(to), flags, 0o600, dir_fd=tree.parent_fd(to))
        try:
            while data := os.read(source, CHUNK):
                left = memoryview(data)
                while left:
                    left = left[os.write(sink, left) :]
            os.fchmod(sink, stat.S_IMODE(st.st_mode) & 0o1777)
            os.utime(sink, ns=(st.st_atime_ns, st.st_mtime_ns))
        finally:
            os.close(sink)
    finally:
        os.close(source)
