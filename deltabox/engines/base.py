"""The engine contract: what a view is made of, and what a view can do. Data and protocols only.

An engine makes a `View` of a base plus layers; it never commits, never decides, never confines.
"""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, Protocol

Access = Literal["ro", "rw", "cow"]


@dataclass(frozen=True, slots=True)
class Graft:
    """A host file or directory that stands in the view at `dest`, below home, /tmp or the project.

    `source` is a host path the user's configuration named (opened without following links below it);
    `ro` and `rw` are binds, `cow` is an overlay whose upper is `upper` (with `work` beside it).
    """

    source: Path
    dest: Path
    access: Access
    upper: Path | None = None
    work: Path | None = None


@dataclass(frozen=True, slots=True)
class ViewSpec:
    """What a view is made of. All paths are the host's, absolute, resolved, without links.

    project: the base, and where the view stands. lowers: frozen layers, top first (the mask layer,
    when there is one, before them). upper, work: on one file system. home: the session's private
    home on disk, shown at `home_at`. tmp_bytes: size of the private /tmp (a tmpfs of the holder).
    grafts: in any order. owner: uid and gid that the sandbox's processes have outside; equal to
    the caller's unless the caller is root.
    """

    project: Path
    upper: Path
    work: Path
    home: Path
    home_at: Path
    tmp_bytes: int
    owner: tuple[int, int]
    lowers: tuple[Path, ...] = ()
    mask: Path | None = None
    grafts: tuple[Graft, ...] = ()
    legacy_mount: bool = False  # kernels before 6.8: mount(2) with an option string


@dataclass(frozen=True, slots=True)
class Entrance:
    """How a process gets to where the view stands: descriptors of the holder's namespaces.

    user is None when the holder shares the caller's user namespace (the caller is root).
    Owned by the view; valid while it lives.
    """

    user: int | None
    mount: int
    owner: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine's views can do, for `doctor`, the card and replies."""

    name: str
    live_base: bool  # changes reach the project before approval (git engine only)
    directory_rename: bool
    block_cow: bool
    notes: tuple[str, ...] = field(default=())


class View(Protocol):
    """A mounted view. `root_fd` is an O_PATH descriptor of the project as the agent sees it.

    The descriptor changes at restack; read the attribute each time. Only paths.Tree may walk it.
    """

    @property
    def root_fd(self) -> int: ...

    @property
    def enter(self) -> Entrance: ...

    async def restack(self, lowers: Sequence[Path], upper: Path, work: Path) -> None:
        """Replace the layers under the project, keeping /tmp, home and grafts. Needs quiet: no
        process of the session may live. About 1 ms. Raises EngineUnavailable; the old stack then stands."""
        ...

    def is_alive(self) -> bool: ...


class Engine(Protocol):
    capabilities: ClassVar[Capabilities]

    def mount(self, spec: ViewSpec) -> AbstractAsyncContextManager[View]:
        """Mount for the life of the context; on exit nothing of it is left.

        Raises: EngineUnavailable with the step, the path and the reason. Cancellation: at any
        point; the exit is shielded and bounded.
        """
        ...
