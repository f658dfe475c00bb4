"""Makes new inodes: clones or copies content, hashes what it wrote, sets owner, mode and times.

Knows one directory descriptor and one name at a time; must not know plans, names or order.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Sequence
from typing import Any

from deltabox.engines.delta import Fingerprint, kind_of
from deltabox.paths import Tree, WorkspacePath
from deltabox.review.diff import open_regular
from deltabox.review.steps import Action, Attributes

_FICLONE = 0x40049409
CHUNK_BYTES = 1 << 20
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_CLONE = (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS)


class Changed(Exception):
    """The content is no longer what was shown."""

    def __init__(self, path: bytes) -> None:
        super().__init__(path)
        self.path = path


class Copier:
    """Makes the entries of one plan; remembers whether this pair of file systems can clone."""

    def __init__(self, *, is_strict: bool) -> None:
        self.is_strict = is_strict
        self._is_root = os.geteuid() == 0
        self._can_clone = True

    def make(
        self,
        folder: int,
        temp: bytes,
        action: Action,
        layers: Sequence[Tree],
        replaced: Tree | None,
        before: Attributes | None,
    ) -> Fingerprint:
        """A new entry `temp` in `folder`. Raises: Changed, OSError; a half-made one may be left.

        The content's hash is taken from what was written, not from what was read before, so a
        writer on the source can spoil the copy but never slip something past the review.
        """
        owner = action.owner or self._owner(folder, before)
        if action.type == "dir":
            return self._make_dir(folder, temp, action, owner)
        if action.type == "symlink":
            return self._make_symlink(folder, temp, action, owner, layers)
        source = self._open_source(action, layers)
        try:
            fd = os.open(temp, _CREATE, 0o600, dir_fd=folder)
            try:
                found = self.copy(source, fd)
                if action.sha256 is not None and found != action.sha256:
                    raise Changed(action.path)
                if action.copy is not None:
                    copy_xattrs(source, fd)
                elif replaced is not None and before is not None and before.type == "file":
                    self._keep_xattrs(replaced, WorkspacePath(action.path), fd)
                self._own(fd, owner)
                os.fchmod(fd, action.mode if action.mode is not None else 0o644)
                if action.mtime_ns is not None:
                    os.utime(fd, ns=(action.mtime_ns, action.mtime_ns))
                if self.is_strict:
                    os.fsync(fd)
                return Fingerprint.of(os.fstat(fd))
            finally:
                os.close(fd)
        finally:
            os.close(source)

    @staticmethod
    def _owner(folder: int, before: Attributes | None) -> tuple[int, int]:
        if before is not None:
            return before.uid, before.gid
        st = os.stat(folder)
        return st.st_uid, st.st_gid

    def _own(self, target: Any, owner: tuple[int, int], **where: Any) -> None:
        """The owner when we may; the group alone where the user belongs to it."""
        if self._is_root:
            os.chown(target, *owner, **where)
            return
        try:
            if owner[1] != os.getegid():
                os.chown(target, -1, owner[1], **where)
        except PermissionError:
            pass  # an ordinary user's new file is the user's own: that is what editors do as well

    def _make_dir(
        self, folder: int, temp: bytes, action: Action, owner: tuple[int, int]
    ) -> Fingerprint:
        os.mkdir(temp, 0o700, dir_fd=folder)
        fd = os.open(temp, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
        try:
            inherited = os.fstat(fd).st_mode & stat.S_ISGID
            self._own(fd, owner)
            # Rights to fill it now; the plan has a last step when it must be locked again.
            os.fchmod(fd, (action.mode or 0) | 0o700 | inherited)
            return Fingerprint.of(os.fstat(fd))
        finally:
            os.close(fd)

    def _make_symlink(
        self,
        folder: int,
        temp: bytes,
        action: Action,
        owner: tuple[int, int],
        layers: Sequence[Tree],
    ) -> Fingerprint:
        if action.layer is not None:
            path = WorkspacePath(action.path)
            try:
                target = layers[action.layer].readlink(path)
            except OSError:
                raise Changed(action.path) from None
        else:
            target = os.fsencode(os.readlink(os.path.join(action.copies or "", action.copy or "")))
        if action.link is not None and target != action.link:
            raise Changed(action.path)
        os.symlink(target, temp, dir_fd=folder)
        self._own(temp, owner, dir_fd=folder, follow_symlinks=False)
        if action.mtime_ns is not None:
            times = (action.mtime_ns, action.mtime_ns)
            os.utime(temp, ns=times, dir_fd=folder, follow_symlinks=False)
        return Fingerprint.of(os.stat(temp, dir_fd=folder, follow_symlinks=False))

    @staticmethod
    def _open_source(action: Action, layers: Sequence[Tree]) -> int:
        if action.layer is None:
            path = os.path.join(action.copies or "", action.copy or "")
            return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            return open_regular(layers[action.layer], WorkspacePath(action.path))
        except OSError:
            raise Changed(action.path) from None

    @staticmethod
    def _keep_xattrs(base: Tree, path: WorkspacePath, fd: int) -> None:
        """The replaced file's own attributes and ACL stay with the path."""
        old = base.open_at(path, os.O_PATH)
        try:
            copy_xattrs(f"/proc/self/fd/{old}", fd)
        finally:
            os.close(old)

    def copy(self, source: int, target: int) -> str:
        """Content by clone where the file systems can, else by reading; hex SHA-256 of the copy."""
        import hashlib

        if self._can_clone:
            try:
                fcntl.ioctl(target, _FICLONE, source)
            except OSError as exc:
                if exc.errno not in _NO_CLONE:
                    raise
                # Not tried again: one failed call for each of thousands of files adds up.
                self._can_clone = exc.errno == errno.EINVAL
            else:
                return _hash(target)
        state = hashlib.sha256()
        size = os.fstat(source).st_size
        if size <= CHUNK_BYTES:
            while data := os.read(source, CHUNK_BYTES):
                state.update(data)
                write_all(target, data)
            return state.hexdigest()
        # copy_file_range would not hash what it copies, so its gain would go into a second read.
        at = 0
        while True:
            hole_end = _next_data(source, at, size)
            if hole_end > at:
                _hash_zeros(state, hole_end - at)
                os.lseek(target, hole_end, os.SEEK_SET)
                os.lseek(source, hole_end, os.SEEK_SET)
                at = hole_end
            data = os.read(source, CHUNK_BYTES)
            if not data:
                break
            state.update(data)
            write_all(target, data)
            at += len(data)
        os.ftruncate(target, at)
        return state.hexdigest()


def _next_data(fd: int, at: int, size: int) -> int:
    if at >= size:
        return at
    try:
        found = os.lseek(fd, at, os.SEEK_DATA)
    except OSError as exc:
        found = size if exc.errno == errno.ENXIO else at
    os.lseek(fd, at, os.SEEK_SET)
    return min(found, size)


def _hash_zeros(state: Any, count: int) -> None:
    block = bytes(min(count, CHUNK_BYTES))
    while count > 0:
        state.update(block[: min(count, len(block))])
        count -= len(block)


def _hash(fd: int) -> str:
    import hashlib

    os.lseek(fd, 0, os.SEEK_SET)
    state = hashlib.sha256()
    while data := os.read(fd, CHUNK_BYTES):
        state.update(data)
    return state.hexdigest()


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def copy_xattrs(source: int | str, target: int) -> None:
    """user.* and the access ACL; what the target's file system refuses is left."""
    try:
        names = os.listxattr(source)
    except OSError as exc:
        if exc.errno == errno.EOPNOTSUPP:
            return
        raise
    for attribute in names:
        if attribute.startswith("user.") or attribute == "system.posix_acl_access":
            try:
                os.setxattr(target, attribute, os.getxattr(source, attribute))
            except OSError as exc:
                if exc.errno not in (errno.EOPNOTSUPP, errno.EPERM, errno.ENODATA):
                    raise


def copy_entry(
    from_dir: int, old: bytes, to_dir: int, new: bytes, *, is_strict: bool
) -> Fingerprint:
    """A file or link copied whole, with owner, mode, times and attributes."""
    st = os.stat(old, dir_fd=from_dir, follow_symlinks=False)
    if stat.S_ISLNK(st.st_mode):
        os.symlink(os.readlink(old, dir_fd=from_dir), new, dir_fd=to_dir)
    elif stat.S_ISREG(st.st_mode):
        source = os.open(old, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=from_dir)
        try:
            target = os.open(new, _CREATE, 0o600, dir_fd=to_dir)
            try:
                Copier(is_strict=is_strict).copy(source, target)
                copy_xattrs(source, target)
                if os.geteuid() == 0:
                    os.fchown(target, st.st_uid, st.st_gid)
                os.fchmod(target, stat.S_IMODE(st.st_mode))
                os.utime(target, ns=(st.st_atime_ns, st.st_mtime_ns))
                if is_strict:
                    os.fsync(target)
            finally:
                os.close(target)
        finally:
            os.close(source)
    else:
        raise OSError(errno.EXDEV, f"a {kind_of(st.st_mode)} file cannot be copied", old)
    return Fingerprint.of(os.stat(new, dir_fd=to_dir, follow_symlinks=False))
