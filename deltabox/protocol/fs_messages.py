"""Parameters and results of fs.*: what goes over the wire, and nothing it means.

A `path` is relative to the project or absolute; `pathB64` is the same as base64 of its bytes, for names
that are no UTF-8. Relative and absolute names of a project file mean the same: the workspace's view.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from deltabox.protocol.messages import Encoding, Named, Sparse, Wire

MIB = 1 << 20
MAX_WINDOW = 8 * MIB  # base64 makes 11 MiB of it, and a line holds 16
MAX_ENTRIES = 10_000  # of one listing; a page of these is about 1.5 MiB
MAX_PATHS = 1000
MAX_HITS = 10_000
DEFAULT_HITS = 1000
MAX_LINE_BYTES = 64 * 1024

Space = Literal["view", "host"]
FileType = Literal["file", "directory", "symlink", "other"]
Mode = Annotated[int, Meta(ge=0, le=0o777)]
Offset = Annotated[int, Meta(ge=0, le=(1 << 63) - 1 - MAX_WINDOW)]
Window = Annotated[int, Meta(ge=0, le=MAX_WINDOW)]
LineNumber = Annotated[int, Meta(ge=1, le=1 << 53)]
Hits = Annotated[int, Meta(ge=1, le=MAX_HITS)]


class Path(Wire, frozen=True, kw_only=True):
    """One of path and pathB64; neither means the project itself."""

    path: str | None = None
    path_b64: str | None = msgspec.field(default=None, name="pathB64")


class OfFile(Path, frozen=True, kw_only=True):
    """generation: when given, the call is refused once changes were decided since."""

    session: str
    generation: int | None = None


class Look(Path, frozen=True, kw_only=True):
    """Metadata. Before a session exists give projectRoot instead: the base answers, and nothing opens."""

    session: str | None = None
    project_root: str | None = None
    generation: int | None = None


class Resolved(Sparse, frozen=True, kw_only=True):
    """space: `host` is outside the project: it can be read, and not written. targetKey: the same
    for all names of one file, across commits and aborts. path: relative for `view`, links followed.
    displayPath: for people. processPath: what a command of the session calls it. exists: a link
    that leads out of the project counts as missing, and calls on it are refused."""

    target_key: str
    space: Space
    path: str
    display_path: str
    process_path: str
    exists: bool
    path_b64: str | None = msgspec.field(default=None, name="pathB64")
    session: str | None = None


class Info(Sparse, frozen=True, kw_only=True):
    """What stands there. mode: permission bits. version: opaque; equal means unchanged."""

    type: FileType
    size: int
    mode: int
    mtime_ns: int
    version: str
    space: Space
    link: str | None = None
    link_b64: str | None = msgspec.field(default=None, name="linkB64")


class StatMany(Wire, frozen=True, kw_only=True):
    """paths, then pathsB64; links followed unless `follow` is false."""

    session: str | None = None
    project_root: str | None = None
    generation: int | None = None
    paths: Annotated[list[str], Meta(max_length=MAX_PATHS)] = msgspec.field(default_factory=list)
    paths_b64: Annotated[list[str], Meta(max_length=MAX_PATHS)] = msgspec.field(
        default_factory=list, name="pathsB64"
    )
    follow: bool = True


class Outcome(Sparse, frozen=True, kw_only=True):
    """Of one path: what stands there, or why that cannot be told (`FS_NOT_FOUND`, …)."""

    info: Info | None = None
    code: str | None = None
    message: str | None = None


class Outcomes(Wire, frozen=True, kw_only=True):
    """In the order asked."""

    results: list[Outcome]


class ListDir(Look, frozen=True, kw_only=True):
    """after, afterB64: the last name of the page before."""

    after: str | None = None
    after_b64: str | None = msgspec.field(default=None, name="afterB64")
    limit: Annotated[int, Meta(ge=1, le=MAX_ENTRIES)] = 2000


class Entry(Sparse, frozen=True, kw_only=True):
    name: str
    type: FileType
    size: int
    mode: int
    mtime_ns: int
    name_b64: str | None = msgspec.field(default=None, name="nameB64")
    link: str | None = None
    link_b64: str | None = msgspec.field(default=None, name="linkB64")


class Listing(Wire, frozen=True, kw_only=True):
    """In the order of the names' bytes. more: ask again with `after` the last name."""

    entries: list[Entry]
    more: bool
    space: Space


class Read(OfFile, frozen=True, kw_only=True):
    """encoding: how to send the bytes; without it UTF-8 where they are, else base64. maxBytes: a
    larger file is refused with FS_TOO_LARGE."""

    encoding: Encoding | None = None
    max_bytes: Window = MAX_WINDOW


class ReadRange(OfFile, frozen=True, kw_only=True):
    """Bytes from offset on, or lines from line (counted from 1) on; length bounds both."""

    offset: Offset | None = None
    length: Window = MIB
    line: LineNumber | None = None
    lines: LineNumber | None = None
    encoding: Encoding | None = None


class Content(Sparse, frozen=True, kw_only=True):
    """size: the whole file's. offset: where data begins. eof: nothing follows it. line, lines: of a
    window of lines."""

    data: str
    encoding: Encoding
    size: int
    mode: int
    version: str
    space: Space
    offset: int
    eof: bool
    line: int | None = None
    lines: int | None = None


class Write(OfFile, frozen=True, kw_only=True):
    """expectedVersion: refuse with FS_STALE_VERSION unless that is there. exclusive: refuse with
    FS_EXISTS if anything is. create: whether it may be made. parents: make missing folders too.
    mode: else a replaced file's stays. withText: send before and after back."""

    data: str
    encoding: Encoding = "utf-8"
    expected_version: str | None = None
    create: bool = True
    exclusive: bool = False
    parents: bool = True
    mode: Mode | None = None
    with_text: bool = False


class Edit(OfFile, frozen=True, kw_only=True):
    """oldText must stand there exactly once, or `count` times, or any number with replaceAll; as it
    is, no pattern. lineEndings: `keep` takes LFs of both texts for CRLF in a file that has only those."""

    old_text: str
    new_text: str
    expected_version: str | None = None
    replace_all: bool = False
    count: Annotated[int, Meta(ge=1)] | None = None
    line_endings: Literal["keep", "exact"] = "keep"
    with_text: bool = False


class Mkdir(OfFile, frozen=True, kw_only=True):
    """parents: make those above too, and let an existing one be."""

    parents: bool = False
    mode: Mode | None = None


class Remove(OfFile, frozen=True, kw_only=True):
    """recursive: a folder with what is in it. A link goes itself, never what it points to."""

    recursive: bool = False
    missing_ok: bool = False
    expected_version: str | None = None


class Rename(OfFile, frozen=True, kw_only=True):
    """to, toB64: the new name. overwrite: a file may stand there."""

    to: str | None = None
    to_b64: str | None = msgspec.field(default=None, name="toB64")
    overwrite: bool = False
    expected_version: str | None = None


class Chmod(OfFile, frozen=True, kw_only=True):
    mode: Mode


class Symlink(OfFile, frozen=True, kw_only=True):
    """target, targetB64: what the link says; not looked at."""

    target: str | None = None
    target_b64: str | None = msgspec.field(default=None, name="targetB64")


class Changed(Sparse, frozen=True, kw_only=True):
    """path: what was changed, links followed. turn: what review.diff names in `by`. changed: every
    path that the call changed, at most 1000 of changedTotal. before, after: with `withText`,
    of text up to 256 KiB. replaced: of an edit."""

    path: str
    generation: int
    changed: list[Named]
    changed_total: int
    path_b64: str | None = msgspec.field(default=None, name="pathB64")
    version: str | None = None
    created: bool | None = None
    size: int | None = None
    turn: int | None = None
    replaced: int | None = None
    before: str | None = None
    after: str | None = None


class Search(OfFile, frozen=True, kw_only=True):
    """path: the folder (or file) to search. ignore: honour .gitignore, .ignore and .git/info/exclude.
    hidden: names with a dot too (`.git` never). searchId: send hits as notifications as they come,
    and only the totals in the reply."""

    ignore: bool = True
    hidden: bool = True
    limit: Hits = DEFAULT_HITS
    search_id: str | None = None


class Glob(Search, frozen=True, kw_only=True):
    """pattern: `*`, `?`, `[…]`, `{a,b}` within a name, `**` across folders; without a `/` it is held
    against the name alone, at any depth, else against the path below `path`. Files only."""

    pattern: Annotated[str, Meta(min_length=1, max_length=4096)]


class Grep(Search, frozen=True, kw_only=True):
    """pattern: a regular expression of ripgrep's kind (of PCRE where there is only grep), or as it is
    with `literal`. include: globs that a file's path must match one of."""

    pattern: Annotated[str, Meta(min_length=1, max_length=4096)]
    literal: bool = False
    ignore_case: bool = False
    include: Annotated[list[str], Meta(max_length=64)] = msgspec.field(default_factory=list)


class Match(Sparse, frozen=True, kw_only=True):
    """One line. textB64: where it is no UTF-8. cut: the line goes on. column: bytes before the match,
    where the tool tells."""

    path: str
    line: int
    text: str
    path_b64: str | None = msgspec.field(default=None, name="pathB64")
    text_b64: str | None = msgspec.field(default=None, name="textB64")
    column: int | None = None
    cut: bool = False


class Found(Sparse, frozen=True, kw_only=True):
    """total: hits sent, in the reply or before it. truncated: there are more than limit."""

    total: int
    truncated: bool
    paths: list[Named] | None = None
    matches: list[Match] | None = None


class SearchHits(Sparse, frozen=True, kw_only=True):
    """Notification fs.hits: the next hits of a search, in order."""

    session: str
    search_id: str
    paths: list[Named] | None = None
    matches: list[Match] | None = None
