"""`doctor`: which engines and isolations work here, which do not and why, and what would help."""

import argparse
import os
from typing import Any

import trio

from deltabox import config
from deltabox.cli.review import colours, setting, show_json
from deltabox.paths import display
from deltabox.session import garbage, health
from deltabox.session import project as projects


def doctor(args: argparse.Namespace) -> int:
    """Status 0 when `deltabox run` can work here with its defaults, else 4."""
    where, project = setting(args)
    report: dict[str, Any] = trio.run(health.examine, where, project)
    with projects.open_state(where) as store:
        report["recovered"] = projects.recovered(store)
        report["leftovers"] = garbage.leftovers(store, where)
    report["config"] = {
        "state": str(where.state),
        "file": str(where.config_file) if where.config_file.exists() else None,
    }
    config.load(where, project)  # says what is wrong with the files, if anything
    if args.json:
        show_json(report)
    else:
        _show(report, display(os.fsencode(project)))
    return 0 if report["ready"] else 4


def _show(report: dict[str, Any], project: str) -> None:
    tint = colours()
    print(f"project {project}; state {report['config']['state']}")
    for section in ("engines", "isolations"):
        for item in report[section]:
            mark = (
                f"{tint.green}works{tint.off}" if item["works"] else f"{tint.red}no{tint.off}   "
            )
            print(f"{mark}  {tint.bold}{item['name']}{tint.off}: {item['why']}")
            for remedy in item["remedies"]:
                print("       → " + remedy.replace("\n", "\n         "))
    for line in (*report["notes"], *report["recovered"], *report["leftovers"]):
        print(f"  ·  {line}")
    if report["ready"]:
        print(f"{tint.green}ready{tint.off}: `deltabox run -- CMD` works here")
    else:
        print(f"{tint.red}not ready{tint.off}: `deltabox run` would refuse")
