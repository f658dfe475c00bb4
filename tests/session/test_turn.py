"""The state tables: total, so that no event can be met by a KeyError, and with no way back from closed."""

from collections.abc import Callable
from typing import get_args

import pytest

from deltabox.errors import DeltaboxError, Failed, NotFound, SessionRunning
from deltabox.session.turn import (
    QUIET_ONLY,
    REVIEW,
    SESSION,
    ReviewEvent,
    ReviewState,
    SessionEvent,
    SessionState,
    next_review,
    next_session,
)


def outcome(act: Callable[..., str], *args: str) -> str:
    try:
        return act(*args)
    except DeltaboxError as exc:
        return exc.sentence


@pytest.mark.parametrize("state", get_args(SessionState))
@pytest.mark.parametrize("event", get_args(SessionEvent))
def test_a_session_goes_on_to_a_state_or_says_why_not(state: str, event: str) -> None:
    found = outcome(next_session, state, event)
    assert found in get_args(SessionState) or found.endswith(".")


@pytest.mark.parametrize("state", get_args(ReviewState))
@pytest.mark.parametrize("event", get_args(ReviewEvent))
def test_a_review_goes_on_to_a_state_or_says_why_not(state: str, event: str) -> None:
    found = outcome(next_review, state, event)
    assert found in get_args(ReviewState) or found.endswith(".")


def test_the_tables_know_every_state() -> None:
    assert set(SESSION) == set(get_args(SessionState))
    assert set(REVIEW) == set(get_args(ReviewState))


def test_a_session_lives_from_idle_to_closed() -> None:
    state: SessionState = "idle"
    events: tuple[SessionEvent, ...] = ("own", "rest", "own", "own", "rest", "close")
    seen = []
    for event in events:
        state = next_session(state, event)
        seen.append(state)
    assert seen == ["running", "idle", "running", "running", "idle", "closed"]


@pytest.mark.parametrize("event", get_args(SessionEvent))
def test_a_closed_session_is_over(event: SessionEvent) -> None:
    with pytest.raises(NotFound, match="closed"):
        next_session("closed", event)


@pytest.mark.parametrize("event", sorted(QUIET_ONLY))
def test_what_needs_quiet_is_refused_while_processes_live(event: SessionEvent) -> None:
    assert next_session("running", event) == "closed"
    with pytest.raises(SessionRunning):
        next_session("running", event, live=True)


def test_only_a_mutation_opens_a_review() -> None:
    assert [e for e in get_args(ReviewEvent) if REVIEW["none"].get(e) == "open"] == ["mutate"]


@pytest.mark.parametrize("event", ["commit", "abort", "decide-part"])
def test_deciding_where_nothing_is_pending_is_not_found(event: ReviewEvent) -> None:
    with pytest.raises(NotFound, match="nothing to review"):
        next_review("none", event)


@pytest.mark.parametrize("state", ["committed", "aborted"])
@pytest.mark.parametrize("event", get_args(ReviewEvent))
def test_a_decided_review_is_never_decided_again(state: ReviewState, event: ReviewEvent) -> None:
    with pytest.raises(Failed, match=state):
        next_review(state, event)
