"""Routes one request to its method: finds it, decodes its parameters, puts it in order, runs it.

Knows no method by name and no transport. A methods module exports `METHODS: dict[str, Method]`; the
tables are joined by whoever serves. Unknown parameters are ignored, so that a newer client can talk
to an older server; a missing or wrong one is INVALID_PARAMS and names the field.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from deltabox.errors import BadUsage, DeltaboxError
from deltabox.session.order import Ticket
from deltabox.session.workspace import Workspace


class UnknownMethod(DeltaboxError):
    """No such method in this version; `initialize` lists those there are."""

    rpc_code = -32601
    host_code = "METHOD_NOT_FOUND"
    exit_status = 2


class Context(Protocol):
    """What a method may use of the connection that called it."""

    @property
    def ticket(self) -> Ticket | None:
        """The place in the session's queue, taken when a queued request arrived."""
        ...

    def session(self, session: str) -> Workspace:
        """The live workspace of that id, on this coordinator. Raises: NotFound."""
        ...

    async def notify(self, method: str, params: Any) -> None:
        """Send a notification; waits while the client does not read. Silent when it has gone."""
        ...


def never(params: Any) -> bool:
    del params
    return False


def always(params: Any) -> bool:
    del params
    return True


@dataclass(frozen=True, slots=True)
class Method:
    """One method. Its docstring (first paragraph) stands in docs/protocol.md.

    params: a msgspec.Struct, camelCase on the wire; a method of one session has a `session: str`,
    and may have `generation: int | None`, which is then checked before the method runs.
    handle: (context, params) → a struct or a dict of JSON types. is_read: changes nothing, so it
    runs beside everything; other methods wait for their turn in the session's queue, in the order of
    arrival, and hold it while they run. queued: overrides that (for methods that queue by
    themselves or must not wait, like a decision beside a running command).
    waits_itself: the method waits for its ticket and gives it back (session.exec, which may
    outlive its request). result: for the documentation;
    a tuple where one of several comes.
    """

    params: type[msgspec.Struct]
    handle: Callable[[Any, Any], Awaitable[Any]]
    is_read: bool
    queued: Callable[[Any], bool] | None = None
    waits_itself: bool = False
    result: Any = None

    def waits(self, params: Any) -> bool:
        if self.queued is not None:
            return self.queued(params)
        return not self.is_read and hasattr(params, "session")


Table = Mapping[str, Method]


def find(table: Table, name: str) -> Method:
    """Raises: UnknownMethod."""
    method = table.get(name)
    if method is None:
        raise UnknownMethod(
            f"There is no method {name[:80]!r} in this version; `initialize` lists what there is."
        )
    return method


def decode(name: str, method: Method, params: dict[str, Any]) -> Any:
    """The parameters as the method's struct. Raises: BadUsage naming the field."""
    try:
        return msgspec.convert(params, method.params)
    except msgspec.ValidationError as exc:
        # msgspec ends with "- at `$.field`", which names it as the client wrote it.
        raise BadUsage(f"{name}: {exc}.".replace("`$.", "`"), code="INVALID_PARAMS") from exc
