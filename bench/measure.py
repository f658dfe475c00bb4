"""Rows, targets and the way numbers are taken: medians of interleaved rounds. Knows no workload.

On a shared machine absolute times drift by the minute; two things measured in turn, round by
round, drift together, so their ratio holds.
"""

import gc
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

Action = Callable[[], Awaitable[float]]
"""Does the work once and returns the milliseconds of the part that counts."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a row has to hold. total: deltabox's own figure; ratio and added: against the plain one."""

    kind: Literal["total", "ratio", "added"]
    limit: float

    def shown(self, unit: str) -> str:
        if self.kind == "ratio":
            return f"≤ {self.limit:g} x"
        return f"≤ {'+' if self.kind == 'added' else ''}{self.limit:g} {unit}"

    def is_met(self, plain: float | None, deltabox: float) -> bool:
        if self.kind == "total":
            return deltabox <= self.limit
        if plain is None:
            return False
        if self.kind == "added":
            return deltabox - plain <= self.limit
        return deltabox <= plain * self.limit


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. plain is None where nothing plain does the same."""

    name: str
    plain: float | None
    deltabox: float
    target: Target | None = None
    unit: str = "ms"

    @property
    def ratio(self) -> float | None:
        return self.deltabox / self.plain if self.plain else None

    def as_dict(self) -> dict[str, Any]:
        """For --json. The keys say ms; `unit` is another one for the rows that measure memory."""
        return {
            "name": self.name,
            "plain_ms": None if self.plain is None else round(self.plain, 3),
            "deltabox_ms": round(self.deltabox, 3),
            "ratio": None if self.ratio is None else round(self.ratio, 3),
            "target": self.target.shown(self.unit) if self.target else None,
            "met": self.target.is_met(self.plain, self.deltabox) if self.target else None,
            "unit": self.unit,
        }

    def cells(self) -> tuple[str, ...]:
        row = self.as_dict()
        met = {True: "yes", False: "NO", None: "-"}[row["met"]]
        plain = "-" if self.plain is None else f"{self.plain:.2f}"
        ratio = "-" if self.ratio is None else f"{self.ratio:.2f}"
        unit = "" if self.unit == "ms" else f" {self.unit}"
        return self.name, plain, f"{self.deltabox:.2f}{unit}", ratio, row["target"] or "-", met


HEADINGS = ("name", "plain", "deltabox", "ratio", "target", "met")


def table(rows: Sequence[Row]) -> str:
    cells = [HEADINGS, *(row.cells() for row in rows)]
    widths = [max(len(line[at]) for line in cells) for at in range(len(HEADINGS))]
    lines = [
        " | ".join(
            cell.ljust(width) if at in (0, 4, 5) else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]
    lines.insert(1, "-|-".join("-" * width for width in widths))
    return "\n".join(lines)


async def interleaved(rounds: int, actions: Mapping[str, Action]) -> dict[str, float]:
    """The median of each action over `rounds`, after one round that warms caches and is not counted.

    Every other round goes backwards, so that none always runs in another's wake. Garbage of the
    benchmark itself is collected between, never within.
    """
    taken: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(rounds + 1):
        names = list(actions)
        for name in reversed(names) if number % 2 else names:
            with _no_collection():
                spent = await actions[name]()
            if number:
                taken[name].append(spent)
    return {name: statistics.median(spent) for name, spent in taken.items()}


@contextmanager
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Clock:
    """Milliseconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter_ns()

    @property
    def ms(self) -> float:
        return (time.perf_counter_ns() - self._start) / 1e6


class Samples:
    """Named figures of work whose steps build on each other, so that it cannot be interleaved."""

    def __init__(self) -> None:
        self._taken: dict[str, list[float]] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        with _no_collection():
            clock = Clock()
            yield
            self._taken.setdefault(name, []).append(clock.ms)

    def median(self, name: str) -> float:
        """Without the first round, which warms caches."""
        return statistics.median(self._taken[name][1:])


def spawn(argv: Sequence[str], env: Mapping[str, str]) -> float:
    """Run a program of the host to its end without a word; its milliseconds.

    posix_spawn and wait4 alone, so that what starts it costs the same whatever it is.
    Raises: RuntimeError for a status other than 0.
    """
    quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
    clock = Clock()
    pid = os.posix_spawn(argv[0], list(argv), dict(env), file_actions=quiet)
    _, status, _ = os.wait4(pid, 0)
    spent = clock.ms
    if status != 0:
        raise RuntimeError(f"{' '.join(argv)} ended with status {status:#x}")
    return spent


def rss_mib(pid: int | str = "self") -> float:
    """Resident memory of a process."""
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
    return 0.0
