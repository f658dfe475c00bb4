"""A review as text: exact patches for git, safe lines for a person, the JSON of `diff --json`.

Reads contents on demand and keeps none. Never prints and never colours.
"""

import base64
import hashlib
import os
import zlib
from collections.abc import Iterator
from typing import Any

import msgspec

from deltabox.engines.delta import Merged
from deltabox.paths import Tree, WorkspacePath, display
from deltabox.review.model import Change, Review
from deltabox.review.patch import make

_LETTERS = {
    "added": "A",
    "modified": "M",
    "deleted": "D",
    "renamed": "R",
    "mode": "m",
    "type": "T",
}


def patch(merged: Merged, change: Change) -> bytes:
    """The change as `git apply` takes it, bytes as they are; b"" for what git cannot say (folders,
    modes other than the executable bit). Costs reading both sides."""
    old = _side(merged.base, change.origin or change.path, change.old_type, change.old_mode)
    new = None
    if change.kind != "deleted" and not change.refused:
        tree = merged.base if change.layer < 0 else merged.layers[change.layer]
        new = _side(tree, change.path, change.type, change.mode)
    if old is not None and new is not None and old[0][:3] != new[0][:3]:
        return _one(change.path, None, old, None) + _one(change.path, None, None, new)
    return _one(change.path, change.origin, old, new)


def patches(merged: Merged, review: Review) -> Iterator[bytes]:
    """Every change outside `.git`, deletions first."""
    for change in review.shown():
        if text := patch(merged, change):
            yield text


def _side(
    tree: Tree, path: bytes, kind: str | None, mode: int | None
) -> tuple[bytes, bytes] | None:
    """(git mode, content) of a file or link, None for everything else."""
    at = WorkspacePath(path)
    if kind == "symlink":
        return b"120000", tree.readlink(at)
    if kind != "file":
        return None
    with os.fdopen(tree.open_file(at), "rb") as file:
        return (b"100755" if (mode or 0) & 0o100 else b"100644"), file.read()


def _one(
    path: bytes,
    origin: bytes | None,
    old: tuple[bytes, bytes] | None,
    new: tuple[bytes, bytes] | None,
) -> bytes:
    if old == new and origin is None:
        return b""
    a, b = _quote(b"a/" + (origin or path)), _quote(b"b/" + path)
    out = [b"diff --git " + a + b" " + b]
    if old is None and new is not None:
        out.append(b"new file mode " + new[0])
    elif new is None and old is not None:
        out.append(b"deleted file mode " + old[0])
    elif old is not None and new is not None and old[0] != new[0]:
        out += [b"old mode " + old[0], b"new mode " + new[0]]
    if origin is not None:
        out += [
            b"similarity index 100%",
            b"rename from " + _quote(origin),
            b"rename to " + _quote(path),
        ]
    left, right = old[1] if old else b"", new[1] if new else b""
    if left == right and (old is None) == (new is None):
        return b"\n".join(out) + b"\n"
    out.append(b"index %s..%s" % (_blob(old), _blob(new)))
    if b"\0" in left[:8000] or b"\0" in right[:8000]:
        body = b"GIT binary patch\n" + _literal(right) + _literal(left)
        return b"\n".join(out) + b"\n" + body
    if left == right:
        return b"\n".join(out) + b"\n"
    out += [b"--- " + (a if old else b"/dev/null"), b"+++ " + (b if new else b"/dev/null")]
    data: bytes = make(left, right).data
    return b"\n".join(out) + b"\n" + data[data.index(b"\n@@ ") + 1 :]


def _blob(side: tuple[bytes, bytes] | None) -> bytes:
    if side is None:
        return b"0" * 40
    header = b"blob %d\0" % len(side[1])
    return hashlib.sha1(header + side[1], usedforsecurity=False).hexdigest().encode()


def _literal(data: bytes) -> bytes:
    """git's base-85 form: lines of up to 52 bytes after a letter that says how many."""
    packed = zlib.compress(data)
    lines = [b"literal %d" % len(data)]
    for at in range(0, len(packed), 52):
        part = packed[at : at + 52]
        count = len(part) + (64 if len(part) <= 26 else 70)
        lines.append(bytes([count]) + base64.b85encode(part, pad=True))
    return b"\n".join(lines) + b"\n\n"


def _quote(path: bytes) -> bytes:
    """git's C-style quoting, octal for every byte outside printable ASCII."""
    if all(0x20 <= ch < 0x7F and ch not in b'"\\' for ch in path):
        return path
    out = bytearray(b'"')
    for ch in path:
        if ch in b'"\\':
            out += b"\\%c" % ch
        elif 0x20 <= ch < 0x7F:
            out.append(ch)
        else:
            out += b"\\%03o" % ch
    return bytes(out + b'"')


def safe_line(line: bytes) -> str:
    """A line of a file for a person's terminal: control, format and bidi characters and bytes that
    are not UTF-8 as backslash escapes; tabs stay."""
    text = line.decode("utf-8", "surrogateescape")
    out = []
    for ch in text:
        code = ord(ch)
        if ch == "\t" or ch.isprintable():
            out.append(ch)
        elif 0xDC80 <= code <= 0xDCFF:
            out.append(f"\\x{code - 0xDC00:02x}")
        else:
            out.append(f"\\x{code:02x}" if code < 0x100 else f"\\u{{{code:x}}}")
    return "".join(out)


def unified(merged: Merged, change: Change) -> list[str]:
    """The change for a person: a heading, then hunks, each line safe to print. Binary and large
    contents are named, not shown."""
    lines = [summary(change)]
    lines += [f"  note: {note}" for note in change.notes]
    if change.refused is not None:
        return [*lines, f"  refused: {change.refused}"]
    if change.kind in ("renamed", "mode") or "dir" in (change.type, change.old_type):
        return lines
    if change.binary or change.large:
        return [
            *lines,
            "  binary content" if change.binary else "  too large to show line by line",
        ]
    if "symlink" in (change.type, change.old_type):
        if change.old_link is not None:
            lines.append("-→ " + safe_line(change.old_link))
        if change.link is not None:
            lines.append("+→ " + safe_line(change.link))
        return lines
    body = patch(merged, change)
    at = body.find(b"\n@@ ")
    return (
        lines
        if at < 0
        else lines + [safe_line(ln) for ln in body[at + 1 :].rstrip(b"\n").split(b"\n")]
    )


def summary(change: Change) -> str:
    """One line: letter, name, counts, what is odd about it."""
    parts = [_LETTERS[change.kind], display(change.path)]
    if change.origin is not None:
        parts.append(f"(from {display(change.origin)})")
    if change.kind == "type":
        parts.append(f"({change.old_type} → {change.type})")
    if change.mode is not None and change.old_mode is not None and change.mode != change.old_mode:
        parts.append(f"(mode {change.old_mode:04o} → {change.mode:04o})")
    if change.added is not None and change.removed is not None and change.kind != "renamed":
        parts.append(f"+{change.added} -{change.removed}")
    elif change.binary or change.large:
        parts.append("binary" if change.binary else "large")
    if change.risk is not None:
        parts.append(f"[{change.risk.tier}: {change.risk.reason}]")
    if change.conflict is not None:
        parts.append(f"[conflict: {change.conflict.project}]")
    if change.refused is not None:
        parts.append(f"[refused: {change.refused}]")
    return " ".join(parts)


def as_json(review: Review, *, review_id: str, session: str) -> dict[str, Any]:
    """The result of `review.diff` and `diff --json`: JSON types only, deletions first."""
    files = []
    for change in review.shown():
        entry: dict[str, Any] = {
            **_name("path", change.path),
            "kind": change.kind,
            "type": change.type or change.old_type,
            "added": change.added,
            "removed": change.removed,
            "binary": change.binary,
            "sizeBefore": change.size_before,
            "sizeAfter": change.size_after,
            "by": change.by,
            "hunks": [msgspec.to_builtins(h) for h in change.hunks],
        }
        if change.origin is not None:
            entry |= _name("from", change.origin)
        if change.mode != change.old_mode and change.kind != "deleted":
            entry |= {"mode": change.mode, "oldMode": change.old_mode}
        if change.risk is not None:
            entry["risk"] = msgspec.to_builtins(change.risk)
        if change.conflict is not None:
            entry["conflict"] = {
                "agent": change.conflict.agent,
                "project": change.conflict.project,
            }
        if change.refused is not None:
            entry["refused"] = change.refused
        if change.notes:
            entry["notes"] = change.notes
        files.append(entry)
    units = [
        {
            **_name("path", unit.path),
            "kind": unit.kind,
            "count": unit.count,
            "words": unit.words,
            **({"risk": msgspec.to_builtins(unit.risk)} if unit.risk else {}),
            **(
                {"conflict": {"agent": unit.conflict.agent, "project": unit.conflict.project}}
                if unit.conflict
                else {}
            ),
        }
        for unit in review.units
    ]
    return {
        "review": review_id,
        "session": session,
        "digest": review.digest,
        "moving": review.is_moving,
        "files": files,
        "units": units,
    }


def _name(key: str, path: bytes) -> dict[str, str]:
    """A path as text, with its exact bytes beside it when they are not UTF-8."""
    try:
        return {key: path.decode()}
    except UnicodeDecodeError:
        return {
            key: path.decode("utf-8", "replace"),
            key + "B64": base64.b64encode(path).decode(),
        }
