"""Tasks beside a context's body, which end with it and never change what it raises."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio


@asynccontextmanager
async def beside() -> AsyncIterator[trio.Nursery]:
    """A nursery for tasks that serve the body and are cancelled when it is done.

    The body's own exception comes out as it is, where a plain nursery would put it into a group that
    no caller expects. A task's failure cancels the body and comes out in a group: it is a defect.
    """
    raised: BaseException | None = None
    async with trio.open_nursery() as nursery:
        try:
            yield nursery
        except trio.Cancelled:
            raise
        except BaseException as exc:  # noqa: BLE001 - raised again below
            raised = exc
        finally:
            nursery.cancel_scope.cancel()
    if raised is not None:
        raise raised
