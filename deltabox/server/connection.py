"""One client on one stream of bytes: requests in, answers and notifications out, each in its task.

The same for stdio and for sockets. Knows frames, limits, order and cancellation; no method by name
but those of the connection itself (initialize, $/cancel). What a client sends can fail its request,
never the connection and never another client.
"""

import contextlib
import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec
import trio

from deltabox.errors import BadUsage, DeltaboxError, NotFound, StaleVersion
from deltabox.protocol import jsonrpc
from deltabox.protocol import messages as m
from deltabox.server import dispatch
from deltabox.server.host import Host, Live
from deltabox.session.execs import Exec
from deltabox.session.order import Ticket
from deltabox.session.workspace import Workspace

log = logging.getLogger(__name__)

CHUNK = 64 * 1024

T = TypeVar("T")


class Stream(Protocol):
    """What a transport gives: both directions of bytes."""

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray: ...

    async def send_all(self, data: bytes) -> None: ...


class TooManyRequests(DeltaboxError):
    """More requests in flight than a connection may have; wait for answers."""

    rpc_code = -32000
    host_code = "TOO_MANY_REQUESTS"


class Unavailable(DeltaboxError):
    """The client cannot be asked: it does not answer such requests, or it has gone."""

    host_code = "UNAVAILABLE"


@dataclass(eq=False)
class Call:
    """One request under way. `on_cancel` is what `$/cancel` does instead of cancelling its task."""

    connection: "Connection"
    ticket: Ticket | None = None
    on_cancel: Callable[[], None] | None = None
    replied: trio.Event = field(default_factory=trio.Event)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    was_cancelled: bool = False

    @property
    def host(self) -> Host:
        return self.connection.host

    def live(self, session: str) -> Live:
        """A session that this process owns. Raises: NotFound."""
        return self.host.get(session)

    def session(self, session: str) -> Workspace:
        return self.host.get(session).workspace

    def take_ticket(self) -> Ticket | None:
        """The caller answers for giving it back from here on."""
        ticket, self.ticket = self.ticket, None
        return ticket

    def check(self, params: Any) -> None:
        """Raises: StaleVersion when the request names another generation than the session's."""
        wanted = getattr(params, "generation", None)
        if wanted is None or params.session is None:
            return
        found = self.session(params.session).generation
        if wanted != found:
            raise StaleVersion(
                f"Session {params.session} is at generation {found} and the request was made at "
                f"{wanted}; changes were decided in between, so look again.",
                generation=found,
            )

    async def notify(self, method: str, params: Any) -> None:
        await self.connection.notify(method, params)

    async def ask(self, method: str, params: Any, kind: type[T]) -> T:
        return await self.connection.ask(method, params, kind)

    def cancel(self) -> None:
        self.was_cancelled = True
        if self.on_cancel is not None:
            self.on_cancel()
        else:
            self.scope.cancel()


class Connection:
    """Serves one client until its end of file or `stop`."""

    def __init__(self, host: Host, stream: Stream, table: dispatch.Table) -> None:
        self.host = host
        self.client = m.ClientInfo()
        self.capabilities = m.ClientCapabilities()
        self._stream = stream
        self._table = {**table, **METHODS}
        self._sending = trio.Lock()
        self._gone = False
        self._calls: dict[jsonrpc.Id, Call] = {}
        self._count = 0
        self._reading = trio.CancelScope()
        self._nursery: trio.Nursery | None = None
        self._asked: dict[str, tuple[trio.Event, list[jsonrpc.Response]]] = {}
        self._asks = itertools.count(1)
        self._execs: set[Exec] = set()
        self.subscriptions: dict[str, trio.CancelScope] = {}

    async def serve(self, *, settle_s: float = 0.0) -> None:
        """Until end of file or `stop`; requests then have `settle_s` to be done.

        Commands that this client runs in the foreground end with it. Cancellation: at once.
        """
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                with self._reading:
                    await self._read(nursery)
                for scope in self.subscriptions.values():
                    scope.cancel()
                # Who has asked us something and gone will not answer what we asked.
                for event, _ in self._asked.values():
                    event.set()
                nursery.cancel_scope.deadline = trio.current_time() + settle_s
        finally:
            self._nursery = None
            for one in self._execs:
                one.cancel()

    def stop(self) -> None:
        """Read no more, as if the client had closed its end."""
        self._reading.cancel()

    def own(self, one: Exec) -> None:
        """This exec ends with the connection."""
        self._execs = {e for e in self._execs if not e.finished.is_set()} | {one}

    def spawn(self, work: Callable[[], Any]) -> None:
        """A task that ends with the connection."""
        if self._nursery is not None:
            self._nursery.start_soon(work)

    async def notify(self, method: str, params: Any) -> None:
        """Waits while the client does not read; silent when it has gone."""
        await self._send(jsonrpc.notification(method, params))

    async def ask(self, method: str, params: Any, kind: type[T]) -> T:
        """A request to the client. Raises: Unavailable when it cannot or does not answer properly."""
        ident = f"d{next(self._asks)}"
        event, replies = trio.Event(), list[jsonrpc.Response]()
        self._asked[ident] = (event, replies)
        try:
            await self._send(jsonrpc.request(ident, method, params))
            await event.wait()
        finally:
            del self._asked[ident]
        if not replies:
            raise Unavailable(f"The client went away before it answered {method}.")
        if replies[0].error is not None:
            raise Unavailable(f"The client answered {method} with an error.")
        try:
            return msgspec.convert(replies[0].result, kind)
        except msgspec.ValidationError as exc:
            raise Unavailable(f"The client's answer to {method} is wrong: {exc}.") from exc

    async def _send(self, line: bytes) -> None:
        async with self._sending:
            if self._gone:
                return
            self._gone = True  # a line cut by cancellation leaves nothing that could follow it
            try:
                await self._stream.send_all(line)
            except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
                self.stop()
                return
            self._gone = False

    async def _read(self, nursery: trio.Nursery) -> None:
        decoder = jsonrpc.Decoder()
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while chunk := await self._stream.receive_some(CHUNK):
                for frame in decoder.feed(bytes(chunk)):
                    await self._take(frame, nursery)

    async def _take(self, frame: jsonrpc.Frame, nursery: trio.Nursery) -> None:
        """One frame. Here the order of arrival is still known; in the tasks it no longer is."""
        if isinstance(frame, jsonrpc.Malformed):
            await self._send(jsonrpc.malformed(frame))
        elif isinstance(frame, jsonrpc.Response):
            asked = self._asked.get(str(frame.id))
            if asked is not None and not asked[1]:
                asked[1].append(frame)
                asked[0].set()
        elif frame.notification and frame.method in ("$/cancel", "initialized"):
            call = self._calls.get(frame.params.get("id"))
            if call is not None and frame.method == "$/cancel":
                call.cancel()
        elif not frame.notification and frame.id in self._calls:
            words = f"Request {frame.id!r} is still under way; give each request its own id."
            data = {"code": "DUPLICATE_ID"}
            await self._send(jsonrpc.error(frame.id, jsonrpc.INVALID_REQUEST, words, data))
        elif self._count >= m.MAX_IN_FLIGHT:
            busy = TooManyRequests(
                f"{m.MAX_IN_FLIGHT} requests are under way; wait for answers.",
                limit=m.MAX_IN_FLIGHT,
                retryable=True,
            )
            await self._send(jsonrpc.error_of(frame.id, busy))
        else:
            call = Call(self)
            self._count += 1
            if not frame.notification:
                self._calls[frame.id] = call
            try:
                method = dispatch.find(self._table, frame.method)
                params = dispatch.decode(frame.method, method, frame.params)
                if method.waits(params):
                    call.ticket = call.session(params.session).order.ticket()
            except DeltaboxError as exc:
                nursery.start_soon(self._reply, frame, call, jsonrpc.error_of(frame.id, exc))
                return
            nursery.start_soon(self._answer, frame, call, method, params)

    async def _answer(
        self, frame: jsonrpc.Request, call: Call, method: dispatch.Method, params: Any
    ) -> None:
        reply = b""
        try:
            with call.scope:
                reply = jsonrpc.result(frame.id, await self._call(call, method, params))
        except Exception as exc:  # noqa: BLE001 - it fails this request alone
            reply = _failure(frame, exc)
        finally:
            if call.ticket is not None:
                call.ticket.done()
        if not reply:
            words = f"{frame.method} was cancelled."
            reply = jsonrpc.error(frame.id, jsonrpc.CANCELLED, words, {"code": "CANCELLED"})
        await self._reply(frame, call, reply)

    async def _call(self, call: Call, method: dispatch.Method, params: Any) -> Any:
        if call.ticket is None or method.waits_itself:
            call.check(params)
            return await method.handle(call, params)
        async with call.ticket:
            call.check(params)
            return await method.handle(call, params)

    async def _reply(self, frame: jsonrpc.Request, call: Call, reply: bytes) -> None:
        """The request counts until its answer is sent: who does not read cannot pile answers up."""
        try:
            if not frame.notification:
                await self._send(reply)
        finally:
            self._count -= 1
            if not frame.notification:
                self._calls.pop(frame.id, None)
            call.replied.set()


def _failure(frame: jsonrpc.Request, exc: Exception) -> bytes:
    found = sole(exc)
    if isinstance(found, DeltaboxError):
        return jsonrpc.error_of(frame.id, found)
    log.warning("%s failed inside: %r", frame.method, found)
    words = f"{frame.method} failed inside deltabox ({type(found).__name__}: {found})."
    return jsonrpc.error(frame.id, jsonrpc.INTERNAL_ERROR, words, {"code": "FAILED"})


def sole(exc: BaseException) -> BaseException:
    """The one exception in nested groups, or the first of several deliberate ones."""
    if not isinstance(exc, BaseExceptionGroup):
        return exc
    deliberate = exc.subgroup(DeltaboxError)
    return sole((deliberate or exc).exceptions[0])


async def _initialize(call: Call, params: m.Initialize) -> m.Initialized:
    """Say who is there and what it can do. The first request of a polite client."""
    connection = call.connection
    connection.client = params.client_info
    connection.capabilities = params.capabilities
    return m.Initialized(
        protocol_version=m.VERSION,
        server_info=m.ClientInfo(name="deltabox", version=call.host.version()),
        methods=sorted(connection._table),  # noqa: SLF001 - its own method
        engines=["overlay"],
        isolations=["bubblewrap", "none"],
        profiles=["read-only", "workspace-write"],
        limits=m.Limits(
            line_bytes=jsonrpc.MAX_LINE,
            depth=jsonrpc.MAX_DEPTH,
            requests_in_flight=m.MAX_IN_FLIGHT,
            output_chunk_bytes=m.MAX_OUTPUT_CHUNK,
            collected_bytes=m.MAX_COLLECTED,
            timeout_ms=m.MAX_TIMEOUT_MS,
            stop_grace_ms=m.STOP_GRACE_MS,
        ),
    )


async def _cancel(call: Call, params: m.Cancel) -> dict[str, Any]:
    """Cancel the request of that id: a notification, so it has no answer of its own. The cancelled
    request is answered with error -32800, or (session.exec) with what it had done so far."""
    found = call.connection._calls.get(params.id)  # noqa: SLF001
    if found is None:
        raise NotFound(f"No request {params.id!r} is under way.")
    if found is call:
        raise BadUsage("A request cannot cancel itself.")
    found.cancel()
    return {}


METHODS: Mapping[str, dispatch.Method] = {
    "initialize": dispatch.Method(m.Initialize, _initialize, is_read=True, result=m.Initialized),
    "$/cancel": dispatch.Method(m.Cancel, _cancel, is_read=True, result=m.Nothing),
}
