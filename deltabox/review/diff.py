"""Delta plus base → Review: which paths really differ, how, on what they build, who made them.

Reads both sides by descriptors and writes nothing. What may be committed is the plan's business.
"""

import errno
import os
import stat
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import msgspec

from deltabox.engines.delta import (
    Fingerprint,
    Merged,
    Node,
    Touched,
    foreign_xattrs,
    is_foreign_xattr,
)
from deltabox.paths import Tree, WorkspacePath, display, is_within, name, parent
from deltabox.review import gitunit, risk
from deltabox.review.digest import digest
from deltabox.review.model import Change, ChangeKind, Conflict, Review
from deltabox.review.patch import hunks_of, line_count, line_stats

# Above this a side is hashed as a stream and has no line diff: libgit2 takes about 1 s for two
# unlike sides of 8 MiB, and nobody reads such a diff.
TEXT_LIMIT_BYTES = 8 << 20
CHUNK_BYTES = 1 << 20
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
# Set-id bits never reach the project, so they are no part of what is shown as the mode.
MODE_MASK = 0o1777


class _Content(msgspec.Struct):
    """One side of a file. data: None above the limit. sha256: of the whole, filled when needed."""

    size: int
    data: bytes | None
    sha256: str | None
    xattrs: list[str]

    @property
    def is_binary(self) -> bool:
        # git's own rule: a NUL among the first 8,000 bytes.
        return self.data is not None and b"\0" in self.data[:8000]

    @property
    def lines(self) -> int | None:
        if self.data is None or self.is_binary:
            return None
        return line_count(self.data)


def build(
    merged: Merged,
    *,
    fingerprints: Mapping[WorkspacePath, Fingerprint | None],
    since_ns: int,
    drifted: Collection[WorkspacePath] = (),
    authors: Mapping[WorkspacePath, Sequence[str]] | None = None,
    ours: Mapping[WorkspacePath, Fingerprint] | None = None,
    detail: Literal["bare", "stat", "full"] = "stat",
    text_limit_bytes: int = TEXT_LIMIT_BYTES,
    is_moving: bool = False,
) -> Review:
    """Everything that taking the delta would change in the base.

    Costs reading each touched file on both sides once; untouched parts of the base cost nothing.
    Args:
        fingerprints: what the base had at first touch (None: nothing). A path that is missing here
            builds on what the base has now, unless that is newer than `since_ns`.
        since_ns: when the session began, by the clock of the base's file system.
        drifted: paths whose base was already newer than the session at first touch.
        authors: who made a path change, shown as it is. ours: what earlier commits left in the base.
        detail: `bare` leaves out line counts, which is enough to decide (same changes, same digest);
            `full` adds hunks; patch text is `review.text.patch`'s, on demand.
    Raises: OSError when a side cannot be listed; a file or directory that cannot be read becomes a
        change that is refused, with the reason.
    """
    looked = _Look(merged, text_limit_bytes, detail)
    changes: list[Change] = []
    deleted: dict[bytes, Node] = {}
    for touched in merged.changed():
        change = looked.compare(touched)
        if change is None:
            continue
        _judge_base(change, touched, fingerprints, drifted, since_ns)
        if authors is not None:
            change.by = list(authors.get(touched.path, ()))
        changes.append(change)
        if change.kind == "deleted" and change.old_type == "file" and touched.before is not None:
            deleted[change.path] = touched.before
    _refuse_unreadable(changes, merged)
    changes = looked.pair_renames(changes, deleted)
    changes, units = gitunit.gather(changes, merged, since_ns=since_ns, ours=ours or {})
    changes.sort(key=lambda c: c.path)
    _hide_directories(changes)
    return Review(digest=digest(changes), changes=changes, units=units, is_moving=is_moving)


class _Look:
    """Reads both sides of touched paths; one per review."""

    def __init__(
        self, merged: Merged, limit: int, detail: Literal["bare", "stat", "full"]
    ) -> None:
        self.merged, self.limit = merged, limit
        self.with_counts, self.with_hunks = detail != "bare", detail == "full"

    def compare(self, touched: Touched) -> Change | None:
        before, after = touched.before, touched.after
        path = touched.path
        if after is None:
            return None if before is None else self._deleted(path, before)
        change = Change(
            path=path,
            kind="added",
            type=after.kind,
            mode=None if after.kind == "symlink" else stat.S_IMODE(after.st.st_mode) & MODE_MASK,
            layer=after.layer,
            mtime_ns=after.st.st_mtime_ns,
            source=None if after.kind == "dir" else Fingerprint.of(after.st),
        )
        if before is not None:
            change.old_type = before.kind
            change.size_before = before.st.st_size if before.kind == "file" else None
            if before.kind != "symlink":
                change.old_mode = stat.S_IMODE(before.st.st_mode) & MODE_MASK
            change.kind = "type" if before.kind != after.kind else "mode"
        try:
            is_real = self._look_at(change, before, after)
        except PermissionError:
            change.refused = "cannot be read, so it cannot be shown"
            is_real = True
        self._note_set_id(change, before, after)
        return change if is_real or change.refused else None

    def _look_at(self, change: Change, before: Node | None, after: Node) -> bool:
        if after.kind == "special":
            change.refused = f"a {_special_word(after.st.st_mode)} stays out of the project"
            return True
        if after.kind == "symlink":
            change.link = after.tree.readlink(after.path)
            if before is not None and before.kind == "symlink":
                change.old_link = before.tree.readlink(before.path)
                change.kind = "modified"
                return change.link != change.old_link
            return True
        if after.kind == "dir":
            return change.kind != "mode" or change.mode != change.old_mode
        return self._look_at_file(change, before, after)

    def _look_at_file(self, change: Change, before: Node | None, after: Node) -> bool:
        path = after.path
        new = self._read(after, with_xattrs=True)
        change.size_after = new.size
        old: _Content | None = None
        if before is not None and before.kind == "file":
            old = self._read_or_none(before)
        foreign = new.xattrs
        if foreign and before is not None and before.kind == "file":
            foreign = sorted(set(foreign) - set(foreign_xattrs(before.tree, before.path)))
        if foreign:
            shown = ", ".join(display(os.fsencode(attribute)) for attribute in foreign)
            change.notes.append(f"extended attributes stay out: {shown}")
        if old is not None and self._is_equal(before, old, after, new):
            change.sha256 = new.sha256 or _sha256(new)
            change.size_before = old.size
            if change.mode == change.old_mode and foreign:
                change.refused = change.notes.pop()
            return change.mode != change.old_mode
        if before is not None and before.kind == "file":
            change.kind = "modified"
        change.sha256 = new.sha256 or _sha256(new)
        old_data = old.data if old is not None else None
        change.risk = risk.assess(path, old_data, new.data)
        change.large = new.data is None or (old is not None and old.data is None)
        change.binary = new.is_binary or (old is not None and old.is_binary)
        if self.with_counts and not change.large and not change.binary:
            if old_data is not None and new.data is not None:
                change.removed, change.added = line_stats(old_data, new.data)
            else:
                change.added, change.removed = new.lines, 0
            if self.with_hunks and new.data is not None:
                change.hunks = hunks_of(path, old_data, new.data)
        return True

    def _deleted(self, path: WorkspacePath, before: Node) -> Change:
        change = Change(path=path, kind="deleted", old_type=before.kind)
        if before.kind != "symlink":
            change.old_mode = stat.S_IMODE(before.st.st_mode) & MODE_MASK
        if before.kind == "special":
            change.refused = f"a {_special_word(before.st.st_mode)} is not deleted for you"
        elif before.kind == "symlink":
            change.old_link = before.tree.readlink(path)
        elif before.kind == "file":
            change.size_before = before.st.st_size
            content = self._read_or_none(before) if self.with_counts else None
            if content is not None:
                change.removed = content.lines
                change.added = 0
                change.binary = content.is_binary
                change.large = content.data is None
                if self.with_hunks and content.data is not None and not change.binary:
                    change.hunks = hunks_of(path, content.data, None)
        return change

    @staticmethod
    def _note_set_id(change: Change, before: Node | None, after: Node) -> None:
        new = after.st.st_mode & 0o6000
        old = before.st.st_mode & 0o6000 if before is not None else 0
        if after.kind != "file" or not (new or old):
            return
        change.notes.append("set-user-id and set-group-id bits stay out")
        if change.kind == "mode" and change.mode == change.old_mode and new != old:
            change.refused = change.notes.pop()

    def _read_or_none(self, node: Node) -> _Content | None:
        try:
            return self._read(node)
        except PermissionError:
            return None

    def _read(self, node: Node, *, with_xattrs: bool = False) -> _Content:
        # The one hot place of a review: one open, fstat, read and close for each side of a file.
        fd = os.open(name(node.path), _OPEN, dir_fd=node.tree.parent_fd(node.path))
        try:
            st = os.fstat(fd)
            if not stat.S_ISREG(st.st_mode):
                raise PermissionError(f"{display(node.path)} is no longer a regular file")
            xattrs = _foreign(fd) if with_xattrs else []
            if st.st_size > self.limit:
                hashed, size = _hash_stream(fd)
                return _Content(size, None, hashed, xattrs)
            data = _read_all(fd, st.st_size)
            return _Content(len(data), data, None, xattrs)
        finally:
            os.close(fd)

    @staticmethod
    def _is_equal(before: Node | None, old: _Content, after: Node, new: _Content) -> bool:
        if before is None or old.size != new.size:
            return False
        if old.data is not None and new.data is not None:
            return old.data == new.data
        return (old.sha256 or _sha256(old)) == (new.sha256 or _sha256(new))

    def pair_renames(self, changes: list[Change], deleted: Mapping[bytes, Node]) -> list[Change]:
        """Fold a deleted and an added file of equal, non-empty content into one rename.

        Among several equal ones the same file name wins, then the path order. Costs a hash of each
        deleted file that has the size of an added one. Paths below `.git` are left alone.
        """
        gone: dict[int, list[Change]] = {}
        for change in changes:
            is_free = change.conflict is None and gitunit.unit_of(change.path) is None
            if is_free and change.path in deleted and change.size_before:
                gone.setdefault(change.size_before, []).append(change)
        if not gone:
            return changes
        new = [
            c
            for c in changes
            if c.kind == "added" and c.type == "file" and c.size_after in gone and not c.refused
            if gitunit.unit_of(c.path) is None
        ]
        # By content and name, and by content alone; each list in path order, taken from the front.
        named: dict[tuple[str, bytes], deque[Change]] = {}
        alike: dict[str, deque[Change]] = {}
        for size in {c.size_after for c in new}:
            for old in gone[size or 0]:
                content = self._read_or_none(deleted[old.path])
                if content is not None:
                    sha256 = content.sha256 or _sha256(content)
                    named.setdefault((sha256, _last(old.path)), deque()).append(old)
                    alike.setdefault(sha256, deque()).append(old)
        used: set[bytes] = set()
        for is_same_name in (True, False):
            for change in new:
                if change.origin is not None or change.sha256 is None:
                    continue
                key = (change.sha256, _last(change.path))
                olds = named.get(key) if is_same_name else alike.get(change.sha256)
                while olds:
                    old = olds.popleft()
                    if old.path not in used:
                        used.add(old.path)
                        _fold(change, old)
                        break
        return [c for c in changes if c.path not in used]


def _fold(change: Change, old: Change) -> None:
    change.kind = "renamed"
    change.origin, change.origin_base = old.path, old.base
    change.old_type, change.old_mode, change.size_before = (
        old.old_type,
        old.old_mode,
        old.size_before,
    )
    change.hunks = []
    if not change.binary and not change.large:
        change.added = change.removed = 0
    change.by = sorted({*change.by, *old.by}, key=[*change.by, *old.by].index)


def _last(path: bytes) -> bytes:
    return path.rpartition(b"/")[2]


def _judge_base(
    change: Change,
    touched: Touched,
    fingerprints: Mapping[WorkspacePath, Fingerprint | None],
    drifted: Collection[WorkspacePath],
    since_ns: int,
) -> None:
    """Fill in what the change builds on, and the conflict when the project is no longer that."""
    path, before = touched.path, touched.before
    now = None if before is None else Fingerprint.of(before.st)
    project: str | None = None
    if path in fingerprints:
        known = change.base = fingerprints[path]
        if path in drifted:
            project = (
                "was deleted in the project while the agent's view may have shown it"
                if now is None and known is None
                else "was changed in the project before the agent first touched it"
            )
        elif known is None:
            project = None if now is None else f"the project now has a {_word(now)} there"
        elif now is None:
            project = f"the project no longer has the {_word(known)}"
        elif not now.same_as(known):
            project = _what_changed(known, now)
    else:
        change.base = now
        # A directory's ctime moves with its children, which are judged one by one.
        if now is not None and now.type != "dir" and now.ctime_ns > since_ns:
            project = "was changed in the project since the session began"
    if project is not None:
        change.conflict = Conflict(path, _agent_words(change), project)


def _what_changed(known: Fingerprint, now: Fingerprint) -> str:
    if known.type != now.type:
        return f"the {_word(known)} became a {_word(now)} in the project"
    if known.type == "dir" or (known.size, known.mtime_ns, known.ino) == (
        now.size,
        now.mtime_ns,
        now.ino,
    ):
        return "its mode or owner was changed in the project"
    return f"was changed in the project ({known.size} → {now.size} bytes)"


def _word(fingerprint: Fingerprint) -> str:
    return {"file": "file", "dir": "directory", "symlink": "link", "special": "special file"}[
        fingerprint.type
    ]


def _agent_words(change: Change) -> str:
    words: dict[ChangeKind, str] = {
        "added": "added it",
        "modified": "modified it",
        "deleted": "deleted it",
        "renamed": "renamed it",
        "mode": "changed its mode",
        "type": f"made it a {change.type}",
    }
    sizes = ""
    if change.size_before is not None and change.size_after is not None:
        sizes = f" ({change.size_before} → {change.size_after} bytes)"
    return words[change.kind] + sizes


def _refuse_unreadable(changes: list[Change], merged: Merged) -> None:
    for path in merged.unreadable:
        change = next((c for c in changes if c.path == path), None)
        if change is None:
            change = Change(path=path, kind="mode", type="dir", old_type="dir")
            changes.append(change)
        change.refused = "the directory cannot be read, so what is in it cannot be shown"


def _hide_directories(changes: Sequence[Change]) -> None:
    """Directories that come or go with shown contents are spoken for by these."""
    speaking = set()
    for change in changes:
        at = WorkspacePath(change.path)
        while at and (at := parent(at)) not in speaking:
            speaking.add(at)
        if change.origin is not None:
            at = WorkspacePath(change.origin)
            while at and (at := parent(at)) not in speaking:
                speaking.add(at)
    for change in changes:
        kinds = (change.kind, change.type or change.old_type)
        if kinds in (("added", "dir"), ("deleted", "dir")) and change.path in speaking:
            change.is_shown = change.conflict is not None or change.refused is not None


def open_regular(tree: Tree, path: WorkspacePath) -> int:
    """Tree.open_file without a second walk: one openat below the remembered parent."""
    fd = os.open(name(path), _OPEN, dir_fd=tree.parent_fd(path))
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise PermissionError(f"{display(path)} is no longer a regular file")
    return fd


def _foreign(fd: int) -> list[str]:
    try:
        return [a for a in os.listxattr(fd) if is_foreign_xattr(a)]
    except OSError as exc:
        if exc.errno == errno.EOPNOTSUPP:
            return []
        raise


def _read_all(fd: int, size: int) -> bytes:
    # One byte more than promised tells whether the file grew; then the rest is read as well.
    data = os.read(fd, size + 1)
    if len(data) == size:
        return data
    parts = [data]
    while part := os.read(fd, CHUNK_BYTES):
        parts.append(part)
    return b"".join(parts)


def _hash_stream(fd: int) -> tuple[str, int]:
    import hashlib

    state, size = hashlib.sha256(), 0
    while part := os.read(fd, CHUNK_BYTES):
        state.update(part)
        size += len(part)
    return state.hexdigest(), size


def _sha256(content: _Content) -> str:
    import hashlib

    content.sha256 = hashlib.sha256(content.data or b"").hexdigest()
    return content.sha256


def _special_word(mode: int) -> str:
    if stat.S_ISFIFO(mode):
        return "fifo"
    return "socket" if stat.S_ISSOCK(mode) else "device"


def selects(selection: Collection[bytes] | None, change: Change) -> bool:
    """True when the selection names the change, its origin, or a directory above either."""
    if selection is None:
        return True
    paths: list[Any] = [change.path]
    if change.origin is not None:
        paths.append(change.origin)
    return any(is_within(p, chosen) for p in paths for chosen in selection)
