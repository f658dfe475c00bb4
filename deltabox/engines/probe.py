"""Which engines work here and why the others do not; picks the one a session asked for.

`choose` costs nothing: a session start simply mounts, and a failure explains itself. `survey` tries
each engine for real, for `deltabox doctor`. Must not know sessions.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deltabox.errors import BadUsage, EngineUnavailable

if TYPE_CHECKING:
    from deltabox.engines.base import Engine

# Said as it is, not hidden: who reads of them elsewhere must learn that this version lacks them.
NOT_IN_THIS_VERSION = {
    "fuse": "the fuse engine is not in this version of deltabox",
    "git": "the git engine is not in this version of deltabox",
}


@dataclass(frozen=True, slots=True)
class EngineReport:
    """One engine as `doctor` shows it."""

    name: str
    usable: bool
    reason: str
    remedies: tuple[str, ...] = ()


def choose(name: str) -> "Engine":
    """The engine for `auto` or for a name; whether it works shows when it mounts.

    Raises: EngineUnavailable for an engine that this version lacks, BadUsage for an unknown name.
    """
    if name in ("auto", "overlay"):
        from deltabox.engines.overlay import OverlayEngine

        return OverlayEngine()
    if name in NOT_IN_THIS_VERSION:
        reason = NOT_IN_THIS_VERSION[name]
        raise EngineUnavailable(f"{reason[0].upper()}{reason[1:]}; use `--engine overlay`.")
    known = ", ".join(("auto", "overlay", *NOT_IN_THIS_VERSION))
    raise BadUsage(f"There is no engine {name!r}; the engines are {known}.")


async def survey(project: Path, state_dir: Path) -> tuple[EngineReport, ...]:
    """Every engine, tried on this pair of directories. Costs about 10 ms; changes neither."""
    from deltabox.engines.overlay import usable

    overlay = await usable(project, state_dir)
    absent = (
        EngineReport(name, False, reason + ".") for name, reason in NOT_IN_THIS_VERSION.items()
    )
    return (EngineReport("overlay", overlay.usable, overlay.reason, overlay.remedies), *absent)
