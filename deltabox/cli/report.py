"""`sessions log gc`: what there is, what happened, what can go."""

import argparse
import os
import time
from typing import Any

from deltabox import config
from deltabox.cli import text
from deltabox.cli.card import ask
from deltabox.cli.review import colours, setting, show_json
from deltabox.paths import display
from deltabox.session import garbage
from deltabox.session import project as projects


def sessions(args: argparse.Namespace) -> int:
    where, project = setting(args)
    with projects.open_state(where) as store:
        recovered = projects.recovered(store)
        rows = projects.overview(store, where, None if args.all else project, closed=args.all)
    if args.session:
        rows = [row for row in rows if row["session"].startswith(args.session)]
    if args.json:
        show_json({"sessions": rows, "recovered": recovered})
        return 0
    for sentence in recovered:
        print(sentence)
    if not rows:
        print(f"no sessions in {display(os.fsencode(project))}; `deltabox run -- CMD` starts one")
    tint = colours()
    for row in rows:
        owner = f", owner {row['pid']}" if row["pid"] else ""
        pending = f", review {row['review']} open" if row["review"] else ""
        print(
            f"{tint.bold}{row['session']}{tint.off}  {row['state']}{owner}{pending}  "
            f"{row['engine']} · {row['isolation']} · network {row['network']}  "
            f"{text.size(row['bytes'])}  {text.age(time.time_ns() - row['updatedNs'])}"
        )
        print(f"    {display(os.fsencode(row['project']))}")
        if row["lastCommand"]:
            print(f"    {text.command_line(row['lastCommand'])}")
    return 0


def log(args: argparse.Namespace) -> int:
    where, project = setting(args)
    with projects.open_state(where) as store:
        events = store.journal(project)
    if args.session:
        events = [e for e in events if (e["session"] or "").startswith(args.session)]
    if args.json:
        show_json({"events": events})
        return 0
    for event in events:
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["atNs"] / 1e9))
        print(f"{moment}  {event['session'] or '-':<9}  {describe(event)}")
    if not events:
        print(f"nothing has happened in {display(os.fsencode(project))} yet")
    return 0


def describe(event: dict[str, Any]) -> str:
    """One event of the journal in words."""
    match event["kind"]:
        case "turn.start":
            return f"$ {text.command_line(event['argv'])}"
        case "turn.end":
            done = text.outcome(event["code"], event["signal"])
            changed = text.plural(event["changed"], "path")
            return f"  {done} after {text.duration(event['durationNs'])}, touched {changed}"
        case "review.commit":
            return f"committed {text.plural(event['paths'], 'change')} as {event['commit']}"
        case "review.abort":
            return f"discarded {text.plural(event['paths'], 'change')} into trash {event['trash']}"
        case "checkpoint":
            return f"checkpoint {event['checkpoint']} {event['label']}".rstrip()
        case "checkpoint.skipped":
            return f"no checkpoint: {event['reason']}"
        case "undo.abort":
            return f"took {event['trash']} out of the trash for review"
        case "undo":
            return f"took back {event['undone']} as {event['commit']}"
        case "session.start":
            return f"session began: {event['engine']} · {event['isolation']} · network {event['network']}"
        case "session.close":
            return "session ended"
        case "recovered":
            return str(event["sentence"])
    return str(event["kind"])


def gc(args: argparse.Namespace) -> int:
    where = config.places()
    settings = config.load(where)
    with projects.open_state(where) as store:
        items = garbage.garbage(store, where, settings.trash)
        kept = garbage.stays(store)
        if args.json and args.dry_run:
            show_json({"items": [item.as_dict() for item in items], "trash": kept})
            return 0
        total = sum(item.bytes for item in items)
        if not args.json:
            for row in kept:
                print(
                    f"{text.size(row['bytes']):>10}  trash {row['trash']}: "
                    f"{text.plural(row['paths'], 'discarded path')} of "
                    f"{display(os.fsencode(row['project']))}, {text.age(row['ageNs'])}; "
                    f"`deltabox undo {row['trash']}` brings them back for review"
                )
            if kept:
                print(
                    f"{text.size(sum(row['bytes'] for row in kept)):>10}  in the trash; what goes:"
                )
            for item in items:
                print(f"{text.size(item.bytes):>10}  {item.what}")
            print(
                f"{text.size(total):>10}  in {text.plural(len(items), 'item')}; undecided reviews stay"
            )
        if args.dry_run or not items:
            return 0
        if not args.yes and ask("remove these? [y/N]") not in ("y", "yes"):
            print("nothing was removed")
            return 0
        for item in items:
            item.remove()
        if args.json:
            show_json({"items": [item.as_dict() for item in items], "bytes": total})
    return 0
