"""Review results as lines for a person: counts, risks, conflicts, coloured patches. Pure: returns text.

Works on the plain `review.diff` result, so that it shows a live owner's answer and our own alike.
Everything from the project (names, text) was escaped by review/ before it comes here, except where
`display` is called below.
"""

import textwrap
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO

from deltabox.paths import display

MARKS = {
    "added": "+",
    "deleted": "-",
    "modified": "~",
    "renamed": ">",
    "mode": "m",
    "type": "t",
    "git": "g",
}
RANKS = {"refused": "refused unless named", "warned": "look closely", "noted": "note"}


@dataclass(frozen=True)
class Palette:
    """Escape sequences, or empty strings where there is no colour."""

    red: str = ""
    green: str = ""
    yellow: str = ""
    cyan: str = ""
    bold: str = ""
    dim: str = ""
    off: str = ""


PLAIN = Palette()
COLOUR = Palette(
    red="\x1b[31m",
    green="\x1b[32m",
    yellow="\x1b[33m",
    cyan="\x1b[36m",
    bold="\x1b[1m",
    dim="\x1b[2m",
    off="\x1b[0m",
)


def palette(*, is_terminal: bool, environ: dict[str, str]) -> Palette:
    """Colour on a terminal unless NO_COLOR or TERM=dumb say otherwise."""
    dumb = environ.get("TERM", "dumb") == "dumb" or environ.get("NO_COLOR", "") != ""
    return COLOUR if is_terminal and not dumb else PLAIN


def size(count: int) -> str:
    """Bytes as a person reads them."""
    if count < 1024:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1024:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} TiB"


def duration(nanoseconds: int) -> str:
    seconds = nanoseconds / 1e9
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"


def age(nanoseconds: int) -> str:
    seconds = max(0, nanoseconds // 10**9)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length} {unit} ago"
    return "just now"


def plural(count: int, noun: str, plural_form: str | None = None) -> str:
    return f"{count} {noun if count == 1 else plural_form or noun + 's'}"


def totals(files: Iterable[dict[str, Any]]) -> str:
    """`5 files: 2 added, 1 deleted, 2 modified, +12 -3 lines`."""
    counts: dict[str, int] = {}
    added = removed = number = 0
    for file in files:
        number += 1
        counts[file["kind"]] = counts.get(file["kind"], 0) + 1
        added += file.get("added") or 0
        removed += file.get("removed") or 0
    kinds = ", ".join(f"{counts[k]} {k}" for k in MARKS if k in counts)
    lines = f", +{added} -{removed} lines" if added or removed else ""
    return f"{plural(number, 'change')}: {kinds}{lines}" if number else "no changes"


def file_line(file: dict[str, Any], colours: Palette = PLAIN) -> str:
    """One change: mark, name, what it is, counts, risk."""
    kind = file["kind"]
    tint = {"added": colours.green, "deleted": colours.red, "git": colours.cyan}.get(
        kind, colours.yellow
    )
    shown = file["display"]
    if kind == "renamed":
        shown = f"{file['fromDisplay']} → {shown}"
    facts = []
    if file.get("summary"):
        facts.append(file["summary"])
    elif file.get("binary"):
        facts.append(
            f"binary, {size(file.get('sizeBefore') or 0)} → {size(file.get('sizeAfter') or 0)}"
        )
    elif file.get("added") or file.get("removed"):
        facts.append(
            f"{colours.green}+{file['added']}{colours.off} {colours.red}-{file['removed']}{colours.off}"
        )
    if file.get("what"):
        facts.append(file["what"])
    risk = file.get("risk")
    if risk:
        facts.append(f"{colours.yellow}[{RANKS[risk['tier']]}: {risk['reason']}]{colours.off}")
    tail = f"  {'  '.join(facts)}" if facts else ""
    return f"{tint}{MARKS[kind]} {shown}{colours.off}{tail}"


def stat(result: dict[str, Any], colours: Palette = PLAIN) -> Iterator[str]:
    """The whole list, deletions first (the order review gives), then what was left out and why."""
    for file in result["files"]:
        yield file_line(file, colours)
    yield from remarks(result, colours)
    yield totals(result["files"])


def remarks(result: dict[str, Any], colours: Palette = PLAIN, *, width: int = 0) -> Iterator[str]:
    """Conflicts, refused entries and notes; nothing of these is ever cut, notes are wrapped."""
    for conflict in result.get("conflicts", ()):
        yield (
            f"{colours.red}! conflict {conflict['display']}{colours.off}: "
            f"agent: {conflict['agent']}; project: {conflict['project']}"
        )
    for refused in result.get("refused", ()):
        yield f"{colours.red}x left out {refused['display']}{colours.off}: {refused['reason']}"
    for note in result.get("notes", ()):
        lines = textwrap.wrap(note, width - 2) if width > 20 else [note]
        for number, line in enumerate(lines):
            yield f"{colours.dim}{' ' if number else '·'} {line}{colours.off}"


def coloured_patch(patch: str, colours: Palette) -> str:
    """The readable form of review/text.py with a colour for each kind of line; a line that begins

    with a letter is a file's heading there, since content lines begin with ` +-@` or a backslash.
    """
    if not colours.off:
        return patch
    tints = {"+": colours.green, "-": colours.red, "@": colours.cyan}
    out = []
    # Not splitlines(), which also ends lines at form feeds and the like.
    for line in patch.removesuffix("\n").split("\n"):
        tint = colours.bold if line[:1].isalpha() else tints.get(line[:1], "")
        out.append(f"{tint}{line}{colours.off}" if tint else line)
    return "\n".join(out) + ("\n" if patch.endswith("\n") else "")


def command_line(argv: Iterable[str], limit: int = 60) -> str:
    """A command for one line of a card; the whole of it stands in `deltabox log --json`."""
    import shlex

    text = display(shlex.join(argv).encode("utf-8", "surrogateescape")).strip('"')
    return text if len(text) <= limit else text[: limit - 1] + "…"


def outcome(code: int | None, signal: int | None) -> str:
    if signal is not None:
        return f"killed by signal {signal}"
    return "unfinished" if code is None else f"exit {code}"


class Progress:
    """A counter on one terminal line, only once the work has taken PATIENCE_S; silent elsewhere."""

    PATIENCE_S = 0.5

    def __init__(self, stream: TextIO, what: str) -> None:
        self._stream = stream
        self._what = what
        self._began = time.monotonic()
        self._next = self._began + self.PATIENCE_S
        self._is_shown = False

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total:
            self.end()
        elif now >= self._next and self._stream.isatty():
            self._next = now + 0.1
            self._is_shown = True
            self._stream.write(f"\r{self._what} {done}/{total}\x1b[K")
            self._stream.flush()

    def end(self) -> None:
        if self._is_shown:
            self._is_shown = False
            self._stream.write("\r\x1b[K")
            self._stream.flush()
