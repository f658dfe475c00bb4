"""Git projects of a wanted size out of files that this machine has, and a private home and state.

Everything lies in one temporary folder that is removed at the end; TMPDIR chooses its file system.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deltabox import config
from deltabox.config import Places
from deltabox.engines.delta import remove_layers
from deltabox.process import run_trusted

SOURCES = ("/usr/include", "/usr/lib/python3", "/usr/share", "/usr/lib")
LARGEST = 64 << 10  # source trees are small files; one library would outweigh a thousand of them
SMALL, LARGE = 8_000, 100_000
_GIT_TIMEOUT_S = 900


@dataclass(frozen=True, slots=True)
class Ground:
    """Where a run of the benchmark works, and how much of it is wanted."""

    root: Path
    home: Path
    where: Places
    environ: dict[str, str]
    quick: bool

    def rounds(self, full: int) -> int:
        return max(5, full // 3) if self.quick else full

    def project(self, files: int, name: str = "project") -> Path:
        """The git project with about this many files, made at the first call."""
        made = self.home / "work" / f"{name}-{files}"
        if not made.exists():
            fill(made, files)
            git(made, "init", "-q", "-b", "main")
            commit_all(made)
        return made


def commit_all(project: Path) -> None:
    """All of it in one commit and one pack, with an index that a status can trust.

    A file as young as the index is hashed at each status; the last status here writes a younger one.
    """
    git(project, "add", "-A")
    git(project, "commit", "-q", "--allow-empty", "-m", "state")
    git(project, "gc", "-q")
    git(project, "status", "--porcelain")


def git(project: Path, *words: str) -> str:
    who = ("-c", "user.name=Bench", "-c", "user.email=bench@localhost")
    argv = ["/usr/bin/git", *who, "-c", "gc.auto=0", "-C", str(project), *words]
    return os.fsdecode(run_trusted([os.fsencode(w) for w in argv], timeout_s=_GIT_TIMEOUT_S))


def fill(folder: Path, files: int) -> None:
    """Copy `files` small files under their own names; the machine's set again where it has too few."""
    folder.mkdir(parents=True)
    left, again = files, 0
    while left:
        before = left
        for source in candidates():
            target = folder / f"part{again}" / source.relative_to("/usr")
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                shutil.copyfile(source, target, follow_symlinks=False)
            except OSError:
                continue  # unreadable to us
            target.chmod(0o644)
            left -= 1
            if not left:
                break
        if left == before:
            raise RuntimeError(f"none of {', '.join(SOURCES)} has files to copy")
        again += 1


def candidates() -> Iterator[Path]:
    for source in SOURCES:
        for directory, names, found in os.walk(source):
            names[:] = sorted(n for n in names if n not in ("__pycache__", ".git"))
            for name in sorted(found):
                path = Path(directory, name)
                if name == ".gitignore" or path.is_symlink() or not path.is_file():
                    continue
                if path.stat().st_size <= LARGEST:
                    yield path


@contextmanager
def ground(*, quick: bool) -> Iterator[Ground]:
    """A fresh folder with home and state; gone afterwards, whatever overlay left in it."""
    root = Path(os.path.realpath(tempfile.mkdtemp(prefix="deltabox-bench-")))
    home = root / "home"
    home.mkdir()
    environ = {
        "HOME": str(home),
        "PATH": os.environ.get("PATH", os.defpath),
        "LANG": "C.UTF-8",
        "DELTABOX_STATE_DIR": str(root / "state"),
        "DELTABOX_RUNTIME_DIR": str(root / "run"),
    }
    try:
        yield Ground(root, home, config.places(environ), environ, quick)
    finally:
        remove_layers(root)
