"""Runs one command in bubblewrap, where a view stands: opens what the policy names, starts, ends.

Everything that is executed or mounted from the host is opened here first, in the host's namespace
and through no link, and used by descriptor: inside the view the same name may be the agent's file.
Must not decide what a command may see (policy.py) or word bubblewrap's options (bubblewrap.py).
"""

import os
import stat
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from deltabox import process
from deltabox.engines.base import Entrance
from deltabox.errors import DeltaboxError, IsolationUnavailable
from deltabox.isolation import bubblewrap
from deltabox.isolation.policy import SandboxPolicy
from deltabox.isolation.running import Command, Stdio, launch, memory_file
from deltabox.paths import RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, openat2

_LINKLESS = RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS
_INSTALL = (
    "install it: `apt install bubblewrap` (Debian, Ubuntu), `dnf install bubblewrap` (Fedora) or "
    "`pacman -S bubblewrap` (Arch)"
)

# What a program said of its version, by the very file: asking takes 3 ms of a session's start, and
# a server starts many. A program that is replaced is another file, or has another ctime.
_VERSIONS: dict[tuple[int, ...], tuple[tuple[int, ...], bytes]] = {}


@dataclass(frozen=True, slots=True)
class Bubblewrap:
    """The checked program, held open. Closes its descriptor on exit."""

    fd: int
    path: Path
    version: tuple[int, ...]

    def close(self) -> None:
        os.close(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def find_bwrap(environ: Mapping[str, str], agent_writable: Iterable[Path] = ()) -> Bubblewrap:
    """bubblewrap from DELTABOX_BWRAP, else from PATH, checked once; about 3 ms, most of it --version.

    Entries of PATH that are relative or below `agent_writable` (project, session directories) are
    passed over: what stands there may be the agent's own work.
    Raises: IsolationUnavailable when there is none, and for one that is set-uid, writable by others,
    below an agent-writable path, or too old.
    """
    forbidden = [Path(os.path.realpath(path)) for path in agent_writable]
    named = environ.get("DELTABOX_BWRAP")
    if named:
        if not named.startswith("/"):
            raise IsolationUnavailable(
                f"DELTABOX_BWRAP is {named!r}, a relative path; give an absolute one."
            )
        return _check(Path(os.path.realpath(named)), forbidden)
    for folder in environ.get("PATH", os.defpath).split(":"):
        if not folder.startswith("/"):
            continue
        path = Path(os.path.realpath(Path(folder) / "bwrap"))
        if os.access(path, os.X_OK) and path.is_file() and not _is_below(path, forbidden):
            return _check(path, forbidden)
    raise IsolationUnavailable(
        f"bubblewrap is not installed, so nothing can be confined; {_INSTALL}."
    )


def _is_below(path: Path, folders: Iterable[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _check(path: Path, forbidden: Sequence[Path]) -> Bubblewrap:
    if _is_below(path, forbidden):
        raise IsolationUnavailable(
            f"{path} lies where the agent can write, so it is not used as bubblewrap; {_INSTALL}, or "
            "name another one in DELTABOX_BWRAP."
        )
    with ExitStack() as undo:
        fd = _open_executable(path)
        undo.callback(os.close, fd)
        st = os.fstat(fd)
        if st.st_mode & (stat.S_ISUID | stat.S_ISGID):
            raise IsolationUnavailable(
                f"{path} is set-uid, and such a bubblewrap is not safe to steer; take the bit away "
                f"(`chmod u-s {path}`) and allow user namespaces, or name another in DELTABOX_BWRAP."
            )
        if st.st_mode & stat.S_IWOTH or st.st_uid not in (0, os.geteuid()):
            raise IsolationUnavailable(
                f"{path} can be changed by other users, so it is not used; {_INSTALL}."
            )
        known = (st.st_dev, st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns)
        version, words = _VERSIONS.get(known) or _ask_version(fd, path)
        _VERSIONS[known] = version, words
        if version < bubblewrap.MINIMUM_VERSION:
            found = ".".join(map(str, version)) or repr(words[:40])
            least = ".".join(map(str, bubblewrap.MINIMUM_VERSION))
            raise IsolationUnavailable(
                f"{path} is bubblewrap {found}, and deltabox needs {least} or later; {_INSTALL}."
            )
        undo.pop_all()
    return Bubblewrap(fd, path, version)


def _ask_version(fd: int, path: Path) -> tuple[tuple[int, ...], bytes]:
    try:
        words = process.run_trusted([b"/proc/self/fd/%d" % fd, b"--version"], fds=[fd])
    except (OSError, DeltaboxError) as exc:
        raise IsolationUnavailable(f"{path} cannot be run: {exc}; {_INSTALL}.") from exc
    return bubblewrap.version(words), words


def _open_executable(path: Path) -> int:
    try:
        fd = openat2(_root(), bytes(path), os.O_RDONLY, resolve=_LINKLESS)
    except OSError as exc:
        raise IsolationUnavailable(
            f"{path} cannot be opened: {exc.strerror}; {_INSTALL}."
        ) from exc
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise IsolationUnavailable(f"{path} is not a program; {_INSTALL}.")
    return fd


def _root() -> int:
    """openat2 takes absolute paths from any directory descriptor; AT_FDCWD serves."""
    return -100


@asynccontextmanager
async def start(
    policy: SandboxPolicy,
    bwrap: Bubblewrap,
    entrance: Entrance,
    argv: Sequence[bytes],
    stdio: Stdio,
) -> AsyncIterator[Command]:
    """A command in a fresh sandbox where the view stands, for the life of the context; about 6 ms.

    On exit every process inside is killed and gone. The command has started when the context is
    entered, or `wait` says at once why it could not be run.
    Raises: IsolationUnavailable with bubblewrap's words when the sandbox cannot be made; NotFound
    when the policy's cwd is not there; BadUsage-like errors come from policy.build, earlier.
    Cancellation: at any point; the end is shielded and bounded.
    """
    with ExitStack() as opened:

        def build(init: Sequence[bytes]) -> tuple[Sequence[bytes], Sequence[int]]:
            sources = {
                b: _open_source(b.source, opened) for b in (*policy.system, *policy.over_proc)
            }
            contents = {f: _memory(f.dest.name, f.content, opened) for f in policy.files}
            options = bubblewrap.arguments(policy, sources, contents)
            args_fd = _memory("args", bubblewrap.packed(options), opened)
            init_fd = os.open(process.native_program("init"), os.O_RDONLY | os.O_CLOEXEC)
            opened.callback(os.close, init_fd)
            line = bubblewrap.command_line(args_fd, init_fd, init)
            fds = [*sources.values(), *contents.values(), args_fd, init_fd, filter_fd]
            return entered(entrance, bwrap.fd, line, fds)

        filter_fd = _memory("filter", policy.filter, opened)
        init = [b"--filter", b"%d" % filter_fd, b"--chdir", bytes(policy.cwd)]
        for name, value in policy.rlimits:
            init += [b"--rlimit", f"{name}={value}".encode()]
        async with launch(
            build, init, argv, policy.env, stdio, layer="bubblewrap", started=opened.close
        ) as command:
            yield command


def entered(
    entrance: Entrance, program: int, argv: Sequence[bytes], fds: Sequence[int]
) -> tuple[Sequence[bytes], Sequence[int]]:
    """argv (of deltabox-enter) and descriptors by which `program` runs where the view stands."""
    user = b"-" if entrance.user is None else b"%d" % entrance.user
    uid, gid = entrance.owner
    place = [user, b"%d" % entrance.mount, b"%d" % uid, b"%d" % gid, b"%d" % program]
    namespaces = [fd for fd in (entrance.user, entrance.mount) if fd is not None]
    return [bytes(process.native_program("enter")), *place, *argv], [*fds, *namespaces, program]


def _open_source(path: Path, opened: ExitStack) -> int:
    try:
        fd = openat2(_root(), bytes(path), os.O_PATH, resolve=_LINKLESS)
    except OSError as exc:
        raise IsolationUnavailable(
            f"{path} cannot be given to the sandbox: {exc.strerror}; it was there when the session "
            "started, so start a new one.",
            path=str(path),
        ) from exc
    opened.callback(os.close, fd)
    return fd


def _memory(name: str, content: bytes, opened: ExitStack) -> int:
    fd = memory_file(name, content)
    opened.callback(os.close, fd)
    return fd
