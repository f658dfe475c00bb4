"""review.* and undo.*: wire parameters → one decision → wire result.

A session that is open here decides beside its commands; another one at its owner's, or on disk when
nobody has it open. What a decision means is the review's business.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import msgspec
import trio

from deltabox.errors import Refused
from deltabox.protocol import messages as m
from deltabox.server.connection import Call, Unavailable
from deltabox.server.dispatch import Method
from deltabox.server.host import project_of
from deltabox.session import project as projects
from deltabox.session.pending import Detail
from deltabox.store import Session, Store

T = TypeVar("T")

CHOICES = ["allowed-once", "rejected", "partial", "cancelled", "unavailable"]
SHOWN = 5  # files named in an approval's one-line reason


async def begin(call: Call, params: m.OfReview) -> m.ReviewState:
    """Open a review, if none is. Mutations and commands do it by themselves; reads never do."""
    session = call.session(params.session).session
    call.host.store.open_review(session.id)
    return _state(call, session)


async def status(call: Call, params: m.OfReview) -> m.ReviewState:
    """Whether a review is open, at a cost that does not grow with the project. Opens none."""
    return _state(call, call.host.store.session(params.session))


def _state(call: Call, session: Session) -> m.ReviewState:
    store = call.host.store
    session = store.session(session.id)
    review = store.review_of(session.id)
    live = call.host.find(session.id)
    return m.ReviewState(
        session=session.id,
        review=review.id if review else None,
        generation=session.generation,
        opened_ns=review.opened_ns if review else None,
        shown=review.shown if review else None,
        pending=len(store.touches(session.id)),
        running=0 if live is None else len(live.workspace.running_commands()),
    )


async def decide(call: Call, named: str, act: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """Run `act` on the session's desk, wherever it is. Cancellation: not once it has begun."""
    host = call.host
    live = host.find(named)
    if live is not None:
        return await live.workspace.decide(act)
    session = host.store.session(named)

    def work() -> dict[str, Any]:
        with (
            Store.open(host.where.database) as store,
            projects.desk(store, host.where, session) as desk,
        ):
            return act(desk)

    return await finished(work)


async def finished(work: Callable[[], T]) -> T:
    """In a thread, to its end: what has begun to write is not left half-way by a cancellation."""
    found: list[T] = []
    with trio.CancelScope(shield=True):
        found.append(await trio.to_thread.run_sync(work))
    return found[0]


async def diff(call: Call, params: m.ReviewDiff) -> dict[str, Any]:
    """The pending changes, deletions first; what was seen is remembered as shown, if it was all.
    The members are those of `deltabox diff --json`."""
    detail: Detail = params.detail
    return await decide(
        call, params.session, lambda desk: desk.diff(detail=detail, paths=params.chosen())
    )


async def commit(call: Call, params: m.ReviewCommit) -> dict[str, Any]:
    """Apply all or `paths` to the project: exactly what was shown, or nothing. Raises the generation.
    REVIEW_CHANGED when it is no longer what was shown, REVIEW_CONFLICT when the project moved.
    An empty review commits silently."""
    if params.hunks:
        raise Refused("Hunks cannot be committed by themselves in this version; give the `paths`.")

    def act(desk: Any) -> dict[str, Any]:
        return cast(
            dict[str, Any],
            desk.commit(
                paths=params.chosen(),
                digest=params.digest,
                on_conflict=params.on_conflict,
                allow=params.allowed(),
                keep_mtime=params.keep_mtime,
            ),
        )

    project = call.host.store.session(params.session).project
    async with call.host.writing(project):
        return await decide(call, params.session, act)


async def abort(call: Call, params: m.OfPaths) -> dict[str, Any]:
    """Discard all or `paths` into the trash; the project is not touched. Raises the generation."""
    return await decide(call, params.session, lambda desk: desk.abort(paths=params.chosen()))


async def request(call: Call, params: m.ReviewRequest) -> m.Decided:
    """Ask the client's person by `approval.request` and do what they say. An empty review commits
    silently. `cancelled` and `unavailable` leave the review open, unless `otherwise` says what to do
    when nobody can be asked."""
    shown = await decide(call, params.session, lambda desk: desk.diff(detail="stat"))
    if not shown["files"] and not shown["refused"]:
        result = await commit(call, m.ReviewCommit(session=params.session))
        return _decided(call, params, "empty", result)
    answer = await _ask(call, params, shown)
    if answer.outcome == "unavailable" and params.otherwise != "keep":
        outcome = "allowed-once" if params.otherwise == "commit" else "rejected"
        answer = m.ApprovalAnswer(outcome=cast(Any, outcome))
    if answer.outcome == "allowed-once" or (answer.outcome == "partial" and answer.chosen()):
        partial = answer if answer.outcome == "partial" else m.ApprovalAnswer(outcome="partial")
        wanted = m.ReviewCommit(
            session=params.session,
            digest=shown["digest"],
            paths=partial.paths,
            paths_b64=partial.paths_b64,
        )
        return _decided(call, params, "committed", await commit(call, wanted))
    if answer.outcome == "rejected":
        result = await abort(call, m.OfPaths(session=params.session))
        return _decided(call, params, "aborted", result)
    return _decided(call, params, "kept", None)


def _decided(
    call: Call, params: m.ReviewRequest, outcome: str, result: dict[str, Any] | None
) -> m.Decided:
    generation = call.host.store.session(params.session).generation
    return m.Decided(outcome=outcome, generation=generation, result=result)


async def _ask(call: Call, params: m.ReviewRequest, shown: dict[str, Any]) -> m.ApprovalAnswer:
    if not call.connection.capabilities.approval:
        return m.ApprovalAnswer(outcome="unavailable")
    asked = m.Approval(
        session=params.session,
        tool_name="deltabox-review",
        reason=_reason(shown),
        digest=shown["digest"],
        diff=shown,
        choices=CHOICES,
    )
    try:
        return await call.ask("approval.request", asked, m.ApprovalAnswer)
    except Unavailable:
        return m.ApprovalAnswer(outcome="unavailable")


def _reason(shown: dict[str, Any]) -> str:
    files = shown["files"]
    parts = [f"{f['display']} ({f['kind']}, +{f['added']} -{f['removed']})" for f in files[:SHOWN]]
    more = f" and {len(files) - SHOWN} more" if len(files) > SHOWN else ""
    return f"{len(files)} changed files wait for approval: {', '.join(parts)}{more}."


async def undo_list(call: Call, params: m.UndoList) -> m.UndoRows:
    """What was committed to a project and undone in it, newest first."""
    project = project_of(params.project_root)
    return m.UndoRows(
        commits=[
            m.UndoRow(
                commit=c.id,
                session=c.session,
                kind=c.kind,
                at_ns=c.at_ns,
                state=c.state,
                undoes=c.undoes,
                summary=c.summary,
            )
            for c in call.host.store.commits(project)
        ]
    )


async def undo_apply(call: Call, params: m.UndoApply) -> m.Undone:
    """Take back a commit in the project itself, all of it or nothing; itself undoable.
    REVIEW_CONFLICT when the project moved since."""
    host = call.host
    project = project_of(params.project_root)

    def work() -> dict[str, Any]:
        with Store.open(host.where.database) as store:
            return projects.undo(store, host.where, project, params.commit)

    async with host.writing(project):
        return msgspec.convert(await finished(work), m.Undone)


METHODS: Mapping[str, Method] = {
    "review.begin": Method(m.OfReview, begin, is_read=True, result=m.ReviewState),
    "review.status": Method(m.OfReview, status, is_read=True, result=m.ReviewState),
    "review.diff": Method(m.ReviewDiff, diff, is_read=True, result=dict),
    "review.commit": Method(
        m.ReviewCommit, commit, is_read=False, queued=lambda _: False, result=dict
    ),
    "review.abort": Method(m.OfPaths, abort, is_read=False, queued=lambda _: False, result=dict),
    "review.request": Method(
        m.ReviewRequest, request, is_read=False, queued=lambda _: False, result=m.Decided
    ),
    "undo.list": Method(m.UndoList, undo_list, is_read=True, result=m.UndoRows),
    "undo.apply": Method(m.UndoApply, undo_apply, is_read=False, result=m.Undone),
}
