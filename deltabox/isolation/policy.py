"""What one command may see and do: facts of the host plus a wish make a SandboxPolicy. Pure.

Must not look at the host, open anything or know bubblewrap's options. Whatever cannot be granted
safely is refused here, with a sentence; nothing is silently left out.
"""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from deltabox.errors import BadUsage, Refused
from deltabox.isolation import seccomp

Profile = Literal["read-only", "workspace-write", "read-write"]
Network = Literal["off", "host"]
Where = Literal["host", "view"]

MIB = 1 << 20
TMP = Path("/tmp")
HOSTNAME = "deltabox"
DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"

# Made by the sandbox itself; a project there would hide them or be hidden.
_RESERVED = (Path("/dev"), Path("/proc"), Path("/sys"), Path("/etc"))
_COVERED = (*_RESERVED, TMP, Path("/run"), Path("/var/tmp"))  # a project must not contain these

# What of the caller's environment goes in. An allow-list: nobody can list all names of secrets.
_PASSED_ENV = frozenset(
    [
        "COLORTERM",
        "HOME",
        "LANG",
        "LANGUAGE",
        "LOGNAME",
        "NO_COLOR",
        "PATH",
        "SHELL",
        "TERM",
        "TERM_PROGRAM",
        "TZ",
        "USER",
    ]
)

# Names by which a value becomes code in another program, or moves where it looks for code.
# They go in only when a person named them on the command line.
_RISKY_ENV = frozenset(
    [
        "BASH_ENV",
        "BASHOPTS",
        "ENV",
        "GCONV_PATH",
        "IFS",
        "JAVA_TOOL_OPTIONS",
        "LOCPATH",
        "NLSPATH",
        "NODE_OPTIONS",
        "NODE_PATH",
        "PERL5LIB",
        "PERL5OPT",
        "PROMPT_COMMAND",
        "PS4",
        "PYTHONHOME",
        "PYTHONINSPECT",
        "PYTHONPATH",
        "PYTHONSTARTUP",
        "PYTHONWARNINGS",
        "RUBYLIB",
        "RUBYOPT",
        "SHELLOPTS",
        "SSLKEYLOGFILE",
        "_JAVA_OPTIONS",
    ]
)
_RISKY_ENV_PREFIXES = ("BASH_FUNC_", "DYLD_", "GIT_", "LD_", "MALLOC_", "npm_config_")


@dataclass(frozen=True, slots=True)
class Bind:
    """A tree of the host or of the view, mounted at `dest`; recursive.

    `host` sources are opened in the host's namespace, without links; `view` sources are the three
    mounts that the view's holder made, named by where they stand.
    """

    source: Path
    dest: Path
    where: Where
    writable: bool = False


@dataclass(frozen=True, slots=True)
class File:
    """A small file given by its content."""

    dest: Path
    content: bytes
    mode: int = 0o444


@dataclass(frozen=True, slots=True)
class Link:
    dest: Path
    target: str


@dataclass(frozen=True, slots=True)
class Memory:
    """A tmpfs of its own; sized, since an unsized one is half of the machine's memory."""

    dest: Path
    size_bytes: int
    mode: int = 0o1777


@dataclass(frozen=True, slots=True)
class Facts:
    """What the host has, gathered by host.py once per session. Paths are absolute and without links.

    system, etc: trees and contents that stand inside where they stand outside. system_links: as
    found (`/bin` → `usr/bin`). read_only: the command's own files and toolchains, outside the trees
    of the view (those below home, /tmp and the project are grafts of the view). hidden: deltabox's
    state and whatever else must never be seen. uid, gid: as seen inside. git_identity: name, email.
    proc_readonly, proc_masked: what root, even without capabilities, could write or read in /proc
    and others cannot; empty for other owners.
    certificates: each variable that names a certificate file, and the file's place inside.
    """

    project: Path
    home: Path
    user: str
    uid: int
    gid: int
    machine: str
    system: tuple[Path, ...]
    system_links: tuple[Link, ...] = ()
    etc: tuple[File, ...] = ()
    etc_links: tuple[Link, ...] = ()
    resolv_conf: bytes = b""
    hosts: bytes = b""
    read_only: tuple[Path, ...] = ()
    hidden: tuple[Path, ...] = ()
    proc_readonly: tuple[Path, ...] = ()
    proc_masked: tuple[Path, ...] = ()
    environ: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    git_identity: tuple[str, str] | None = None
    certificates: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Wish:
    """What the caller asks for one command. named_env: what a person wrote on the command line;
    env: from configuration or a request, where risky names are refused. cwd: absolute, inside."""

    cwd: Path
    profile: Profile = "workspace-write"
    network: Network = "off"
    nest: bool = False
    env: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    named_env: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    tmp_bytes: int = 2048 * MIB
    shm_bytes: int = 512 * MIB
    rlimits: tuple[tuple[str, int], ...] = (("core", 0),)


@dataclass(frozen=True, slots=True)
class SandboxPolicy:
    """Everything that `bubblewrap.arguments` and init need; in mounting order."""

    system: tuple[Bind, ...]
    over_proc: tuple[Bind, ...]
    trees: tuple[Bind, ...]
    links: tuple[Link, ...]
    memory: tuple[Memory, ...]
    directories: tuple[Path, ...]
    files: tuple[File, ...]
    env: tuple[tuple[str, str], ...] = field(repr=False)
    network: Network
    nest: bool
    filter: bytes = field(repr=False)
    hostname: str
    uid: int
    gid: int
    cwd: Path
    rlimits: tuple[tuple[str, int], ...]


def within(path: Path, ancestor: Path) -> bool:
    """Path.is_relative_to at a tenth of its cost (hundreds of comparisons in each policy)."""
    inner, outer = str(path), str(ancestor)
    return inner == outer or inner.startswith(outer.rstrip("/") + "/")


def view_trees(project: Path, home: Path) -> tuple[Path, ...]:
    """The folders that the view's holder mounts, without those that lie inside another."""
    candidates = sorted({project, home, TMP})
    return tuple(c for c in candidates if not any(c != o and within(c, o) for o in candidates))


def is_graft(path: Path, project: Path, home: Path) -> bool:
    """Whether a host path lies where the view stands, so that the view must show it, not the sandbox."""
    return any(within(path, tree) for tree in view_trees(project, home))


def build(facts: Facts, wish: Wish) -> SandboxPolicy:
    """The whole policy for one command.

    Raises: Refused where the wish cannot be granted safely, BadUsage for an environment variable
    that cannot be one, IsolationUnavailable for a machine without a system call table.
    """
    fixed = _fixed(facts, wish.profile, wish.network, wish.nest, wish.tmp_bytes, wish.shm_bytes)
    env = _environment(facts, wish, tmp_is_writable=_is_writable(fixed.trees, TMP))
    return replace(fixed, env=env, cwd=wish.cwd, rlimits=wish.rlimits)


@functools.lru_cache(maxsize=16)  # 2 ms once for a session's facts, 0.05 ms for each later command
def _fixed(
    facts: Facts, profile: Profile, network: Network, nest: bool, tmp_bytes: int, shm_bytes: int
) -> SandboxPolicy:
    """What the commands of one session share: all but environment, folder and resource limits."""
    _check_places(facts)
    if profile == "read-write":
        raise Refused(
            "The profile read-write is not available yet: it would change files outside the project "
            "without a review; use workspace-write, or --pass PATH:rw for one folder."
        )
    trees = _trees(facts, profile)
    system = _system(facts)
    files = _files(facts, network)
    links = (*facts.system_links, *facts.etc_links, Link(Path("/var/run"), "/run"))
    memory = (Memory(Path("/dev/shm"), shm_bytes), Memory(Path("/var/tmp"), tmp_bytes))
    return SandboxPolicy(
        system=system,
        over_proc=_over_proc(facts),
        trees=trees,
        links=links,
        memory=memory,
        directories=_directories(system, trees, files, links, memory),
        files=files,
        env=(),
        network=network,
        nest=nest,
        filter=seccomp.program(nest=nest, machine=facts.machine),
        hostname=HOSTNAME,
        uid=facts.uid,
        gid=facts.gid,
        cwd=facts.project,
        rlimits=(),
    )


def _check_places(facts: Facts) -> None:
    for path in (facts.project, facts.home, *facts.system, *facts.read_only, *facts.hidden):
        if not path.is_absolute() or ".." in path.parts:
            raise Refused(f"{path} is not an absolute path without `..`; give it in full.")
    for name, path in (("project", facts.project), ("home directory", facts.home)):
        if any(within(p, path) for p in (*_COVERED, *facts.system)):
            raise Refused(
                f"{path} cannot be the {name} of a sandbox, since it is or contains a directory of "
                "the system; choose a folder of its own."
            )
        if any(within(path, reserved) for reserved in _RESERVED):
            raise Refused(
                f"{path} cannot be the {name} of a sandbox, which has its own "
                f"{'/'.join(path.parts[:2])[1:]} there; move it elsewhere."
            )
    if within(facts.home, facts.project):
        raise Refused(
            f"{facts.project} is or contains the home directory; choose a project folder in it."
        )
    if facts.uid == 0 or facts.gid == 0:
        raise Refused("A sandbox never runs as uid or gid 0; give it an ordinary one.")


def _system(facts: Facts) -> tuple[Bind, ...]:
    """Host trees, parents before what lies in them, and nothing of the view's or of deltabox's own."""
    binds = []
    wanted = _without_nested((*facts.system, *facts.read_only))
    for path in wanted:
        if is_graft(path, facts.project, facts.home):
            raise Refused(
                f"{path} lies where the workspace stands, so it cannot be taken from the host; "
                "pass it with --pass."
            )
        if path == Path("/") or within(facts.home, path):
            raise Refused(f"{path} contains the home directory; pass a folder below it instead.")
        for hidden in facts.hidden:
            if within(hidden, path) or within(path, hidden):
                raise Refused(
                    f"{path} holds or lies in {hidden}, which no sandbox may see; pass another folder."
                )
        binds.append(Bind(path, path, "host"))
    return tuple(binds)


def _over_proc(facts: Facts) -> tuple[Bind, ...]:
    """Dropping capabilities does not make root an ordinary user to the kernel's own files: it would
    still own /proc/sys, and one line into core_pattern there is a program run by the host."""
    null = Path("/dev/null")
    covers = [Bind(path, path, "host") for path in facts.proc_readonly]
    masks = [Bind(null, path, "host") for path in facts.proc_masked]
    return (*covers, *masks)


def _without_nested(paths: Iterable[Path]) -> list[Path]:
    kept: list[Path] = []
    for path in sorted(set(paths)):
        if not any(within(path, k) for k in kept):
            kept.append(path)
    return kept


def _trees(facts: Facts, profile: Profile) -> tuple[Bind, ...]:
    """One bind for each of the view's trees; a part of a tree never gets a mount of its own.

    So a read-only project below the home folder makes the whole home read-only: a second mount at
    the project would have a destination that the agent can turn into a link.
    """
    trees = []
    for tree in view_trees(facts.project, facts.home):
        holds_session = within(facts.project, tree) or within(facts.home, tree)
        writable = profile == "workspace-write" or not holds_session
        trees.append(Bind(tree, tree, "view", writable))
    return tuple(trees)


def _directories(
    system: Iterable[Bind],
    trees: Iterable[Bind],
    files: Iterable[File],
    links: Iterable[Link],
    memory: Iterable[Memory],
) -> tuple[Path, ...]:
    """/run and every directory that stands above something without being below a mount.

    Named so that they are 0755: bubblewrap makes missing parents 0700, which a nested user
    namespace cannot enter. Below a mount nothing is made: that may be the agent's.
    """
    mounts = {"/proc", "/dev", *(str(m.dest) for m in memory)}
    mounts.update(str(bind.dest) for bind in (*system, *trees))
    made = [*mounts, *(str(f.dest) for f in files), *(str(link.dest) for link in links)]
    above = {"/run"}
    for path in made:
        parents = list(_parents(path))
        # Upwards, so that what lies at or below the outermost mount on the way is left out.
        below = max((at for at, folder in enumerate(parents) if folder in mounts), default=-1)
        above.update(parents[below + 1 :])
    return tuple(sorted(map(Path, above)))


def _parents(path: str) -> Iterator[str]:
    """The directories above a path, nearest first, without `/`; as text, since these are hundreds."""
    while (cut := path.rfind("/")) > 0:
        path = path[:cut]
        yield path


def _is_writable(trees: Iterable[Bind], path: Path) -> bool:
    return any(tree.writable and within(path, tree.dest) for tree in trees)


def _files(facts: Facts, network: Network) -> tuple[File, ...]:
    user = _one_field(facts.user) or "user"
    passwd = (
        "root:x:0:0:root:/root:/usr/sbin/nologin\n"
        f"{user}:x:{facts.uid}:{facts.gid}:{user}:{_one_field(str(facts.home))}:{_shell(facts)}\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    )
    group = f"root:x:0:\ntty:x:5:\n{user}:x:{facts.gid}:\nnogroup:x:65534:\n"
    local = f"127.0.0.1 localhost\n::1 localhost ip6-localhost\n127.0.1.1 {HOSTNAME}\n".encode()
    files = [
        File(Path("/etc/passwd"), passwd.encode("utf-8", "surrogateescape")),
        File(Path("/etc/group"), group.encode("utf-8", "surrogateescape")),
        File(Path("/etc/hostname"), f"{HOSTNAME}\n".encode()),
        File(
            Path("/etc/nsswitch.conf"),
            b"passwd: files\ngroup: files\nshadow: files\nhosts: files dns\n"
            b"services: files\nprotocols: files\nnetworks: files\n",
        ),
        File(Path("/etc/hosts"), local if network == "off" else local + facts.hosts),
    ]
    if network == "host":
        files.append(File(Path("/etc/resolv.conf"), facts.resolv_conf))
    taken = {file.dest for file in files}
    return (*(file for file in facts.etc if file.dest not in taken), *files)


def _one_field(text: str) -> str:
    """For /etc/passwd: a name with a colon or a newline would forge a second field or line."""
    return "".join(c for c in text if c not in ":\n\r\0")


def _shell(facts: Facts) -> str:
    shell = dict(facts.environ).get("SHELL", "")
    known = shell.startswith(("/bin/", "/usr/bin/")) and _one_field(shell) == shell
    return shell if known and ".." not in shell else "/bin/sh"


def _environment(
    facts: Facts, wish: Wish, *, tmp_is_writable: bool
) -> tuple[tuple[str, str], ...]:
    env = {
        name: value
        for name, value in facts.environ
        if name in _PASSED_ENV or (name.startswith("LC_") and name.isupper())
    }
    path = [entry for entry in env.get("PATH", "").split(":") if entry.startswith("/")]
    env["PATH"] = ":".join(path) or DEFAULT_PATH
    env |= {
        "HOME": str(facts.home),
        "USER": facts.user,
        "LOGNAME": facts.user,
        "SHELL": _shell(facts),
        "DELTABOX": "1",
    }
    if not tmp_is_writable:
        env["TMPDIR"] = "/var/tmp"
    if facts.git_identity is not None:
        name, email = facts.git_identity
        env |= {
            "GIT_AUTHOR_NAME": name,
            "GIT_AUTHOR_EMAIL": email,
            "GIT_COMMITTER_NAME": name,
            "GIT_COMMITTER_EMAIL": email,
        }
    env |= dict(facts.certificates)
    for name, value in wish.env:
        if is_risky(name):
            raise Refused(
                f"The environment variable {name} can make programs run other code, so it is taken "
                f"only from the command line; write --env {name}=VALUE there."
            )
        env[name] = value
    env |= dict(wish.named_env)
    env["PWD"] = str(wish.cwd)
    for name, value in env.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise BadUsage(f"{name!r} cannot be the name or value of an environment variable.")
    return tuple(sorted(env.items()))


def is_risky(name: str) -> bool:
    """Whether an environment variable of this name is code, or chooses code, for some program."""
    return name in _RISKY_ENV or name.startswith(_RISKY_ENV_PREFIXES)
