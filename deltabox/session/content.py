"""What a file holds, whole or in windows, and the version that names it. Reads open descriptors only.

Version of a file: a hash of its content up to HASH_BYTES, so that it survives copy-up, commit and
chmod, and two writes within one clock tick still differ; above, size and times (which at worst say
stale for a file that is not). Of a link: a hash of its target. Of a directory: its times.
"""

import hashlib
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass

from deltabox.errors import TooLarge
from deltabox.paths import display

MIB = 1 << 20
HASH_BYTES = MIB  # read and hashed in about a millisecond
MAX_BYTES = 8 * MIB  # one message; base64 makes 11 MiB of it, and a line holds 16
CHUNK = MIB


@dataclass(slots=True)
class Content:
    """Bytes of a file. size: the whole file's. at: where `data` begins. eof: nothing follows it.

    first_line, lines: of a window of lines, counted from 1.
    """

    data: bytes
    size: int
    mode: int
    version: str
    at: int = 0
    eof: bool = True
    first_line: int | None = None
    lines: int | None = None


def hashed(data: bytes) -> str:
    return "h" + hashlib.blake2b(data, digest_size=16).hexdigest()


def version_by_times(st: os.stat_result) -> str:
    return f"s{st.st_size:x}.{st.st_mtime_ns:x}.{st.st_ctime_ns:x}"


def too_large(path: bytes, size: int, limit: int) -> TooLarge:
    return TooLarge(
        f"{display(path)} has {size} bytes, more than the {limit} of one message; "
        "read it in windows with fs.readRange.",
        size=size,
        limit=limit,
        use="fs.readRange",
    )


def read_whole(fd: int, path: bytes, limit: int) -> Content:
    """An open regular file's content and version. Raises: TooLarge."""
    st = os.fstat(fd)
    if st.st_size > limit:
        raise too_large(path, st.st_size, limit)
    data = read_all(fd, limit + 1, guess=st.st_size)
    if len(data) > limit:  # it grew, or is of a kind that tells no size
        raise too_large(path, len(data), limit)
    return Content(data, len(data), stat.S_IMODE(st.st_mode), _version_read(fd, st, data))


def read_bytes(fd: int, offset: int, length: int) -> Content:
    """A window of bytes; empty past the end. The version is the whole file's."""
    st = os.fstat(fd)
    if st.st_size <= HASH_BYTES:
        whole = read_all(fd, HASH_BYTES + 1, guess=st.st_size)
        window = whole[offset : offset + length]
        version, size = _version_read(fd, st, whole), len(whole)
    else:
        window, version, size = _pread(fd, offset, length), version_by_times(st), st.st_size
    mode = stat.S_IMODE(st.st_mode)
    eof = offset + len(window) >= size
    return Content(window, size, mode, version, at=offset, eof=eof)


def read_lines(
    fd: int, first: int, count: int, limit: int, *, check: Callable[[], None] = lambda: None
) -> Content:
    """`count` lines from line `first` on, with their ends as they are; at most `limit` bytes.

    Costs the reading up to the window. check: called between chunks; may raise to give up.
    """
    st = os.fstat(fd)
    line, at, offset = 1, 0, 0
    kept = bytearray()
    begins = 0 if first <= 1 else None
    digest = hashlib.blake2b(digest_size=16) if st.st_size <= HASH_BYTES else None
    last_was_cut = False
    while chunk := os.pread(fd, CHUNK, offset):
        check()
        if digest is not None:
            digest.update(chunk)
        start = 0
        if begins is None:
            start, line = _skip_lines(chunk, line, first)
            if start < 0:
                offset += len(chunk)
                continue
            begins = offset + start
        offset += len(chunk)
        kept += chunk[start:]
        if len(kept) > limit or kept.count(b"\n") >= count:
            last_was_cut = True
            break
    if digest is not None:
        while chunk := os.pread(fd, CHUNK, offset):
            digest.update(chunk)
            offset += len(chunk)
            last_was_cut = True
    at = st.st_size if begins is None else begins
    data = _first_lines(bytes(kept), count, limit)
    version = version_by_times(st) if digest is None else "h" + digest.hexdigest()
    ended = (not last_was_cut and len(data) == len(kept)) or at + len(data) >= st.st_size
    lines = data.count(b"\n") + (not data.endswith(b"\n") and bool(data))
    return Content(
        data,
        st.st_size,
        stat.S_IMODE(st.st_mode),
        version,
        at=at,
        eof=ended,
        first_line=first,
        lines=lines,
    )


def _skip_lines(chunk: bytes, line: int, first: int) -> tuple[int, int]:
    """Where line `first` begins in the chunk that starts in line `line`, or -1; and the line then."""
    missing = first - line
    here = chunk.count(b"\n")
    if here < missing:
        return -1, line + here
    at = -1
    for _ in range(missing):
        at = chunk.index(b"\n", at + 1)
    return at + 1, first


def _first_lines(data: bytes, count: int, limit: int) -> bytes:
    end = -1
    for _ in range(count):
        found = data.find(b"\n", end + 1)
        if found < 0:
            end = len(data) - 1
            break
        end = found
    return data[: min(end + 1, limit)]


def _version_read(fd: int, before: os.stat_result, data: bytes) -> str:
    if len(data) <= HASH_BYTES:
        return hashed(data)
    after = os.fstat(fd)
    # A file that grew while it was read has a version that nothing will match.
    return version_by_times(before if before.st_mtime_ns == after.st_mtime_ns else after)


def read_all(fd: int, limit: int, *, guess: int = 0) -> bytes:
    first = os.read(fd, min(guess + 1, limit) if guess else min(limit, 1 << 16))
    if guess and len(first) == guess:
        return first  # one more byte was asked for, so this was the end
    parts, size = [first], len(first)
    while size < limit and (more := os.read(fd, min(CHUNK, limit - size))):
        parts.append(more)
        size += len(more)
    return b"".join(parts)


def _pread(fd: int, offset: int, length: int) -> bytes:
    parts = []
    while length > 0 and (data := os.pread(fd, min(length, CHUNK), offset)):
        parts.append(data)
        offset += len(data)
        length -= len(data)
    return b"".join(parts)
