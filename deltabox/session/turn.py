"""The states of a session and of its review, and which event leads where. A table, no I/O.

All that decides whether an event may happen lives in this file; this file never knows who asks.
"""

from typing import Literal

from deltabox.errors import Failed, NotFound, SessionRunning

SessionState = Literal["idle", "running", "closed"]
SessionEvent = Literal["own", "rest", "close"]
ReviewState = Literal["none", "open", "committed", "aborted"]
ReviewEvent = Literal["mutate", "commit", "abort", "decide-part", "settle"]

SESSION: dict[SessionState, dict[SessionEvent, SessionState]] = {
    "idle": {"own": "running", "close": "closed"},
    # "own" while running: the owner died without a word and the next one took its lock.
    "running": {"own": "running", "rest": "idle", "close": "closed"},
    "closed": {},
}

REVIEW: dict[ReviewState, dict[ReviewEvent, ReviewState]] = {
    # Reads never open a review; the first mutation does. What cancelled out settles without a word.
    "none": {"mutate": "open", "settle": "none"},
    "open": {
        "mutate": "open",
        "decide-part": "open",
        "commit": "committed",
        "abort": "aborted",
        "settle": "committed",
    },
    # A decided review is history: the next mutation opens a new one.
    "committed": {},
    "aborted": {},
}

# Events that need the session's processes gone, because they change what lies under a live mount.
QUIET_ONLY: frozenset[SessionEvent] = frozenset({"close"})


def next_session(state: SessionState, event: SessionEvent, *, live: bool = False) -> SessionState:
    """Raises: SessionRunning, NotFound for a session that is over."""
    if live and event in QUIET_ONLY:
        raise SessionRunning(
            "Processes of the session still run; wait for them or end them first."
        )
    if state == "closed":
        raise NotFound("The session is closed; start a new one.")
    to = SESSION[state].get(event)
    if to is None:
        raise Failed(f"The session is {state}, where {event!r} cannot happen; report this.")
    return to


def next_review(state: ReviewState, event: ReviewEvent) -> ReviewState:
    """Raises: NotFound when there is nothing to decide."""
    to = REVIEW[state].get(event)
    if to is None:
        if state == "none":
            raise NotFound("There is nothing to review: the session has no pending changes.")
        raise Failed(f"The review is already {state}; `deltabox log` tells when.")
    return to
