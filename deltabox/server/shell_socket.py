"""Runs a command for deltabox-sh: its pipes go to the command as they are, its life is the command's.

One SOCK_SEQPACKET connection is one command. Packets:
  client → owner   `run` with four descriptors (words, stdin, stdout, stderr), or
                   `tty ROWS COLUMNS` with one (words); then `signal N`, `size ROWS COLUMNS`, `cont`
  owner → client   `started`, `tty` with the terminal's master, `stopped N`, then one of
                   `exit CODE [WHY]`, `killed SIGNAL`, `error WHY`
`words` is a memory file of NUL-terminated words: cwd, profile (may be empty), then the command.

A descriptor is given to the command only where holding it grants nothing else: an anonymous pipe
or /dev/null. A terminal, a directory or a file could be opened anew through /proc with more rights
than the descriptor has; deltabox-sh relays those through pipes. Not trusted, checked here.
"""

import contextlib
import os
import stat
from pathlib import Path

import trio

from deltabox.errors import BadUsage, DeltaboxError
from deltabox.isolation.running import Command, Exit, Handed, Stdio, Tty
from deltabox.paths import display
from deltabox.process import Control, Message
from deltabox.server.connection import sole
from deltabox.server.host import Live

MAX_WORDS_BYTES = 4 << 20  # the kernel's own limit for an argument list is 2 MiB by default
_NULL = (1, 3)  # the device number of /dev/null


async def serve(live: Live, peer: trio.socket.SocketType) -> None:
    """One command, from its request to its end; ends it when the client has gone."""
    control = Control.of(peer)
    first = await control.receive()
    if first is None:
        return
    try:
        words, stdio = _request(first)
        async with contextlib.AsyncExitStack() as stack:
            if isinstance(stdio, Handed):  # a terminal runs beside the queue
                await stack.enter_async_context(live.workspace.order.ticket())
            answer = await _run(live, control, words, stdio)
    except Exception as exc:  # noqa: BLE001 - it fails this command alone
        found = sole(exc)
        words_of_it = found.sentence if isinstance(found, DeltaboxError) else str(found)
        answer = f"error {words_of_it}"
    finally:
        for fd in first.fds:
            os.close(fd)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        await control.send(answer.encode()[:4096])


def _request(message: Message) -> tuple[list[bytes], Stdio]:
    kind, *numbers = message.data.decode("ascii", "replace").split(" ")
    if kind == "run" and len(message.fds) == 4:
        for name, fd in zip(("input", "output", "error output"), message.fds[1:], strict=True):
            _check(name, fd)
        return _words(message.fds[0]), Handed(*message.fds[1:])
    if kind == "tty" and len(message.fds) == 1 and len(numbers) == 2:
        rows, columns = (min(65535, max(1, int(n))) for n in numbers)
        return _words(message.fds[0]), Tty(rows, columns)
    raise BadUsage("This request is none of deltabox-sh's; use one of the same version.")


def _check(name: str, fd: int) -> None:
    st = os.fstat(fd)
    if stat.S_ISCHR(st.st_mode) and (os.major(st.st_rdev), os.minor(st.st_rdev)) == _NULL:
        return
    if not (stat.S_ISFIFO(st.st_mode) and os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:")):
        raise BadUsage(f"The command's {name} is no pipe, so it is not given to it; relay it.")


def _words(fd: int) -> list[bytes]:
    if not stat.S_ISREG(os.fstat(fd).st_mode) or os.fstat(fd).st_size > MAX_WORDS_BYTES:
        raise BadUsage("The command's words do not come in a memory file of at most 4 MiB.")
    words = os.pread(fd, MAX_WORDS_BYTES, 0).split(b"\0")[:-1]
    if len(words) < 3:
        raise BadUsage("deltabox-sh sent no command.")
    return words


async def _run(live: Live, control: Control, words: list[bytes], stdio: Stdio) -> str:
    cwd, profile, *argv = (os.fsdecode(word) for word in words)
    project = live.workspace.session.project
    inside = Path(cwd) if Path(cwd).is_relative_to(project) else project
    async with live.workspace.command(
        argv, stdio=stdio, cwd=inside, profile=profile or None, env=live.env
    ) as running:
        command = running.command
        if command.terminal is not None:
            await control.send(b"tty", [command.terminal.fileno()])
        else:
            await control.send(b"started")
        exit_: Exit | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_obey, control, command, nursery.cancel_scope)
            nursery.start_soon(_tell_stops, control, command)
            exit_ = await command.wait()
            nursery.cancel_scope.cancel()
    if exit_ is None:
        return "error The client went away."
    if exit_.signal is not None:
        return f"killed {exit_.signal}"
    why = f" {display(os.fsencode(argv[0]))}: {exit_.reason}" if exit_.reason else ""
    return f"exit {exit_.code}{why}"


async def _obey(control: Control, command: Command, scope: trio.CancelScope) -> None:
    """The client's orders until it has gone; then the command goes too."""
    while (message := await control.receive()) is not None:
        for fd in message.fds:
            os.close(fd)
        word, *numbers = message.data.decode("ascii", "replace").split(" ")
        values = [int(n) for n in numbers if n.isdigit()]
        if word == "signal" and values:
            await command.signal(values[0])
        elif word == "size" and len(values) == 2:
            command.resize(min(65535, values[0]), min(65535, values[1]))
        elif word == "cont":
            await command.cont()
    scope.cancel()


async def _tell_stops(control: Control, command: Command) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while (number := await command.stopped()) is not None:
            await control.send(b"stopped %d" % number)
