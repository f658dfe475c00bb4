"""What the user wished for: flags' defaults, configuration files, environment, places on disk.

The only reader of the environment, the home directory and TOML. Yields frozen plain objects; the
rest of deltabox never asks `os.environ`. pydantic (90 ms) is imported only when there is a file to check.
"""

import os
import pwd
import stat
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from deltabox.errors import BadUsage, Refused

EngineName = Literal["auto", "overlay", "fuse", "git"]
IsolationName = Literal["bubblewrap", "none"]
NetworkName = Literal["off", "host"]
ReviewMode = Literal["ask", "commit", "abort", "keep"]

ENGINE_ALIASES = {"cbcow": "fuse", "cbcow-through": "fuse", "git-ghost": "git"}
ISOLATION_ALIASES = {"deltabox": "bubblewrap", "bwrap": "bubblewrap"}

PROJECT_FILE = "deltabox.toml"
MIB = 1 << 20
MAX_FILE_BYTES = MIB  # a page is usual; a project's file may come from anybody
MAX_NUMBER = 1 << 60  # what off_t, tmpfs and SQLite take with room for a factor


@dataclass(frozen=True)
class Limits:
    """Sizes in bytes, times in seconds."""

    tmp: int = (
        2048 * MIB
    )  # the private /tmp, a tmpfs: a Python or npm build fits, a runaway log does not
    shm: int = 512 * MIB
    nofile: int = 65536  # Node and Go ask for many; the host's hard limit still holds
    core: int = 0  # a core dump in the project would be a change nobody made
    common: int = (
        256 * MIB
    )  # copies kept of base files that an agent touched and git does not have
    diff: int = 8 * MIB  # larger sides are hashed and counted, not diffed by line


@dataclass(frozen=True)
class Trash:
    """What `deltabox gc` may take away; nothing is taken by a timer."""

    keep_days: int = 30
    keep_bytes: int = 4096 * MIB


@dataclass(frozen=True)
class Config:
    """One session's wishes, merged from defaults, the user's file, the project's file and flags."""

    engine: str = "auto"
    isolation: str = "bubblewrap"
    network: str = "host"
    review: str = "ask"
    durability: str = "fast"
    checkpoints: str = "auto"  # after each command that changed something, or `off`
    deny: tuple[str, ...] = ()
    ro: tuple[str, ...] = ()
    passes: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    profile: str = "workspace-write"
    nest: bool = False
    limits: Limits = field(default_factory=Limits)
    trash: Trash = field(default_factory=Trash)


@dataclass(frozen=True)
class Places:
    """Where things are on this host. `user` is whom the sandbox's processes belong to outside."""

    home: Path
    state: Path
    runtime: Path
    config_file: Path
    user: str
    uid: int
    gid: int
    environ: dict[str, str]

    @property
    def sessions(self) -> Path:
        return self.state / "sessions"

    @property
    def database(self) -> Path:
        return self.state / "deltabox.db"


def places(environ: dict[str, str] | None = None) -> Places:
    """Read the environment. Under sudo the invoking user owns the session: home, state and processes.

    Raises: BadUsage when a path variable is relative.
    """
    env = dict(os.environ if environ is None else environ)
    uid, gid = os.geteuid(), os.getegid()
    home_text = env.get("HOME", "")
    if uid == 0 and _number(env, "SUDO_UID"):
        uid = _number(env, "SUDO_UID")
        gid = _number(env, "SUDO_GID") or uid
        try:
            home_text = pwd.getpwuid(uid).pw_dir
        except KeyError:
            home_text = home_text or "/"
    try:
        entry = pwd.getpwuid(uid)
        user, fallback_home = entry.pw_name, entry.pw_dir
    except KeyError:  # a container's arbitrary uid
        user, fallback_home = env.get("USER", "user"), "/"
    _absolute({"HOME": home_text}, "HOME")
    home = Path(os.path.realpath(home_text or fallback_home))
    state = _absolute(env, "DELTABOX_STATE_DIR") or (
        (_absolute(env, "XDG_STATE_HOME") or home / ".local/state") / "deltabox"
    )
    runtime = _absolute(env, "DELTABOX_RUNTIME_DIR")
    if runtime is None:
        xdg = _absolute(env, "XDG_RUNTIME_DIR")
        runtime = xdg / "deltabox" if xdg is not None and xdg.is_dir() else state / "run"
    config_home = _absolute(env, "XDG_CONFIG_HOME") or home / ".config"
    return Places(
        home=home,
        state=Path(os.path.realpath(state)),
        runtime=runtime,
        config_file=config_home / "deltabox" / "config.toml",
        user=user,
        uid=uid,
        gid=gid,
        environ=env,
    )


def _number(env: dict[str, str], variable: str) -> int:
    """An id from the environment; 0 where it is none."""
    value = env.get(variable, "")
    return int(value) if value.isascii() and value.isdigit() and len(value) <= 10 else 0


def _absolute(env: dict[str, str], variable: str) -> Path | None:
    value = env.get(variable)
    if not value:
        return None
    if not value.startswith("/"):
        raise BadUsage(f"{variable} is {value!r}, a relative path; give an absolute one.")
    return Path(value)


def find_project(start: Path, named: str | None) -> Path:
    """The project: `named`, else the nearest ancestor of `start` with .git or deltabox.toml, else `start`.

    Returns a path without links. Raises: BadUsage when it is no directory.
    """
    if named is not None:
        chosen = Path(os.path.realpath(named))
        if not chosen.is_dir():
            raise BadUsage(f"{named} is no directory; give --project an existing one.")
        return chosen
    here = Path(os.path.realpath(start))
    for candidate in (here, *here.parents):
        if os.path.lexists(candidate / ".git") or os.path.lexists(candidate / PROJECT_FILE):
            return candidate
    return here


def check_project(project: Path, where: Places) -> None:
    """Refuse a project that cannot be one.

    Raises: Refused for `/`, a home directory or what contains it, and for one that contains the state.
    """
    if project == Path("/"):
        raise Refused(
            "The whole root directory cannot be a project; go into a folder or give --project."
        )
    if where.home == project or where.home.is_relative_to(project):
        raise Refused(
            f"{project} is your home directory or contains it, and would hold deltabox's own state and "
            "your keys; go into a project folder or give --project."
        )
    if where.state == project or where.state.is_relative_to(project):
        raise Refused(
            f"{project} contains deltabox's state directory {where.state}; "
            "set DELTABOX_STATE_DIR to a folder outside the project."
        )
    if Path(os.path.realpath(where.runtime)).is_relative_to(project):
        raise Refused(
            f"{project} contains deltabox's sockets ({where.runtime}), where an agent could approve "
            "itself; set DELTABOX_RUNTIME_DIR to a folder outside the project."
        )
    if project.is_relative_to(where.state):
        raise Refused(
            f"{project} lies inside deltabox's own state directory; choose another project."
        )


def load(where: Places, project: Path | None = None) -> Config:
    """Defaults, then the user's file, then the project's, which can only narrow.

    Raises: BadUsage naming the file and the key.
    """
    config = Config()
    if os.path.lexists(where.config_file):
        config = _user_file(where.config_file, config)
    if project is not None and os.path.lexists(project / PROJECT_FILE):
        config = _narrowed(project / PROJECT_FILE, config)
    return config


# [table] key → Config field. Sub-tables that are dataclasses of their own are checked as such.
_USER_KEYS = {
    ("engine", "name"): "engine",
    ("isolation", "name"): "isolation",
    ("isolation", "profile"): "profile",
    ("isolation", "nest"): "nest",
    ("isolation", "env"): "env",
    ("network", "mode"): "network",
    ("deny", "paths"): "deny",
    ("deny", "readonly"): "ro",
    ("pass", "paths"): "passes",
    ("review", "mode"): "review",
    ("review", "durability"): "durability",
    ("review", "checkpoints"): "checkpoints",
}


def _read(file: Path, flags: int) -> dict[str, Any]:
    """Raises: BadUsage, also for what is no regular file, too long, no UTF-8 or too deeply nested."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | flags)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise BadUsage(f"{file} is no regular file; make it one or move it away.")
            content = b""
            while len(content) <= MAX_FILE_BYTES and (piece := os.read(fd, MAX_FILE_BYTES + 1)):
                content += piece
        finally:
            os.close(fd)
        if len(content) > MAX_FILE_BYTES:
            raise BadUsage(f"{file} is longer than {MAX_FILE_BYTES} bytes; shorten it.")
        return tomllib.loads(content.decode())
    except (OSError, ValueError, RecursionError) as exc:  # bad TOML and bad UTF-8 are ValueErrors
        raise BadUsage(f"{file} cannot be read: {exc}. Correct it or move it away.") from exc


def _user_file(file: Path, config: Config) -> Config:
    values: dict[str, Any] = {}
    for table, content in _read(
        file, os.O_CLOEXEC
    ).items():  # a link into a dotfiles folder is usual
        if table in ("limits", "trash"):
            values[table] = content
            continue
        if not isinstance(content, dict):
            raise BadUsage(f"{file}: {_shown(table)} must be a table like [{_shown(table)}].")
        for key, value in content.items():
            target = _USER_KEYS.get((table, key))
            if target is None:
                known = sorted(k for t, k in _USER_KEYS if t == table)
                hint = (
                    f"[{table}] knows {', '.join(known)}"
                    if known
                    else f"known tables are {_tables()}"
                )
                raise BadUsage(
                    f"{file}: [{_shown(table)}] {_shown(key)} is not a setting; {hint}."
                )
            values[target] = value
    return checked(config, values, source=str(file))


def _tables() -> str:
    return ", ".join(f"[{t}]" for t in sorted({t for t, _ in _USER_KEYS} | {"limits", "trash"}))


def checked(config: Config, values: dict[str, Any], *, source: str) -> Config:
    """`config` with `values` on top, types and ranges checked.

    Raises: BadUsage naming `source`, the key and what is wrong with it.
    """
    from pydantic import ConfigDict, TypeAdapter, ValidationError, create_model

    plain = {k: v for k, v in values.items() if k not in ("limits", "trash")}
    kinds: dict[str, Any] = {
        "engine": EngineName,
        "isolation": IsolationName,
        "network": NetworkName,
        "review": ReviewMode,
        "durability": Literal["fast", "strict"],
        "checkpoints": Literal["auto", "off"],
        "profile": Literal["read-only", "workspace-write", "read-write"],
        "nest": bool,
        **dict.fromkeys(("deny", "ro", "passes", "env"), tuple[str, ...]),
    }
    fields: dict[str, Any] = {name: (kind | None, None) for name, kind in kinds.items()}
    if isinstance(plain.get("engine"), str):
        plain["engine"] = ENGINE_ALIASES.get(plain["engine"], plain["engine"])
    if isinstance(plain.get("isolation"), str):
        plain["isolation"] = ISOLATION_ALIASES.get(plain["isolation"], plain["isolation"])
    model = create_model(
        "Settings",
        __config__=ConfigDict(extra="forbid", strict=False),
        **fields,
    )
    try:
        given = model.model_validate(plain).model_dump(exclude_unset=True)
        tables: tuple[tuple[str, Any], ...] = (("limits", config.limits), ("trash", config.trash))
        for table, current in tables:
            if table in values:
                if not isinstance(values[table], dict):
                    raise BadUsage(f"{source}: {table} must be a table like [{table}].")
                unknown = set(values[table]) - set(current.__dataclass_fields__)
                if unknown:
                    known = ", ".join(current.__dataclass_fields__)
                    raise BadUsage(
                        f"{source}: [{table}] {_shown(min(unknown))} is not a setting; it knows {known}."
                    )
                numbers = {
                    key: _size(value, f"{source}: [{table}] {key}: ")
                    if isinstance(value, str)
                    else value
                    for key, value in values[table].items()
                }
                whole = TypeAdapter(dict[str, int]).validate_python(numbers, strict=True)
                for key, value in whole.items():
                    _in_range(f"{source}: [{table}] {key}", key, value)
                given[table] = replace(current, **whole)
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "value"
        raise BadUsage(f"{source}: {where}: {first['msg']}.") from exc
    return replace(config, **given)


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def _size(text: str, named: str) -> int:
    """`512M`, `2G`, `1048576` as bytes. Raises BadUsage that begins with `named`."""
    body = text.strip().upper().removesuffix("IB").removesuffix("B")
    number, unit = (body[:-1], body[-1]) if body[-1:] in "KMGT" and body else (body, "")
    # isdigit() alone is true of superscripts, which int() refuses; int() of thousands of digits too.
    if not (number.isascii() and number.isdigit() and len(number) <= 20):
        raise BadUsage(f"{named}{text[:40]!r} is no size; write it like 512M or 2G.")
    return int(number) * _UNITS[unit]


def _in_range(named: str, key: str, value: int) -> None:
    """Raises BadUsage. 0 means none, but to tmpfs it means no limit at all, and to nofile no program."""
    least = 1 if key in ("tmp", "shm", "nofile") else 0
    if not least <= value <= MAX_NUMBER:
        raise BadUsage(f"{named} is {value}; it must be between {least} and {MAX_NUMBER}.")


def with_limits(config: Config, assignments: list[str]) -> Config:
    """`--limit K=V`, repeatable. Raises BadUsage."""
    values: dict[str, int] = {}
    for assignment in assignments:
        key, sep, value = assignment.partition("=")
        if not sep or key not in Limits.__dataclass_fields__:
            known = ", ".join(Limits.__dataclass_fields__)
            raise BadUsage(f"--limit {assignment}: write K=V with K one of {known}.")
        values[key] = _size(value, f"--limit {key}: ")
        _in_range(f"--limit {key}", key, values[key])
    return replace(config, limits=replace(config.limits, **values)) if values else config


def _narrowed(file: Path, config: Config) -> Config:
    """The project's own file: it may deny more and cut the network, never open anything."""
    # Without following a link: the project's file is in the agent's reach at other times.
    data = _read(file, os.O_NOFOLLOW | os.O_CLOEXEC)
    allowed = {"deny", "network"}
    for table in data:
        if table not in allowed:
            raise BadUsage(
                f"{file}: [{_shown(table)}] cannot be set by a project; "
                "it can only narrow, by [deny] and [network]."
            )
    deny = data.get("deny", {})
    if not isinstance(deny, dict) or set(deny) - {"paths", "readonly"}:
        raise BadUsage(f"{file}: [deny] knows paths and readonly.")
    narrowed = checked(
        config,
        {
            "deny": (*config.deny, *_strings(file, deny.get("paths", []))),
            "ro": (*config.ro, *_strings(file, deny.get("readonly", []))),
        },
        source=str(file),
    )
    network = data.get("network", {})
    if network not in ({}, {"mode": "off"}):
        raise BadUsage(f'{file}: a project can only set [network] mode = "off".')
    return replace(narrowed, network="off") if network else narrowed


def _shown(name: str) -> str:
    """A key of a file, which anybody may have written, for a person's eyes."""
    from deltabox.paths import display

    return display(os.fsencode(name))


def _strings(file: Path, value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise BadUsage(f"{file}: [deny] takes lists of paths.")
    return value
