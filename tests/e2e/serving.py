"""A project and a coordinator for tests of the protocol: by the Python client, or by raw lines.

Everything is real: `deltabox serve` as a child process, real views, real sandboxes.
"""

import json
import os
import subprocess  # noqa: TID251 - the test is the host, which starts the coordinator
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from deltabox import client
from tests.places import REPOSITORY

HANG_S = 60  # a test that waits so long has failed


@dataclass(frozen=True, slots=True)
class World:
    """A home with a project in it, and a state folder beside."""

    root: Path

    @classmethod
    def make(cls, root: Path) -> "World":
        world = cls(root)
        world.project.mkdir(parents=True)
        (world.project / "a.txt").write_text("one\ntwo\n")
        (world.project / "b.txt").write_text("b\n")
        return world

    @property
    def project(self) -> Path:
        return self.root / "home" / "work"

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def env(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if k.startswith("COVERAGE_")}
        return {
            **kept,
            "DELTABOX_STATE_DIR": str(self.state),
            "HOME": str(self.root / "home"),
            "LANG": "C.UTF-8",
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": str(REPOSITORY),
            "SECRET_TOKEN": "hunter2",
        }

    @asynccontextmanager
    async def coordinator(
        self, answers: Mapping[str, client.Answer] | None = None
    ) -> AsyncIterator[client.Client]:
        with trio.fail_after(HANG_S):
            async with client.coordinator(environ=self.env, answers=answers) as made:
                yield made

    @asynccontextmanager
    async def session(self, **options: Any) -> AsyncIterator[client.Session]:
        async with self.coordinator() as made:
            yield await self.start(made, **options)

    async def start(self, made: client.Client, **options: Any) -> client.Session:
        options.setdefault("projectRoot", str(self.project))
        return client.Session(made, await made.call("session.start", **options))

    def cli(self, *words: str, status: int = 0, stdin: str | None = None) -> str:
        """A verb in the project, from another terminal."""
        done = subprocess.run(
            [sys.executable, "-m", "deltabox", *words],
            cwd=self.project,
            env=self.env,
            capture_output=True,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            text=True,
            timeout=HANG_S,
            check=False,
        )
        assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
        return done.stdout

    @contextmanager
    def raw(self) -> Iterator["Raw"]:
        child = subprocess.Popen(
            [sys.executable, "-m", "deltabox", "serve"],
            env=self.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        with child:
            try:
                yield Raw(child)
            finally:
                child.kill()


class Raw:
    """Lines to and from a coordinator."""

    def __init__(self, child: "subprocess.Popen[bytes]") -> None:
        self.child = child
        self._ids = 0

    def send(self, data: bytes) -> None:
        assert self.child.stdin
        self.child.stdin.write(data)
        self.child.stdin.flush()

    def line(self) -> Any:
        assert self.child.stdout
        found = self.child.stdout.readline()
        assert found, "the coordinator closed its output"
        return json.loads(found)

    def post(self, method: str, **params: Any) -> int:
        self._ids += 1
        self.send(
            json.dumps({"id": self._ids, "method": method, "params": params}).encode() + b"\n"
        )
        return self._ids

    def call(self, method: str, **params: Any) -> Any:
        """The answer's result; notifications on the way are dropped."""
        ident = self.post(method, **params)
        while True:
            found = self.line()
            if found.get("id") == ident:
                assert "error" not in found, found
                return found["result"]

    def ends(self) -> tuple[int, bytes]:
        """Close its input; its status and what was left on its output."""
        assert self.child.stdin
        self.child.stdin.close()
        assert self.child.stdout
        rest = self.child.stdout.read()
        return self.child.wait(HANG_S), rest


def alive(words: str) -> list[int]:
    """Processes of this machine whose command line holds `words`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if words.encode() in line and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


async def until_gone(words: str) -> None:
    with trio.fail_after(HANG_S):
        while alive(words):  # noqa: ASYNC110 - /proc wakes nobody
            await trio.sleep(0.02)
