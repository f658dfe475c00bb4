"""What one stream of a command printed: its beginning in memory, all of it in a spill file past that.

Bounded in memory and on disk. Must not know who reads it.
"""

import os
from dataclasses import dataclass
from pathlib import Path

# A command in a loop fills the disk at some hundred MB a second; nobody reads a log past this.
MAX_SPILL_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Captured:
    """head: the first bytes, up to the limit. total: how much was printed. truncated: head is not
    all. spill: the file that has it (up to MAX_SPILL_BYTES), where one was made."""

    head: bytes
    total: int
    truncated: bool
    spill: Path | None


class Capture:
    """Collects one stream. limit_bytes 0 only counts; spill None keeps nothing past the limit."""

    def __init__(self, limit_bytes: int, spill: Path | None) -> None:
        self._limit = limit_bytes
        self._path = spill
        self._parts: list[bytes] = []
        self._kept = 0
        self._total = 0
        self._file = -1
        self._failed = False

    def add(self, chunk: bytes) -> None:
        self._total += len(chunk)
        room = self._limit - self._kept
        if room > 0:
            part = chunk[:room]
            self._parts.append(part)
            self._kept += len(part)
        if self._limit and self._total > self._limit:
            self._overflow(chunk)

    def _overflow(self, chunk: bytes) -> None:
        """Past the limit: the file gets what came before too, so that it is whole."""
        if self._path is None or self._failed or self._total > MAX_SPILL_BYTES:
            return
        try:
            if self._file < 0:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
                self._file = os.open(self._path, flags, 0o600)
                before = self._total - len(chunk)
                chunk = b"".join(self._parts)[:before] + chunk
            view = memoryview(chunk)
            while view:
                view = view[os.write(self._file, view) :]
        except OSError:
            # A full disk: the reply says `truncated`, and the command goes on.
            self._failed = True

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def result(self) -> Captured:
        made = self._path if self._path is not None and self._path.exists() else None
        truncated = bool(self._limit) and self._total > self._limit
        return Captured(b"".join(self._parts), self._total, truncated, made if truncated else None)
