"""What a review is made of: plain records that go to the store, to the wire and to the card.

Data only: no file is read here and nothing is decided.
"""

from typing import Literal

import msgspec

from deltabox.engines.delta import Fingerprint, Kind

ChangeKind = Literal["added", "modified", "deleted", "renamed", "mode", "type"]
Tier = Literal["refused", "warned", "noted"]


class Risk(msgspec.Struct, frozen=True):
    """Why a change deserves a second look. `refused` is committed only when named."""

    tier: Tier
    reason: str


class Conflict(msgspec.Struct, frozen=True):
    """Agent and project both moved; both sides in words."""

    path: bytes
    agent: str
    project: str


class Hunk(msgspec.Struct, frozen=True, rename="camel"):
    """n counts from 1 within its file; the id stays the same while the lines do."""

    id: str
    n: int
    old_start: int
    old_lines: int
    new_start: int
    new_lines: int


class Change(msgspec.Struct, kw_only=True):
    """One real difference between project and view.

    type, mode, size_after, sha256 (files), link (symlinks): the view's side, None when deleted.
    old_*: the project's side, None when added. origin: where a renamed file came from.
    base: the fingerprint the change builds on (first touch, else now). layer: which layer holds the
    new content. added, removed: lines, None when not counted. refused: why this cannot be
    committed at all. notes: parts that stay out of the commit. is_shown: False for directories
    that their children speak for. unit: the `.git` directory it belongs to.
    """

    path: bytes
    kind: ChangeKind
    type: Kind | None = None
    old_type: Kind | None = None
    mode: int | None = None
    old_mode: int | None = None
    size_before: int | None = None
    size_after: int | None = None
    sha256: str | None = None
    link: bytes | None = None
    old_link: bytes | None = None
    origin: bytes | None = None
    base: Fingerprint | None = None
    origin_base: Fingerprint | None = None
    source: Fingerprint | None = None
    mtime_ns: int = 0
    layer: int = -1
    binary: bool = False
    large: bool = False
    added: int | None = None
    removed: int | None = None
    hunks: list[Hunk] = []
    risk: Risk | None = None
    by: list[str] = []
    conflict: Conflict | None = None
    refused: str | None = None
    notes: list[str] = []
    is_shown: bool = True
    unit: bytes | None = None


class GitUnit(msgspec.Struct, kw_only=True):
    """Everything below one `.git` directory, shown and committed as one thing."""

    path: bytes
    kind: Literal["added", "modified", "deleted"]
    count: int
    words: list[str]
    conflict: Conflict | None = None
    risk: Risk | None = None


class Review(msgspec.Struct, kw_only=True):
    """All pending changes, sorted by path, those of `units` among them (marked by `unit`)."""

    digest: str
    changes: list[Change]
    units: list[GitUnit] = []
    is_moving: bool = False

    def shown(self) -> list[Change]:
        """What a person lists: deletions first, then the rest by path; units are separate lines."""
        lines = [c for c in self.changes if c.is_shown and c.unit is None]
        return sorted(lines, key=lambda c: (c.kind != "deleted", c.path))

    def conflicts(self) -> list[Conflict]:
        found = [c.conflict for c in self.changes if c.conflict is not None and c.unit is None]
        return found + [u.conflict for u in self.units if u.conflict is not None]
