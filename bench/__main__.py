"""`python -m bench`: which rows, the table on stdout, JSON where wanted. Measures nothing itself.

Exit status 0 whatever the figures are; 1 when a row could not be measured, 2 for wrong usage.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import trio

from bench import processes, reviews, trees
from bench.measure import Row, table
from bench.projects import Ground, ground

GROUPS: dict[str, Callable[[Ground], Awaitable[list[Row]]]] = {
    "start": processes.session_start,
    "exec": processes.execs,
    "cli": processes.command_line,
    "memory": processes.memory,
    "layers": processes.layers,
    "view": trees.view,
    "review": reviews.review,
}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="8,000 files only, a third of the rounds"
    )
    parser.add_argument(
        "--only", choices=GROUPS, action="append", metavar="NAME", help=", ".join(GROUPS)
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")
    args = parser.parse_args(argv)
    # Byte code is cached for a user; a development shell often forbids it and would measure that.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if os.getloadavg()[0] > (os.cpu_count() or 1):
        _say("this machine is busy with something else: ratios hold roughly, milliseconds do not")
    rows, failed = trio.run(_measure, args.only or list(GROUPS), args.quick)
    print(table(rows))
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        found = {"rows": [row.as_dict() for row in rows], "machine": machine()}
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if failed else 0


async def _measure(names: Sequence[str], quick: bool) -> tuple[list[Row], list[str]]:
    """A group that fails says so and is left out; the others are still measured."""
    rows: list[Row] = []
    failed = []
    with ground(quick=quick) as place:
        for name in names:
            _say(f"measuring {name} …")
            try:
                rows += await GROUPS[name](place)
            except Exception as exc:  # noqa: BLE001 - one broken row must not cost the others
                failed.append(name)
                _say(f"{name} could not be measured: {exc!r}")
    return rows, failed


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "kernel": platform.release(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "root": os.geteuid() == 0,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
