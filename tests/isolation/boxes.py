"""A real sandbox on a real overlay view, and the few ways in which tests use one."""

import os
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from deltabox.engines.overlay import OverlayEngine, OverlayView
from deltabox.isolation import host, none, sandbox
from deltabox.isolation.policy import Facts, SandboxPolicy, Wish, build
from deltabox.isolation.running import Command, Exit, Pipes, Stdio, Tty
from deltabox.isolation.sandbox import Bubblewrap
from tests.places import ME, Place

ENVIRON = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "TERM": "xterm"}
HANG_S = 20  # a test that waits so long has failed


@dataclass(frozen=True, slots=True)
class Result:
    exit: Exit
    out: bytes
    err: bytes

    @property
    def text(self) -> str:
        assert self.exit == Exit(code=0), self
        return self.out.decode().strip()


@dataclass(frozen=True, slots=True)
class Box:
    place: Place
    view: OverlayView
    bwrap: Bubblewrap

    def facts(self, **changes: Any) -> Facts:
        fields: dict[str, Any] = {
            "project": self.place.project,
            "home": self.place.home_at,
            "user": "tester",
            "owner": ME,
            "environ": ENVIRON,
            "hidden": [self.place.session],
        }
        return host.gather(**(fields | changes))

    def policy(self, facts: Facts | None = None, **wish: Any) -> SandboxPolicy:
        fields: dict[str, Any] = {"cwd": self.place.project}
        return build(facts or self.facts(), Wish(**(fields | wish)))

    @asynccontextmanager
    async def start(
        self,
        *argv: str,
        stdio: Stdio | None = None,
        policy: SandboxPolicy | None = None,
        **wish: Any,
    ) -> AsyncIterator[Command]:
        line = [os.fsencode(a) for a in argv]
        with trio.fail_after(HANG_S):
            async with sandbox.start(
                policy or self.policy(**wish), self.bwrap, self.view.enter, line, stdio or Pipes()
            ) as command:
                yield command

    async def run(self, *argv: str, stdin: bytes = b"", **how: Any) -> Result:
        async with self.start(*argv, **how) as command:
            return await collect(command, stdin)

    async def sh(self, script: str, *args: object, **how: Any) -> Result:
        return await self.run("/bin/bash", "-c", script, "bash", *map(str, args), **how)

    @asynccontextmanager
    async def unconfined(
        self,
        *argv: str,
        stdio: Stdio | None = None,
        cwd: Path | None = None,
        env: Mapping[str, str] = ENVIRON,
    ) -> AsyncIterator[Command]:
        line = [os.fsencode(a) for a in argv]
        with trio.fail_after(HANG_S):
            async with none.start(
                self.view.enter,
                line,
                stdio or Pipes(),
                cwd=cwd or self.place.project,
                env=tuple(env.items()),
            ) as command:
                yield command


@asynccontextmanager
async def open_box(place: Place, **spec: Any) -> AsyncIterator[Box]:
    with sandbox.find_bwrap(os.environ) as bwrap:
        async with OverlayEngine().mount(place.spec(**spec)) as view:
            yield Box(place, view, bwrap)


async def collect(command: Command, stdin: bytes = b"") -> Result:
    """Feed it, read it to the end, and wait."""
    assert command.stdin
    assert command.stdout
    assert command.stderr
    chunks: dict[str, list[bytes]] = {"out": [], "err": []}

    async def feed() -> None:
        assert command.stdin
        with suppress(trio.BrokenResourceError):  # it ended without reading all
            await command.stdin.send_all(stdin)
        await command.stdin.aclose()

    async def read(stream: trio.abc.ReceiveStream, into: list[bytes]) -> None:
        into.extend([bytes(chunk) async for chunk in stream])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(feed)
        nursery.start_soon(read, command.stdout, chunks["out"])
        nursery.start_soon(read, command.stderr, chunks["err"])
        ended = await command.wait()
    return Result(ended, b"".join(chunks["out"]), b"".join(chunks["err"]))


class Screen:
    """What a terminal has shown so far, and waiting for words on it."""

    def __init__(self, command: Command) -> None:
        assert command.terminal is not None
        self.terminal = command.terminal
        self.seen = b""
        self._from = 0

    async def until(self, words: bytes) -> bytes:
        """Read on until `words` have come after what was last waited for; all up to them."""
        while (at := self.seen.find(words, self._from)) < 0:
            with trio.move_on_after(HANG_S / 2) as limit:
                chunk = await self.terminal.receive_some()
            assert not limit.cancelled_caught, f"{words!r} did not come: {self.seen!r}"
            assert chunk, f"the terminal ended without {words!r}: {self.seen!r}"
            self.seen += chunk
        before, self._from = self.seen[self._from : at], at + len(words)
        return before

    async def type(self, text: bytes) -> None:
        await self.terminal.send_all(text)


def python(code: str, *args: object) -> Sequence[str]:
    """A Python program as argv; the system's own, which stands in every sandbox."""
    return ["/usr/bin/python3", "-I", "-c", code, *map(str, args)]


def quoted(*words: object) -> str:
    return shlex.join(map(str, words))


TERMINAL = Tty(24, 80)
