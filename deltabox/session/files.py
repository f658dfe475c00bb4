"""The files of a workspace for file calls: reads, versions, and changes that happen wholly or not at all.

Synchronous, on one paths.Tree over the view; a change goes through the mount like any program's.
Must not know wires or sessions' rows, decide who is credited, or follow a link by the kernel.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self, TypeVar

from deltabox.errors import (
    BadPath,
    FileExists,
    FileFailed,
    IsDirectory,
    NotDirectory,
    NotFound,
    NotRegularFile,
    PermissionDenied,
    Refused,
)
from deltabox.paths import (
    Tree,
    WorkspacePath,
    display,
    is_within,
)
from deltabox.session.content import (
    HASH_BYTES,
    MAX_BYTES,
    Content,
    hashed,
    read_all,
    read_whole,
    version_by_times,
)
from deltabox.session.target import acting_as, follow

SCRATCH = b".deltabox-fs-"

T = TypeVar("T")
Type = Literal["file", "directory", "symlink", "other"]


@dataclass(frozen=True, slots=True)
class Info:
    """What stands at a path. mode: permission bits. link: the target, of a symlink."""

    type: Type
    size: int
    mode: int
    mtime_ns: int
    version: str
    link: bytes | None = None


def type_of(mode: int) -> Type:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "directory"
    return "symlink" if stat.S_ISLNK(mode) else "other"


@contextmanager
def told(path: bytes) -> Iterator[None]:
    """The kernel's refusals as the errors that a caller can act on."""
    try:
        yield
    except OSError as exc:
        raise _error(path, exc) from exc


def _error(path: bytes, exc: OSError) -> Exception:
    shown = display(path)
    code = exc.errno
    if code in (errno.ENOENT,):
        return NotFound(f"{shown} does not exist.")
    if code == errno.ENOTDIR:
        return NotDirectory(f"{shown} goes through something that is no directory.")
    if code == errno.EISDIR:
        return IsDirectory(f"{shown} is a directory.")
    if code == errno.EEXIST:
        return FileExists(f"{shown} exists already.")
    if code == errno.ENOTEMPTY:
        return FileExists(f"{shown} is a directory that is not empty; ask for recursive.")
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        return PermissionDenied(f"{shown}: {os.strerror(code)}; its modes forbid it.")
    if code == errno.EOVERFLOW:
        return PermissionDenied(
            f"{shown} belongs to another user, so the workspace cannot change it (EOVERFLOW)."
        )
    if code in (errno.ELOOP, errno.EXDEV):
        return Refused(f"{shown} goes through a link that leaves the project or just changed.")
    if code == errno.ENAMETOOLONG:
        return BadPath(f"{shown} has a name longer than the file system takes.")
    words = os.strerror(code) if code else str(exc)
    return FileFailed(f"{shown}: {words}.", errno=code)


class Files:
    """One call's look at the files. Use it in `with`, in one thread, without awaiting inside.

    tree: becomes this object's. project: where it stands, for links that name it. denied, fixed:
    paths that no call may touch, or change. Every method raises the errors of `told`.
    """

    __slots__ = ("_acting", "_denied", "_fixed", "_project", "tree")

    def __init__(
        self,
        tree: Tree,
        project: bytes,
        owner: tuple[int, int],
        *,
        denied: tuple[WorkspacePath, ...] = (),
        fixed: tuple[WorkspacePath, ...] = (),
    ) -> None:
        self.tree = tree
        self._project = project
        self._acting = acting_as(owner)
        self._denied = denied
        self._fixed = fixed

    def __enter__(self) -> Self:
        self._acting.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.tree.close()
        self._acting.__exit__(None, None, None)

    # looking

    def resolved(self, path: WorkspacePath, *, last: bool = True) -> WorkspacePath:
        """`path` without links. Raises: Refused when one leaves the project."""
        with told(path):
            for _ in range(8):
                try:
                    return self._allowed(follow(self.tree, self._project, path, last=last))
                except OSError as exc:
                    # A folder became a link between two steps of the walk: walk again.
                    if exc.errno != errno.ELOOP:
                        raise
                    self.tree.forget()
            raise FileFailed(f"{display(path)} keeps changing; try again.")

    def _allowed(self, path: WorkspacePath) -> WorkspacePath:
        for closed in self._denied:
            if is_within(path, closed):
                raise Refused(f"{display(path)} is denied by this session's settings.")
        return path

    def _strictly(
        self, path: WorkspacePath, act: Callable[[WorkspacePath], T], *, last: bool = True
    ) -> T:
        """`act` on the path as it is, or with its links expanded where that meets one."""
        with told(path):
            try:
                return act(self._allowed(path))
            except OSError as exc:
                # ENOTDIR: the last component before the name was a link (or a file: told below).
                if exc.errno not in (errno.ELOOP, errno.ENOTDIR):
                    raise
            self.tree.forget()
            return act(self.resolved(path, last=last))

    def lstat(self, path: WorkspacePath) -> Info:
        """What stands there; a final link is told as one."""
        return self._strictly(path, self._info, last=False)

    def stat(self, path: WorkspacePath) -> Info:
        """What stands there, links followed inside the project."""
        info = self.lstat(path)
        if info.type != "symlink":
            return info
        there = self.resolved(path)
        with told(path):
            return self._info(there)

    def _info(self, path: WorkspacePath) -> Info:
        st = self.tree.lstat(path)
        return self._described(path, st)

    def _described(self, path: WorkspacePath, st: os.stat_result) -> Info:
        kind = type_of(st.st_mode)
        link = self.tree.readlink(path) if kind == "symlink" else None
        if link is not None:
            version = hashed(link)
        elif kind == "file" and st.st_size <= HASH_BYTES:
            version = self._hash(path, st)
        else:
            version = version_by_times(st)
        return Info(kind, st.st_size, stat.S_IMODE(st.st_mode), st.st_mtime_ns, version, link)

    def _hash(self, path: WorkspacePath, st: os.stat_result) -> str:
        try:
            fd = self.tree.open_file(path)
        except PermissionError:
            return version_by_times(st)  # it can be looked at, not read
        try:
            return hashed(read_all(fd, HASH_BYTES + 1))
        finally:
            os.close(fd)

    def listing(
        self, path: WorkspacePath, *, after: bytes = b"", limit: int
    ) -> tuple[list[tuple[bytes, os.stat_result, bytes | None]], bool]:
        """Name, lstat and link target of what a directory holds after the name `after`, in the order
        of bytes; and whether there is more. What vanishes meanwhile is left out."""
        return self._strictly(path, lambda p: self._list(p, after, limit))

    def _list(
        self, path: WorkspacePath, after: bytes, limit: int
    ) -> tuple[list[tuple[bytes, os.stat_result, bytes | None]], bool]:
        # A link as the last component is ENOTDIR with O_DIRECTORY, so look first.
        st = self.tree.lstat(path)
        if stat.S_ISLNK(st.st_mode):
            raise OSError(errno.ELOOP, "a link", path)
        fd = self.tree.open_at(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return entries(fd, after, limit)
        finally:
            os.close(fd)

    # reading

    def open(self, path: WorkspacePath) -> int:
        """A regular file for reading; the caller closes it. Never blocks on a fifo."""
        return self._strictly(path, self._open)

    def _open(self, path: WorkspacePath) -> int:
        st = self.tree.lstat(path)
        if stat.S_ISLNK(st.st_mode):
            raise OSError(errno.ELOOP, "a link", path)
        must_be_file(st, path)
        fd = self.tree.open_at(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        st = os.fstat(fd)
        if not stat.S_ISREG(st.st_mode):  # swapped between the two
            os.close(fd)
            must_be_file(st, path)
        return fd

    def size(self, path: WorkspacePath) -> int:
        """Bytes of the regular file there, links followed; 0 for what is none."""
        return self._strictly(path, self._size)

    def _size(self, path: WorkspacePath) -> int:
        st = self.tree.lstat(path)
        if stat.S_ISLNK(st.st_mode):
            raise OSError(errno.ELOOP, "a link", path)
        return st.st_size if stat.S_ISREG(st.st_mode) else 0

    def read(self, path: WorkspacePath, *, limit: int = MAX_BYTES) -> Content:
        """The whole file. Raises: TooLarge over `limit`."""
        fd = self.open(path)
        try:
            with told(path):
                return read_whole(fd, path, limit)
        finally:
            os.close(fd)


def entries(
    fd: int, after: bytes, limit: int
) -> tuple[list[tuple[bytes, os.stat_result, bytes | None]], bool]:
    """A page of an open directory: name, lstat, link target; and whether more follows."""
    names = sorted(n for n in map(os.fsencode, os.listdir(fd)) if n > after)
    found = []
    for child in names[:limit]:
        with contextlib.suppress(FileNotFoundError):
            st = os.stat(child, dir_fd=fd, follow_symlinks=False)
            link = os.readlink(child, dir_fd=fd) if stat.S_ISLNK(st.st_mode) else None
            found.append((child, st, link))
    return found, len(names) > limit


def must_be_file(st: os.stat_result, path: bytes) -> None:
    if stat.S_ISREG(st.st_mode):
        return
    if stat.S_ISDIR(st.st_mode):
        raise IsDirectory(f"{display(path)} is a directory; list it with fs.listDir.")
    if stat.S_ISLNK(st.st_mode):
        raise OSError(errno.ELOOP, "a link", path)
    raise NotRegularFile(
        f"{display(path)} is a fifo, a socket or a device, which is never opened."
    )
