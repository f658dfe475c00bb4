"""Files of the host outside the project, for looking only: the same calls as files.Files has.

Whether a place may be seen is judged on where an opened descriptor really is. Never writes.
"""

import contextlib
import os
import stat
from collections.abc import Callable
from types import TracebackType
from typing import Self

from deltabox.errors import Refused
from deltabox.paths import display, is_within
from deltabox.session.content import HASH_BYTES, hashed, read_all, version_by_times
from deltabox.session.files import Info, entries, must_be_file, told, type_of
from deltabox.session.target import acting_as, open_host, reopen


class HostFiles:
    """One call's look. check: raises Refused for a place that nobody may see; project: never seen here,
    since that would be the base and not the view. Errors as in files.Files."""

    __slots__ = ("_acting", "_check", "_project")

    def __init__(
        self, project: bytes, owner: tuple[int, int], check: Callable[[bytes], None]
    ) -> None:
        self._project = project
        self._acting = acting_as(owner)
        self._check = check

    def __enter__(self) -> Self:
        self._acting.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._acting.__exit__(None, None, None)

    def _open(self, path: bytes, *, follow: bool = True) -> int:
        self._check(
            path
        )  # before it is opened, so that the answer does not tell what exists there
        with told(path):
            fd, real = open_host(path, follow_last=follow)
        try:
            self._judge(path, real)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _judge(self, path: bytes, real: bytes) -> None:
        self._check(real)
        if is_within(real, self._project):
            raise Refused(f"{display(path)} leads into the project; name the file there.")

    def resolved(self, path: bytes, *, last: bool = True) -> bytes:
        with told(path):
            fd = self._open(path, follow=last)
            try:
                return os.readlink(b"/proc/self/fd/%d" % fd)
            finally:
                os.close(fd)

    def lstat(self, path: bytes) -> Info:
        return self._info(path, follow=False)

    def stat(self, path: bytes) -> Info:
        return self._info(path, follow=True)

    def _info(self, path: bytes, *, follow: bool) -> Info:
        fd = self._open(path, follow=follow)
        try:
            with told(path):
                st = os.fstat(fd)
                kind = type_of(st.st_mode)
                link = os.readlink(b"", dir_fd=fd) if kind == "symlink" else None
                version = hashed(link) if link is not None else _version(fd, st)
            return Info(kind, st.st_size, stat.S_IMODE(st.st_mode), st.st_mtime_ns, version, link)
        finally:
            os.close(fd)

    def open(self, path: bytes) -> int:
        fd = self._open(path)
        try:
            with told(path):
                must_be_file(os.fstat(fd), path)
                return reopen(fd, os.O_RDONLY)
        finally:
            os.close(fd)

    def listing(
        self, path: bytes, *, after: bytes = b"", limit: int
    ) -> tuple[list[tuple[bytes, os.stat_result, bytes | None]], bool]:
        pin = self._open(path)
        try:
            with told(path):
                fd = os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=pin)
                try:
                    return entries(fd, after, limit)
                finally:
                    os.close(fd)
        finally:
            os.close(pin)


def _version(fd: int, st: os.stat_result) -> str:
    if stat.S_ISREG(st.st_mode) and st.st_size <= HASH_BYTES:
        with contextlib.suppress(PermissionError):
            readable = reopen(fd, os.O_RDONLY)
            try:
                return hashed(read_all(readable, HASH_BYTES + 1))
            finally:
                os.close(readable)
    return version_by_times(st)
