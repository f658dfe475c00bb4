"""Directories for a test's project, session and home, and ways to look at a view from both sides."""

import hashlib
import os
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltabox.engines.base import ViewSpec
from deltabox.engines.overlay import OverlayView
from deltabox.paths import Tree, parse
from deltabox.process import native_program, run_trusted

REPOSITORY = Path(__file__).resolve().parent.parent
ME = (os.geteuid(), os.getegid())


@dataclass(frozen=True, slots=True)
class Place:
    """A project below a home, and a session's directory beside; all real, all below `root`."""

    root: Path
    project: Path
    session: Path
    home_at: Path

    @classmethod
    def make(cls, root: Path, *, project: str = "home/work/project") -> "Place":
        place = cls(root, root / project, root / "state" / "session", root / "home")
        place.project.mkdir(parents=True)
        place.home_at.mkdir(exist_ok=True)
        (place.session / "home").mkdir(parents=True)
        (place.project / "a").write_text("base a")
        (place.project / "dir").mkdir()
        (place.project / "dir" / "b").write_text("base b")
        return place

    @property
    def upper(self) -> Path:
        return self.session / "upper"

    def spec(self, **changes: Any) -> ViewSpec:
        fields: dict[str, Any] = {
            "project": self.project,
            "upper": self.upper,
            "work": self.session / "work",
            "home": self.session / "home",
            "home_at": self.home_at,
            "tmp_bytes": 1 << 20,
            "owner": ME,
        }
        return ViewSpec(**(fields | changes))


def listing(root: Path) -> dict[str, tuple[object, ...]]:
    """Every entry below `root` with its mode, times and content: equal before and after means untouched."""
    found: dict[str, tuple[object, ...]] = {}
    for path in [root, *sorted(root.rglob("*"))]:
        st = path.lstat()
        content = ""
        if stat.S_ISREG(st.st_mode):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        elif stat.S_ISLNK(st.st_mode):
            content = str(path.readlink())
        found[str(path)] = (st.st_ino, st.st_mode, st.st_uid, st.st_gid, st.st_mtime_ns, content)
    return found


def read(view: OverlayView, path: str) -> bytes:
    with Tree(os.dup(view.root_fd)) as tree, open(tree.open_file(parse(path)), "rb") as file:
        return file.read()


def write(view: OverlayView, path: str, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with Tree(os.dup(view.root_fd)) as tree:
        fd = tree.open_at(parse(path), flags, mode=0o644)
        with open(fd, "wb") as file:
            file.write(data)


def names(view: OverlayView, path: str = "") -> list[bytes]:
    with Tree(os.dup(view.root_fd)) as tree:
        return tree.names(parse(path))


def run_in(view: OverlayView, *argv: str, fds: tuple[int, ...] = ()) -> str:
    """Run a program where the view stands; its standard output. Raises: Failed with its stderr."""
    entrance = view.enter
    program = os.open(argv[0], os.O_PATH | os.O_CLOEXEC)
    try:
        inside = [program, entrance.mount, *fds]
        user = "-" if entrance.user is None else str(entrance.user)
        if entrance.user is not None:
            inside.append(entrance.user)
        head = [str(native_program("enter")), user, str(entrance.mount)]
        tail = [*map(str, entrance.owner), str(program), *argv]
        return os.fsdecode(run_trusted([os.fsencode(a) for a in head + tail], fds=inside))
    finally:
        os.close(program)


def sh(view: OverlayView, script: str, *args: object) -> str:
    return run_in(view, "/bin/sh", "-c", script, "sh", *map(str, args)).strip()


def run_python(code: str, *args: object, under: tuple[str, ...] = ()) -> str:
    """A Python program that can import deltabox and tests, in a process started by `under`."""
    head = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); sys.dont_write_bytecode = True\n"
    argv = [*under, sys.executable, "-c", head + code, *map(str, args)]
    return os.fsdecode(run_trusted([os.fsencode(a) for a in argv], timeout_s=30)).strip()


def namespace_users(mount_ns: int) -> list[int]:
    """The processes that live in that mount namespace (by its inode)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "ns/mnt").stat().st_ino == mount_ns:
                    found.append(int(entry.name))
            except OSError:
                continue  # gone, or another user's
    return found


def mounts_at(root: Path, pid: int | str = "self") -> list[str]:
    """The mount points below `root` that a process sees, as mountinfo writes them."""
    lines = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    return [line.split()[4] for line in lines if line.split()[4].startswith(str(root))]
