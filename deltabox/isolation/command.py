"""Finds what a command needs from the host to run at all: its file, interpreters, install prefix.

Looks, and decides nothing about the sandbox; everything it names is meant to be passed read-only.
It never names the home directory itself, `/`, or a folder that holds deltabox's state.
"""

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from deltabox.errors import NotFound

_SYSTEM = tuple(
    Path(p) for p in ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt", "/nix")
)
_PROGRAM_FOLDERS = ("bin", "sbin", "shims", ".bin")
_MAX_LINKS = 40  # as the kernel's own limit
_MAX_INTERPRETERS = 4  # the kernel's limit for `#!` chains is 4 as well

# Below the home directory: programs and libraries, and by name nothing with credentials. `.cargo`
# itself has credentials.toml, `.npmrc` a token, `.local/share` keyrings, so only parts are named.
_TOOLCHAINS = (
    ".asdf/bin",
    ".asdf/installs",
    ".asdf/lib",
    ".asdf/plugins",
    ".asdf/shims",
    ".bun/bin",
    ".cargo/bin",
    ".cargo/env",
    ".deno/bin",
    ".dotnet",
    ".fnm",
    ".ghcup/bin",
    ".ghcup/ghc",
    ".go",
    ".juliaup/bin",
    ".local/bin",
    ".local/lib",
    ".local/pipx",
    ".local/share/fnm",
    ".local/share/mise/installs",
    ".local/share/mise/shims",
    ".local/share/pipx",
    ".local/share/pnpm",
    ".local/share/rtx/installs",
    ".local/share/uv/python",
    ".local/share/uv/tools",
    ".npm-global",
    ".nvm",
    ".poetry",
    ".pyenv",
    ".rbenv",
    ".rustup",
    ".sdkman/candidates",
    ".volta/bin",
    ".volta/tools",
    "go/bin",
    "go/pkg",
    "miniconda3",
    "miniforge3",
    "n/bin",
    "sdk",
)


@dataclass(frozen=True, slots=True)
class Found:
    """program: what to start; where the name led, or past its links when those cannot be shown.
    read_only: existing host paths without links, none inside another, that have to be visible for
    it to run; empty for a program of the system."""

    program: Path
    read_only: tuple[Path, ...]


def resolve(
    argv0: str,
    *,
    path_env: str,
    cwd: Path,
    project: Path,
    home: Path,
    hidden: Iterable[Path] = (),
) -> Found:
    """What `argv0` needs, following its links and `#!` lines; about 0.3 ms.

    Raises: NotFound when no such program is there, or it may not be executed.
    """
    program = _look_up(argv0, path_env, cwd)
    needed: list[Path] = []
    todo = [program]
    for _ in range(_MAX_INTERPRETERS + 1):
        if not todo:
            break
        current = todo.pop()
        for step in _links(current):
            needed += _around(step, home)
            if step.is_symlink() and step.parent.name in _PROGRAM_FOLDERS:
                needed.append(step.parent)  # a link is shown by showing its folder
        todo += _interpreters(Path(os.path.realpath(current)), path_env)
    forbidden = (Path("/"), home, *hidden)
    kept: list[Path] = []
    for path in sorted({Path(os.path.realpath(p)) for p in needed}):
        if not path.exists():
            continue  # a `#!` line can name anything; starting the command will tell
        if any(_within(path, root) for root in (*_SYSTEM, project, *kept)):
            continue
        if any(_within(place, path) for place in forbidden) or any(
            _within(path, h) for h in hidden
        ):
            continue
        kept.append(path)
    if not any(_within(program, root) for root in (*_SYSTEM, project, *kept)):
        program = Path(os.path.realpath(program))
    return Found(program, tuple(kept))


def toolchains(home: Path, hidden: Iterable[Path] = ()) -> tuple[Path, ...]:
    """The user's tool folders that exist, without links and without what lies outside home."""
    found: list[Path] = []
    for name in _TOOLCHAINS:
        path = f"{home}/{name}"
        # A link would lead the bind elsewhere than its name says; the target has a name of its own.
        if os.path.exists(path) and os.path.realpath(path) == path:
            found.append(Path(path))
    return tuple(p for p in found if not any(_within(h, p) or _within(p, h) for h in hidden))


def _within(path: Path, folder: Path) -> bool:
    return path == folder or path.is_relative_to(folder)


def _look_up(argv0: str, path_env: str, cwd: Path) -> Path:
    if not argv0 or "\0" in argv0:
        raise NotFound("The command has no name; write one after --.")
    if "/" in argv0:
        candidates = [cwd / argv0]
    else:
        candidates = [Path(p) / argv0 for p in path_env.split(":") if p.startswith("/")]
    refused = None
    for candidate in candidates:
        try:
            st = os.stat(candidate)
        except OSError:
            continue
        if stat.S_ISREG(st.st_mode) and os.access(candidate, os.X_OK):
            return Path(os.path.normpath(candidate.parent.resolve() / candidate.name))
        refused = candidate
    if refused is not None:
        raise NotFound(
            f"{refused} cannot be executed; it is no program or lacks the x permission."
        )
    where = "" if "/" in argv0 else " in PATH"
    raise NotFound(f"{argv0} was not found{where}; check its name, or give its full path.")


def _links(path: Path) -> Iterator[Path]:
    """The file and each file its chain of links passes, since each of them has to be there."""
    for _ in range(_MAX_LINKS):
        yield path
        try:
            target = os.readlink(path)
        except OSError:
            return
        joined = path.parent / target
        path = Path(os.path.realpath(joined.parent)) / joined.name


def _around(file: Path, home: Path) -> list[Path]:
    """The file itself and the install prefix that it belongs to."""
    found = [file]
    parts = file.parts
    if "node_modules" in parts:  # PREFIX/node_modules/.bin/x, PREFIX/lib/node_modules/pkg/x
        found.append(_unless_home(Path(*parts[: parts.index("node_modules")]), file, home))
    if file.parent.name == "bin":
        prefix = file.parent.parent
        config = prefix / "pyvenv.cfg"
        if config.is_file():
            found.append(prefix)
            found += _base_of_venv(config)
        elif (prefix / "lib").is_dir() and prefix not in (home, home / ".local", Path("/")):
            found.append(prefix)  # a self-contained install: bin beside its lib
        if prefix.name == ".pyenv" or prefix.parent.name == ".pyenv":
            found.append(prefix if prefix.name == ".pyenv" else prefix.parent)
    if file.parent.name == "shims" and file.parent.parent.name in (".pyenv", ".rbenv", ".asdf"):
        found.append(file.parent.parent)
    return found


def _unless_home(prefix: Path, file: Path, home: Path) -> Path:
    """A prefix that is the home folder would take all of it: node_modules alone has to do."""
    return prefix / "node_modules" if prefix in (home, Path("/")) else prefix


def _base_of_venv(config: Path) -> list[Path]:
    """The interpreter a venv was made from: `home = /path/bin` in pyvenv.cfg."""
    try:
        text = config.read_text("utf-8", "replace")
    except OSError:
        return []
    for line in text.splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "home" and value.strip().startswith("/"):
            folder = Path(value.strip())
            return [folder.parent] if folder.name == "bin" else [folder]
    return []


def _interpreters(file: Path, path_env: str) -> list[Path]:
    """What a `#!` line starts: the interpreter, and with /usr/bin/env what env will look up."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return []
    with open(fd, "rb") as script:
        first = script.read(512).split(b"\n", 1)[0] if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    if not first.startswith(b"#!"):
        return []
    words = os.fsdecode(first[2:]).split()
    if not words or not words[0].startswith("/") or not os.path.exists(words[0]):
        return []  # what is not there cannot be shown; starting the script tells so, as env(1) does
    found = [Path(words[0])]
    if Path(words[0]).name == "env":
        # `env -S prog args` and `env VAR=1 prog`; options other than -S take no value in scripts.
        named = [w.removeprefix("-S") for w in words[1:] if w != "-S" and not w.startswith("--")]
        name = next((w for w in named if w and not w.startswith("-") and "=" not in w), None)
        if name is not None:
            with contextlib.suppress(NotFound):  # it will say so itself
                found.append(_look_up(name, path_env, Path("/")))
    return found
