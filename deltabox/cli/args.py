"""Verbs and flags. Declares, parses, checks nothing that needs the disk."""

import argparse
from typing import Any, NoReturn

from deltabox.errors import BadUsage

ENGINES = ("auto", "overlay", "fuse", "git", "cbcow", "cbcow-through", "git-ghost")
PROFILES = ("read-only", "workspace-write", "read-write")


class _Parser(argparse.ArgumentParser):
    """argparse that raises one sentence instead of printing two lines and leaving."""

    def __init__(self, **options: Any) -> None:
        # Whole flags only: a beginning that is unique today is another flag's tomorrow.
        super().__init__(**{"allow_abbrev": False, **options})

    # No @override: typing_extensions would cost each start 8 ms.
    def error(self, message: str) -> NoReturn:  # type: ignore[explicit-override]
        raise BadUsage(f"{message[:1].upper()}{message[1:]}; see `{self.prog} --help`.")


def parser() -> argparse.ArgumentParser:
    top = _Parser(
        prog="deltabox",
        description="Run an agent on a copy-on-write view of your project; review, commit, abort or undo.",
        epilog="Exit status: 0 done, 1 failed, 2 usage or ambiguous, 3 refused (conflict, changed, denied), "
        "4 unavailable (engine, isolation), 130 interrupted; `run` gives the command's own.",
    )
    top.add_argument("--version", action="store_true", help="print the version")
    verbs = top.add_subparsers(dest="verb", metavar="VERB", parser_class=_Parser)

    run = verbs.add_parser("run", help="run a command in the workspace, then review its changes")
    where(run)
    protection(run)
    run.add_argument(
        "--review", choices=("ask", "commit", "abort", "keep"), help="what follows the command"
    )
    run.add_argument(
        "--new", action="store_true", help="a new session, even if one has open changes"
    )
    run.add_argument(
        "--yes", action="store_true", help="approve without asking (as --review commit)"
    )
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="[--] CMD …")

    demo = verbs.add_parser(
        "demo", help="a scripted agent on a sample project, each promise checked"
    )
    demo.add_argument("--yes", action="store_true", help="answer the card with approve")

    doctor = verbs.add_parser("doctor", help="what works here, what does not and why")
    where(doctor)
    as_json(doctor)

    sessions = verbs.add_parser("sessions", help="list sessions with open changes or live owners")
    where(sessions)
    as_json(sessions)
    sessions.add_argument("--all", action="store_true", help="of all projects, closed ones too")

    diff = verbs.add_parser("diff", help="show the pending changes")
    where(diff)
    as_json(diff)
    diff.add_argument("--stat", action="store_true", help="names and counts only")
    diff.add_argument(
        "--patch", action="store_true", help="a patch that git apply takes, uncoloured"
    )
    diff.add_argument("paths", nargs="*", metavar="PATH")

    review = verbs.add_parser("review", help="show the card and ask")
    where(review)

    commit = verbs.add_parser("commit", help="apply pending changes to the project")
    where(commit)
    as_json(commit)
    commit.add_argument(
        "--digest", help="apply only if the changes are still these (from diff --json)"
    )
    commit.add_argument(
        "--on-conflict",
        choices=("fail", "skip"),
        default="fail",
        help="where the project moved meanwhile",
    )
    commit.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="PATH",
        help="a refused change to let in, by name",
    )
    commit.add_argument("--keep-mtime", action="store_true", help="keep the times the agent left")
    commit.add_argument(
        "--yes", action="store_true", help="accepted for scripts; commit never asks"
    )
    commit.add_argument("paths", nargs="*", metavar="PATH")

    abort = verbs.add_parser("abort", help="discard pending changes (into a trash)")
    where(abort)
    as_json(abort)
    abort.add_argument("--yes", action="store_true", help="accepted for scripts; abort never asks")
    abort.add_argument("paths", nargs="*", metavar="PATH")

    undo = verbs.add_parser("undo", help="take back a commit, by default the project's latest")
    where(undo, session=False)
    as_json(undo)
    undo.add_argument("id", nargs="?", metavar="ID")

    checkpoint = verbs.add_parser("checkpoint", help="remember the workspace's files as they are")
    where(checkpoint)
    as_json(checkpoint)
    checkpoint.add_argument("--list", action="store_true", help="list the checkpoints instead")
    checkpoint.add_argument("label", nargs="?", default="", metavar="LABEL")

    restore = verbs.add_parser("restore", help="go back to a checkpoint, wholly or at some paths")
    where(restore)
    as_json(restore)
    restore.add_argument("id", metavar="ID")
    restore.add_argument("paths", nargs="*", metavar="PATH")

    log = verbs.add_parser("log", help="what ran, what was decided, in which order")
    where(log)
    as_json(log)

    execute = verbs.add_parser("exec", help="run a command in a session that is open or waits")
    where(execute)
    execute.add_argument("--profile", choices=PROFILES)
    execute.add_argument("command", nargs=argparse.REMAINDER, metavar="[--] CMD …")

    serve = verbs.add_parser("serve", help="answer a host over stdio (docs/protocol.md)")
    serve.add_argument(
        "--schema", action="store_true", help="print the JSON Schema of every method"
    )
    serve.add_argument(
        "--stop-grace-ms", type=int, default=2000, metavar="MS", help="for a graceful stop"
    )

    gc = verbs.add_parser(
        "gc", help="free what is no longer needed; says what goes before it goes"
    )
    as_json(gc)
    gc.add_argument("--dry-run", action="store_true", help="only say what would go")
    gc.add_argument("--yes", action="store_true", help="do not ask")
    return top


def where(verb: argparse.ArgumentParser, *, session: bool = True) -> None:
    verb.add_argument(
        "--project", metavar="DIR", help="default: nearest folder with .git or deltabox.toml"
    )
    if session:
        verb.add_argument("--session", metavar="ID", help="default: the project's only open one")


def as_json(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--json", action="store_true", help="one JSON object on stdout")


def protection(verb: argparse.ArgumentParser) -> None:
    """Flags that say how the command is confined."""
    verb.add_argument("--engine", choices=ENGINES, help="how the view is made (default auto)")
    verb.add_argument("--isolation", choices=("bubblewrap", "deltabox", "none"))
    verb.add_argument("--profile", choices=PROFILES)
    verb.add_argument("--net", choices=("off", "host"), help="network of the command")
    verb.add_argument("--env", action="append", default=[], metavar="NAME[=VALUE]")
    verb.add_argument(
        "--pass",
        action="append",
        default=[],
        metavar="PATH[:ro|cow|rw]",
        dest="passes",
        help="a host path to show at its place (default ro)",
    )
    verb.add_argument(
        "--deny", action="append", default=[], metavar="PATH", help="hide a project path"
    )
    verb.add_argument(
        "--ro", action="append", default=[], metavar="PATH", help="never commit this path"
    )
    verb.add_argument(
        "--nest", action="store_true", help="let the command make sandboxes of its own"
    )
    verb.add_argument("--limit", action="append", default=[], metavar="K=V")
    verb.add_argument("--durability", choices=("fast", "strict"))
