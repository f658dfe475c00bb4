"""A mounted session: its view, its watcher, its commands, and decisions while it lives.

Owns everything between the first mount and the last unmount; whoever opened it closes it. The
upper is written by the mount alone; what this file decides about it goes through pending.py.
"""

import contextlib
import os
import stat
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import trio

from deltabox.config import Config, Places
from deltabox.engines import probe
from deltabox.engines.base import View
from deltabox.errors import (
    BadUsage,
    DeltaboxError,
    EngineUnavailable,
    Failed,
    NotFound,
    SessionRunning,
)
from deltabox.isolation import command as commands
from deltabox.isolation import host, none, policy, sandbox
from deltabox.isolation.policy import Facts, Network, Profile, Wish
from deltabox.isolation.running import Command, Exit, Stdio, Tty
from deltabox.paths import Tree, WorkspacePath, is_within, parse
from deltabox.session import checkpoint, common, pending, present
from deltabox.session.changes import Change, EditableFiles
from deltabox.session.folder import Folder
from deltabox.session.order import Order
from deltabox.session.recipe import owner_of, passed_outside, view_spec
from deltabox.session.target import check_host
from deltabox.session.tasks import beside
from deltabox.session.touch import Seen, TouchWatcher
from deltabox.store import Checkpoint, Session, Store, Touch


@dataclass(slots=True, eq=False)
class Author:
    """A command from before its start to after its end, and what was seen to change meanwhile.
    shared: another one lived beside it, whose work may be among its paths."""

    turn: int
    shared: bool = False
    paths: set[WorkspacePath] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Running:
    """One live command of the session. author: None for a search of ours, which can change nothing."""

    command: Command
    has_terminal: bool
    author: Author | None

    @property
    def turn(self) -> int | None:
        return self.author.turn if self.author else None

    @property
    def shared(self) -> bool:
        return self.author is not None and self.author.shared

    @property
    def paths(self) -> set[WorkspacePath]:
        return self.author.paths if self.author else set()


@dataclass(slots=True)
class Mutation:
    """One change by a file call: what it says that it touches, and what was seen to change there."""

    method: str
    path: WorkspacePath
    change: Change = field(default_factory=Change)
    paths: set[WorkspacePath] = field(default_factory=set)
    turn: int | None = None

    def owns(self, path: WorkspacePath) -> bool:
        return any(is_within(path, root) for root in self.change.roots)


class Workspace:
    """An open session. Made by `open_workspace` only."""

    def __init__(
        self,
        store: Store,
        where: Places,
        session: Session,
        settings: Config,
        folder: Folder,
        view: View,
        facts: Facts,
        base: Tree,
        watcher: TouchWatcher,
        bwrap: sandbox.Bubblewrap | None,
    ) -> None:
        self.session = session
        self.settings = settings
        self.view = view
        self.order = Order()  # foreground commands and file mutations
        self._store = store
        self._where = where
        self._folder = folder
        self._facts = facts
        self._base = base
        self._watcher = watcher
        self._bwrap = bwrap
        self._running: list[Running] = []
        self._authors: list[Author] = []
        self._common_left = settings.limits.common
        self._fresh: list[Touch] = []
        self._has_fresh = trio.Event()
        self._mutations: list[Mutation] = []
        self._denied = tuple(parse(word) for word in settings.deny)
        self._fixed = tuple(parse(word) for word in settings.ro)
        self._decisions = trio.Lock()
        self._restacking = (
            trio.Lock()
        )  # held while layers change, and while a command counts itself
        self._starting = 0  # commands from their beginning until their last process is gone
        self._broken: DeltaboxError | None = None
        self._is_marked = True  # nothing has changed since the last checkpoint
        self._last_turn: int | None = None

    @property
    def generation(self) -> int:
        """How often changes were decided, as it is now; `session` has it as it was at the start."""
        return self._store.session(self.session.id).generation

    def files(self) -> EditableFiles:
        """The view's files, for one call; use it in `with`, without awaiting inside. About 10 µs."""
        tree = Tree(os.dup(self.view.root_fd))
        project = os.fsencode(self.session.project)
        owner = self.view.enter.owner
        return EditableFiles(tree, project, owner, denied=self._denied, fixed=self._fixed)

    def check_host(self, path: bytes) -> None:
        """Whether a file call may read this real place of the host. Raises: Refused."""
        where = self._where
        hidden = (os.fsencode(where.state), os.fsencode(where.runtime))
        check_host(path, home=os.fsencode(where.home), hidden=hidden)

    @asynccontextmanager
    async def command(
        self,
        argv: Sequence[str],
        *,
        stdio: Stdio,
        cwd: Path,
        profile: str | None = None,
        named_env: Sequence[tuple[str, str]] = (),
        env: Sequence[tuple[str, str]] = (),
        is_journaled: bool = True,
    ) -> AsyncIterator[Running]:
        """Run one command in the workspace for the life of the context; journaled as a turn, unless
        it is a read-only one of ours that the person did not ask for as such.

        named_env: what a person wrote; env: from a request, where names that mean code are refused.
        argv[0] is looked up inside, by the sandbox's PATH. Raises: IsolationUnavailable, Refused,
        NotFound (cwd). Cancellation: ends the command and everything it started.
        """
        if not argv:
            raise BadUsage("There is no command to run; write it after `--`.")
        wish = Wish(
            cwd=cwd,
            profile=cast(Profile, profile or self.settings.profile),
            network=cast(Network, self.settings.network),
            nest=self.settings.nest,
            env=tuple(env),
            named_env=tuple(named_env),
            tmp_bytes=self.settings.limits.tmp,
            shm_bytes=self.settings.limits.shm,
            rlimits=(("core", self.settings.limits.core), ("nofile", self.settings.limits.nofile)),
        )
        built = policy.build(self._facts, wish)
        if is_journaled:
            await self._mark()
        async with self._restacking:  # from here on the view is not restacked
            if self._broken is not None:
                raise self._broken
            self._starting += 1
        try:
            author = self._begin(argv, wish) if is_journaled else None
        except BaseException:
            self._starting -= 1
            raise
        words = [os.fsencode(word) for word in argv]
        exit_: Exit | None = None
        running: Running | None = None
        try:
            if self._bwrap is not None:
                starting = sandbox.start(built, self._bwrap, self.view.enter, words, stdio)
            else:
                starting = none.start(
                    self.view.enter,
                    words,
                    stdio,
                    cwd=built.cwd,
                    env=_unconfined(self._where.environ, built.env),
                    rlimits=built.rlimits,
                )
            async with starting as started:
                running = Running(started, isinstance(stdio, Tty), author)
                self._running.append(running)
                try:
                    yield running
                finally:
                    with trio.CancelScope(shield=True), trio.move_on_after(0.5):
                        exit_ = await started.wait()
        finally:
            # Only now are its processes gone; a restack before would leave them the old layers.
            self._starting -= 1
            if running is not None:
                self._running.remove(running)
            if author is not None:
                self._end(author, argv, exit_)

    def _begin(self, argv: Sequence[str], wish: Wish) -> Author:
        """Journal a command that is about to start: its first writes may come before we hear of it."""
        with self._store.transaction():
            self._take(self._watcher.drain())
            turn = self._store.begin_turn(self.session.id, argv, wish.profile, wish.network)
            self._last_turn = turn
            self._store.note(
                "turn.start",
                session=self.session.id,
                project=self.session.project,
                turn=turn,
                argv=list(argv),
            )
        author = Author(turn)
        for other in self._authors:
            other.shared = author.shared = True
        self._authors.append(author)
        return author

    def _end(self, author: Author, argv: Sequence[str], exit_: Exit | None) -> None:
        code = exit_.code if exit_ else None
        signal = exit_.signal if exit_ else None
        try:
            self._take(self._watcher.drain())
        finally:
            self._authors.remove(author)
        with self._store.transaction():
            took_ns = self._store.end_turn(
                author.turn, code=code, signal=signal, shared=author.shared
            )
            self._store.note(
                "turn.end",
                session=self.session.id,
                project=self.session.project,
                turn=author.turn,
                code=code,
                signal=signal,
                durationNs=took_ns,
                changed=len(self.changed(author.paths)),
            )

    def changed(self, paths: Iterable[WorkspacePath]) -> list[WorkspacePath]:
        """Of paths with events, those that are more than a copied-up folder of the project."""
        found = []
        for path in sorted(paths):
            st = self._base.lstat_or_none(path)
            if st is None or not stat.S_ISDIR(st.st_mode):
                found.append(path)
        return found

    def _take(self, seen: Seen) -> None:
        """Record first touches, and who was running while paths changed."""
        self._drop_scratch(seen)
        if not seen.paths:
            return
        self._is_marked = False
        beside = set(seen.paths)
        for call in self._mutations:
            mine = {p for p in beside if call.owns(p)}
            call.paths |= mine
            beside -= mine
        with self._store.transaction():
            self._store.add_touches(self.session.id, seen.first)
            self._store.open_review(self.session.id)
            for one in self._authors:
                one.paths |= beside
                self._store.add_authors(self.session.id, one.turn, beside)
        if seen.first:
            self._fresh.extend(seen.first)
            self._has_fresh.set()

    def _drop_scratch(self, seen: Seen) -> None:
        """A file call's temporary names are nobody's change."""
        scratch = [s for call in self._mutations for s in call.change.scratch]
        if not scratch:
            return
        gone = {p for p in seen.paths if any(is_within(p, s) for s in scratch)}
        seen.paths -= gone
        seen.first = [t for t in seen.first if t.path not in gone]
        self._watcher.forget(gone)

    @asynccontextmanager
    async def mutation(self, method: str, path: WorkspacePath) -> AsyncIterator[Mutation]:
        """One change by a file call, in the block; then journaled as a turn of its own, whose argv is

        the method and the path, and credited with what was seen to change where it says it works.
        When nothing changed, nothing is journaled. Beside commands, never beside a decision or a
        restack: it waits for them. Cancellation: while it waits.
        """
        async with self._decisions:
            self._take(self._watcher.drain())
            call = Mutation(method, path)
            self._mutations.append(call)
            code = 1
            try:
                yield call
                code = 0
            finally:
                try:
                    self._take(self._watcher.drain())
                finally:
                    self._mutations.remove(call)
                if call.paths:
                    self._credit(call, code)

    def _credit(self, call: Mutation, code: int) -> None:
        session = self.session.id
        argv = [call.method, os.fsdecode(call.path)]
        changed = self.changed(call.paths)
        with self._store.transaction():
            call.turn = self._store.begin_turn(session, argv, "workspace-write", "off")
            self._store.end_turn(call.turn, code=code, signal=None, shared=bool(self._authors))
            self._store.add_authors(session, call.turn, call.paths)
            self._store.note(
                "fs.changed",
                session=session,
                project=self.session.project,
                turn=call.turn,
                method=call.method,
                code=code,
                changed=[present.named(p) for p in changed[:20]],
                count=len(changed),
            )

    async def watch(self) -> None:
        """Take first touches as they happen, and keep common versions beside; runs till cancelled."""
        while True:
            await trio.lowlevel.wait_readable(self._watcher.fd)
            began = trio.current_time()
            self._take(self._watcher.drain())
            # A command that makes files by the thousand shall not pay for being watched: at most a
            # fifth of one core, also where each look is a walk (queue overflow, no more watches).
            await trio.sleep(max(0.01, 4 * (trio.current_time() - began)))

    async def keep(self) -> None:
        """Keep common versions of what was touched first, apart from the watch, which must not wait
        for their copying; runs till cancelled."""
        while True:
            await self._has_fresh.wait()
            self._has_fresh = trio.Event()
            await self._keep_common()

    async def _keep_common(self) -> None:
        if not self._fresh:
            return
        batch, self._fresh = self._fresh, []

        def keep() -> dict[bytes, str]:
            # A tree of its own: the watcher uses `_base` meanwhile, and a Tree keeps the parent it
            # used last open, so two threads would close and reuse each other's descriptors.
            with Tree(os.dup(self._base.fd)) as base:
                return common.keep(base, self._folder.common, batch, budget=self._common_left)

        kept = await trio.to_thread.run_sync(keep)
        sizes = {t.path: t.size for t in batch}
        self._common_left -= sum(sizes[p] for p in kept)
        with self._store.transaction():
            for path, name in kept.items():
                self._store.set_common(self.session.id, path, name)

    def running_commands(self) -> list[int]:
        """The turns whose commands live."""
        return [running.turn for running in self._running if running.turn is not None]

    async def decide(self, act: Callable[[pending.Pending], dict[str, Any]]) -> dict[str, Any]:
        """Run one decision beside live commands: they are stopped while it looks, where they can be.

        In a thread with a database connection of its own. Cancellation: not once it has begun.
        """
        async with self._decisions:
            self._take(self._watcher.drain())
            root = os.dup(self.view.root_fd)
            try:
                live = pending.Live(root, frozen=await self._freeze())

                def work() -> dict[str, Any]:
                    with Store.open(self._where.database) as store:
                        return act(pending.Pending(store, self._where, self.session.id, live=live))

                with trio.CancelScope(shield=True):
                    result = await trio.to_thread.run_sync(work)
            finally:
                await self._thaw()
                os.close(root)
            return result

    async def checkpoint(self, label: str = "", *, turn: int | None = None) -> Checkpoint:
        """Remember the files as they are. Quiet: the top layer is set aside and the view restacked,

        about 2 ms. With live commands: they are stopped where they can be, and the layer is copied.
        """
        row = await self._checkpoint(label, turn, None)
        assert row is not None  # no budget was set
        return row

    async def _checkpoint(
        self, label: str, turn: int | None, budget: int | None
    ) -> Checkpoint | None:
        async with self._decisions, self._restacking:
            self._take(self._watcher.drain())
            self._is_marked = True
            if not self._starting:
                return await self._restacked(
                    lambda: checkpoint.create(
                        self._store, self._where, self.session.id, label=label, turn=turn
                    )
                )
            await self._freeze()
            try:
                return await trio.to_thread.run_sync(self._clone, label, turn, budget)
            finally:
                await self._thaw()

    def _clone(self, label: str, turn: int | None, budget: int | None) -> Checkpoint | None:
        with Store.open(self._where.database) as store:
            return checkpoint.clone(
                store, self._where, self.session.id, label=label, turn=turn, budget=budget
            )

    async def _mark(self) -> None:
        """The automatic checkpoint: what was changed so far, before the next command can spoil it.

        Skipped, and said in the journal, when a copy beside live commands would cost too much or
        the disk is full: it is a courtesy, the command goes on.
        """
        self._take(self._watcher.drain())
        if self._is_marked or self.settings.checkpoints == "off":
            return
        try:
            row = await self._checkpoint(
                "before the next command", self._last_turn, checkpoint.CLONE_BUDGET
            )
            why = "it would copy too much beside live commands"
        except (OSError, Failed) as exc:
            row, why = None, str(exc)
        if row is None:
            with contextlib.suppress(Failed):
                self._store.note(
                    "checkpoint.skipped",
                    session=self.session.id,
                    project=self.session.project,
                    reason=why,
                )

    async def restore(self, named: str, paths: Sequence[WorkspacePath] = ()) -> Checkpoint:
        """Go back to a checkpoint, wholly or at `paths`; returns the one made of the present state.

        Raises: SessionRunning while commands live, NotFound, Refused.
        """
        async with self._decisions, self._restacking:
            if self._starting:
                raise SessionRunning(
                    "Commands of the session still run; end them first, then restore."
                )
            self._take(self._watcher.drain())
            return await self._restacked(
                lambda: checkpoint.restore(self._store, self._where, self.session.id, named, paths)
            )

    async def _restacked(self, change: Callable[[], Checkpoint]) -> Checkpoint:
        """Change the layers of a quiet session and show them. If the view cannot follow, no command

        starts in it again: its mounted upper would be a layer that checkpoints name.
        """
        try:
            row = change()
        except OSError as exc:
            # Half-way the row may name the upper as frozen; recovery sees to it at the next start.
            self._broken = Failed(
                f"The checkpoint stopped half-way ({exc.strerror or exc}); nothing is lost: end the "
                "session and continue it with `deltabox run`."
            )
            raise self._broken from exc
        session = self._store.session(self.session.id)
        lowers = [self._folder.layers / name for name in checkpoint.stack_of(session)]
        with trio.CancelScope(shield=True):
            try:
                await self.view.restack(lowers, self._folder.upper, self._folder.work)
            except EngineUnavailable as exc:
                self._broken = exc
                raise
        self._watcher.restart(Tree.open(self._folder.upper))
        return row

    async def _freeze(self) -> bool:
        """Stop commands that have no terminal (a shell with job control would notice)."""
        quiet = True
        for running in self._running:
            if running.has_terminal:
                quiet = False
                continue
            with contextlib.suppress(Exception):
                quiet = (await running.command.freeze()).running == 0 and quiet
        return quiet

    async def _thaw(self) -> None:
        with trio.CancelScope(shield=True):
            for running in self._running:
                if not running.has_terminal:
                    with trio.move_on_after(2):
                        await running.command.thaw()


@asynccontextmanager
async def open_workspace(
    store: Store,
    where: Places,
    session: Session,
    settings: Config,
    folder: Folder,
    *,
    argv: Sequence[str] = (),
    cwd: Path | None = None,
) -> AsyncIterator[Workspace]:
    """Mount the session's view and watch it. The caller holds the session's lock.

    argv: the command that is known already; its own files and install prefix are shown read-only.
    Raises: EngineUnavailable, IsolationUnavailable, Refused. Costs about 10 ms.
    """
    owner = owner_of(where, session.project)
    read_only = needed(where, session.project, argv[0] if argv else "sh", cwd or session.project)
    engine = probe.choose(session.engine)
    spec = view_spec(where, session, settings, folder, owner, read_only)
    async with AsyncExitStack() as stack:
        bwrap = None
        if session.isolation == "bubblewrap":
            bwrap = stack.enter_context(
                sandbox.find_bwrap(where.environ, (session.project, where.state))
            )
        view = await stack.enter_async_context(engine.mount(spec))
        base = stack.enter_context(Tree.open(session.project))
        since = pending.stamp()
        store.update_session(session.id, since_ns=since)
        watcher = TouchWatcher(
            Tree.open(folder.upper), base, since_ns=since, known=store.touches(session.id)
        )
        stack.callback(watcher.close)
        facts = host.gather(
            project=session.project,
            home=where.home,
            user=where.user if where.uid else "user",  # root appears as an ordinary user
            owner=owner,
            environ=where.environ,
            read_only=[
                *(p for p in read_only if not policy.is_graft(p, session.project, where.home)),
                *passed_outside(settings, where, session.project),
            ],
            hidden=(where.state, where.runtime),
        )
        workspace = Workspace(
            store,
            where,
            replace(session, since_ns=since),
            settings,
            folder,
            view,
            facts,
            base,
            watcher,
            bwrap,
        )
        async with beside() as nursery:
            nursery.start_soon(workspace.watch)
            nursery.start_soon(workspace.keep)
            yield workspace


def needed(where: Places, project: Path, program: str, cwd: Path) -> list[Path]:
    """Host paths that the command needs to see read-only: its own files, the user's toolchains."""
    hidden = (where.state, where.runtime)
    found = list(commands.toolchains(where.home, hidden))
    # What is not on the host may be in the view (a script of an earlier turn); init will tell.
    with contextlib.suppress(NotFound):
        found += commands.resolve(
            program,
            path_env=where.environ.get("PATH", ""),
            cwd=cwd,
            project=project,
            home=where.home,
            hidden=hidden,
        ).read_only
    return found


def _unconfined(
    environ: Mapping[str, str], built: Sequence[tuple[str, str]]
) -> list[tuple[str, str]]:
    """Without isolation the user's whole environment goes in: hiding it would only look safe."""
    return sorted({**environ, **dict(built)}.items())
