"""Where a path that a host sent points: into the view, or to the host beside it. Opens nothing in the view.

A name becomes a WorkspacePath once, by text; links inside the view are expanded here to another
WorkspacePath, and whoever opens it does so strictly (paths.Tree follows no link at all). So a link
swapped in meanwhile can at worst make the call fail. Must not know methods, versions or wires.
"""

import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from deltabox.errors import BadPath, FileFailed, NotRegularFile, Refused
from deltabox.paths import RESOLVE_NO_MAGICLINKS, Tree, WorkspacePath, display, is_within, openat2
from deltabox.paths import parse as parse_relative

MAX_LINKS = 40  # the kernel's own bound on one walk

# Keys and tokens of the person, below their home. What is not listed can be read: a model may need
# a header of the system or a sibling project.
SECRETS = (
    b".ssh",
    b".aws",
    b".gnupg",
    b".netrc",
    b".kube",
    b".docker",
    b".azure",
    b".git-credentials",
    b".npmrc",
    b".pypirc",
    b".password-store",
    b".config/gh",
    b".config/gcloud",
    b".config/deltabox",
    b".local/share/keyrings",
)
# The kernel's own trees: our environment, memory and devices stand there under many names.
KERNEL = (b"/proc", b"/sys", b"/dev")


@dataclass(frozen=True, slots=True)
class OnHost:
    """Outside the project: absolute bytes, folded, no link of it followed yet."""

    path: bytes


Place = WorkspacePath | OnHost


def locate(raw: bytes, project: bytes) -> Place:
    """What `raw` names, relative to the project or absolute. Pure; about 2 µs.

    `..` is folded as text, as hosts do before they ask. Raises: BadPath.
    """
    if b"\0" in raw:
        raise BadPath(f"{display(raw)} holds a NUL byte, which no path can.")
    if not raw.startswith(b"/") and b".." not in raw:
        return parse_relative(raw)
    folded = _folded(raw if raw.startswith(b"/") else project + b"/" + raw)
    if not is_within(folded, project):
        return OnHost(folded)
    return parse_relative(folded[len(project) :].lstrip(b"/"))


def _folded(path: bytes) -> bytes:
    parts: list[bytes] = []
    for part in path.split(b"/"):
        if part == b"..":
            del parts[-1:]
        elif part not in (b"", b"."):
            parts.append(part)
    return b"/" + b"/".join(parts)


def follow(tree: Tree, project: bytes, path: WorkspacePath, *, last: bool = True) -> WorkspacePath:
    """`path` with its links expanded, as a command in the sandbox would walk them; `last`: the final
    one too. What is missing stays as it is named. An absolute target below the project means the view.

    Raises: Refused when a link leads out of the project; FileFailed for a loop.
    """
    done: list[bytes] = []
    todo = path.split(b"/")[::-1] if path else []
    links = 0
    while todo:
        part = todo.pop()
        if part in (b"", b"."):
            continue
        if part == b"..":
            if done:
                done.pop()
                continue
            # Above the root: it may come back down by the project's name, else it leaves.
            todo = _back_inside(project, b"/".join([project, part, *todo[::-1]]), path)
            continue
        here = WorkspacePath(b"/".join([*done, part]))
        target = _link(tree, here) if todo or last else None
        if target is None:
            done.append(part)
            continue
        links += 1
        if links > MAX_LINKS:
            raise FileFailed(
                f"{display(path)} goes through a loop of links; name the file itself."
            )
        rest = target.split(b"/")[::-1]
        if target.startswith(b"/"):
            done = []
            rest = _back_inside(project, target, path)
        todo += rest
    return WorkspacePath(b"/".join(done))


def _link(tree: Tree, path: WorkspacePath) -> bytes | None:
    """The target, or None where no link stands."""
    try:
        return tree.readlink(path)
    except OSError as exc:
        if exc.errno in (errno.EINVAL, errno.ENOENT, errno.ENOTDIR):
            return None
        raise


def _back_inside(project: bytes, target: bytes, path: bytes) -> list[bytes]:
    """The components below the project that an absolute `target` means, last first.

    Only the way up to the project is folded: below it `..` is the walk's business.
    """
    kept: list[bytes] = []
    parts = [part for part in target.split(b"/") if part not in (b"", b".")]
    for n, part in enumerate(parts, 1):
        if part == b"..":
            del kept[-1:]
        else:
            kept.append(part)
        # Going up again from the project is not coming into it (and would be walked for ever).
        if b"/" + b"/".join(kept) == project and parts[n : n + 1] != [b".."]:
            return parts[n:][::-1]
    raise Refused(
        f"{display(path)} goes through a link that leaves the project (to {display(target)}); "
        "name the file there itself, if you mean it."
    )


def check_host(path: bytes, *, home: bytes, hidden: tuple[bytes, ...]) -> None:
    """Raises: Refused for what the deny set keeps from file calls. Pure."""
    if any(is_within(path, place) for place in KERNEL):
        raise Refused(f"{display(path)} is the kernel's, not a file; run a command to look at it.")
    if any(is_within(path, place) for place in hidden):
        raise Refused(f"{display(path)} is deltabox's own state, which no agent may see.")
    if any(is_within(path, home + b"/" + name) for name in SECRETS):
        raise Refused(f"{display(path)} holds keys or tokens of yours, which no agent may see.")


def open_host(path: bytes, *, follow_last: bool = True) -> tuple[int, bytes]:
    """An O_PATH descriptor of a host path, and where it really is. The caller closes it.

    Every check is made on the real place of what was opened, never on the name. Raises: OSError.
    """
    flags = os.O_PATH | (0 if follow_last else os.O_NOFOLLOW)
    root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fd = openat2(root, path.lstrip(b"/") or b".", flags, resolve=RESOLVE_NO_MAGICLINKS)
    finally:
        os.close(root)
    try:
        if os.fstat(fd).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "deleted", path)  # noqa: TRY301
        return fd, os.readlink(b"/proc/self/fd/%d" % fd)
    except BaseException:
        os.close(fd)
        raise


def reopen(fd: int, flags: int) -> int:
    """The same file or directory, open for reading. Raises: NotRegularFile, before it is opened."""
    mode = os.fstat(fd).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise NotRegularFile(
            "A fifo, socket or device is never opened by a file call; use a command."
        )
    return os.open(b"/proc/self/fd/%d" % fd, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)


_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def acting_as(owner: tuple[int, int]) -> Iterator[None]:
    """Reach files with the rights of the session's owner, and make them theirs, where we are root.

    Else a file call could read what the agent's own commands cannot, and would leave files that
    they cannot change. For this thread and until the end of the block: there must be no await in it.
    Costs 2 µs; nothing for an ordinary user.
    """
    uid, gid = owner
    if os.geteuid() != 0 or uid == 0:
        yield
        return
    # The group first: without root's uid it could not be changed. The kernel takes root's powers
    # over files away with the uid and gives them back with it.
    _libc.setfsgid(gid)
    _libc.setfsuid(uid)
    try:
        yield
    finally:
        _libc.setfsuid(0)
        _libc.setfsgid(os.getegid())
