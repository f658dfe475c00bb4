"""What happened below a `.git` directory, as one unit: what counts, in which order, in which words.

Reads the base's and the view's git files by its own parsers; never runs git, never writes.
"""

import hashlib
from collections.abc import Mapping, Sequence

from deltabox.engines.delta import Fingerprint, Merged
from deltabox.paths import Tree, WorkspacePath, display, is_within, join, name, parent
from deltabox.review.model import Change, Conflict, GitUnit

INDEX_LIMIT_BYTES = 256 << 20  # an index of two million entries; more is not one

# Publish order: whatever is pointed at comes before what points. A pack is seen by its .idx.
_RANKS = {"pack": 1, "object": 2, "idx": 3, "other": 4, "log": 5, "ref": 6, "head": 7, "index": 8}


def unit_of(path: bytes) -> WorkspacePath | None:
    """The `.git` directory that `path` is or lies below; the outermost when they nest."""
    if b".git" not in path:
        return None
    parts = path.split(b"/")
    if b".git" not in parts:
        return None
    return WorkspacePath(b"/".join(parts[: parts.index(b".git") + 1]))


def category(path: bytes) -> str:
    """One of `_RANKS`' keys for a path below a `.git` directory."""
    parts = path.split(b"/")
    inside = parts[parts.index(b".git") + 1 :]
    # Submodules and worktrees keep whole git directories further down.
    while len(inside) > 2 and inside[0] in (b"modules", b"worktrees"):
        inside = inside[2:]
    first, last = (inside[0], inside[-1]) if inside else (b"", b"")
    if first == b"objects":
        if last.endswith(b".pack"):
            return "pack"
        return "idx" if b"pack" in inside and last.endswith((b".idx", b".midx")) else "object"
    if first == b"logs":
        return "log"
    if first in (b"refs", b"packed-refs"):
        return "ref"
    if last == b"index":
        return "index"
    return "head" if last.endswith(b"HEAD") else "other"


def rank(path: bytes, is_dir: bool) -> int:
    """Sort key of publish steps: directories first, the working tree next, then git's own order."""
    if is_dir:
        return -1
    return 0 if unit_of(path) is None else _RANKS[category(path)]


def gather(
    changes: Sequence[Change],
    merged: Merged,
    *,
    since_ns: int,
    ours: Mapping[WorkspacePath, Fingerprint],
) -> tuple[list[Change], list[GitUnit]]:
    """Group the changes below each `.git` directory into one unit.

    Never part of a unit: `*.lock` files, deletions of objects, an index whose entries and HEAD are
    the same (git rewrites its stat data at every status). ours: what earlier commits of this session
    left in the base, so that they do not count as the user's. Costs a walk of the base's `.git` for
    each unit with changes. Raises: OSError.
    """
    kept: list[Change] = []
    groups: dict[WorkspacePath, list[Change]] = {}
    for change in changes:
        prefix = unit_of(change.path)
        if prefix is None or (
            change.path == prefix and "dir" not in (change.type, change.old_type)
        ):
            kept.append(change)
        else:
            groups.setdefault(prefix, []).append(change)
    units = []
    for prefix, found in sorted(groups.items()):
        members = _members(prefix, found, merged)
        if not members:
            continue
        for change in members:
            change.unit = prefix
            change.is_shown = False
        kept += members
        units.append(_unit(prefix, members, merged, since_ns, ours))
    return kept, units


def _members(prefix: WorkspacePath, found: list[Change], merged: Merged) -> list[Change]:
    by_path = {c.path: c for c in found}
    whole = by_path.get(prefix)
    if whole is not None and whole.kind == "deleted":
        return found
    if whole is not None and whole.kind == "added":
        return [c for c in found if not c.path.endswith(b".lock")]
    members = [
        c
        for c in found
        if not c.path.endswith(b".lock")
        and not (c.kind == "deleted" and b"/objects/" in c.path[len(prefix) :])
    ]
    head = join(prefix, b"HEAD")
    index = by_path.get(join(prefix, b"index"))
    if index is not None and index.kind == "modified" and head not in by_path:
        at = WorkspacePath(index.path)
        old = _index_entries(merged.base, at)
        node = merged.lookup(at)
        new = None if node is None else _index_entries(node.tree, at)
        if old is not None and old == new:
            members.remove(index)
    return members


def _unit(
    prefix: WorkspacePath,
    members: list[Change],
    merged: Merged,
    since_ns: int,
    ours: Mapping[WorkspacePath, Fingerprint],
) -> GitUnit:
    own = next((c for c in members if c.path == prefix), None)
    kind = own.kind if own is not None and own.kind in ("added", "deleted") else "modified"
    risks = [c.risk for c in members if c.risk is not None]
    risks.sort(key=lambda r: ("refused", "warned", "noted").index(r.tier))
    files = [c for c in members if "dir" not in (c.type, c.old_type)]
    words = _words(prefix, files)
    conflict = None
    if kind != "added":
        moved = moved_since(merged.base, prefix, since_ns, ours)
        touched = next((c.conflict for c in members if c.conflict is not None), None)
        if moved or touched is not None:
            what = ", ".join(display(p[len(prefix) + 1 :]) for p in moved[:3]) or "the same files"
            conflict = Conflict(
                prefix, f"changed {'; '.join(words)}", f"git moved meanwhile: {what}"
            )
    elif own is not None and own.conflict is not None:
        conflict = own.conflict
    return GitUnit(
        path=prefix,
        kind="added" if kind == "added" else "deleted" if kind == "deleted" else "modified",
        count=len(files) or len(members),
        words=words,
        conflict=conflict,
        risk=risks[0] if risks else None,
    )


def _words(prefix: WorkspacePath, files: Sequence[Change]) -> list[str]:
    """The unit for a person: refs by name, the rest counted."""
    counts: dict[str, int] = {}
    words = []
    for change in files:
        what = category(change.path)
        inside = change.path[len(prefix) + 1 :]
        if what in ("ref", "head", "other") and not inside.startswith(b"hooks/"):
            verb = {"added": "new", "deleted": "deleted"}.get(change.kind, "changed")
            words.append(f"{verb} {display(inside)}")
        else:
            what = "hook" if inside.startswith(b"hooks/") else what
            what = "object" if what in ("pack", "idx") else what
            counts[what] = counts.get(what, 0) + 1
    if len(words) > 6:
        words = [*words[:5], f"{len(words) - 5} more"]
    plain = {"object": "object file", "log": "log", "hook": "hook"}
    for what, count in counts.items():
        if what == "index":
            words.append("staged files")
        else:
            words.append(f"{count} {plain[what]}{'s' if count != 1 else ''}")
    return words


def moved_since(
    base: Tree,
    prefix: WorkspacePath,
    since_ns: int,
    ours: Mapping[WorkspacePath, Fingerprint],
) -> list[WorkspacePath]:
    """What somebody else changed below the base's `.git` since then; a `*.lock` is git at work.

    A directory counts below refs/ only, where it shows a deletion: everywhere else git makes and
    removes temporary files all the time.
    """
    if (st := base.lstat_or_none(prefix)) is None or Fingerprint.of(st).type != "dir":
        return [prefix]
    our_dirs = {parent(p) for p in ours}
    moved = []
    for path, st in base.walk(prefix):
        if st.st_ctime_ns <= since_ns:
            continue
        now = Fingerprint.of(st)
        if now.type == "dir":
            if is_within(path, join(prefix, b"refs")) and path not in our_dirs:
                moved.append(path)
        elif not now.same_as(ours.get(path)):
            moved.append(path)
    return moved


def _index_entries(tree: Tree, path: WorkspacePath) -> list[tuple[bytes, int, bytes, int]] | None:
    import os

    try:
        fd = tree.open_file(path)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as file:
        data = file.read(INDEX_LIMIT_BYTES)
    return parse_index(data)


def index_digest(tree: Tree, path: WorkspacePath) -> str | None:
    """SHA-256 over the entries of the git index at `path`; None when it is no index, or none we read.

    Equal before and after git only refreshed its stat data, which every `git status` may do.
    """
    if category(path) != "index":
        return None
    entries = _index_entries(tree, path)
    return None if entries is None else hashlib.sha256(repr(entries).encode()).hexdigest()


def parse_index(data: bytes) -> list[tuple[bytes, int, bytes, int]] | None:
    """(path, mode, id, flags) of each entry of a git index, version 2, 3 or 4; None if it is none.

    flags: stage, assume-valid, skip-worktree and intent-to-add, without the name's length. SHA-1
    repositories only: an index of SHA-256 ids does not parse and then counts as changed.
    Source: gitformat-index(5).
    """
    if len(data) < 32 or data[:4] != b"DIRC":
        return None
    version = int.from_bytes(data[4:8], "big")
    count = int.from_bytes(data[8:12], "big")
    if version not in (2, 3, 4):
        return None
    entries = []
    at, previous = 12, b""
    try:
        for _ in range(count):
            start = at
            mode = int.from_bytes(data[at + 24 : at + 28], "big")
            oid = data[at + 40 : at + 60]
            flags = int.from_bytes(data[at + 60 : at + 62], "big")
            at += 62
            extended = 0
            if flags & 0x4000:
                extended = int.from_bytes(data[at : at + 2], "big")
                at += 2
            if version == 4:
                strip, at = _varint(data, at)
                end = data.index(b"\0", at)
                previous = previous[: len(previous) - strip] + data[at:end]
                at = end + 1
                entry = previous
            else:
                end = data.index(b"\0", at)
                entry = data[at:end]
                at = start + ((end - start) // 8 + 1) * 8
            entries.append((entry, mode, oid, (flags & 0xF000) << 16 | extended))
    except (ValueError, IndexError):
        return None
    return entries


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The offset encoding of packs: each further group adds one before it shifts."""
    value = data[at] & 0x7F
    while data[at] & 0x80:
        at += 1
        value = ((value + 1) << 7) | (data[at] & 0x7F)
    return value, at + 1


def is_hook(path: bytes) -> bool:
    return b"/hooks/" in path and not name(WorkspacePath(path)).endswith(b".sample")
