"""deltabox from Python: a trio client of the protocol, and `open`, a session of your own in one line.

    async with deltabox.open("/path/to/project") as session:
        done = await session.run("make test")
        print(done["stdout"], (await session.diff())["files"])
        await session.commit()

Everything goes over the wire to a coordinator, a process of its own; what a method takes and gives is
in docs/protocol.md, and comes back as plain dicts with its names. Must not import the server.
"""

import base64
import itertools
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import trio
from trio.lowlevel import FdStream

from deltabox import process
from deltabox.errors import DeltaboxError, SessionBusy
from deltabox.protocol import jsonrpc
from deltabox.protocol.client import error_from
from deltabox.session.tasks import beside

CHUNK = 64 * 1024
REPLY_LIMIT = 1 << 30  # a diff of everything; what comes is from our own coordinator
END_S = 15.0  # stopping: two graces, unmounting, judging
BACKLOG = 64  # notifications that wait for a reader of an exec before the connection does

# The member by which a notification says whom it is for.
_NAMED_BY = {
    "exec.output": "execId",
    "exec.exit": "execId",
    "event": "subscription",
    "fs.hits": "searchId",
}

Result = dict[str, Any]
Answer = Callable[[Result], Any]


class Stream(Protocol):
    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray: ...

    async def send_all(self, data: bytes) -> None: ...


class Client:
    """One connection. Requests may be made from any task; each waits for its own answer.

    answers: how to answer requests of the server, by method (`approval.request`).
    """

    def __init__(self, stream: Stream, answers: Mapping[str, Answer] | None = None) -> None:
        self._stream = stream
        self._answers = dict(answers or {})
        self._ids = itertools.count(1)
        self._waiting: dict[int, tuple[trio.Event, list[jsonrpc.Response]]] = {}
        self._sending = trio.Lock()
        self._routes: dict[tuple[str, str], trio.MemorySendChannel[tuple[str, Result]]] = {}
        self._over = False

    async def run(self) -> None:
        """Receive until the server closes; every request still waiting then fails."""
        decoder = jsonrpc.Decoder(limit=REPLY_LIMIT)
        try:
            async with trio.open_nursery() as nursery:
                try:
                    while chunk := await self._stream.receive_some(CHUNK):
                        for frame in decoder.feed(bytes(chunk)):
                            await self._take(frame, nursery)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    pass
                nursery.cancel_scope.cancel()
        finally:
            self._over = True
            for event, _ in self._waiting.values():
                event.set()
            for channel in self._routes.values():
                channel.close()

    async def call(self, method: str, **params: Any) -> Result:
        """One request. Raises: the server's error as its class; SessionBusy when it has gone.

        Cancellation: tells the server by `$/cancel`.
        """
        if self._over:
            raise SessionBusy("The coordinator has gone; start another.")
        ident = next(self._ids)
        event, replies = trio.Event(), list[jsonrpc.Response]()
        self._waiting[ident] = (event, replies)
        try:
            await self._send(jsonrpc.request(ident, method, params))
            try:
                await event.wait()
            except trio.Cancelled:
                with trio.CancelScope(shield=True), trio.move_on_after(1):
                    await self._send(jsonrpc.notification("$/cancel", {"id": ident}))
                raise
        finally:
            del self._waiting[ident]
        if not replies:
            raise SessionBusy(f"The coordinator went away before it answered {method}.")
        if replies[0].error is not None:
            raise error_from(replies[0].error)
        found: Result = replies[0].result
        return found

    @asynccontextmanager
    async def notifications(
        self, kind: str, name: str
    ) -> AsyncIterator[trio.MemoryReceiveChannel[tuple[str, Result]]]:
        """Notifications that name `name` in their member `kind` (execId, subscription, searchId), as
        (method, params). Who does not read them holds the whole connection up, past a backlog of 64.
        """
        send, receive = trio.open_memory_channel[tuple[str, Result]](BACKLOG)
        self._routes[kind, name] = send
        try:
            async with receive:
                yield receive
        finally:
            self._routes.pop((kind, name), None)
            send.close()

    @asynccontextmanager
    async def events(
        self, **params: Any
    ) -> AsyncIterator[trio.MemoryReceiveChannel[tuple[str, Result]]]:
        """Events (the members of events.subscribe choose which) for the life of the context."""
        name = f"py-{os.urandom(4).hex()}"
        async with self.notifications("subscription", name) as channel:
            await self.call("events.subscribe", subscription=name, **params)
            try:
                yield channel
            finally:
                channel.close()
                with trio.CancelScope(shield=True), trio.move_on_after(END_S):
                    await self._unsubscribe(name)

    async def _unsubscribe(self, name: str) -> None:
        try:
            await self.call("events.unsubscribe", subscription=name)
        except DeltaboxError:
            return  # the connection has gone, and the subscription with it

    async def _send(self, line: bytes) -> None:
        async with self._sending:
            try:
                await self._stream.send_all(line)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as exc:
                raise SessionBusy("The coordinator has gone; start another.") from exc

    async def _take(self, frame: jsonrpc.Frame, nursery: trio.Nursery) -> None:
        if isinstance(frame, jsonrpc.Response):
            waiting = self._waiting.get(frame.id) if isinstance(frame.id, int) else None
            if waiting is not None:
                waiting[1].append(frame)
                waiting[0].set()
        elif isinstance(frame, jsonrpc.Request) and not frame.notification:
            nursery.start_soon(self._answer, frame)
        elif isinstance(frame, jsonrpc.Request):
            await self._route(frame)

    async def _route(self, frame: jsonrpc.Request) -> None:
        member = _NAMED_BY.get(frame.method, "")
        key = (member, str(frame.params.get(member)))
        channel = self._routes.get(key)
        if channel is not None:
            try:
                await channel.send((frame.method, frame.params))
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self._routes.pop(key, None)

    async def _answer(self, frame: jsonrpc.Request) -> None:
        answer = self._answers.get(frame.method)
        if answer is None:
            words = f"This client does not answer {frame.method}."
            await self._send(jsonrpc.error(frame.id, jsonrpc.METHOD_NOT_FOUND, words))
            return
        await self._send(jsonrpc.result(frame.id, await answer(frame.params)))


class Exec:
    """A streaming command. Iterate it for `(channel, bytes)`; then `exit` has its `exec.exit`."""

    def __init__(
        self,
        session: "Session",
        exec_id: str,
        channel: trio.MemoryReceiveChannel[tuple[str, Result]],
    ) -> None:
        self.id = exec_id
        self.exit: Result | None = None
        self._session = session
        self._channel = channel

    async def write(self, data: bytes | str, *, close: bool = False) -> None:
        coded = data.encode() if isinstance(data, str) else data
        await self._call("exec.write", **_coded(coded), close=close)

    async def cancel(self) -> None:
        await self._call("exec.cancel")

    async def signal(self, number: int | str) -> None:
        await self._call("exec.signal", signal=number)

    async def resize(self, rows: int, columns: int) -> None:
        await self._call("exec.resize", rows=rows, columns=columns)

    async def _call(self, method: str, **params: Any) -> Result:
        return await self._session.call(method, execId=self.id, **params)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[str, bytes]:
        async for method, params in self._channel:
            if method == "exec.output":
                return params["channel"], content(params, "data")
            self.exit = params
            break
        raise StopAsyncIteration

    async def wait(self) -> Result:
        """Read on to the end, dropping the output; its `exec.exit`. Raises: SessionBusy."""
        async for _ in self:
            pass
        if self.exit is None:
            raise SessionBusy("The coordinator went away while the command ran.")
        return self.exit


class Session:
    """A session of a client. `info` is what session.start said."""

    def __init__(self, client: Client, info: Result) -> None:
        self.client = client
        self.info = info
        self.id: str = info["session"]
        self._names = itertools.count(1)

    async def call(self, method: str, **params: Any) -> Result:
        """Any method of the protocol on this session."""
        return await self.client.call(method, session=self.id, **params)

    async def run(self, command: str | Sequence[str], **how: Any) -> Result:
        """Run a command line (bash) or an argv to its end; the result of session.exec.

        input: bytes or text for its standard input. Cancellation: ends the command.
        """
        return await self.call("session.exec", **_command(command, how))

    @asynccontextmanager
    async def exec(self, command: str | Sequence[str], **how: Any) -> AsyncIterator[Exec]:
        """Run a command with its output as it comes; ended, if it still lives, with the context."""
        name = f"py{next(self._names)}-{os.urandom(3).hex()}"
        params = {**_command(command, how), "stream": True, "execId": name}
        async with self.client.notifications("execId", name) as channel:
            await self.call("session.exec", **params)
            started = Exec(self, name, channel)
            try:
                yield started
            finally:
                if started.exit is None:
                    with trio.CancelScope(shield=True), trio.move_on_after(END_S):
                        await _ended(started)

    async def read(self, path: str) -> bytes:
        """A whole file of the workspace, up to 8 MiB."""
        return content(await self.call("fs.read", path=path), "data")

    async def write(self, path: str, data: bytes | str, **how: Any) -> Result:
        coded = _coded(data.encode() if isinstance(data, str) else data)
        return await self.call("fs.write", path=path, **coded, **how)

    async def diff(self, **how: Any) -> Result:
        return await self.call("review.diff", **how)

    async def commit(self, *paths: str, **how: Any) -> Result:
        return await self.call("review.commit", paths=list(paths), **how)

    async def abort(self, *paths: str, **how: Any) -> Result:
        return await self.call("review.abort", paths=list(paths), **how)

    async def stop(self) -> Result:
        return await self.call("session.stop")


async def _ended(started: Exec) -> None:
    try:
        await started.cancel()
        await started.wait()
    except DeltaboxError:
        return  # it has ended, or all of it has


def _command(command: str | Sequence[str], how: dict[str, Any]) -> dict[str, Any]:
    what = {"command": command} if isinstance(command, str) else {"argv": list(command)}
    given = how.get("input")
    if isinstance(given, bytes):
        coded = _coded(given)
        how = {**how, "input": coded["data"], "encoding": coded["encoding"]}
    return {**what, **how}


def _coded(data: bytes) -> dict[str, str]:
    try:
        return {"data": data.decode(), "encoding": "utf-8"}
    except UnicodeDecodeError:
        return {"data": base64.b64encode(data).decode(), "encoding": "base64"}


def content(params: Result, member: str) -> bytes:
    """The bytes of a member that has an `encoding` (`stdoutEncoding` for `stdout`) beside it."""
    encoding = params.get(f"{member}Encoding") or params.get("encoding")
    text: str = params[member]
    return base64.b64decode(text) if encoding == "base64" else text.encode()


class _Pipes:
    """A child's standard streams as one stream."""

    def __init__(self, to: int, source: int) -> None:
        self._to = FdStream(to)
        self._from = FdStream(source)

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._from.receive_some(max_bytes)

    async def send_all(self, data: bytes) -> None:
        await self._to.send_all(data)

    async def close_input(self) -> None:
        await self._to.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with trio.CancelScope(shield=True):
            await self._to.aclose()
            await self._from.aclose()


@asynccontextmanager
async def coordinator(
    *,
    environ: Mapping[str, str] | None = None,
    answers: Mapping[str, Answer] | None = None,
    name: str = "deltabox-python",
) -> AsyncIterator[Client]:
    """A coordinator of your own (`deltabox serve`), for as many sessions as you like.

    Ends with the context: gracefully, within a few seconds; undecided reviews stay for later.
    """
    theirs_in, our_out = os.pipe()
    our_in, theirs_out = os.pipe()
    argv = [os.fsencode(sys.executable), b"-m", b"deltabox", b"serve"]
    where = dict(os.environ if environ is None else environ)
    # The same deltabox as this one, installed or not.
    root = str(Path(__file__).resolve().parent.parent)
    where["PYTHONPATH"] = os.pathsep.join(p for p in (root, where.get("PYTHONPATH")) if p)
    async with _Pipes(our_out, our_in) as pipes:
        try:
            child = await process.open_process(
                argv, stdin=theirs_in, stdout=theirs_out, stderr=2, env=where
            )
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        try:
            client = Client(pipes, answers)
            async with beside() as nursery:
                nursery.start_soon(client.run)
                await client.call(
                    "initialize",
                    protocolVersion="1",
                    clientInfo={"name": name},
                    capabilities={"approval": "approval.request" in client._answers},  # noqa: SLF001
                )
                yield client
                await pipes.close_input()
                with trio.move_on_after(END_S):
                    await child.wait()
        finally:
            with trio.CancelScope(shield=True):
                await pipes.close_input()
                await process.end(child, grace_s=END_S)


@asynccontextmanager
async def open(  # noqa: A001 - deltabox.open, as one says it
    project: str | os.PathLike[str],
    *,
    environ: Mapping[str, str] | None = None,
    answers: Mapping[str, Answer] | None = None,
    **options: Any,
) -> AsyncIterator[Session]:
    """A session of your own on a project: `async with deltabox.open(project) as session`.

    options: the members of session.start (engine, network, policy, …). On the way out the session is
    stopped and what was not decided waits for `deltabox review`. Raises: as session.start.
    """
    async with coordinator(environ=environ, answers=answers) as client:
        info = await client.call("session.start", projectRoot=os.path.realpath(project), **options)
        yield Session(client, info)
