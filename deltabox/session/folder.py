"""Where a session keeps its things on disk, and the lock that says who owns it.

<state>/sessions/<id>/lock     held by the owner for its life (fcntl, by open file); pid inside, for people
                     /upper    the top layer; written only by the mount while one stands
                     /upper.new, /scrap   of a restore under way
                     /work     overlay's own
                     /layers/  frozen layers
                     /mask     what hides denied paths, the topmost lower layer
                     /home     the private home           /grafts/  uppers of cow passes
                     /common/  copies of base files as the agent first found them
"""

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deltabox.engines.delta import remove_layers
from deltabox.errors import Failed, SessionBusy


@dataclass(frozen=True, slots=True)
class Folder:
    root: Path

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def upper(self) -> Path:
        return self.root / "upper"

    @property
    def fresh_upper(self) -> Path:
        """An upper in the making; it takes the other's place by one rename."""
        return self.root / "upper.new"

    @property
    def scrap(self) -> Path:
        """What a restore of paths pushed aside, until it is done."""
        return self.root / "scrap"

    @property
    def work(self) -> Path:
        return self.root / "work"

    @property
    def layers(self) -> Path:
        return self.root / "layers"

    @property
    def mask(self) -> Path:
        return self.root / "mask"

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def grafts(self) -> Path:
        return self.root / "grafts"

    @property
    def common(self) -> Path:
        return self.root / "common"

    def create(self, owner: tuple[int, int]) -> None:
        """Make the folder; upper and work come with the first mount. `owner` gets the home."""
        make_private(self.root, owner)
        for folder in (self.layers, self.common, self.grafts):
            make_private(folder, owner)
        make_private(self.home, owner)

    def remove(self) -> None:
        """Delete everything; also what an agent made unreadable or overlay left with mode 000."""
        remove_tree(self.root)


def make_private(folder: Path, owner: tuple[int, int]) -> None:
    """mkdir -p with mode 0700 for the last part, owned by `owner` when we are root."""
    missing = [folder]
    while not missing[-1].parent.is_dir():
        missing.append(missing[-1].parent)
    for part in reversed(missing):
        try:
            part.mkdir(mode=0o700)
        except FileExistsError:
            continue
        if os.geteuid() == 0 and owner != (0, 0):
            os.chown(part, *owner)


def remove_tree(folder: Path) -> None:
    """rm -rf of any depth and mode; never follows a link. Raises: Failed naming what stayed."""
    try:
        remove_layers(folder)
    except OSError as exc:
        raise Failed(f"{folder} could not be removed ({exc}); remove it by hand.") from exc


def owner_of(lock: Path) -> str:
    """Who the lock file says holds it, for a sentence."""
    try:
        text = lock.read_text().strip()
    except OSError:
        text = ""
    return f"process {text}" if text else "another process"


# struct flock on 64-bit Linux: type, whence, start, length, pid (0 for this kind of lock).
_FLOCK = struct.Struct("hhqqi4x")


def _try_lock(fd: int) -> bool:
    """Lock the open file (not the process: one coordinator has many sessions, and a second opening
    of the file in the same process must neither succeed nor, when closed, free the first)."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError as exc:
        if exc.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


@contextmanager
def locked(lock: Path, *, what: str) -> Iterator[None]:
    """Hold a lock on `lock` for the context; gone with the process, however it ends.

    Not inherited by programs we start; excludes other tasks and threads of this process too.
    Raises: SessionBusy naming the holder, or saying that the last one has just removed it all.
    """
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if os.geteuid() == 0:  # under sudo: the user must be able to lock it without
            above = os.stat(lock.parent)
            os.fchown(fd, above.st_uid, above.st_gid)
        if not _try_lock(fd):
            raise SessionBusy(
                f"{what} is in use by {owner_of(lock)}; wait for it or work through it."
            )
        if not _is_at(fd, lock):
            raise SessionBusy(f"{what} has just been ended by another process; look again.")
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)


def _is_at(fd: int, path: Path) -> bool:
    """Whether the open file still has that name; a lock on a removed file excludes nobody."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def is_locked(lock: Path) -> bool:
    """True while anybody, this process included, holds the lock."""
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        # Asked, not tried: a lock taken for a moment would make somebody else's start fail.
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, 0, 0, 0))
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
    finally:
        os.close(fd)


def process_start(pid: int) -> int | None:
    """When a process started, in clock ticks since boot: with the pid a name that is never reused."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
