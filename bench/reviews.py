"""Many changed paths at once: what it costs to list, commit, take back and discard them."""

import os
from pathlib import Path

from bench.measure import Row, Samples, Target
from bench.processes import opened
from bench.projects import SMALL, Ground, git
from deltabox.isolation.running import Pipes
from deltabox.process import run_trusted
from deltabox.session import project as projects
from deltabox.session.pending import Pending, tidy
from deltabox.store import Session, Store

EDITED, DELETED, ADDED = 1100, 1100, 1100
_EDIT = """
import os, subprocess, sys
edited, deleted, added = map(int, sys.argv[1:4])
names = subprocess.run(["git", "ls-files", "-z"], capture_output=True, check=True).stdout.split(b"\\0")
names = [n for n in names if n and os.path.getsize(n)]
for name in names[:edited]:
    with open(name, "ab") as file:
        file.write(b"one more line\\n")
for name in names[edited : edited + deleted]:
    os.unlink(name)
for number in range(added):
    folder = f"added/part{number % 20}"
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/file{number}.txt", "w") as file:
        file.write(f"number {number}\\n" * 50)
"""
_ARGV = ["/usr/bin/python3", "-I", "-c", _EDIT, *map(str, (EDITED, DELETED, ADDED))]


async def review(ground: Ground) -> list[Row]:
    """Each round: an agent changes 3,300 paths; list, commit and undo them; again, then discard.

    Beside them, on the same files, what plain tools take for the like: git status after the commit,
    a copy of the delta, its removal.
    """
    project = ground.project(SMALL, "reviewed")
    taken = Samples()
    with projects.open_state(ground.where) as store:
        for _ in range(ground.rounds(9) + 1):
            desk, session = await _changed(ground, store, project)
            with taken.timed("copy"):
                _shell(
                    "cp -a",
                    projects.folder_of(ground.where, session.id).upper,
                    ground.root / "copy",
                )
            with taken.timed("remove"):
                _shell("rm -r", ground.root / "copy")
            with taken.timed("list"):
                digest = desk.diff()["digest"]
            with taken.timed("commit"):
                done = desk.commit(digest=digest)
            tidy(store, ground.where, session.id)
            with taken.timed("status"):
                git(project, "status", "--porcelain")
            with taken.timed("undo"):
                projects.undo(store, ground.where, project, done["commit"])
            desk, session = await _changed(ground, store, project)
            with taken.timed("discard"):
                desk.abort()
            tidy(store, ground.where, session.id)

    def row(name: str, plain: str, words: str, limit: float | None) -> Row:
        target = Target("total", limit) if limit is not None else None
        return Row(f"3,300 changes: {words}", taken.median(plain), taken.median(name), target)

    return [
        row("list", "status", "list, beside git status", 60),
        row("commit", "copy", "commit, beside cp -a", 400),
        row("discard", "remove", "discard, beside rm -r", 80),
        row("undo", "copy", "undo, beside cp -a", None),
    ]


def _shell(words: str, *paths: Path) -> None:
    argv = [*words.split(), *map(str, paths)]
    run_trusted([b"/usr/bin/env", *(os.fsencode(word) for word in argv)], timeout_s=60)


async def _changed(ground: Ground, store: Store, project: Path) -> tuple[Pending, Session]:
    async with opened(ground, store, project) as workspace:
        session = workspace.session
        stdio = Pipes(stdin=False)
        async with workspace.command(_ARGV, stdio=stdio, cwd=project) as running:
            ended = await running.command.wait()
    if ended.status != 0:
        raise RuntimeError(f"the scripted changes failed: {ended}")
    return Pending(store, ground.where, session.id), session
