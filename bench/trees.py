"""File work in the overlay view, inside the real sandbox, against the same work in the plain directory."""

import itertools
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from bench.measure import Action, Row, Target, interleaved
from bench.processes import opened
from bench.projects import SMALL, Ground
from deltabox.isolation.running import Pipes
from deltabox.process import end, open_process
from deltabox.session import project as projects

Ask = Callable[[dict[str, Any]], Awaitable[float]]
WORKER = Path(__file__).with_name("worker.py").read_text()
PYTHON = ["/usr/bin/python3", "-I", "-c", WORKER]
CREATED = 1000
_numbers = itertools.count()


async def view(ground: Ground) -> list[Row]:
    """Caches are warm but for the first status: a fresh mount has no dentries of its own yet."""
    project = ground.project(SMALL)
    scratch = ground.home / "work" / "created"
    scratch.mkdir(exist_ok=True)
    status = {"argv": ["git", "-C", str(project), "status", "--porcelain"]}
    tasks: dict[str, tuple[dict[str, Any], float]] = {
        "find": ({"argv": ["find", str(project)]}, 1.1),
        "git status, later": (status, 1.1),
        "grep -r": ({"argv": ["grep", "-rc", "e", str(project)]}, 1.2),
        "read all": ({"read": str(project)}, 1.2),
    }
    rows = []
    with projects.open_state(ground.where) as store:
        async with plain_worker() as outside:
            rows.append(await _first_status(ground, project, status, outside))
            async with opened(ground, store, project) as workspace:
                inside_command = workspace.command(PYTHON, stdio=Pipes(), cwd=project)
                async with inside_command as running, _worker(running.command) as inside:
                    for name, (task, limit) in tasks.items():
                        both = {"plain": _task(outside, task), "view": _task(inside, task)}
                        took = await interleaved(ground.rounds(15), both)
                        target = Target("ratio", limit)
                        rows.append(
                            Row(f"overlay view: {name}", took["plain"], took["view"], target)
                        )
                    both = {
                        "plain": _creating(outside, scratch),
                        "view": _creating(inside, project),
                    }
                    took = await interleaved(ground.rounds(15), both)
                    target = Target("ratio", 1.5)
                    name = f"overlay view: create {CREATED:,} files"
                    rows.append(Row(name, took["plain"], took["view"], target))
            store_left(ground, store, project)
    return rows


async def _first_status(
    ground: Ground, project: Path, status: dict[str, Any], outside: Ask
) -> Row:
    """A new session for each round: the first status in a view rebuilds git's idea of every inode."""

    async def first() -> float:
        with projects.open_state(ground.where) as store:
            async with opened(ground, store, project) as workspace:
                command = workspace.command(PYTHON, stdio=Pipes(), cwd=project)
                async with command as running, _worker(running.command) as inside:
                    spent = await inside(status)
            store_left(ground, store, project)
        return spent

    took = await interleaved(ground.rounds(12), {"plain": _task(outside, status), "view": first})
    target = Target("ratio", 2.2)
    return Row("overlay view: git status, first", took["plain"], took["view"], target)


def store_left(ground: Ground, store: Any, project: Path) -> None:
    """Throw away what the sessions on `project` changed, so that none is continued or listed."""
    for session in store.sessions(project):
        with projects.desk(store, ground.where, session) as desk:
            desk.abort()


def _task(ask: Ask, task: dict[str, Any]) -> Action:
    async def act() -> float:
        return await ask(task)

    return act


def _creating(ask: Ask, folder: Path) -> Action:
    async def act() -> float:
        made = folder / f"made-by-bench-{next(_numbers)}"
        return await ask({"create": str(made), "count": CREATED})

    return act


@asynccontextmanager
async def plain_worker() -> AsyncIterator[Ask]:
    """A worker on the host, in the plain directory."""
    requests, our_requests = os.pipe()
    our_answers, answers = os.pipe()
    process = await open_process(
        [os.fsencode(word) for word in PYTHON],
        stdin=requests,
        stdout=answers,
        env={"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"},
    )
    os.close(requests)
    os.close(answers)
    sending = trio.lowlevel.FdStream(our_requests)
    receiving = trio.lowlevel.FdStream(our_answers)
    try:
        async with sending, receiving:
            yield await _ready(sending, receiving)
    finally:
        await end(process)


@asynccontextmanager
async def _worker(command: Any) -> AsyncIterator[Ask]:
    try:
        yield await _ready(command.stdin, command.stdout)
    finally:
        await command.stdin.aclose()


async def _ready(sending: trio.abc.SendStream, receiving: trio.abc.ReceiveStream) -> Ask:
    async def answer() -> float:
        line = b""
        while not line.endswith(b"\n"):
            part = await receiving.receive_some()
            if not part:
                raise RuntimeError("the worker of the benchmark has ended")
            line += part
        return float(json.loads(line)["ms"])

    async def ask(task: dict[str, Any]) -> float:
        await sending.send_all(json.dumps(task).encode() + b"\n")
        return await answer()

    await answer()  # it says once that it is there
    return ask
