"""Paths inside a tree: bytes relative to a directory descriptor, resolved by openat2 and nothing else.

The only escape check of deltabox. Whoever touches a base, a layer or a view goes through `Tree`;
a path string is never resolved twice, so a symlink swapped in between cannot redirect a write.
Must not know what a session, an engine or a review is.
"""

import ctypes
import errno
import os
import re
import stat
import unicodedata
from collections.abc import Iterator
from typing import NewType, Self

from deltabox.errors import BadPath

WorkspacePath = NewType("WorkspacePath", bytes)
"""Relative to the project, `/`-separated, no empty, `.` or `..` component, no NUL; the root is b""."""

ROOT = WorkspacePath(b"")

RESOLVE_NO_XDEV = 0x01
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08

# What every access of ours means: below the root, through no link of any kind.
STRICT = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS

_SYS_OPENAT2 = 437  # the same number on every architecture (it came after the tables were unified)
_SYS_RENAMEAT2 = {"x86_64": 316, "aarch64": 276, "riscv64": 276}[os.uname().machine]
RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2

_libc = ctypes.CDLL(None, use_errno=True)
# The kernel takes 4,096 bytes of path with its NUL, but trees go deeper (mkdir and cd in turn).
_STEP_BYTES = 4000
# Printable by Unicode's category, yet drawn as nothing or as a blank: two names would look alike.
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)


class _OpenHow(ctypes.Structure):
    _fields_ = [
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    ]


def openat2(dir_fd: int, path: bytes, flags: int, *, mode: int = 0, resolve: int = STRICT) -> int:
    """openat2(2), about 2 µs. O_CLOEXEC is always added.

    Raises: OSError; EXDEV for an escape, ELOOP for a link where none is allowed, EAGAIN is retried.
    """
    if b"\0" in path:  # C would take the part before it for the whole
        raise OSError(errno.EINVAL, "a path holds a NUL byte", path)
    how = _OpenHow(flags | os.O_CLOEXEC, mode, resolve)
    while True:
        fd: int = _libc.syscall(_SYS_OPENAT2, dir_fd, path, ctypes.byref(how), ctypes.sizeof(how))
        if fd >= 0:
            return fd
        code = ctypes.get_errno()
        # EAGAIN: a rename raced with the walk and the kernel could not prove that it stayed beneath.
        if code not in (errno.EINTR, errno.EAGAIN):
            raise OSError(code, os.strerror(code), path)


def renameat2(old_fd: int, old: bytes, new_fd: int, new: bytes, flags: int) -> None:
    """renameat2(2) with RENAME_NOREPLACE or RENAME_EXCHANGE, which Python's os.rename cannot ask for."""
    if _libc.syscall(_SYS_RENAMEAT2, old_fd, old, new_fd, new, ctypes.c_uint(flags)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), old, None, new)


def parse(path: bytes | str) -> WorkspacePath:
    """A relative path as a WorkspacePath; `./` and doubled slashes are folded.

    Raises: BadPath for absolute paths, `..`, NUL, components over 255 bytes, text that is no name.
    """
    try:
        raw = os.fsencode(path)
    except UnicodeEncodeError as exc:  # a lone surrogate, which no bytes of a file name decode to
        raise BadPath(
            f"{path!a} is no file name; give its bytes where text cannot hold it."
        ) from exc
    if raw.startswith(b"/") or b"\0" in raw:
        raise BadPath(
            f"{display(raw)} is not a path inside the project; give one relative to its root."
        )
    parts = [p for p in raw.split(b"/") if p not in (b"", b".")]
    if b".." in parts:
        raise BadPath(f"{display(raw)} leaves the project; give a path below its root.")
    if any(len(p) > 255 for p in parts):
        raise BadPath(
            f"{display(raw)} has a name longer than 255 bytes, which no file here can have."
        )
    return WorkspacePath(b"/".join(parts))


def display(path: bytes) -> str:
    """A path for a person's eyes: on one line, with nothing that moves the cursor or reorders text.

    Printable names come back as they are; control, format and unseen characters, bidi overrides,
    decomposed letters and bytes that are not UTF-8 become backslash escapes, and such a name is
    quoted, so that it cannot be mistaken for another file's plain name. So is one with blanks at an
    end or in a row, which would run into the text around it. Two names never come back equal.
    """
    text = path.decode("utf-8", "surrogateescape")
    # é as one letter and as e with an accent are two files and one picture.
    is_composed = text.isascii() or unicodedata.is_normalized("NFC", text)
    is_plain = is_composed and text.isprintable() and not _UNSEEN.search(text)
    if (
        is_plain
        and not any(part in text for part in ("\\", '"', "  "))
        and text == text.strip(" ")
    ):
        return text or "."
    out = []
    for ch in text:
        code = ord(ch)
        if 0xDC80 <= code <= 0xDCFF:
            out.append(f"\\x{code - 0xDC00:02x}")
        elif ch in '\\"':
            out.append("\\" + ch)
        elif ch.isprintable() and not _UNSEEN.match(ch) and (is_composed or code < 0x80):
            out.append(ch)
        else:
            plain = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(ch)
            # From 0x80 on \x is a byte that is no UTF-8, so a character is written another way.
            out.append(plain or (f"\\x{code:02x}" if code < 0x80 else f"\\u{{{code:x}}}"))
    return '"' + "".join(out) + '"'


def parent(path: WorkspacePath) -> WorkspacePath:
    return WorkspacePath(path.rpartition(b"/")[0])


def name(path: WorkspacePath) -> bytes:
    return path.rpartition(b"/")[2]


def join(directory: WorkspacePath, child: bytes) -> WorkspacePath:
    return WorkspacePath(directory + b"/" + child if directory else child)


def is_within(path: bytes, ancestor: bytes) -> bool:
    """True when `path` is `ancestor` or lies below it; both are WorkspacePaths or both absolute."""
    return not ancestor or path == ancestor or path.startswith(ancestor.rstrip(b"/") + b"/")


class Tree:
    """A directory held open, and the only ways to reach what lies below it.

    Owns its descriptor; close it or use it in `with`. Costs: each call one openat2 of the parent
    and one *at system call. Errors are OSError as the kernel gives them: ENOENT, ENOTDIR, ELOOP
    where a component is a link, EXDEV where one would leave the tree (or cross a mount if
    `one_filesystem`).
    """

    __slots__ = ("_last", "fd", "resolve")

    def __init__(self, fd: int, *, one_filesystem: bool = False) -> None:
        self.fd = fd
        self.resolve = STRICT | (RESOLVE_NO_XDEV if one_filesystem else 0)
        # The parent used last stays open: walks and plans touch a directory's children in a row.
        # It is a descriptor, so it keeps meaning the same directory even if the name moves;
        # publish steps that must not follow a moved directory call `forget()` first.
        self._last: tuple[bytes, int] | None = None

    @classmethod
    def open(
        cls, directory: str | bytes | os.PathLike[str], *, one_filesystem: bool = False
    ) -> Self:
        """The host's directory, which the caller has resolved and trusts; a final link is refused."""
        flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        return cls(os.open(directory, flags), one_filesystem=one_filesystem)

    def close(self) -> None:
        self.forget()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def forget(self) -> None:
        """Drop the cached parent, so that the next call walks from the root again."""
        if self._last is not None:
            os.close(self._last[1])
            self._last = None

    def open_at(self, path: WorkspacePath, flags: int, *, mode: int = 0) -> int:
        """A new descriptor, the caller's to close. The last component is never followed either.

        Paths of any length: one past the kernel's limit is walked in steps, each as strict.
        """
        at, rest = self.fd, path or b"."
        try:
            while len(rest) > _STEP_BYTES and (cut := rest.rfind(b"/", 0, _STEP_BYTES)) > 0:
                step = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
                below = openat2(at, rest[:cut], step, resolve=self.resolve)
                if at != self.fd:
                    os.close(at)
                at, rest = below, rest[cut + 1 :]
            return openat2(at, rest, flags | os.O_NOFOLLOW, mode=mode, resolve=self.resolve)
        finally:
            if at != self.fd:
                os.close(at)

    def parent_fd(self, path: WorkspacePath) -> int:
        """The directory that holds `path`; stays the tree's, valid until the next call."""
        directory = parent(path)
        if not directory:
            return self.fd
        if self._last is not None and self._last[0] == directory:
            return self._last[1]
        fd = self.open_at(directory, os.O_PATH | os.O_DIRECTORY)
        self.forget()
        self._last = (directory, fd)
        return fd

    def lstat(self, path: WorkspacePath) -> os.stat_result:
        if not path:
            return os.stat(self.fd)
        return os.stat(name(path), dir_fd=self.parent_fd(path), follow_symlinks=False)

    def lstat_or_none(self, path: WorkspacePath) -> os.stat_result | None:
        """None where nothing stands, also where a parent is missing, a file or a link."""
        try:
            return self.lstat(path)
        except OSError as exc:
            if exc.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return None
            raise

    def readlink(self, path: WorkspacePath) -> bytes:
        return os.readlink(name(path), dir_fd=self.parent_fd(path))

    def open_file(self, path: WorkspacePath) -> int:
        """A regular file for reading; refuses anything else without blocking on a fifo.

        Raises: OSError, EINVAL when what stands there is no regular file.
        """
        fd = self.open_at(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", path)
        return fd

    def names(self, path: WorkspacePath = ROOT) -> list[bytes]:
        """The names in a directory, sorted."""
        fd = self.open_at(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return sorted(os.fsencode(n) for n in os.listdir(fd))
        finally:
            os.close(fd)

    def walk(self, path: WorkspacePath = ROOT) -> Iterator[tuple[WorkspacePath, os.stat_result]]:
        """Everything below `path`, parents before children, siblings in byte order.

        Depth does not cost stack. A directory that vanishes or cannot be read during the walk
        raises its OSError: a scan that silently skips would show less than there is.
        """
        todo = [path]
        while todo:
            directory = todo.pop()
            fd = self.open_at(directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                with os.scandir(fd) as entries:
                    found = [
                        (join(directory, os.fsencode(e.name)), e.stat(follow_symlinks=False))
                        for e in entries
                    ]
            finally:
                os.close(fd)
            found.sort()
            below = []
            for child, st in found:
                yield child, st
                if stat.S_ISDIR(st.st_mode):
                    below.append(child)
            todo.extend(reversed(below))
