"""A review as the plain result that goes to the wire, to `--json` and to the card. Pure.

Field names are the protocol's (docs/protocol.md). Paths come as text where they are UTF-8, and as
`pathB64` too where they are not; `display` is what a person may be shown.
"""

import base64
from collections.abc import Iterable
from typing import Any

import msgspec

from deltabox.paths import display, is_within
from deltabox.review.model import Change, Conflict, GitUnit, Review


def named(path: bytes, key: str = "path") -> dict[str, Any]:
    """`path` as text, with its bytes beside it where text cannot hold them."""
    try:
        return {key: path.decode()}
    except UnicodeDecodeError:
        text = path.decode("utf-8", "backslashreplace")
        return {key: text, f"{key}B64": base64.b64encode(path).decode()}


def result(review: Review, *, paths: Iterable[bytes] = (), hunks: bool = False) -> dict[str, Any]:
    """The files (deletions first), conflicts and refused entries of a review, or of `paths` in it."""
    chosen = list(paths)

    def is_chosen(path: bytes) -> bool:
        return not chosen or any(is_within(path, c) for c in chosen)

    files = [file(c, hunks=hunks) for c in review.shown() if not c.refused and is_chosen(c.path)]
    files += [unit(u) for u in review.units if is_chosen(u.path)]
    return {
        "digest": review.digest,
        "moving": review.is_moving,
        "files": files,
        "conflicts": [conflict(c) for c in review.conflicts() if is_chosen(c.path)],
        "refused": [left_out(c) for c in review.changes if c.refused and is_chosen(c.path)],
    }


def file(change: Change, *, hunks: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        **named(change.path),
        "display": display(change.path),
        "kind": change.kind,
        "type": change.type or change.old_type,
        "added": change.added or 0,
        "removed": change.removed or 0,
        "binary": change.binary or change.large,
        "sizeBefore": change.size_before,
        "sizeAfter": change.size_after,
        "by": change.by,
        "hunks": [msgspec.to_builtins(h) for h in change.hunks] if hunks else [],
    }
    if change.origin is not None:
        found |= named(change.origin, "from")
        found["fromDisplay"] = display(change.origin)
    if change.risk is not None:
        found["risk"] = {"tier": change.risk.tier, "reason": change.risk.reason}
    words = what(change)
    if words:
        found["what"] = words
    return found


def what(change: Change) -> str:
    """What the counts do not tell: modes, links, types, parts that stay out."""
    words = []
    if change.kind == "type":
        words.append(f"{change.old_type} became {change.type}")
    elif change.kind in ("added", "deleted") and "dir" in (change.type, change.old_type):
        words.append("empty folder" if change.kind == "added" else "folder")
    if change.old_mode is not None and change.mode is not None and change.old_mode != change.mode:
        words.append(f"mode {change.old_mode:o} → {change.mode:o}")
    elif change.kind == "added" and change.type == "file" and (change.mode or 0) & 0o111:
        words.append("executable")
    if change.link is not None:
        words.append(f"→ {display(change.link)}")
    words += change.notes
    return ", ".join(words)


def unit(found: GitUnit) -> dict[str, Any]:
    """Everything below one `.git` as one line."""
    line: dict[str, Any] = {
        **named(found.path),
        "display": display(found.path),
        "kind": "git",
        "type": "dir",
        "added": 0,
        "removed": 0,
        "binary": False,
        "sizeBefore": None,
        "sizeAfter": None,
        "by": [],
        "hunks": [],
        "count": found.count,
        "summary": "; ".join(found.words),
    }
    if found.risk is not None:
        line["risk"] = {"tier": found.risk.tier, "reason": found.risk.reason}
    return line


def conflict(found: Conflict) -> dict[str, Any]:
    return {
        **named(found.path),
        "display": display(found.path),
        "agent": found.agent,
        "project": found.project,
    }


def left_out(change: Change) -> dict[str, Any]:
    return {**named(change.path), "display": display(change.path), "reason": change.refused}
