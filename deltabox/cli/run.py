"""`run`: a command in the workspace on the user's terminal or pipes, then the review.

stdout carries only what the command printed. The exit status is the command's own; 125 when
deltabox failed before it, 126 and 127 as env(1).
"""

import argparse
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import trio

from deltabox import config
from deltabox.cli import card, terminal, text
from deltabox.cli.review import colours, setting
from deltabox.config import Config, Places
from deltabox.errors import BadUsage, DeltaboxError
from deltabox.isolation import none
from deltabox.isolation.running import Command, Exit, Pipes, Tty
from deltabox.paths import display
from deltabox.server import owner
from deltabox.session import coordinator
from deltabox.session import project as projects
from deltabox.session.pending import settings_of
from deltabox.session.workspace import Workspace
from deltabox.store import Session, Store

# After the command has ended its output may still sit in a pipe; a descendant cannot hold it open,
# since the sandbox dies with the command, so this only bounds a slow reader of ours.
DRAIN_S = 30.0
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def run(args: argparse.Namespace) -> int:
    argv = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not argv:
        raise BadUsage("There is no command to run; write it like `deltabox run -- claude`.")
    where, project = setting(args)
    settings = wishes(args, where, project)
    cwd = Path(os.path.realpath(os.getcwd()))
    cwd = cwd if cwd.is_relative_to(project) else project
    # What can be refused without a session is refused before one is made, or the state folder is.
    env = named_env(args.env, where)
    config.check_project(project, where)
    with projects.open_state(where) as store:
        session, continued = coordinator.choose(
            store, where, project, settings, named=args.session, new=args.new
        )
        announce(session, settings, continued=continued)
        exit_ = trio.run(_run, store, where, session, settings, argv, cwd, env)
        tell_failure(exit_, argv[0])
        after(store, where, store.session(session.id), settings.review)
    return exit_.status


def resume(
    store: Store, where: Places, session: Session, argv: Sequence[str], *, profile: str | None
) -> int:
    """Run one command in a session that nobody owns; nothing is asked, its review stays open."""
    settings = settings_of(session)
    if profile is not None:
        settings = replace(settings, profile=profile)
    cwd = Path(os.path.realpath(os.getcwd()))
    cwd = cwd if cwd.is_relative_to(session.project) else session.project
    exit_ = trio.run(_run, store, where, session, settings, argv, cwd, [])
    tell_failure(exit_, argv[0])
    return exit_.status


def wishes(args: argparse.Namespace, where: Places, project: Path) -> Config:
    """Files, then flags. Raises: BadUsage."""
    settings = config.load(where, project)
    flags = {
        "engine": args.engine,
        "isolation": args.isolation,
        "profile": args.profile,
        "network": args.net,
        "durability": args.durability,
        "review": "commit" if args.yes and args.review is None else args.review,
    }
    given = {name: value for name, value in flags.items() if value is not None}
    for name, aliases in (
        ("engine", config.ENGINE_ALIASES),
        ("isolation", config.ISOLATION_ALIASES),
    ):
        if name in given:
            given[name] = aliases.get(given[name], given[name])
    settings = replace(settings, **given)
    settings = replace(
        settings,
        deny=(*settings.deny, *args.deny),
        ro=(*settings.ro, *args.ro),
        passes=(*settings.passes, *args.passes),
        nest=settings.nest or args.nest,
    )
    return config.with_limits(settings, args.limit)


def named_env(words: Sequence[str], where: Places) -> list[tuple[str, str]]:
    """`NAME=VALUE`, or `NAME` for the value it has outside. Raises: BadUsage when it has none."""
    found = []
    for word in words:
        name, equals, value = word.partition("=")
        if not name:
            raise BadUsage(f"--env {word}: an environment variable needs a name before the `=`.")
        if not equals:
            if name not in where.environ:
                raise BadUsage(f"--env {name}: the variable is not set; write --env {name}=VALUE.")
            value = where.environ[name]
        found.append((name, value))
    return found


def tell_failure(exit_: Exit, program: str) -> None:
    """Why the command could not be run, or who ended it; nothing for a command that ended by itself."""
    if exit_.reason is None:
        return
    shown = display(os.fsencode(program))
    if exit_.status == 127:
        tell(
            f"{shown} was not found in the workspace, or what its first line names was not; "
            "a program outside the system's folders and the project needs --pass."
        )
    elif exit_.status == 126:
        tell(f"{shown} cannot be executed in the workspace ({exit_.reason}); look at its mode.")
    else:
        tell(f"{exit_.reason}.")


def announce(session: Session, settings: Config, *, continued: bool) -> None:
    """One line on stderr: which session, how protected."""
    if continued:
        tell(
            f"continuing session {session.id}, which has changes to review (--new starts another)"
        )
    if settings.isolation == "none":
        tell(none.WARNING)
    tell(
        f"session {session.id} · {session.engine} engine · {settings.isolation} · "
        f"network {settings.network} · {settings.profile}"
    )


def tell(words: str) -> None:
    print(f"deltabox: {words}", file=sys.stderr, flush=True)


async def _run(
    store: Store,
    where: Places,
    session: Session,
    settings: Config,
    argv: Sequence[str],
    cwd: Path,
    env: Sequence[tuple[str, str]],
) -> Exit:
    # From before the command starts until after it has ended: one that came in between would fall
    # on us, and take the command down instead of reaching it.
    with trio.open_signal_receiver(*FORWARDED) as received:
        async with (
            coordinator.owning(store, where, session, settings, argv=argv, cwd=cwd) as workspace,
            owner.answering(store, where, workspace),
        ):
            if sys.stdin.isatty() and sys.stdout.isatty():
                return await _on_terminal(workspace, argv, cwd, env, received)
            return await _on_pipes(workspace, argv, cwd, env, received)


async def _on_pipes(
    workspace: Workspace,
    argv: Sequence[str],
    cwd: Path,
    env: Sequence[tuple[str, str]],
    received: AsyncIterator[int],
) -> Exit:
    async with workspace.command(argv, stdio=Pipes(), cwd=cwd, named_env=env) as running:
        command = running.command
        assert command.stdin is not None
        assert command.stdout is not None
        assert command.stderr is not None
        async with trio.open_nursery() as feeding:
            feeding.start_soon(terminal.feed, 0, command.stdin)
            feeding.start_soon(_forward_signals, command, received)
            async with trio.open_nursery() as draining:
                draining.start_soon(terminal.drain, command.stdout, 1)
                draining.start_soon(terminal.drain, command.stderr, 2)
                exit_ = await command.wait()
                draining.cancel_scope.deadline = trio.current_time() + DRAIN_S
            feeding.cancel_scope.cancel()
    return exit_


async def _on_terminal(
    workspace: Workspace,
    argv: Sequence[str],
    cwd: Path,
    env: Sequence[tuple[str, str]],
    received: AsyncIterator[int],
) -> Exit:
    rows, columns = terminal.size_of(1)
    stdio = Tty(rows, columns)
    async with workspace.command(argv, stdio=stdio, cwd=cwd, named_env=env) as running:
        command = running.command
        master = command.terminal
        assert master is not None
        with terminal.raw(0) as cooked:
            async with trio.open_nursery() as feeding:
                feeding.start_soon(terminal.feed, 0, master)
                feeding.start_soon(_follow_size, command)
                feeding.start_soon(_suspend, command, cooked)
                feeding.start_soon(_forward_signals, command, received)
                async with trio.open_nursery() as draining:
                    draining.start_soon(terminal.drain, master, 1)
                    exit_ = await command.wait()
                    draining.cancel_scope.deadline = trio.current_time() + DRAIN_S
                feeding.cancel_scope.cancel()
    return exit_


async def _follow_size(command: Command) -> None:
    with trio.open_signal_receiver(signal.SIGWINCH) as resized:
        async for _ in resized:
            command.resize(*terminal.size_of(1))


async def _forward_signals(command: Command, received: AsyncIterator[int]) -> None:
    """What reaches us is meant for the command; keys of a raw terminal go through the pty instead."""
    async for number in received:
        await command.signal(number)


async def _suspend(command: Command, cooked: Any) -> None:
    """Ctrl-Z stopped the command: stop ourselves too, so that the user's shell takes over."""
    while await command.stopped() is not None:
        with cooked():
            os.kill(os.getpid(), signal.SIGSTOP)
            # Here again after `fg`.
        command.resize(*terminal.size_of(1))
        await command.cont()


def after(store: Store, where: Places, session: Session, mode: str) -> None:
    """What follows the command: nothing pending, or the review as asked. Errors keep the review."""
    if session.state == "closed" or store.review_of(session.id) is None:
        return
    counter = text.Progress(sys.stderr, "committing: step")
    with projects.desk(store, where, session, counter) as desk:
        result = desk.diff()
        if not result["files"] and not result["refused"]:
            return
        try:
            if mode == "ask" and sys.stdin.isatty() and sys.stdout.isatty():
                card.decide(desk, result, colours(), where.environ)
            elif mode == "commit":
                done = desk.commit(digest=result["digest"])
                _said(card.say_commit, done)
            elif mode == "abort":
                _said(card.say_abort, desk.abort())
            else:
                if mode == "ask":
                    print(card.render(result, colours(sys.stderr)), file=sys.stderr)
                tell(card.kept(result))
        except DeltaboxError as exc:
            tell(exc.sentence)
            tell(card.kept(desk.diff()))


def _said(say: Any, done: dict[str, Any]) -> None:
    """On stderr, since stdout is the command's."""
    import contextlib

    with contextlib.redirect_stdout(sys.stderr):
        say(done, colours(sys.stderr))
