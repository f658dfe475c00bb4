"""One running command behind deltabox-init: its streams, its signals, its end. Confines nothing.

How the process got there (sandbox.py, none.py) is not known here; what init says is believed, what
the command says is only passed on.
"""

import contextlib
import errno
import fcntl
import os
import signal
import struct
import termios
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Literal

import trio
from trio.lowlevel import FdStream

from deltabox import process
from deltabox.errors import IsolationUnavailable, NotFound

START_TIMEOUT_S = 20.0  # 5 ms is usual; a machine in heavy swap takes seconds
GRACE_S = 2.0  # init ends at once when told; killing it would lose nothing but its tidiness
MAX_WORDS_BYTES = 16384  # of bubblewrap's own complaint


@dataclass(frozen=True, slots=True)
class Pipes:
    """Standard streams as pipes; without `stdin` the command reads end of file."""

    stdin: bool = True


@dataclass(frozen=True, slots=True)
class Tty:
    """An own pseudo-terminal, made inside; the user's terminal never enters."""

    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Handed:
    """Somebody else's pipes, given to the command as they are; borrowed. Never a terminal, a
    directory or a file: whoever hands them has checked it."""

    stdin: int
    stdout: int
    stderr: int


Stdio = Pipes | Tty | Handed


@dataclass(frozen=True, slots=True)
class Exit:
    """How the command ended: one of `code` and `signal`. `reason` says why it could not be run
    (code 127 when it is not there, 126 else, as env(1) has it)."""

    code: int | None = None
    signal: int | None = None
    reason: str | None = None

    @property
    def status(self) -> int:
        """As a shell shows it."""
        return self.code if self.code is not None else 128 + (self.signal or 0)


@dataclass(frozen=True, slots=True)
class Frozen:
    """running: threads that had not stopped within a second (they wait in the kernel); 0 is quiet."""

    running: int


class Terminal:
    """The master side, with the methods of a trio stream. Reads b"" at the end, when no
    process inside holds the terminal any more."""

    def __init__(self, fd: int) -> None:
        self._stream = FdStream(fd)

    def fileno(self) -> int:
        return self._stream.fileno()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        try:
            return bytes(await self._stream.receive_some(max_bytes))
        except trio.BrokenResourceError as exc:
            # That is how Linux says end of file on a master.
            if isinstance(exc.__cause__, OSError) and exc.__cause__.errno == errno.EIO:
                return b""
            raise

    async def aclose(self) -> None:
        await self._stream.aclose()


class Command:
    """A started command. Read its output while it runs: a full pipe stops it, as pipes do.

    terminal is set with Tty, the three streams with Pipes. pid: init's, as the host sees it.
    is_scoped: Landlock keeps its signals and abstract sockets inside.
    """

    def __init__(self, control: process.Control) -> None:
        self.stdin: trio.abc.SendStream | None = None
        self.stdout: trio.abc.ReceiveStream | None = None
        self.stderr: trio.abc.ReceiveStream | None = None
        self.terminal: Terminal | None = None
        self.pid: int | None = None
        self.is_scoped = False
        self._control = control
        self._turn = trio.Lock()
        self._exit: Exit | None = None
        self._stops: list[int] = []
        self._frozen: list[Frozen] = []
        self._thawed = 0
        self._has_started = False
        self._is_over = False
        self._pidfd = -1

    async def started(self) -> bool:
        """Whether init got as far as the command (or to the reason why it cannot be run)."""
        await self._until(lambda: self._has_started or self._exit is not None or self._is_over)
        return self._has_started or self._exit is not None

    async def wait(self) -> Exit:
        """How the command ended; again as often as asked. Everything it left behind is then being
        killed, and is gone when the context of `start` is left. Cancellation: safe."""
        await self._until(lambda: self._exit is not None or self._is_over)
        # init never goes without a word unless it was killed from outside the sandbox.
        return self._exit or Exit(
            signal=signal.SIGKILL, reason="the sandbox was killed from outside"
        )

    async def stopped(self) -> int | None:
        """The signal that next stops the command (Ctrl-Z: SIGTSTP), or None once it has ended."""
        await self._until(lambda: bool(self._stops) or self._exit is not None or self._is_over)
        return self._stops.pop(0) if self._stops else None

    async def signal(self, number: int) -> None:
        """To the terminal's foreground group, else to the command's; nothing once it has ended."""
        await self._say(b"signal %d" % number)

    async def cont(self) -> None:
        """Continue a stopped command."""
        await self._say(b"cont")

    async def freeze(self) -> Frozen:
        """Stop every process inside and wait until all threads rest, at most about a second.

        A shell with job control notices; see `thaw`. Raises: NotFound when the command has ended.
        """
        await self._say(b"freeze")
        await self._until(lambda: bool(self._frozen) or self._exit is not None or self._is_over)
        if not self._frozen:
            raise NotFound("The command has already ended, so there is nothing to freeze.")
        return self._frozen.pop(0)

    async def thaw(self) -> None:
        """Undo `freeze`; what was stopped before it stays stopped."""
        before = self._thawed
        await self._say(b"thaw")
        await self._until(lambda: self._thawed > before or self._exit is not None or self._is_over)

    def resize(self, rows: int, columns: int) -> None:
        """Tell the terminal its size; the foreground group gets SIGWINCH. No-op with pipes."""
        if self.terminal is not None:
            size = struct.pack("4H", rows, columns, 0, 0)
            with contextlib.suppress(OSError):  # nobody is left to see it
                fcntl.ioctl(self.terminal.fileno(), termios.TIOCSWINSZ, size)

    async def close(self) -> None:
        """For `launch`, once the processes are gone: the streams and descriptors."""
        with trio.CancelScope(shield=True):
            for stream in (self.stdin, self.stdout, self.stderr, self.terminal):
                if stream is not None:
                    await stream.aclose()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def kill(self) -> None:
        """SIGKILL init, and so everything inside; `launch` does it to what ignores its closed socket."""
        if self._pidfd >= 0:
            process.kill_quietly(self._pidfd)

    async def _say(self, words: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            await self._control.send(words)

    async def _until(self, is_done: Callable[[], bool]) -> None:
        """Receive until `is_done`. Whoever waits reads for all: no task in the background, and a
        cancelled waiter hands the reading on by leaving the lock."""
        while not is_done():
            async with self._turn:
                if is_done():
                    return
                message = await self._control.receive()
                # no await between here and the end of the block: a message is taken whole
                if message is None:
                    self._is_over = True
                else:
                    self._take(message)

    def _take(self, message: process.Message) -> None:
        if self.pid is None and message.pid:
            self.pid = message.pid
            with contextlib.suppress(ProcessLookupError):
                self._pidfd = os.pidfd_open(message.pid)
        word, *rest = message.data.decode("utf-8", "replace").split(" ", 3)
        if word == "tty" and message.fds and self.terminal is None:
            self.terminal = Terminal(message.fds[0])
            return
        for fd in message.fds:
            os.close(fd)
        number = int(rest[0]) if rest and rest[0].isdigit() else 0
        match word:
            case "ready":
                self.is_scoped = number == 1
            case "started":
                self._has_started = True
            case "stopped":
                self._stops.append(number)
            case "frozen":
                self._frozen.append(Frozen(number))
            case "thawed":
                self._thawed += 1
            case "exit":
                self._exit = Exit(code=number)
            case "killed":
                self._exit = Exit(signal=number)
            case "error":
                self._fail(*[*rest, "", "", ""][:3])

    def _fail(self, step: str, code: str, text: str) -> None:
        if step == "exec":
            missing = code == str(errno.ENOENT)
            self._exit = Exit(code=127 if missing else 126, reason=text)
        elif step == "chdir":
            raise NotFound(
                f"The command's folder cannot be entered in the workspace: {text}; choose another."
            )
        else:
            raise IsolationUnavailable(
                f"The sandbox could not be completed at the step `{step}`: {text}; "
                "`deltabox doctor` shows what works here.",
                step=step,
            )


@asynccontextmanager
async def launch(
    build: Callable[[Sequence[bytes]], tuple[Sequence[bytes], Sequence[int]]],
    init: Sequence[bytes],
    argv: Sequence[bytes],
    env: Sequence[tuple[str, str]],
    stdio: Stdio,
    *,
    layer: Literal["bubblewrap", "none"],
    started: Callable[[], None],
) -> AsyncIterator[Command]:
    """Start what `build` makes of init's arguments, and end all of it on the way out.

    build: init's arguments → the argv to start and the descriptors it inherits. init: options
    before the ones for control, streams and environment. started: called once the child has them.
    """
    with ExitStack() as ours, ExitStack() as theirs:
        control, end = process.Control.pair()
        ours.callback(control.close)
        theirs.callback(end.close)
        command = Command(control)
        env_fd = memory_file("env", b"".join(os.fsencode(f"{k}={v}") + b"\0" for k, v in env))
        theirs.callback(os.close, env_fd)
        inherited = [end.fileno(), env_fd]
        options = [b"--control", b"%d" % end.fileno(), b"--env", b"%d" % env_fd, *init]
        if isinstance(stdio, Tty):
            options += [b"--tty", b"%d" % stdio.rows, b"%d" % stdio.columns]
        else:
            for name, fd in zip(
                ("stdin", "stdout", "stderr"), _pipes(command, stdio, theirs), strict=True
            ):
                options += [b"--%s" % name.encode(), b"%d" % fd]
                inherited.append(fd)
        words, words_end = os.pipe()
        ours.callback(os.close, words)
        theirs.callback(os.close, words_end)
        try:
            full_argv, more = build([*options, b"--", *argv])
            child = await process.open_process(
                full_argv, fds=[*inherited, *more], stderr=words_end
            )
        except BaseException:
            await command.close()
            raise
        theirs.close()
        started()
        try:
            await _until_started(command, child, words, layer)
            yield command
        finally:
            with trio.CancelScope(shield=True):
                control.close()
                await _end(child, command)
                await command.close()


def memory_file(name: str, content: bytes) -> int:
    """An anonymous file with this content, at its beginning; the caller's to close."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _pipes(command: Command, stdio: Pipes | Handed, theirs: ExitStack) -> tuple[int, int, int]:
    if isinstance(stdio, Handed):
        return stdio.stdin, stdio.stdout, stdio.stderr

    def pipe(*, we_read: bool) -> tuple[int, FdStream]:
        read, write = os.pipe()
        mine, other = (read, write) if we_read else (write, read)
        theirs.callback(os.close, other)
        return other, FdStream(mine)

    if stdio.stdin:
        stdin, command.stdin = pipe(we_read=False)
    else:
        stdin = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        theirs.callback(os.close, stdin)
    stdout, command.stdout = pipe(we_read=True)
    stderr, command.stderr = pipe(we_read=True)
    return stdin, stdout, stderr


async def _until_started(
    command: Command, child: trio.Process, words: int, layer: Literal["bubblewrap", "none"]
) -> None:
    with trio.move_on_after(START_TIMEOUT_S) as limit:
        if await command.started():
            return
    if limit.cancelled_caught:
        reason = f"nothing was heard from it in {START_TIMEOUT_S:.0f} s"
    else:
        await process.end(child, grace_s=GRACE_S)
        reason = _read_words(words) or f"it ended with status {child.returncode} and no word"
    what = (
        "bubblewrap could not make the sandbox"
        if layer == "bubblewrap"
        else "The command could not start"
    )
    raise IsolationUnavailable(
        f"{what}: {reason}; `deltabox doctor` shows what is missing here and how to get it.",
        layer=layer,
        reason=reason,
    )


def _read_words(fd: int) -> str:
    os.set_blocking(fd, False)  # a survivor may hold the other end
    try:
        text = os.read(fd, MAX_WORDS_BYTES).decode("utf-8", "replace")
    except BlockingIOError:
        return ""
    return "; ".join(line for line in text.splitlines() if line).strip()


async def _end(child: trio.Process, command: Command) -> None:
    """The closed control socket ends init and so the namespace; kill only what does not obey."""
    with trio.move_on_after(GRACE_S):
        await child.wait()
        return
    command.kill()
    await process.end(child)
