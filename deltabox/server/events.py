"""events.subscribe: the store's journal as notifications, resumable by number, in order.

Reads the journal and nothing else; what other processes write to it comes too.
"""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trio

from deltabox.errors import BadUsage, NotFound
from deltabox.protocol import messages as m
from deltabox.server.connection import Call
from deltabox.server.dispatch import Method
from deltabox.server.host import project_of

# Another process's events cannot wake us; asking SQLite costs 20 µs.
LOOK_S = 0.1
BATCH = 500

_names = itertools.count(1)


async def subscribe(call: Call, params: m.Subscribe) -> m.Subscribed:
    """Get the journal's events as they happen, and before that those after `after`, none left out and
    none twice. They wait while the client does not read."""
    store = call.host.store
    project = None if params.project_root is None else project_of(params.project_root)
    newest = store.last_event()
    after = newest if params.after is None else params.after
    name = params.subscription or f"sub{next(_names)}"
    if name in call.connection.subscriptions:
        raise BadUsage(f"The subscription {name!r} is there already; choose another name.")

    scope = call.connection.subscriptions[name] = trio.CancelScope()

    async def pump() -> None:
        with scope:
            await call.replied.wait()
            await _pump(call, name, after, params.session, project)

    call.connection.spawn(pump)
    return m.Subscribed(subscription=name, seq=newest)


async def _pump(
    call: Call, name: str, after: int, session: str | None, project: Path | None
) -> None:
    while True:
        events = call.host.store.journal(project, after=after, limit=BATCH)
        for event in events:
            after = event["seq"]
            if session is None or event["session"] == session:
                await call.notify("event", _event(name, event))
        if len(events) < BATCH:
            await trio.sleep(LOOK_S)


def _event(name: str, event: dict[str, Any]) -> m.Event:
    own = ("seq", "atNs", "session", "project", "kind")
    return m.Event(
        subscription=name,
        seq=event["seq"],
        at_ns=event["atNs"],
        session=event["session"],
        project=event["project"],
        kind=event["kind"],
        data={k: v for k, v in event.items() if k not in own},
    )


async def unsubscribe(call: Call, params: m.Unsubscribe) -> dict[str, Any]:
    """End a subscription; events under way may still come."""
    scope = call.connection.subscriptions.pop(params.subscription, None)
    if scope is None:
        raise NotFound(f"There is no subscription {params.subscription[:40]!r}.")
    scope.cancel()
    return {}


METHODS: Mapping[str, Method] = {
    "events.subscribe": Method(m.Subscribe, subscribe, is_read=True, result=m.Subscribed),
    "events.unsubscribe": Method(m.Unsubscribe, unsubscribe, is_read=True, result=m.Nothing),
}
