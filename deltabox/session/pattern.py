"""Globs as regular expressions over path bytes. Pure.

`*`, `?` and `[…]` stay within a name, `**` as a whole component crosses folders, `{a,b}` gives
choices. A pattern without `/` is held against the last name alone, at any depth.
"""

import re

from deltabox.errors import BadUsage
from deltabox.paths import display

MAX_CHOICES = 256  # of braces multiplied out: a pattern that has more is an attack


def compiled(pattern: bytes) -> re.Pattern[bytes]:
    """Matches a whole path (`fullmatch`) below the searched folder. Linear in the path for what people
    write: no part of what is made repeats a repetition. Raises: BadUsage."""
    choices = _choices(pattern)
    return re.compile(b"|".join(b"(?:" + _one(choice) + b")" for choice in choices), re.DOTALL)


def _choices(pattern: bytes) -> list[bytes]:
    """Braces multiplied out, innermost last."""
    out, todo = [], [pattern]
    while todo:
        text = todo.pop()
        found = _brace(text)
        if found is None:
            out.append(text)
        else:
            start, end, words = found
            todo += [text[:start] + word + text[end:] for word in reversed(words)]
        if len(out) + len(todo) > MAX_CHOICES:
            raise BadUsage(f"The glob {display(pattern)} has too many choices in braces.")
    return out


def _brace(text: bytes) -> tuple[int, int, list[bytes]] | None:
    """The first closed brace: where it begins and ends, and its choices."""
    start = -1
    at = depth = 0
    cuts: list[int] = []
    while at < len(text):
        char = text[at : at + 1]
        if char == b"\\":
            at += 1
        elif char == b"{":
            if depth == 0:
                start, cuts = at, [at]
            depth += 1
        elif char == b"," and depth == 1:
            cuts.append(at)
        elif char == b"}" and depth:
            depth -= 1
            if depth == 0:
                ends = [*cuts[1:], at]
                return start, at + 1, [text[a + 1 : b] for a, b in zip(cuts, ends, strict=True)]
        at += 1
    return None


def _one(pattern: bytes) -> bytes:
    pattern = pattern.removeprefix(b"./").lstrip(b"/") if b"/" in pattern else b"**/" + pattern
    parts = pattern.split(b"/")
    out = b""
    was_deep = False
    for n, part in enumerate(parts):
        is_last = n == len(parts) - 1
        if part == b"**":
            if is_last:
                out += b".+"
            elif not was_deep:
                out += b"(?:[^/]+/)*"
            was_deep = True
            continue
        was_deep = False
        out += _name(part) + (b"" if is_last else b"/")
    return out


def _name(part: bytes) -> bytes:
    out = b""
    at = 0
    while at < len(part):
        char = part[at : at + 1]
        at += 1
        if char == b"*":
            # Several stars say no more than one, and would make matching slow.
            while part[at : at + 1] == b"*":
                at += 1
            out += b"[^/]*"
        elif char == b"?":
            out += b"[^/]"
        elif char == b"\\" and at < len(part):
            out += re.escape(part[at : at + 1])
            at += 1
        elif char == b"[" and (end := _class_end(part, at)) > 0:
            body = part[at:end]
            is_not = body[:1] in (b"!", b"^")
            body = body[1:] if is_not else body
            inner = b"".join(b"-" if c == 0x2D else re.escape(bytes([c])) for c in body)
            out += _checked_class(b"[^/" + inner + b"]" if is_not else b"[" + inner + b"]", part)
            at = end + 1
        else:
            out += re.escape(char)
    return out


def _class_end(part: bytes, at: int) -> int:
    start = at + 1 if part[at : at + 1] in (b"!", b"^") else at
    return part.find(b"]", start + 1)


def _checked_class(made: bytes, part: bytes) -> bytes:
    try:
        re.compile(made)
    except re.error as exc:
        raise BadUsage(
            f"The glob has a class in {display(part)} that says nothing: {exc}."
        ) from exc
    return made
