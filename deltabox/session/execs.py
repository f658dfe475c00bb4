"""The commands of one session that a protocol client started: queue, output, deadline, end.

An exec outlives the request that started it where it is asked to (background, streaming), and never
its workspace. Must not know the wire: output goes to a sink as bytes, and ends as a `Settled`.
"""

import contextlib
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import trio

from deltabox.errors import BadUsage, DeltaboxError, Failed, NotFound
from deltabox.isolation.running import Command, Exit, Pipes, Stdio, Tty
from deltabox.paths import WorkspacePath
from deltabox.session.order import Ticket
from deltabox.session.output import Capture, Captured
from deltabox.session.workspace import Running, Workspace

Channel = Literal["stdout", "stderr", "terminal"]
Sink = Callable[["Exec", Channel, int, bytes], Awaitable[None]]
Ended = Callable[["Exec"], Awaitable[None]]

CHUNK = 64 * 1024  # what a pipe holds; asking for more never gives more
GRACE_S = 2.0  # between a polite TERM and the end of the namespace
DRAIN_S = 30.0  # output left in the pipes when the command has ended; only a slow client needs it
MAX_KEPT = 256  # settled execs whose result can still be asked for


@dataclass(frozen=True, slots=True)
class Asked:
    """One command as asked. stdin: bytes written at once and then end of file; `keep_stdin`
    leaves it open for `write`. collect_bytes: how much of each stream is kept for the result (the
    rest goes to a spill file); 0 where everything goes to a sink. id: the client's own name."""

    argv: tuple[str, ...]
    cwd: Path
    env: tuple[tuple[str, str], ...] = ()
    profile: str | None = None
    timeout_s: float = 600.0
    background: bool = False
    stdin: bytes = b""
    keep_stdin: bool = False
    terminal: tuple[int, int] | None = None
    collect_bytes: int = 0
    id: str | None = None

    @property
    def beside(self) -> bool:
        """Whether it runs beside the queue."""
        return self.background or self.terminal is not None

    @property
    def stdio(self) -> Stdio:
        if self.terminal is not None:
            return Tty(*self.terminal)
        return Pipes(stdin=bool(self.stdin) or self.keep_stdin)


@dataclass(frozen=True, slots=True)
class Settled:
    """How it went. `changed`: what the session's watcher saw between start and end; `shared` if
    other commands lived then, whose work may be among it."""

    exit: Exit
    timed_out: bool
    cancelled: bool
    duration_ns: int
    changed: tuple[WorkspacePath, ...]
    shared: bool
    output: dict[Channel, Captured]


@dataclass(eq=False)
class Exec:
    """One command. States: waiting for its turn, started, finished (settled or failed)."""

    id: str
    asked: Asked
    started_ns: int = 0
    turn: int | None = None
    settled: Settled | None = None
    error: DeltaboxError | None = None
    timed_out: bool = False
    cancelled: bool = False
    started: trio.Event = field(default_factory=trio.Event)
    finished: trio.Event = field(default_factory=trio.Event)
    command: Command | None = None
    _ending: trio.Event = field(default_factory=trio.Event)
    _grace_s: float = GRACE_S
    _feeding: trio.Lock = field(default_factory=trio.Lock)
    _window: "Window | None" = None
    _draining: trio.CancelScope | None = None

    def cancel(self, *, grace_s: float = GRACE_S) -> None:
        """TERM now, the end of everything after the grace. Before its turn it never starts; when it
        has ended and its client does not take the output, the rest of that is dropped."""
        if self._draining is not None:
            self._draining.deadline = min(self._draining.deadline, trio.current_time() + grace_s)
        elif not self.finished.is_set() and not self._ending.is_set():
            self.cancelled = True
            self._grace_s = grace_s
            self._ending.set()

    async def write(self, data: bytes, *, close: bool = False) -> None:
        """Into its standard input or terminal; waits for its turn, and while it does not read.

        Raises: NotFound when it has ended or its input is closed.
        """
        await self.started.wait()
        command = self._live()
        stream = command.terminal or command.stdin
        if stream is None:
            raise NotFound(f"Exec {self.id} was started without standard input; ask for `stdin`.")
        async with self._feeding:
            try:
                if data:
                    await stream.send_all(data)
                if close and command.stdin is not None:
                    await command.stdin.aclose()
            except (trio.BrokenResourceError, trio.ClosedResourceError) as exc:
                raise NotFound(f"Exec {self.id} does not read its input any more.") from exc

    async def signal(self, number: int) -> None:
        await self.started.wait()
        await self._live().signal(number)

    def resize(self, rows: int, columns: int) -> None:
        self._live().resize(rows, columns)

    def acknowledge(self, count: int) -> None:
        if self._window is not None:
            self._window.give(count)

    def _live(self) -> Command:
        if self.command is None or self.finished.is_set():
            raise NotFound(f"Exec {self.id} is not running.")
        return self.command


class Window:
    """Bytes that may be under way to a client that acknowledges; `take` waits for room."""

    def __init__(self, size: int) -> None:
        self._left = size
        self._size = size
        self._room = trio.Event()

    async def take(self, count: int) -> None:
        # One chunk is always let go, so that a window below a chunk's size cannot stand still.
        while self._left < min(count, self._size):
            self._room = trio.Event()
            await self._room.wait()
        self._left -= count

    def give(self, count: int) -> None:
        self._left = min(self._size, self._left + count)
        self._room.set()


class Execs:
    """A workspace's execs. `nursery` is the workspace's own: closing it ends them all."""

    def __init__(self, workspace: Workspace, nursery: trio.Nursery, spill: Path) -> None:
        self._workspace = workspace
        self._nursery = nursery
        self._spill = spill
        self._execs: dict[str, Exec] = {}
        self._counter = 0

    def all(self) -> list[Exec]:
        return list(self._execs.values())

    def running(self) -> list[Exec]:
        return [e for e in self._execs.values() if not e.finished.is_set()]

    def get(self, exec_id: str) -> Exec:
        """Raises: NotFound."""
        found = self._execs.get(exec_id)
        if found is None:
            raise NotFound(
                f"There is no exec {exec_id!r} in this session; `exec.list` lists them."
            )
        return found

    def begin(
        self,
        asked: Asked,
        *,
        ticket: Ticket | None = None,
        check: Callable[[], None] = lambda: None,
        sink: Sink | None = None,
        ended: Ended | None = None,
        window: int | None = None,
    ) -> Exec:
        """Queue or start a command. Never blocks; await `started`, `finished`.

        ticket: the place in the queue, owned from here on; None runs it beside. check: asked when
        the turn has come. ended: awaited last, when the queue has gone on, before `finished`.
        Raises: BadUsage for an id in use.
        """
        exec_id = asked.id
        if exec_id is None:
            self._counter += 1
            exec_id = f"e{self._counter}"
            while exec_id in self._execs:  # a client may have chosen the same
                self._counter += 1
                exec_id = f"e{self._counter}"
        elif exec_id in self._execs and not self._execs[exec_id].finished.is_set():
            raise BadUsage(f"Exec {exec_id!r} is running; choose another execId.")
        made = Exec(exec_id, asked)
        made._window = Window(window) if window else None  # noqa: SLF001 - its maker
        self._execs.pop(exec_id, None)
        self._execs[exec_id] = made
        self._forget_old()
        self._nursery.start_soon(self._run, made, ticket, check, sink, ended)
        return made

    async def end_all(self, grace_s: float) -> None:
        """TERM to all, and wait until all have ended; what does not obey is ended after the grace."""
        for one in self.running():
            one.cancel(grace_s=grace_s)
        for one in self.running():
            await one.finished.wait()

    def _forget_old(self) -> None:
        settled = [e for e in self._execs.values() if e.finished.is_set()]
        for one in settled[: max(0, len(settled) - MAX_KEPT)]:
            del self._execs[one.id]

    async def _run(
        self,
        one: Exec,
        ticket: Ticket | None,
        check: Callable[[], None],
        sink: Sink | None,
        ended: Ended | None,
    ) -> None:
        """The life of one exec. Only cancellation leaves it: a failure is the exec's own result."""
        try:
            if ticket is not None:
                await self._turn_or_end(one, ticket)
            check()
            one.settled = await self._started(one, sink)
        except DeltaboxError as exc:
            one.error = exc
        except OSError as exc:
            one.error = Failed(f"The command could not be run: {exc.strerror or exc}.")
        finally:
            if ticket is not None:
                ticket.done()
            one.command = None
            one.started.set()
            try:
                if ended is not None:
                    await ended(one)
            finally:
                one.finished.set()

    async def _turn_or_end(self, one: Exec, ticket: Ticket) -> None:
        async with trio.open_nursery() as nursery:

            async def ended() -> None:
                await one._ending.wait()  # noqa: SLF001 - the exec and its runner are one
                nursery.cancel_scope.cancel()

            nursery.start_soon(ended)
            await ticket.wait()
            nursery.cancel_scope.cancel()
        if one.cancelled:
            raise NeverStarted(f"Exec {one.id} was cancelled before its turn came.")

    async def _started(self, one: Exec, sink: Sink | None) -> Settled:
        asked = one.asked
        one.started_ns = time.time_ns()
        begun = time.monotonic_ns()
        captures: dict[Channel, Capture] = {}
        try:
            async with self._workspace.command(
                asked.argv,
                stdio=asked.stdio,
                cwd=asked.cwd,
                profile=asked.profile,
                env=asked.env,
            ) as running:
                one.turn = running.turn
                one.command = running.command
                one.started.set()
                exit_ = await self._attend(one, running, captures, sink)
        finally:
            for capture in captures.values():
                capture.close()
        return Settled(
            exit=exit_,
            timed_out=one.timed_out,
            cancelled=one.cancelled,
            duration_ns=time.monotonic_ns() - begun,
            changed=tuple(self._workspace.changed(running.paths)),
            shared=running.shared,
            output={name: capture.result() for name, capture in captures.items()},
        )

    async def _attend(
        self, one: Exec, running: Running, captures: dict[Channel, Capture], sink: Sink | None
    ) -> Exit:
        """Relay its output and watch its deadline until it has ended and its output is read."""
        command = running.command
        streams: list[tuple[Channel, trio.abc.ReceiveStream]] = []
        if command.terminal is not None:
            streams.append(("terminal", command.terminal))  # type: ignore[arg-type]
        if command.stdout is not None:
            streams.append(("stdout", command.stdout))
        if command.stderr is not None:
            streams.append(("stderr", command.stderr))
        async with trio.open_nursery() as watching:
            watching.start_soon(self._enforce, one, command)
            if one.asked.stdin or command.stdin is not None:
                watching.start_soon(self._first_input, one)
            async with trio.open_nursery() as reading:
                for name, stream in streams:
                    spill = self._spill / f"{running.turn}.{name}"
                    limit = one.asked.collect_bytes if sink is None else 0
                    captures[name] = capture = Capture(limit, spill if sink is None else None)
                    reading.start_soon(self._read, one, name, stream, capture, sink)
                exit_ = await command.wait()
                one._ending.set()  # noqa: SLF001
                patience_s = one._grace_s if one.cancelled else DRAIN_S  # noqa: SLF001
                reading.cancel_scope.deadline = trio.current_time() + patience_s
                one._draining = reading.cancel_scope  # noqa: SLF001
            watching.cancel_scope.cancel()
        return exit_

    async def _enforce(self, one: Exec, command: Command) -> None:
        """Cancellation and the deadline: TERM, then after the grace the whole namespace."""
        with trio.move_on_after(one.asked.timeout_s) as limit:
            await one._ending.wait()  # noqa: SLF001
        if limit.cancelled_caught:
            one.timed_out = True
        elif not one.cancelled:
            return  # it has ended by itself
        await command.signal(signal.SIGTERM)
        await trio.sleep(one._grace_s)  # noqa: SLF001
        command.kill()

    async def _first_input(self, one: Exec) -> None:
        with contextlib.suppress(NotFound):
            await one.write(one.asked.stdin, close=not one.asked.keep_stdin)

    async def _read(
        self,
        one: Exec,
        name: Channel,
        stream: trio.abc.ReceiveStream,
        capture: Capture,
        sink: Sink | None,
    ) -> None:
        seq = 0
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while chunk := bytes(await stream.receive_some(CHUNK)):
                capture.add(chunk)
                if sink is not None:
                    if one._window is not None:  # noqa: SLF001
                        await one._window.take(len(chunk))  # noqa: SLF001
                    await sink(one, name, seq, chunk)
                    seq += 1


class NeverStarted(DeltaboxError):
    """Cancelled while it waited for its turn: nothing was run."""

    rpc_code = -32800
    host_code = "CANCELLED"
    exit_status = 130


def shell(command: str) -> Sequence[str]:
    """A command line as argv: bash without the start-up files, which may be the agent's."""
    return ("/bin/bash", "--noprofile", "--norc", "-c", command)
