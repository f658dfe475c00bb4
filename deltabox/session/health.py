"""What `doctor` asks: each engine and isolation tried for real, in words a person understands."""

from pathlib import Path
from typing import Any

from deltabox import config
from deltabox.config import Places
from deltabox.engines import probe
from deltabox.errors import DeltaboxError
from deltabox.isolation import sandbox
from deltabox.session.folder import make_private


async def examine(where: Places, project: Path) -> dict[str, Any]:
    """About 20 ms; leaves nothing behind. Never raises for what does not work: it reports it."""
    make_private(where.state, (where.uid, where.gid))
    notes: list[str] = []
    try:
        config.check_project(project, where)
        engines = [
            {
                "name": report.name,
                "works": report.usable,
                "why": report.reason,
                "remedies": [_remedy(r) for r in report.remedies],
            }
            for report in await probe.survey(project, where.state)
        ]
    except DeltaboxError as exc:
        engines = [{"name": "all", "works": False, "why": exc.sentence, "remedies": []}]
    isolations = [_bubblewrap(where, project)]
    if where.uid == 0:
        notes.append(
            "you are root: commands run as the project's owner, and see an ordinary uid inside"
        )
    ready = any(e["works"] for e in engines) and all(i["works"] for i in isolations)
    return {"engines": engines, "isolations": isolations, "notes": notes, "ready": ready}


def _remedy(remedy: Any) -> str:
    lines = [str(remedy.text)]
    if remedy.command:
        lines.append(f"  {remedy.command}")
    if remedy.file:
        lines.append(str(remedy.file))
    return "\n".join(lines)


def _bubblewrap(where: Places, project: Path) -> dict[str, Any]:
    try:
        with sandbox.find_bwrap(where.environ, (project, where.state)) as found:
            version = ".".join(str(n) for n in found.version)
            works, why = True, f"{found.path} {version}"
    except DeltaboxError as exc:
        works, why = False, exc.sentence
    return {"name": "bubblewrap", "works": works, "why": why, "remedies": []}
