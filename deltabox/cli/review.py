"""`diff review commit abort undo`: find the one session meant, ask its owner or do it here."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deltabox import config
from deltabox.cli import card, text
from deltabox.config import Places
from deltabox.errors import Ambiguous, BadUsage, NotFound
from deltabox.paths import display, parse
from deltabox.session import project as projects
from deltabox.store import Session, Store


def setting(args: argparse.Namespace) -> tuple[Places, Path]:
    """This host's places and the project meant by `--project` or the current folder."""
    where = config.places()
    return where, config.find_project(Path.cwd(), args.project)


@contextmanager
def at_desk(args: argparse.Namespace) -> Iterator[tuple[card.Desk, Session, Places]]:
    """The one session with an open review that the arguments mean, ready for decisions.

    Raises: NotFound when nothing is pending, Ambiguous listing the sessions when several are.
    """
    where, project = setting(args)
    with projects.open_state(where) as store:
        session = pick(store, project, args.session)
        counter = text.Progress(sys.stderr, "committing: step")
        with projects.desk(store, where, session, counter) as desk:
            yield desk, session, where


def pick(store: Store, project: Path, named: str | None) -> Session:
    if named is not None:
        return store.session(named)
    running = [s for s in store.sessions(project) if s.state == "running"]
    found = [s for s in store.sessions(project) if store.review_of(s.id) or s in running]
    if not found:
        raise NotFound(
            f"Nothing is pending in {display(os.fsencode(project))}; "
            "`deltabox sessions --all` lists every project's sessions."
        )
    if len(found) > 1:
        listed = ", ".join(f"{s.id} ({s.state}, {text.age(_now() - s.created_ns)})" for s in found)
        raise Ambiguous(
            f"{display(os.fsencode(project))} has {len(found)} open reviews: {listed}; "
            "choose one with --session ID."
        )
    return found[0]


def _now() -> int:
    import time

    return time.time_ns()


def selection(args: argparse.Namespace, project: Path) -> list[bytes]:
    """PATH arguments, relative to the current folder or absolute, as paths inside the project.

    Raises: BadUsage for one outside.
    """
    chosen = []
    for word in args.paths:
        # By spelling, not by links: the name may exist only in the view.
        full = os.path.normpath(os.path.join(os.path.realpath(os.getcwd()), word))
        if full == str(project):
            chosen.append(b"")
        elif full.startswith(str(project) + "/"):
            chosen.append(parse(full[len(str(project)) + 1 :]))
        else:
            raise BadUsage(f"{word} is not inside {display(os.fsencode(project))}.")
    return [] if b"" in chosen else chosen


def colours(stream: Any = None) -> text.Palette:
    stream = stream or sys.stdout
    return text.palette(is_terminal=stream.isatty(), environ=dict(os.environ))


def show_json(result: dict[str, Any]) -> None:
    json.dump(result, sys.stdout, indent=1)
    print()


def diff(args: argparse.Namespace) -> int:
    if args.stat + args.patch + args.json > 1:
        raise BadUsage("--stat, --patch and --json exclude each other; choose one.")
    with at_desk(args) as (desk, session, where):
        paths = selection(args, session.project)
        if args.json:
            show_json(desk.diff(detail="full", paths=paths))
            return 0
        if args.stat:
            print("\n".join(text.stat(desk.diff(paths=paths), colours())))
            return 0
        result = desk.diff(detail="exact" if args.patch else "patch", paths=paths)
        if args.patch:
            sys.stdout.flush()
            sys.stdout.buffer.write(os.fsencode(result["patch"]))
            return 0
        shown = [text.coloured_patch(result["patch"], colours()).rstrip("\n")]
        shown += [*text.remarks(result, colours()), text.totals(result["files"])]
        card.show_paged("\n".join(line for line in shown if line) + "\n", where.environ)
    return 0


def review(args: argparse.Namespace) -> int:
    with at_desk(args) as (desk, _, where):
        result = desk.diff()
        if not result["files"] and not result["refused"]:
            print("nothing is pending; the review is closed")
            return 0
        if not sys.stdin.isatty():
            print(card.render(result))
            print(card.kept(result))
            return 0
        card.decide(desk, result, colours(), where.environ)
    return 0


def commit(args: argparse.Namespace) -> int:
    with at_desk(args) as (desk, session, _):
        done = desk.commit(
            paths=selection(args, session.project),
            digest=args.digest,
            on_conflict=args.on_conflict,
            allow=_named(args.allow),
            keep_mtime=args.keep_mtime,
        )
    if args.json:
        show_json(done)
    else:
        card.say_commit(done, colours())
    # Skipped conflicts were asked for, and so was what cannot go without them; what stayed out for
    # its risk was not.
    return 3 if any(not one["follows"] for one in done["refused"]) else 0


def _named(words: Sequence[str]) -> list[bytes]:
    return [parse(word) for word in words]


def abort(args: argparse.Namespace) -> int:
    with at_desk(args) as (desk, session, _):
        done = desk.abort(paths=selection(args, session.project))
    if args.json:
        show_json(done)
    else:
        card.say_abort(done, colours())
    return 0


def undo(args: argparse.Namespace) -> int:
    where, project = setting(args)
    if (args.id or "").startswith("t"):
        return _undo_abort(args, where)
    with projects.open_state(where) as store:
        done = projects.undo(store, where, project, args.id)
    if args.json:
        show_json(done)
        return 0
    print(
        f"took back {text.plural(done['paths'], 'change')} of {done['undone']} (as {done['commit']})"
    )
    print(f"  `deltabox undo {done['commit']}` brings them again")
    for session in done["liveSessions"]:
        print(f"  session {session} is running and may show the old content until it restarts")
    return 0


def _undo_abort(args: argparse.Namespace, where: Places) -> int:
    """What an abort discarded is a review again; nothing reaches the project by this."""
    from deltabox.session import trash

    with projects.open_state(where) as store:
        done = trash.take_back(store, where, args.id)
    if args.json:
        show_json(done)
        return 0
    count = text.plural(done["paths"], "discarded change")
    print(f"{count} of {done['trash']} pending again in session {done['session']}")
    print(f"  `deltabox review --session {done['session']}` shows them")
    return 0
