"""The queue of one session: foreground commands and file mutations, one at a time, as they arrived.

A ticket is taken without waiting, in the order of arrival, and may be waited for and given back by
another task than the one that took it (a lock could not be). Knows nothing of what waits.
"""

from collections import deque
from types import TracebackType
from typing import Self

import trio


class Ticket:
    """A place in the queue; give it back by `done`, or use it in `async with`."""

    def __init__(self, order: "Order") -> None:
        self._order = order
        self._called = trio.Event()

    async def wait(self) -> None:
        """Until everything before it is done. Cancellation: keeps the place; call `done`."""
        await self._called.wait()

    def done(self) -> None:
        """Give the place back, held or not; again is fine."""
        self._order.leave(self)

    def call(self) -> None:
        """For the order: it is this one's turn."""
        self._called.set()

    async def __aenter__(self) -> Self:
        try:
            await self.wait()
        except BaseException:
            self.done()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.done()


class Order:
    """First come, first served. Unbounded; the connection bounds how many can come."""

    def __init__(self) -> None:
        self._waiting: deque[Ticket] = deque()

    def ticket(self) -> Ticket:
        """A place behind everybody. Never blocks."""
        ticket = Ticket(self)
        self._waiting.append(ticket)
        if len(self._waiting) == 1:
            ticket.call()
        return ticket

    def leave(self, ticket: Ticket) -> None:
        if ticket not in self._waiting:
            return
        self._waiting.remove(ticket)
        if self._waiting:
            self._waiting[0].call()

    @property
    def length(self) -> int:
        """How many hold or wait for the turn."""
        return len(self._waiting)
