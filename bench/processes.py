"""What it costs to start things: a session, a command in it, deltabox itself; memory; the holder."""

import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path

from bench.measure import Action, Clock, Row, Target, interleaved, rss_mib, spawn
from bench.projects import LARGE, SMALL, Ground
from deltabox import config
from deltabox.engines import delta
from deltabox.engines.base import ViewSpec
from deltabox.engines.overlay import OverlayEngine, OverlayView, prepare_layers
from deltabox.isolation import bubblewrap, host, policy, sandbox
from deltabox.isolation.running import Pipes, memory_file
from deltabox.paths import RESOLVE_NO_SYMLINKS, openat2
from deltabox.process import open_process
from deltabox.session import coordinator
from deltabox.session import project as projects
from deltabox.session.workspace import Workspace
from deltabox.store import Store

IDLE_SESSIONS = 10
LAYERS = (1, 100, 400)


@asynccontextmanager
async def opened(ground: Ground, store: Store, project: Path) -> AsyncIterator[Workspace]:
    """A new session on `project`, the way `run` and `serve` open one."""
    settings = config.load(ground.where, project)
    session, _ = coordinator.choose(store, ground.where, project, settings, named=None, new=True)
    async with coordinator.owning(store, ground.where, session, settings) as workspace:
        yield workspace


async def session_start(ground: Ground) -> list[Row]:
    sizes = [SMALL] if ground.quick else [SMALL, LARGE]

    def starting(project: Path) -> Action:
        async def start() -> float:
            clock = Clock()
            async with opened(ground, store, project):
                return clock.ms

        return start

    with projects.open_state(ground.where) as store:
        actions = {str(size): starting(ground.project(size)) for size in sizes}
        took = await interleaved(ground.rounds(30), actions)
    limit = Target("total", 8)
    rows = [Row(f"session start, {size:,} files", None, took[str(size)], limit) for size in sizes]
    if LARGE in sizes:
        both = took[str(SMALL)], took[str(LARGE)]
        rows.append(Row("session start, 100,000 over 8,000 files", *both, Target("ratio", 1.3)))
    return rows


async def execs(ground: Ground) -> list[Row]:
    project = ground.project(SMALL)
    with projects.open_state(ground.where) as store, ExitStack() as kept:
        async with opened(ground, store, project) as workspace:

            async def confined() -> float:
                clock = Clock()
                async with workspace.command(
                    ["true"], stdio=Pipes(stdin=False), cwd=project
                ) as running:
                    await running.command.wait()
                workspace.changed(running.paths)
                return clock.ms

            actions = {
                "deltabox": confined,
                "bwrap": _bare_bwrap(ground, project, kept),
                "bash": _plain(["/bin/bash", "-c", "true"]),
            }
            took = await interleaved(ground.rounds(60), actions)
    return [
        Row("exec true, over bare bwrap", took["bwrap"], took["deltabox"], Target("added", 1.5)),
        Row("exec true, over bash -c true", took["bash"], took["deltabox"], Target("added", 7)),
    ]


def _bare_bwrap(ground: Ground, project: Path, kept: ExitStack) -> Action:
    """The same options on the host's own trees, with every descriptor open beforehand."""
    facts = host.gather(
        project=project,
        home=ground.home,
        user=ground.where.user,
        owner=(ground.where.uid, ground.where.gid),
        environ=ground.environ,
    )
    built = policy.build(facts, policy.Wish(cwd=project))
    bwrap = kept.enter_context(sandbox.find_bwrap(ground.environ))

    def held(fd: int) -> int:
        kept.callback(os.close, fd)
        return fd

    sources = {
        bind: held(openat2(-100, bytes(bind.source), os.O_PATH, resolve=RESOLVE_NO_SYMLINKS))
        for bind in (*built.system, *built.over_proc)
    }
    contents = {file: held(memory_file("file", file.content)) for file in built.files}
    words = bubblewrap.packed(bubblewrap.arguments(built, sources, contents))
    args_fd = held(memory_file("args", words))
    fds = [*sources.values(), *contents.values(), args_fd, bwrap.fd]

    async def start() -> float:
        for fd in (*contents.values(), args_fd):
            os.lseek(fd, 0, os.SEEK_SET)
        clock = Clock()
        program = b"/proc/self/fd/%d" % bwrap.fd
        process = await open_process(
            [program, b"--args", b"%d" % args_fd, b"--", b"/usr/bin/true"], fds=fds
        )
        if await process.wait() != 0:
            raise RuntimeError("the bare bwrap of the comparison failed")
        return clock.ms

    return start


def _plain(argv: list[str]) -> Action:
    async def start() -> float:
        clock = Clock()
        process = await open_process([os.fsencode(word) for word in argv])
        await process.wait()
        return clock.ms

    return start


async def command_line(ground: Ground) -> list[Row]:
    """From the shell, with byte code cached as a user has it."""
    project = ground.project(SMALL)
    script = Path(sys.executable).with_name("deltabox")
    deltabox = [str(script)] if script.exists() else [sys.executable, "-m", "deltabox"]
    place = ["--project", str(project)]
    change = ["--new", "--review", "keep", "--", "touch", "made-by-bench"]
    spawn([*deltabox, "run", *place, *change], ground.environ)

    def shell(argv: list[str]) -> Action:
        async def start() -> float:
            return spawn(argv, ground.environ)

        return start

    took = await interleaved(
        ground.rounds(15),
        {
            "python": shell([sys.executable, "-c", "pass"]),
            "run": shell([*deltabox, "run", *place, "--new", "--", "true"]),
            "diff": shell([*deltabox, "diff", *place, "--stat"]),
        },
    )
    spawn([*deltabox, "abort", *place, "--yes"], ground.environ)
    limit = Target("added", 150)
    return [
        Row("deltabox run -- true, over python -c pass", took["python"], took["run"], limit),
        Row("deltabox diff --stat, over python -c pass", took["python"], took["diff"], limit),
    ]


async def memory(ground: Ground) -> list[Row]:
    """What one idle session more takes, in a process that has some already."""
    project = ground.project(SMALL)
    with projects.open_state(ground.where) as store:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(opened(ground, store, project))
            before = rss_mib()
            spaces = [
                await stack.enter_async_context(opened(ground, store, project))
                for _ in range(IDLE_SESSIONS)
            ]
            own = (rss_mib() - before) / IDLE_SESSIONS
            views = [space.view for space in spaces]
            holders = [rss_mib(v.pid) for v in views if isinstance(v, OverlayView)]
    held = sum(holders) / IDLE_SESSIONS
    return [Row("memory of an idle session", None, own + held, Target("total", 3), "MiB")]


async def layers(ground: Ground) -> list[Row]:
    """The holder alone (no sandbox), and its restack, which is what a checkpoint or restore does."""
    project = ground.project(SMALL)
    folder = ground.root / "layers"
    folder.mkdir()
    frozen = [folder / f"layer{number}" for number in range(max(LAYERS))]
    for layer in frozen:
        delta.create_layer(layer, os.stat(project))
        (layer / "in-layer").write_text(layer.name)

    def mounting(count: int) -> Action:
        async def mount() -> float:
            clock = Clock()
            async with OverlayEngine().mount(_spec(ground, project, folder, frozen[:count])):
                return clock.ms

        return mount

    actions = {f"view mounted, {n} lower layers": mounting(n) for n in LAYERS}
    took = await interleaved(ground.rounds(20), actions)
    rows = [Row(name, None, spent) for name, spent in took.items()]
    return rows + await _restacks(ground, project, folder)


async def _restacks(ground: Ground, project: Path, folder: Path) -> list[Row]:
    """Checkpoint: the top layer is frozen below a fresh one. Restore: the top is dropped for another."""
    frozen: list[Path] = []
    tops = [folder / "top0"]
    async with OverlayEngine().mount(_spec(ground, project, folder, [], upper=tops[0])) as view:

        async def restack() -> float:
            clock = Clock()
            tops.append(folder / f"top{len(tops)}")
            await view.restack(frozen, tops[-1], folder / "work")
            return clock.ms

        async def checkpoint() -> float:
            frozen.insert(0, tops[-1])
            return await restack()

        took = await interleaved(ground.rounds(20), {"checkpoint": checkpoint, "restore": restack})
    limit = Target("total", 3)
    return [Row(f"{name}, nothing running", None, spent, limit) for name, spent in took.items()]


def _spec(
    ground: Ground, project: Path, folder: Path, lowers: list[Path], *, upper: Path | None = None
) -> ViewSpec:
    home = folder / "home"
    home.mkdir(exist_ok=True)
    spec = ViewSpec(
        project=project,
        upper=upper or folder / "upper",
        work=folder / "work",
        home=home,
        home_at=ground.home,
        tmp_bytes=1 << 20,
        owner=(ground.where.uid, ground.where.gid),
        lowers=tuple(lowers),
    )
    prepare_layers(spec.upper, spec.work, project)
    return spec
