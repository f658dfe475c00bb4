"""The approval card: what ran, what changed, what is risky or not covered, and one question.

Asks and hands the answer to a `Desk`; decides nothing itself. End of input, Ctrl-C and anything
not understood keep the review: the safe answer is the default.
"""

import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from deltabox.cli import text
from deltabox.cli.text import Palette
from deltabox.errors import DeltaboxError, ReviewChanged, ReviewConflict
from deltabox.paths import display, parse

# What fits on one screen beside the head and the question; deletions, risks, conflicts always show.
SHOWN_FILES = 30

CHOICES = "[a]pprove all  [r]eject all  [d]iff  [c]hoose files  [k]eep for later"
# Whole words, not beginnings: who types `abort` means the verb of that name, not to approve.
WORDS = {
    "": "k",
    **dict.fromkeys(("a", "approve", "approve all"), "a"),
    **dict.fromkeys(("r", "reject", "reject all", "abort"), "r"),
    **dict.fromkeys(("d", "diff"), "d"),
    **dict.fromkeys(("c", "choose", "choose files"), "c"),
    **dict.fromkeys(("k", "keep", "keep for later", "q", "quit"), "k"),
}


class Desk(Protocol):
    """Where decisions go: a quiet session's pending changes, or a live owner over its socket."""

    def diff(self, *, detail: str = "stat", paths: Sequence[bytes] = ()) -> dict[str, Any]: ...

    def commit(
        self,
        *,
        paths: Sequence[bytes] = (),
        digest: str | None = None,
        on_conflict: str = "fail",
        allow: Sequence[bytes] = (),
        keep_mtime: bool = False,
    ) -> dict[str, Any]: ...

    def abort(self, *, paths: Sequence[bytes] = ()) -> dict[str, Any]: ...


def head(result: dict[str, Any], colours: Palette) -> Iterator[str]:
    """Who, where, how protected, what ran."""

    def line(label: str, value: str) -> str:
        return f"{colours.dim}{label:<9}{colours.off} {value}"

    yield f"{colours.bold}deltabox review {result['review']}{colours.off}"
    if result.get("liveBase"):
        yield f"{colours.red}files were changed live in the project; reject restores them{colours.off}"
    yield line("project", display(os.fsencode(result["project"])))
    protection = f"{result['engine']} engine · {result['isolation']} · network {result['network']}"
    yield line("session", f"{result['session']} · {protection}")
    if result["isolation"] == "none":
        warning = "no isolation: the command could reach all your files and approve itself"
        yield f"{colours.red}{warning}{colours.off}"
    for turn in result.get("turns", ())[-3:]:
        done = text.outcome(turn["code"], turn["signal"])
        took = text.duration(turn["durationNs"]) if turn["durationNs"] is not None else "running"
        yield line("ran", f"{text.command_line(turn['argv'])} ({done}, {took})")


def body(result: dict[str, Any], colours: Palette, limit: int = SHOWN_FILES) -> Iterator[str]:
    """The files; past `limit` only what must never be hidden, and how many more there are."""
    files = result["files"]
    hidden = 0
    for number, file in enumerate(files):
        must = file["kind"] in ("deleted", "type") or file.get("risk") is not None
        if number < limit or must:
            yield "  " + text.file_line(file, colours)
        else:
            hidden += 1
    if hidden:
        yield f"  … and {text.plural(hidden, 'more change')} (d shows all)"
    yield from ("  " + line for line in text.remarks(result, colours, width=_width() - 4))
    yield f"  {colours.bold}{text.totals(files)}{colours.off}"


def render(result: dict[str, Any], colours: Palette = text.PLAIN) -> str:
    """The whole card without its question."""
    bar = colours.cyan + "│" + colours.off
    lines = [*head(result, colours), "", *body(result, colours)]
    width = _width()
    top = colours.cyan + "╭" + "─" * (width - 1) + colours.off
    bottom = colours.cyan + "╰" + "─" * (width - 1) + colours.off
    return "\n".join([top, *(f"{bar} {line}".rstrip() for line in lines), bottom])


def _width() -> int:
    return min(shutil.get_terminal_size().columns, 78)


def ask(prompt: str) -> str | None:
    """One line from the person, or None at the end of input or on Ctrl-C."""
    print(prompt, end=" ", flush=True)
    try:
        line = sys.stdin.readline()
    except KeyboardInterrupt:
        print()
        return None
    except UnicodeDecodeError:  # bytes that are no text are no answer
        return None
    return line.strip() if line else None


def show_paged(content: str, environ: dict[str, str]) -> None:
    """Through the user's pager when there is a terminal; the text was escaped, only our colours pass."""
    from deltabox import process

    pager = environ.get("PAGER") or ("less" if shutil.which("less") else "")
    if not sys.stdout.isatty() or not pager or pager == "cat":
        print(content, end="")
        return
    try:
        argv = shlex.split(pager)
    except ValueError:  # an open quote in PAGER
        argv = []
    if not argv or not process.run_pager(argv, content, env={"LESS": "-RFX", **environ}):
        print(content, end="")


def decide(desk: Desk, result: dict[str, Any], colours: Palette, environ: dict[str, str]) -> str:
    """Show the card and act on the answers until the review is decided or kept.

    Returns: committed, aborted, partly or kept. Errors that need another answer are said and asked again.
    """
    outcome = "kept"
    shown: dict[str, Any] | None = None
    while True:
        if shown is not result:
            print(render(result, colours))
            shown = result
        answer = ask(f"{colours.bold}{CHOICES}{colours.off} ?")
        try:
            match WORDS.get((answer or "").lower()):
                case "a":
                    done = approve(desk, result)
                    if done is not None:
                        say_commit(done, colours)
                        return "committed"
                case "r":
                    say_abort(desk.abort(), colours)
                    return "aborted"
                case "d":
                    patch = desk.diff(detail="patch")["patch"]
                    show_paged(text.coloured_patch(patch, colours), environ)
                case "c":
                    chosen = choose(result, colours)
                    done = approve(desk, result, paths=chosen) if chosen else None
                    if done is not None:
                        say_commit(done, colours)
                        outcome = "partly"
                        result = desk.diff()
                        if not result["files"]:
                            return "committed"
                case "k":
                    print(kept(result))
                    return outcome
                case _:
                    print(f"{answer!r} is none of the choices.")
        except ReviewChanged as exc:
            print(f"{colours.yellow}{exc.sentence}{colours.off}")
            result = desk.diff()
        except ReviewConflict as exc:
            print(f"{colours.red}{exc.sentence}{colours.off}")
            result = desk.diff()
        except DeltaboxError as exc:
            print(f"{colours.red}{exc.sentence}{colours.off}")


def approve(
    desk: Desk, result: dict[str, Any], paths: Sequence[bytes] = ()
) -> dict[str, Any] | None:
    """Commit, after the refused tier was named file by file by the person.

    None, and nothing committed, when the person left at one of these questions.
    """
    selected = {parse(p) for p in paths}
    named = []
    for file in result["files"]:
        path = path_of(file)
        risk = file.get("risk")
        if risk is None or risk["tier"] != "refused" or (selected and path not in selected):
            continue
        answer = ask(f"{file['display']}: {risk['reason']}. Type yes to let it into the project:")
        if answer is None:
            print("nothing was approved")
            return None
        if answer == "yes":
            named.append(path)
    return desk.commit(paths=list(paths), digest=result["digest"], allow=named)


def choose(result: dict[str, Any], colours: Palette) -> list[bytes]:
    """Numbers from a list: `1 3 5-7`, `all`, nothing for none."""
    files = result["files"]
    for number, file in enumerate(files, 1):
        print(f"{number:>4} {text.file_line(file, colours)}")
    answer = ask("files to approve (like 1 3 5-7, empty for none); the rest stays pending:")
    if not answer:
        return []
    if answer == "all":
        return [path_of(file) for file in files]
    chosen: set[int] = set()
    for word in answer.replace(",", " ").split():
        first, dash, last = word.partition("-")
        with contextlib.suppress(ValueError):
            low, high = int(first), int(last if dash else first)
            if 1 <= low <= high <= len(files):
                chosen.update(range(low, high + 1))
                continue
        print(f"{word!r} is no number between 1 and {len(files)}; nothing was approved.")
        return []
    return [path_of(files[number - 1]) for number in sorted(chosen)]


def path_of(file: dict[str, Any]) -> bytes:
    """The file's path as bytes, whichever way the result carries it."""
    if "pathB64" in file:
        import base64

        return base64.b64decode(file["pathB64"])
    return str(file["path"]).encode()


def say_commit(done: dict[str, Any], colours: Palette) -> None:
    """What reached the project, what did not and why, how to take it back."""
    count = len(done["committed"])
    if done.get("commit"):
        print(
            f"{colours.green}committed {text.plural(count, 'change')}{colours.off} as {done['commit']}; "
            "`deltabox undo` takes it back"
        )
    else:
        print("nothing to commit; the project is as it was")
    for line in text.remarks(done, colours):
        print("  " + line)
    if done.get("left"):
        print(f"  {text.plural(done['left'], 'change')} still pending; `deltabox review` goes on")


def say_abort(done: dict[str, Any], colours: Palette) -> None:
    count = done["discarded"]
    where = f"; kept in the trash as {done['trash']}" if done.get("trash") else ""
    print(f"{colours.yellow}discarded {text.plural(count, 'change')}{colours.off}{where}")


def kept(result: dict[str, Any]) -> str:
    session = result["session"]
    return (
        f"kept: {text.totals(result['files'])}. Go on with `deltabox review --session {session}`, "
        f"`deltabox commit --session {session}` or `deltabox abort --session {session}`."
    )
