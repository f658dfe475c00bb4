"""A real session on a real project, for tests that look at one workspace from inside its owner."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from deltabox import config
from deltabox.config import Config
from deltabox.session import coordinator
from deltabox.session import project as projects
from deltabox.session.workspace import Workspace


@asynccontextmanager
async def open_here(root: Path, **settings: Any) -> AsyncIterator[Workspace]:
    """A workspace on `root`/home/project, which the caller may have filled; made when missing."""
    project = root / "home" / "project"
    project.mkdir(parents=True, exist_ok=True)
    environ = {
        "HOME": str(root / "home"),
        "PATH": os.environ["PATH"],
        "DELTABOX_STATE_DIR": str(root / "state"),
    }
    where = config.places(environ)
    wishes = Config(network="off", **settings)
    with projects.open_state(where) as store:
        session = coordinator.create(store, where, project, wishes)
        async with coordinator.owning(store, where, session, wishes) as workspace:
            yield workspace
