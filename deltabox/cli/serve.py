"""`serve`: a coordinator for a host on standard input and output. `exec`: one command in a session."""

import argparse
import os
import sys
from typing import NoReturn

from deltabox import config
from deltabox.cli.review import pick, setting
from deltabox.errors import BadUsage, SessionBusy
from deltabox.process import native_program
from deltabox.session import project as projects
from deltabox.session.folder import is_locked


def serve(args: argparse.Namespace) -> int:
    """Until end of file on standard input. Its stdout is the protocol's alone."""
    if args.schema:
        from deltabox.server import schema

        sys.stdout.write(schema.as_json())
        return 0
    from deltabox.server import stdio

    stdio.run(config.places(), stop_grace_ms=args.stop_grace_ms)
    return 0


def run_in_session(args: argparse.Namespace) -> int:
    """In the owner's workspace where one lives; else own the session for this command.

    Nothing is asked afterwards: the review stays as it is.
    """
    argv = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not argv:
        raise BadUsage("There is no command to run; write it like `deltabox exec -- make`.")
    where, project = setting(args)
    with projects.open_state(where) as store:
        session = pick(store, project, args.session)
        if not is_locked(projects.folder_of(where, session.id).lock):
            from deltabox.cli import run

            return run.resume(store, where, session, argv, profile=args.profile)
    if session.socket is None:
        raise SessionBusy(f"Session {session.id} is starting or ending; try again.")
    return _become_shell(session.socket, args.profile, argv)


def _become_shell(socket: str, profile: str | None, argv: list[str]) -> NoReturn:
    """deltabox-sh stands for the command from here on: signals, terminal and status are its."""
    program = native_program("sh")
    words = [str(program), "--socket", socket.removesuffix(".sock") + ".sh"]
    if profile is not None:
        words += ["--profile", profile]
    os.execv(program, [*words, "--", *argv])
