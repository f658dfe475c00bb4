"""Dispatch: one verb, one call, one exit status; a deliberate error becomes one sentence."""

import gc
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from deltabox.cli import args as arguments
from deltabox.errors import BadUsage, DeltaboxError

EXIT_INTERRUPTED = 130
EXIT_NO_START = 125  # as env(1): deltabox itself failed before the command

# Imported when used: a verb pays only for what it needs.
VERBS: dict[str, tuple[str, str]] = {
    "run": ("deltabox.cli.run", "run"),
    "demo": ("deltabox.cli.demo", "demo"),
    "diff": ("deltabox.cli.review", "diff"),
    "review": ("deltabox.cli.review", "review"),
    "commit": ("deltabox.cli.review", "commit"),
    "abort": ("deltabox.cli.review", "abort"),
    "undo": ("deltabox.cli.review", "undo"),
    "checkpoint": ("deltabox.cli.checkpoints", "checkpoint"),
    "restore": ("deltabox.cli.checkpoints", "restore"),
    "sessions": ("deltabox.cli.report", "sessions"),
    "log": ("deltabox.cli.report", "log"),
    "gc": ("deltabox.cli.report", "gc"),
    "exec": ("deltabox.cli.serve", "run_in_session"),
    "serve": ("deltabox.cli.serve", "serve"),
    "doctor": ("deltabox.cli.doctor", "doctor"),
}


def main(argv: Sequence[str]) -> int:
    """Returns the exit status. Never a traceback for what a user can cause."""
    verb = next((word for word in argv if not word.startswith("-")), "")
    try:
        try:
            return _dispatch(argv)
        finally:
            # Here, where a reader that has gone is understood; at exit python would complain of it.
            sys.stdout.flush()
    except DeltaboxError as exc:
        print(f"deltabox: {exc.sentence}", file=sys.stderr)
        return EXIT_NO_START if verb in ("run", "exec") else exc.exit_status
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has what it wanted; python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as exc:
        print(f"deltabox: {_os_sentence(exc)}", file=sys.stderr)
        return EXIT_NO_START if verb in ("run", "exec") else 1


def _dispatch(argv: Sequence[str]) -> int:
    parsed = arguments.parser().parse_args(argv)
    if parsed.version:
        print(version())
        return 0
    if parsed.verb is None:
        raise BadUsage("Say what to do: `deltabox run -- CMD`, or see `deltabox --help`.")
    return _load(parsed.verb)(parsed)


def _load(verb: str) -> Callable[[Any], int]:
    import importlib

    module, function = VERBS[verb]
    found: Callable[[Any], int] = getattr(importlib.import_module(module), function)
    # What the imports made stays to the end; no collection need look at it again.
    gc.freeze()
    gc.enable()
    return found


def _os_sentence(exc: OSError) -> str:
    """The kernel's refusal with its object; nothing of it was foreseen, so no next step is known."""
    from deltabox.paths import display

    what = exc.strerror or str(exc)
    if exc.filename is None:
        return f"{what}."
    name = exc.filename if isinstance(exc.filename, bytes) else os.fsencode(str(exc.filename))
    return f"{display(name)}: {what}."


def version() -> str:
    from importlib.metadata import version as installed

    return f"deltabox {installed('deltabox')}"
