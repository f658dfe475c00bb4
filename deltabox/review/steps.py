"""A commit as data: actions on the base, arranged into steps that can be finished or reversed.

Pure: nothing here touches a file. Everything is JSON-able, since a plan is stored before its first
step and read again after a crash.
"""

from collections.abc import Iterable
from typing import Literal

import msgspec

from deltabox.engines.delta import Fingerprint, Kind
from deltabox.paths import WorkspacePath, join, parent
from deltabox.review import gitunit
from deltabox.review.model import Conflict

StepOp = Literal["chmod", "make", "take", "put", "keep"]


class Action(msgspec.Struct, kw_only=True):
    """One wish: `put` an entry at a path, `take` one away, or `chmod` it.

    expect: what must stand there, None for nothing. Content comes from layer `layer` at `path`, or
    from the undo copy named `copy` in the folder `copies`; `sha256` is what was shown.
    owner: None follows the replaced entry, else the folder.
    """

    op: Literal["put", "take", "chmod"]
    path: bytes
    type: Kind
    expect: Fingerprint | None
    mode: int | None = None
    link: bytes | None = None
    sha256: str | None = None
    layer: int | None = None
    copy: str | None = None
    copy_print: Fingerprint | None = None
    copies: str | None = None
    mtime_ns: int | None = None
    owner: tuple[int, int] | None = None
    source: Fingerprint | None = None


class Step(msgspec.Struct, kw_only=True):
    """One system-call-sized deed. n numbers its action and names its temporary entry in `home`:

    make: write the new entry under the temporary name. put: publish it (exchange when something is
    expected there; the displaced entry then has the temporary name). take: move an entry to the
    temporary name. chmod: in place. keep: move what has the temporary name into the undo folder.
    """

    op: StepOp
    n: int
    home: bytes
    action: int
    mode: int | None = None


class LeftOut(msgspec.Struct, frozen=True):
    """follows: only because something else stays out, which is named itself."""

    path: bytes
    why: str
    follows: bool = False


class Plan(msgspec.Struct, kw_only=True):
    commit: str
    actions: list[Action]
    steps: list[Step]
    durability: Literal["fast", "strict"] = "fast"
    skipped: list[Conflict] = []
    left_out: list[LeftOut] = []


class Attributes(msgspec.Struct, frozen=True):
    """What the base had at a path before the commit, as far as undo needs it."""

    type: Kind
    mode: int
    uid: int
    gid: int
    mtime_ns: int


class Progress(msgspec.Struct, kw_only=True):
    """How far a plan is. Handed out at each stage's end and to be stored durably there; what
    happens between two stages is found out from the file system.

    planned → made (all new entries lie under temporary names, verified) → done (all published; from
    here recovery finishes, before it reverses) → kept (undo copies are safe, nothing temporary is
    left). made: fingerprint of each made entry by action. before: what stood there. unlocked: folders
    that got write permission for the time of the commit, with the mode to give back.
    """

    stage: Literal["planned", "made", "done", "kept"] = "planned"
    made: dict[int, Fingerprint] = {}
    before: dict[int, Attributes] = {}
    after: dict[int, Fingerprint | None] = {}
    kept: dict[int, Fingerprint] = {}
    unlocked: list[tuple[bytes, int]] = []


class Outcome(msgspec.Struct, frozen=True):
    """A committed path: the base's new fingerprint (None: deleted), and the delta's that was copied."""

    path: bytes
    fingerprint: Fingerprint | None
    source: Fingerprint | None


class UndoEntry(msgspec.Struct, frozen=True, kw_only=True):
    """How to go back at one path: `before` None means there was nothing.

    expect: the fingerprint that the commit found there, by which an older record knows the entry.
    index: digest of a git index's entries, by which it is still the same after git rewrote its times.
    """

    path: bytes
    expect: Fingerprint | None = None
    before: Attributes | None
    after: Fingerprint | None
    copy: str | None
    copy_print: Fingerprint | None
    index: str | None = None


class UndoRecord(msgspec.Struct, kw_only=True):
    """What reverses a commit; the copies lie in the folder `copies`."""

    commit: str
    copies: str
    entries: list[UndoEntry]


class Committed(msgspec.Struct, kw_only=True):
    """The result: what is in the project now, how to go back, what stayed out and why."""

    paths: list[Outcome]
    undo: UndoRecord
    skipped: list[Conflict] = []
    left_out: list[LeftOut] = []
    notices: list[str] = []


def temporary(commit: str, n: int) -> bytes:
    return f".deltabox-{commit}-{n}".encode()


def temporary_path(plan: Plan, step: Step) -> WorkspacePath:
    return join(WorkspacePath(step.home), temporary(plan.commit, step.n))


def copy_name(n: int) -> str:
    return str(n)


def arrange(actions: Iterable[Action]) -> tuple[list[Action], list[Step]]:
    """Order the deeds so that a kill at any point loses nothing and shows as little as possible.

    Everything is made and verified under temporary names first. Then new names are published
    before old ones go (a crash shows a renamed file twice instead of not at all), except below a
    directory that becomes something else. Modes that lock a directory come last, modes that
    unlock one first.
    """
    ordered = sorted(actions, key=lambda a: a.path)
    puts = {a.path for a in ordered if a.op == "put"}
    unstable = puts | {a.path for a in ordered if a.op == "take"}

    def home(path: bytes) -> bytes:
        at = parent(WorkspacePath(path))
        while at in unstable:
            at = parent(at)
        return at

    def is_below_put(path: bytes) -> bool:
        at = WorkspacePath(path)
        while at:
            at = parent(at)
            if at in puts:
                return True
        return False

    unlock: list[Step] = []
    make: list[Step] = []
    early: list[Step] = []
    put: list[Step] = []
    late: list[Step] = []
    lock: list[Step] = []
    keep: list[Step] = []
    ranks: dict[int, tuple[int, bytes]] = {}
    for n, action in enumerate(ordered):
        at = home(action.path)
        if action.op == "chmod":
            step = Step(op="chmod", n=n, home=at, action=n, mode=action.mode)
            old = action.expect.mode if action.expect is not None else 0
            is_unlock = action.type == "dir" and bool((action.mode or 0) & ~old & 0o300)
            (unlock if is_unlock else lock).append(step)
            continue
        if action.op == "put":
            make.append(Step(op="make", n=n, home=at, action=n))
            put.append(Step(op="put", n=n, home=at, action=n))
            ranks[n] = (gitunit.rank(action.path, action.type == "dir"), action.path)
            if action.type == "dir" and action.mode is not None and action.mode & 0o700 != 0o700:
                lock.append(Step(op="chmod", n=n, home=at, action=n, mode=action.mode))
        else:
            (early if is_below_put(action.path) else late).append(
                Step(op="take", n=n, home=at, action=n)
            )
        if action.expect is not None:
            keep.append(Step(op="keep", n=n, home=at, action=n))
    put.sort(key=lambda s: ranks[s.n])
    for steps in (early, late, lock):
        steps.reverse()  # paths were sorted, so this is children before parents
    return ordered, [*unlock, *make, *early, *put, *late, *lock, *keep]
