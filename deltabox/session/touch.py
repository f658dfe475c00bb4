"""First touches: which paths changed in the upper layer, and what the base was at that moment.

The upper directories are watched from outside the view by inotify; the mount writes them, and each
copy-up, whiteout and new name is an event. So a session learns what a command changed at a cost
that grows with the changes, and takes each base file's fingerprint within milliseconds of the
agent's first change to it. A scan is the backstop: of each directory that appears (its first
children may precede the watch), of everything on queue overflow, and of a delta from an earlier run.

Watches only; it never writes the upper, and decides nothing. Not safe for two threads.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import cast

from deltabox.engines.delta import Fingerprint, Kind
from deltabox.paths import ROOT, Tree, WorkspacePath, is_within, join, parent
from deltabox.review import gitunit
from deltabox.store import Touch

_MODIFY = 0x2
_ATTRIB = 0x4
_CLOSE_WRITE = 0x8
_MOVED_FROM = 0x40
_MOVED_TO = 0x80
_CREATE = 0x100
_DELETE = 0x200
_Q_OVERFLOW = 0x4000
_IGNORED = 0x8000
_ONLYDIR = 0x01000000
_ISDIR = 0x40000000
_MASK = _MODIFY | _ATTRIB | _CLOSE_WRITE | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _ONLYDIR
_EVENT = struct.Struct("iIII")
_BUFFER = 256 * 1024

ABSENT = "-"  # the type of a touch where the base had nothing

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True)
class Seen:
    """What one `drain` brought: every path with an event, and the fingerprints taken first."""

    paths: set[WorkspacePath] = field(default_factory=set)
    first: list[Touch] = field(default_factory=list)


class TouchWatcher:
    """Watches one upper directory for the life of a mount; owns `upper` and closes it.

    since_ns: a base path whose ctime is later than this when first touched counts as drifted: its
    user changed it after the agent's view began, and nobody can tell which content the agent saw.
    known: paths that have a fingerprint already.
    """

    def __init__(
        self, upper: Tree, base: Tree, *, since_ns: int, known: Iterable[bytes] = ()
    ) -> None:
        self._upper = upper
        self._base = base
        self._since_ns = since_ns
        self._known: set[bytes] = set(known)
        self._path_of: dict[int, WorkspacePath] = {}
        self._moves: dict[int, WorkspacePath] = {}
        self._missed = False
        self._tracked: frozenset[bytes] | None = None
        self._shut: set[WorkspacePath] = set()
        self.fd = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"inotify_init1: {os.strerror(code)}")
        self._start = Seen()
        try:
            self._watch_below(ROOT, self._start)
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        self._upper.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def forget(self, paths: Iterable[bytes]) -> None:
        """These were decided; their next change is a first touch again."""
        self._known.difference_update(paths)

    def restart(self, upper: Tree) -> None:
        """Watch another upper after a restack; what is known stays, what was not drained yet too."""
        self._start = self.drain()
        for wd in self._path_of:
            _libc.inotify_rm_watch(self.fd, ctypes.c_int(wd))
        self._path_of.clear()
        self._moves.clear()
        self._shut.clear()
        self._upper.close()
        self._upper = upper
        self._watch_below(ROOT, self._start)

    def drain(self) -> Seen:
        """All events so far; returns at once. Complete for everything that ended before the call,

        since the kernel queues an event before the system call that caused it returns.
        """
        seen, self._start = self._start, Seen()
        while True:
            try:
                data = os.read(self.fd, _BUFFER)
            except BlockingIOError:
                break
            self._take(data, seen)
        if self._missed:
            # The queue overflowed: what it lost is found by a walk, also directories unwatched.
            self._missed = False
            self._path_of.clear()
            self._moves.clear()
            self._watch_below(ROOT, seen)
        return seen

    def _take(self, data: bytes, seen: Seen) -> None:
        at = 0
        while at < len(data):
            wd, mask, cookie, length = _EVENT.unpack_from(data, at)
            name = data[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0")
            at += _EVENT.size + length
            if mask & _Q_OVERFLOW:
                self._missed = True
                continue
            if mask & _IGNORED:
                self._path_of.pop(wd, None)
                continue
            directory = self._path_of.get(wd)
            if directory is None:
                continue
            if not name:
                if directory and mask & _ATTRIB:
                    self._see(directory, seen)
                continue
            path = join(directory, name)
            self._see(path, seen)
            if not mask & _ISDIR:
                continue
            if mask & _MOVED_FROM:
                self._moves[cookie] = path
            elif mask & _MOVED_TO and (old := self._moves.pop(cookie, None)) is not None:
                self._rename_watches(old, path)
                self._watch_below(path, seen)
            elif mask & (_CREATE | _MOVED_TO) or path in self._shut:
                self._watch_below(path, seen)

    def _rename_watches(self, old: WorkspacePath, new: WorkspacePath) -> None:
        for wd, path in list(self._path_of.items()):
            if is_within(path, old):
                self._path_of[wd] = WorkspacePath(new + path[len(old) :])

    def _watch_below(self, path: WorkspacePath, seen: Seen) -> None:
        """Watch `path` and every directory below it, and see all that is there already.

        The watch comes before the listing, so that nothing made in between is missed. What has
        vanished or is no directory any more has an event of its own.
        """
        todo = [path]
        while todo:
            directory = todo.pop()
            try:
                fd = self._upper.open_at(directory, os.O_RDONLY | os.O_DIRECTORY)
            except PermissionError:
                # The agent took our rights to it away; when it gives them back, that is an event.
                self._shut.add(directory)
                self._missed |= not directory  # nothing reports on the root but itself
                continue
            except OSError as exc:
                if exc.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                    continue
                raise
            self._shut.discard(directory)
            try:
                self._watch(fd, directory)
                with os.scandir(fd) as entries:
                    for entry in entries:
                        child = join(directory, os.fsencode(entry.name))
                        self._see(child, seen)
                        if entry.is_dir(follow_symlinks=False):
                            todo.append(child)
            finally:
                os.close(fd)

    def _watch(self, fd: int, path: WorkspacePath) -> None:
        # By descriptor: the names on the way are the agent's and may be links by now.
        wd = _libc.inotify_add_watch(self.fd, b"/proc/self/fd/%d" % fd, ctypes.c_uint32(_MASK))
        if wd >= 0:
            self._path_of[wd] = path
            return
        code = ctypes.get_errno()
        if code == errno.ENOSPC:
            # The user's watch limit (fs.inotify.max_user_watches): fall back to walks.
            self._missed = True
            return
        raise OSError(code, f"inotify_add_watch: {os.strerror(code)}", path)

    def _see(self, path: WorkspacePath, seen: Seen) -> None:
        seen.paths.add(path)
        if path not in self._known:
            self._known.add(path)
            touch = fingerprint(self._base, path, since_ns=self._since_ns)
            if touch.type == ABSENT and self._has_gone(path):
                touch = replace(touch, drifted=True)
            seen.first.append(touch)

    def _has_gone(self, path: WorkspacePath) -> bool:
        """Whether the user has deleted `path` since the view began: git knows it, and its folder has

        changed since. The view may have shown the agent the old file all the same, so what looks
        like a new file is one that the user wanted gone. What git does not know passes as new.
        """
        folder = self._base.lstat_or_none(parent(path))
        if folder is None or folder.st_mtime_ns <= self._since_ns:
            return False
        if self._tracked is None:
            self._tracked = tracked(self._base)
        return path in self._tracked


def fingerprint(base: Tree, path: WorkspacePath, *, since_ns: int) -> Touch:
    """What stands in the base at `path` now. About 6 µs.

    Where the user has taken our rights to look away meanwhile, it counts as drifted.
    """
    try:
        st = base.lstat_or_none(path)
    except PermissionError:
        return Touch(path, ABSENT, 0, 0, 0, 0, 0, drifted=True, common=None)
    if st is None:
        return Touch(path, ABSENT, 0, 0, 0, 0, 0, drifted=False, common=None)
    now = Fingerprint.of(st)
    drifted = now.ctime_ns > since_ns and now.type != "dir"
    return Touch(
        path, now.type, now.ino, now.size, now.mtime_ns, now.ctime_ns, now.mode, drifted, None
    )


def tracked(base: Tree) -> frozenset[bytes]:
    """The paths in the index of the project's own git; none where there is none to read."""
    try:
        fd = base.open_file(WorkspacePath(b".git/index"))
    except OSError:
        return frozenset()
    with os.fdopen(fd, "rb") as file:
        entries = gitunit.parse_index(file.read(gitunit.INDEX_LIMIT_BYTES))
    return frozenset(entry[0] for entry in entries or ())


def recorded(touch: Touch) -> Fingerprint | None:
    """The fingerprint that a stored touch holds; None where nothing stood."""
    if touch.type == ABSENT:
        return None
    kind = cast(Kind, touch.type)
    return Fingerprint(kind, touch.ino, touch.size, touch.mtime_ns, touch.ctime_ns, touch.mode)
