"""The sessions that live in this process: opened, found, parked, ended. One task holds each.

Must not know the wire beyond the errors it raises, nor what a request asks of a session.
"""

import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import trio

from deltabox.config import Config, Places
from deltabox.errors import DeltaboxError, Failed, NotFound, Refused, SessionRunning
from deltabox.session import coordinator
from deltabox.session import project as projects
from deltabox.session.execs import Execs
from deltabox.session.tasks import beside
from deltabox.session.workspace import Workspace
from deltabox.store import Session, SessionId, Store

MAX_PARKED = 8  # a mounted view costs a holder process; the oldest goes first
END_S = 10.0  # after the grace: killing, unmounting and judging a large delta

Listen = Callable[["Live"], Any]


@dataclass(eq=False)
class Live:
    """One session that this process owns."""

    workspace: Workspace
    execs: Execs
    owner: str | None = None
    env: tuple[tuple[str, str], ...] = ()
    is_parked: bool = False
    parked_ns: int = 0
    _stopping: trio.Event = field(default_factory=trio.Event)
    _over: trio.Event = field(default_factory=trio.Event)
    _grace_s: float = 2.0

    @property
    def id(self) -> SessionId:
        return self.workspace.session.id


class Host:
    """The registry. Made by `open_host`; `store` is for the event loop's thread alone."""

    def __init__(self, store: Store, where: Places, listen: Listen | None) -> None:
        self.store = store
        self.where = where
        self.listen = listen
        self._nursery: trio.Nursery | None = None
        self._lives: dict[str, Live] = {}
        self._projects: dict[Path, trio.Lock] = {}

    # finding

    def get(self, session: str) -> Live:
        """Raises: NotFound for one that is not here, with where it is."""
        live = self._lives.get(session)
        if live is None or live.is_parked:
            raise NotFound(
                f"Session {session[:80]!r} {self._whereabouts(session)}; session.start opens one, "
                "session.list lists them.",
                code="SESSION_NOT_FOUND",
            )
        return live

    def _whereabouts(self, session: str) -> str:
        if session in self._lives:
            return "is parked"
        try:
            return f"is {self.store.session(session).state} and not open here"
        except NotFound:
            return "does not exist"

    def find(self, session: str) -> Live | None:
        return self._lives.get(session)

    def lives(self) -> list[Live]:
        return list(self._lives.values())

    def writing(self, project: Path) -> trio.Lock:
        """Held around what writes a project: two sessions of this process then wait for each other
        instead of one being refused."""
        return self._projects.setdefault(project, trio.Lock())

    def version(self) -> str:
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("deltabox")
        except PackageNotFoundError:
            return "unknown"

    # opening

    async def create(self, project: Path, settings: Config, **how: Any) -> Live:
        """A new session, mounted. Raises: as coordinator.owning."""
        session = coordinator.create(self.store, self.where, project, settings)
        try:
            return await self.open(session, settings, **how)
        except BaseException:
            # Nothing ran in it, so there is nothing to keep.
            projects.close_session(self.store, self.where, self.store.session(session.id))
            raise

    async def open(
        self,
        session: Session,
        settings: Config,
        *,
        owner: str | None = None,
        env: tuple[tuple[str, str], ...] = (),
    ) -> Live:
        """Own an idle session from here on."""
        if self._nursery is None:
            raise Refused(
                "This process runs one command and opens no sessions; use `deltabox serve`."
            )
        if session.id in self._lives:
            raise SessionRunning(f"Session {session.id} is open here already.")
        outcome: list[Live | BaseException] = []
        ready = trio.Event()
        self._nursery.start_soon(self._hold, session, settings, owner, env, outcome, ready)
        await ready.wait()
        if not isinstance(outcome[0], Live):
            raise outcome[0]
        return outcome[0]

    async def _hold(
        self,
        session: Session,
        settings: Config,
        owner: str | None,
        env: tuple[tuple[str, str], ...],
        outcome: list[Live | BaseException],
        ready: trio.Event,
    ) -> None:
        """The life of one session. Its failure is its own: no other session's task is cancelled."""
        live: Live | None = None
        try:
            async with (
                coordinator.owning(self.store, self.where, session, settings) as workspace,
                self._around(workspace) as live,
            ):
                live.owner, live.env = owner, env
                outcome.append(live)
                ready.set()
                await live._stopping.wait()  # noqa: SLF001 - the registry and its entry are one
                with trio.move_on_after(live._grace_s + 1):  # noqa: SLF001
                    await live.execs.end_all(live._grace_s)  # noqa: SLF001
        except Exception as exc:  # noqa: BLE001 - reported to who opened it
            outcome.append(_plain(exc))
        finally:
            self._lives.pop(session.id, None)
            if live is not None:
                live._over.set()  # noqa: SLF001
            outcome.append(Failed("The session was ended while it started."))
            ready.set()

    @asynccontextmanager
    async def _around(self, workspace: Workspace) -> AsyncIterator[Live]:
        """Its execs and its sockets."""
        spill = projects.folder_of(self.where, workspace.session.id).root / "output"
        async with beside() as nursery, AsyncExitStack() as stack:
            live = Live(workspace, Execs(workspace, nursery, spill))
            self._lives[live.id] = live
            if self.listen is not None:
                await stack.enter_async_context(self.listen(live))
            yield live

    @asynccontextmanager
    async def adopt(self, workspace: Workspace) -> AsyncIterator[Live]:
        """A workspace that the caller owns, answered for while the context lasts (`deltabox run`)."""
        async with self._around(workspace) as live:
            try:
                yield live
            finally:
                self._lives.pop(live.id, None)

    # ending

    async def stop(self, session: str, *, grace_s: float) -> Session:
        """End its commands, unmount, judge what is left. Returns the session as it then is."""
        live = self._lives.get(session)
        if live is None:
            return self.store.session(session)
        live._grace_s = grace_s  # noqa: SLF001
        live._stopping.set()  # noqa: SLF001
        with trio.CancelScope(shield=True):
            with trio.move_on_after(grace_s + END_S) as limit:
                await live._over.wait()  # noqa: SLF001
        if limit.cancelled_caught:
            raise Failed(f"Session {session} does not end; a process of it waits in the kernel.")
        return self.store.session(session)

    async def stop_all(self, *, grace_s: float) -> None:
        async with trio.open_nursery() as nursery:
            for live in self.lives():
                nursery.start_soon(_quietly, self, live.id, grace_s)

    async def park(self, session: str, *, abort: bool) -> str:
        """Keep it mounted for the next agent on its project. Returns the state it ended in.

        Waits for its queue; open changes are aborted if asked, else the session stops and they wait.
        Raises: SessionRunning while background commands live.
        """
        live = self.get(session)
        async with live.workspace.order.ticket():
            if live.execs.running() or live.workspace.running_commands():
                raise SessionRunning(
                    f"Commands of session {session} still run in the background; end them first."
                )
            if abort:
                await live.workspace.decide(lambda desk: desk.abort())
            settled = await live.workspace.decide(lambda desk: {"quiet": desk.settle()})
            if settled["quiet"]:
                live.is_parked = True
                live.parked_ns = time.time_ns()
                live.owner = None
                live.env = ()
        if not live.is_parked:
            return (await self.stop(session, grace_s=0)).state
        parked = sorted((x for x in self.lives() if x.is_parked), key=lambda x: x.parked_ns)
        same = [
            x
            for x in parked
            if x is not live and x.workspace.session.project == live.workspace.session.project
        ]
        for old in {*same, *parked[: max(0, len(parked) - MAX_PARKED)]}:
            await self.stop(old.id, grace_s=0)
        return "parked"

    def unpark(self, project: Path, settings: Config) -> Live | None:
        """A parked session of the project with exactly these settings; handles of before are stale."""
        for live in self.lives():
            fits = (
                live.workspace.session.project == project and live.workspace.settings == settings
            )
            if live.is_parked and fits and live.workspace.view.is_alive():
                live.is_parked = False
                self.store.update_session(live.id, generation=live.workspace.generation + 1)
                return live
        return None


@asynccontextmanager
async def open_host(
    store: Store, where: Places, listen: Listen | None = None, *, grace_s: float = 2.0
) -> AsyncIterator[Host]:
    """A registry that opens sessions, and ends them with the context."""
    host = Host(store, where, listen)
    async with beside() as nursery:
        host._nursery = nursery  # noqa: SLF001 - its maker
        try:
            yield host
        finally:
            with trio.CancelScope(shield=True):
                await host.stop_all(grace_s=grace_s)


async def _quietly(host: Host, session: str, grace_s: float) -> None:
    try:
        await host.stop(session, grace_s=grace_s)
    except DeltaboxError:
        return  # the next owner's recovery takes it from here


def _plain(exc: BaseException) -> BaseException:
    while isinstance(exc, BaseExceptionGroup):
        exc = (exc.subgroup(DeltaboxError) or exc).exceptions[0]
    if isinstance(exc, OSError):
        return Failed(f"The session could not be opened: {exc}.")
    return exc


def project_of(text: str) -> Path:
    """`projectRoot` as a path without links. Raises: NotFound, Refused."""
    if not text.startswith("/"):
        raise Refused(f"projectRoot {text[:200]!a} is not absolute; give the whole path.")
    path = Path(os.path.realpath(text))
    if not path.is_dir():
        raise NotFound(f"projectRoot {text[:200]!a} is no folder; give an existing one.")
    return path


def with_settings(settings: Config, **given: Any) -> Config:
    """`settings` with what was given and is not None."""
    return replace(settings, **{k: v for k, v in given.items() if v is not None})
