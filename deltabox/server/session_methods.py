"""session.start stop park list status: wire parameters → the registry → wire result."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from deltabox import config
from deltabox.config import Config
from deltabox.engines import probe
from deltabox.errors import BadUsage, EngineUnavailable, IsolationUnavailable, Refused
from deltabox.isolation import none, policy
from deltabox.process import native_program
from deltabox.protocol import messages as m
from deltabox.server.connection import Call
from deltabox.server.dispatch import Method
from deltabox.server.host import Host, Live, project_of, with_settings
from deltabox.server.shell_methods import row as exec_row
from deltabox.session import project as projects
from deltabox.session.folder import is_locked
from deltabox.session.pending import settings_of
from deltabox.store import Session


async def start(call: Call, params: m.SessionStart) -> m.Started:
    """Open a workspace on a project: a new one, a parked one that fits, or (session) an idle one
    whose review is still open. About 10 ms; it lives until session.stop, session.park or the end
    of the coordinator."""
    host = call.host
    project = project_of(params.project_root)
    config.check_project(project, host.where)
    env = _env(params.env)
    if params.session is not None:
        session = host.store.session(params.session)
        if session.project != project:
            raise BadUsage(
                f"Session {session.id} belongs to {session.project}; give that projectRoot."
            )
        live = await host.open(session, settings_of(session), owner=params.owner, env=env)
        return _started(host, live, reused=False)
    settings = wishes(config.load(host.where, project), params)
    live_or_none = host.unpark(project, settings) if params.reuse else None
    if live_or_none is not None:
        live_or_none.owner, live_or_none.env = params.owner, env
        return _started(host, live_or_none, reused=True)
    live = await host.create(project, settings, owner=params.owner, env=env)
    return _started(host, live, reused=False)


def wishes(settings: Config, params: m.SessionStart) -> Config:
    """The files' settings with the request's on top; it can narrow what they say, and open nothing.

    Raises: BadUsage, Refused, EngineUnavailable, IsolationUnavailable.
    """
    if params.transport not in (None, "stdio", "socket"):
        raise EngineUnavailable(
            f"The transport {params.transport[:40]!r} is not offered: deltabox is a process of its "
            "own, spoken to over stdio or its socket."
        )
    engine = params.engine or params.fs_mode or settings.engine
    engine = config.ENGINE_ALIASES.get(engine, engine)
    if engine != "auto" and engine not in probe.NOT_IN_THIS_VERSION and engine != "overlay":
        raise BadUsage(f"There is no engine {engine[:40]!r}; `initialize` lists what there is.")
    probe.choose(engine)
    isolation = params.isolation or settings.isolation
    isolation = config.ISOLATION_ALIASES.get(isolation, isolation)
    if isolation not in ("bubblewrap", "none"):
        raise IsolationUnavailable(
            f"There is no isolation {isolation[:40]!r}; ask for bubblewrap, or for none by name."
        )
    if params.network == "host" and settings.network == "off":
        raise Refused("The network is off by the configuration, and a request cannot open it.")
    asked = params.policy
    settings = with_settings(
        settings,
        engine=engine,
        isolation=isolation,
        durability=params.durability,
        profile=params.profile,
        network=params.network or "off",
    )
    return replace(
        settings,
        deny=(*settings.deny, *asked.deny),
        ro=(*settings.ro, *asked.read_only),
        passes=(*settings.passes, *asked.pass_),
    )


def _env(env: dict[str, str]) -> tuple[tuple[str, str], ...]:
    for name in env:
        if policy.is_risky(name):
            raise Refused(
                f"The environment variable {name} can make programs run other code, so a request "
                "cannot set it."
            )
    return tuple(env.items())


def _started(host: Host, live: Live, *, reused: bool) -> m.Started:
    workspace = live.workspace
    session = workspace.session
    settings = workspace.settings
    engine = probe.choose(session.engine).capabilities
    review = host.store.review_of(session.id)
    notes = list(engine.notes)
    if settings.isolation == "none":
        notes.append(none.WARNING)
    return m.Started(
        session=session.id,
        generation=workspace.generation,
        logical_root=str(session.project),
        engine=session.engine,
        isolation=settings.isolation,
        network=settings.network,
        profile=settings.profile,
        durability=settings.durability,
        capabilities=m.SessionCapabilities(
            live_base=engine.live_base,
            directory_rename=engine.directory_rename,
            block_cow=engine.block_cow,
            confined=settings.isolation != "none",
            network=settings.network,
            notes=notes,
        ),
        guidance=_guidance(session.project, settings),
        shell=m.Shell(program=str(native_program("sh")), args=["--session", session.id]),
        reused=reused,
        review=review.id if review else None,
    )


def _guidance(project: Path, settings: Config) -> str:
    network = (
        "There is no network."
        if settings.network == "off"
        else "The network is this machine's own."
    )
    return (
        f"Your project is at {project}: commands and file tools see the same copy of it there, by "
        "absolute or relative paths. Changes stay in that copy until a person approves them. "
        f"/tmp and the home directory are private to this session. {network}"
    )


async def stop(call: Call, params: m.SessionStop) -> m.SessionEnded:
    """End a session's commands and its view. Open changes are kept for review; without any the
    session is closed and its folder removed."""
    host = call.host
    host.get(params.session)
    return _ended(host, await host.stop(params.session, grace_s=params.grace_ms / 1000))


def _ended(host: Host, session: Session, state: str | None = None) -> m.SessionEnded:
    review = host.store.review_of(session.id)
    return m.SessionEnded(
        session=session.id,
        state=state or session.state,
        generation=session.generation,
        review=review.id if review else None,
    )


async def park(call: Call, params: m.SessionPark) -> m.SessionEnded:
    """Hand the mounted session back, for the next session.start on the project with the same
    settings to take at once. Handles of before (generation) are stale then. Its /tmp and home go
    with it. Refused with SESSION_RUNNING while background commands live."""
    state = await call.host.park(params.session, abort=params.review == "abort")
    return _ended(call.host, call.host.store.session(params.session), state)


async def listing(call: Call, params: m.SessionList) -> m.SessionRows:
    """Sessions of one project or of all, those of other processes too."""
    host = call.host
    project = None if params.project_root is None else project_of(params.project_root)
    found = host.store.sessions(project, closed=params.closed)
    return m.SessionRows(sessions=[m.SessionRow(**_row(host, s)) for s in found])


def _row(host: Host, session: Session) -> dict[str, Any]:
    live = host.find(session.id)
    state = session.state
    if live is not None and live.is_parked:
        state = "parked"
    elif state == "running" and live is None:
        lock = projects.folder_of(host.where, session.id).lock
        state = "running" if is_locked(lock) else "idle"
    review = host.store.review_of(session.id)
    return {
        "session": session.id,
        "project": str(session.project),
        "state": state,
        "here": live is not None,
        "engine": session.engine,
        "isolation": session.isolation,
        "network": session.network,
        "generation": session.generation,
        "review": review.id if review else None,
        "owner": live.owner if live else None,
        "pid": session.pid if state in ("running", "parked") else None,
        "created_ns": session.created_ns,
        "updated_ns": session.updated_ns,
    }


async def status(call: Call, params: m.OfSession) -> m.SessionStatus:
    """One session, and its commands that run or wait where it is open here."""
    host = call.host
    session = host.store.session(params.session)
    live = host.find(session.id)
    running = [] if live is None else [exec_row(one) for one in live.execs.running()]
    return m.SessionStatus(**_row(host, session), running=running)


METHODS: Mapping[str, Method] = {
    "session.start": Method(m.SessionStart, start, is_read=True, result=m.Started),
    "session.stop": Method(m.SessionStop, stop, is_read=True, result=m.SessionEnded),
    "session.park": Method(m.SessionPark, park, is_read=True, result=m.SessionEnded),
    "session.list": Method(m.SessionList, listing, is_read=True, result=m.SessionRows),
    "session.status": Method(m.OfSession, status, is_read=True, result=m.SessionStatus),
}
