"""Runs one command where the view stands with no confinement at all; only for who asked by name.

The command sees the whole host as the user does, may change anything outside the project, and could
approve its own changes: whoever starts one says so (WARNING). It is still in the view, and it still
ends as a whole with its context, as far as its processes stay descendants of ours.
"""

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from deltabox import process
from deltabox.engines.base import Entrance
from deltabox.isolation.running import Command, Stdio, launch
from deltabox.isolation.sandbox import entered

WARNING = (
    "isolation none: commands are NOT confined. They can read and change everything that you can, "
    "reach the network, and approve their own changes."
)


@asynccontextmanager
async def start(
    entrance: Entrance,
    argv: Sequence[bytes],
    stdio: Stdio,
    *,
    cwd: Path,
    env: Sequence[tuple[str, str]],
    rlimits: Sequence[tuple[str, int]] = (("core", 0),),
) -> AsyncIterator[Command]:
    """As sandbox.start, without the sandbox; about 3 ms.

    `freeze` stops descendants in rounds rather than at once. On exit descendants are killed until
    none is left; one that became another user (a set-uid program) can stay.
    Raises: IsolationUnavailable when the view cannot be entered, NotFound when cwd is not there.
    """
    with ExitStack() as opened:
        program = os.open(process.native_program("init"), os.O_RDONLY | os.O_CLOEXEC)
        opened.callback(os.close, program)

        def build(init: Sequence[bytes]) -> tuple[Sequence[bytes], Sequence[int]]:
            return entered(entrance, program, [b"deltabox-init", *init], ())

        init = [b"--unconfined", b"--chdir", bytes(cwd)]
        for name, value in rlimits:
            init += [b"--rlimit", f"{name}={value}".encode()]
        async with launch(
            build, init, argv, env, stdio, layer="none", started=opened.close
        ) as command:
            yield command
