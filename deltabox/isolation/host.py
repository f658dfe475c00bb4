"""Looks once per session at what the host has, and hands it on as policy.Facts. Decides nothing.

The environment is given by the caller (config.py reads it). Only what any user of the host may read
is taken from /etc, also when we are root: the agent is not root.
"""

import os
import stat
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from deltabox.errors import Refused
from deltabox.isolation.policy import Facts, File, Link

_ROOT_NAMES = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "opt", "nix", "gnu")

# Directories below /etc that programs need and that hold no secrets.
_ETC_TREES = (
    "alternatives",
    "ca-certificates",
    "dotnet",
    "fonts",
    "java*",
    "ld.so.conf.d",
    "lua*",
    "maven",
    "nodejs",
    "perl",
    "php",
    "pki/ca-trust",
    "pki/tls/certs",
    "python*",
    "R",
    "ssl/certs",
    "terminfo",
    "texmf",
    "vim",
    "X11/fonts",
)
_ETC_FILES = (
    "bash.bashrc",
    "ca-certificates.conf",
    "debian_version",
    "ethertypes",
    "gai.conf",
    "host.conf",
    "inputrc",
    "issue",
    "ld.so.cache",
    "ld.so.conf",
    "locale.alias",
    "locale.conf",
    "localtime",
    "login.defs",
    "lsb-release",
    "magic",
    "mime.types",
    "nanorc",
    "os-release",
    "profile",
    "protocols",
    "rpc",
    "services",
    "shells",
    "ssl/openssl.cnf",
    "timezone",
    "zsh/*",
)
MAX_ETC_FILE_BYTES = 1 << 20  # ld.so.cache of a full desktop is about 300 KiB
MAX_CA_BYTES = 4 << 20  # Debian's whole bundle is 220 KiB

# Variables by which programs find certificates; a company's own authority is often named so.
_CA_VARIABLES = (
    "CURL_CA_BUNDLE",
    "GIT_SSL_CAINFO",
    "NODE_EXTRA_CA_CERTS",
    "REQUESTS_CA_BUNDLE",
    "SSL_CERT_FILE",
)


def gather(
    *,
    project: Path,
    home: Path,
    user: str,
    owner: tuple[int, int],
    environ: Mapping[str, str],
    read_only: Iterable[Path] = (),
    hidden: Iterable[Path] = (),
) -> Facts:
    """Facts for one session; about 2 ms, with /etc in the page cache.

    owner: uid and gid that the processes have outside; root appears inside as 1000. read_only: what
    command.py found. Raises: Refused for a certificate file that holds a
    private key.
    """
    system, system_links = _roots()
    etc_trees, etc, etc_links = _etc()
    proc_readonly, proc_masked = _proc() if owner[0] == 0 else ((), ())
    certificates, ca_files = _certificates(environ, (*system, *etc_trees))
    return Facts(
        project=project,
        home=home,
        user=user,
        uid=owner[0] or 1000,
        gid=owner[1] or 1000,
        machine=os.uname().machine,
        system=(*system, *etc_trees),
        system_links=system_links,
        etc=(*etc, *ca_files),
        etc_links=etc_links,
        resolv_conf=_content(Path("/etc/resolv.conf"), MAX_ETC_FILE_BYTES) or b"",
        hosts=_content(Path("/etc/hosts"), MAX_ETC_FILE_BYTES) or b"",
        read_only=tuple(read_only),
        proc_readonly=proc_readonly,
        proc_masked=proc_masked,
        hidden=tuple(hidden),
        environ=tuple(sorted(environ.items())),
        git_identity=git_identity(home, environ),
        certificates=certificates,
    )


def _roots() -> tuple[tuple[Path, ...], tuple[Link, ...]]:
    trees, links = [], []
    for name in _ROOT_NAMES:
        path = Path("/") / name
        try:
            st = path.lstat()
        except FileNotFoundError:
            continue
        if stat.S_ISLNK(st.st_mode):
            links.append(Link(path, os.readlink(path)))
        elif stat.S_ISDIR(st.st_mode) and (name == "usr" or os.listdir(path)):
            trees.append(path)
    return tuple(trees), tuple(links)


def _proc() -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """What of the kernel's own in /proc is for root alone: to write (whole directories), to read."""
    readonly, masked = [Path("/proc/sys")], []
    for path in sorted(Path("/proc").iterdir()):
        if path.name.isdigit() or path.is_symlink() or path in readonly:
            continue
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            if any(_owner_only_write(below) for below in path.rglob("*")):
                readonly.append(path)
        elif not mode & stat.S_IROTH:
            masked.append(path)
        elif _owner_only_write(path):
            readonly.append(path)
    return tuple(readonly), tuple(masked)


def _owner_only_write(path: Path) -> bool:
    mode = path.lstat().st_mode
    return stat.S_ISREG(mode) and bool(mode & stat.S_IWUSR) and not mode & stat.S_IWOTH


def _etc() -> tuple[tuple[Path, ...], tuple[File, ...], tuple[Link, ...]]:
    trees, files, links = [], [], []
    for relative in _matches(_ETC_TREES + _ETC_FILES):
        path = Path("/etc") / relative
        target = Path(os.path.realpath(path))
        # Links into /usr stay links (localtime names its zone that way), also when what they
        # belong to is missing there; others are taken by content.
        if path.is_symlink() and target.is_relative_to("/usr"):
            links.append(Link(path, str(target)))
        elif target == path and path.is_dir():
            if path.stat().st_mode & 0o005 == 0o005:
                trees.append(path)
        else:
            content = _content(path, MAX_ETC_FILE_BYTES)
            if content is not None:
                files.append(File(path, content))
    return tuple(trees), tuple(files), tuple(links)


def _matches(patterns: Iterable[str]) -> list[str]:
    found = []
    for pattern in patterns:
        folder, _, name = pattern.rpartition("/")
        if not any(c in name for c in "*?["):
            if os.path.lexists(Path("/etc") / pattern):
                found.append(pattern)
            continue
        try:
            names = sorted(os.listdir(Path("/etc") / folder))
        except OSError:
            continue
        found += [f"{folder}/{n}".lstrip("/") for n in names if fnmatchcase(n, name)]
    return found


def _content(path: Path, limit: int, *, for_everybody: bool = True) -> bytes | None:
    """A regular file that everybody may read, through its links; None for anything else."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return None
    with open(fd, "rb") as file:
        st = os.fstat(fd)
        if not stat.S_ISREG(st.st_mode) or (for_everybody and not st.st_mode & stat.S_IROTH):
            return None
        data = file.read(limit + 1)
    return data if len(data) <= limit else None


def _certificates(
    environ: Mapping[str, str], trees: tuple[Path, ...]
) -> tuple[tuple[tuple[str, str], ...], tuple[File, ...]]:
    """The variables with the paths that hold inside, and the files to put there.

    A file that stands in a visible tree is only named; the same content is taken once.
    """
    paths: list[tuple[str, str]] = []
    files: dict[bytes, File] = {}
    for variable in _CA_VARIABLES:
        path = Path(environ.get(variable, ""))
        if not path.is_absolute():
            continue
        content = _content(path, MAX_CA_BYTES, for_everybody=False)
        if content is None or b"-----BEGIN CERTIFICATE-----" not in content:
            continue
        if b"PRIVATE KEY-----" in content:
            raise Refused(
                f"{variable} names {path}, which holds a private key beside its certificates; "
                "a sandbox must not see it. Name a file with certificates only."
            )
        if all(any(p.is_relative_to(t) for t in trees) for p in (path, path.resolve())):
            paths.append((variable, str(path)))
            continue
        place = Path(f"/etc/deltabox/certificates-{len(files) + 1}.pem")
        paths.append((variable, str(files.setdefault(content, File(place, content)).dest)))
    return tuple(paths), tuple(files.values())


def git_identity(home: Path, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Name and e-mail for commits: the caller's GIT_AUTHOR_*, else [user] of the user's git config.

    Reads the two plain files itself: libgit2 costs 120 ms to import, and includes are the user's
    to name by --env. None unless both are known.
    """
    name, email = environ.get("GIT_AUTHOR_NAME", ""), environ.get("GIT_AUTHOR_EMAIL", "")
    config_home = environ.get("XDG_CONFIG_HOME") or str(home / ".config")
    for path in (Path(config_home) / "git/config", home / ".gitconfig"):
        content = _content(path, MAX_ETC_FILE_BYTES, for_everybody=False)
        if content is not None:
            values = _user_section(content.decode("utf-8", "replace"))
            name = environ.get("GIT_AUTHOR_NAME") or values.get("name", name)
            email = environ.get("GIT_AUTHOR_EMAIL") or values.get("email", email)
    return (name, email) if name and email else None


def _user_section(text: str) -> dict[str, str]:
    values: dict[str, str] = {}
    inside = False
    for raw in text.splitlines():
        line = raw.strip()
        if line.startswith("["):
            heading, _, line = line[1:].partition("]")
            inside = heading.strip().lower() == "user"
            line = line.strip()
        key, equals, value = line.partition("=")
        if inside and equals:
            values[key.strip().lower()] = _git_value(value)
    return values


def _git_value(text: str) -> str:
    """Quotes, backslashes and comments as git-config(1) has them, on one line."""
    out: list[str] = []
    quoted = False
    characters = iter(text.strip())
    for ch in characters:
        if ch == "\\":
            out.append({"n": " ", "t": " ", "b": ""}.get(after := next(characters, ""), after))
        elif ch == '"':
            quoted = not quoted
        elif ch in "#;" and not quoted:
            break
        else:
            out.append(ch)
    return "".join(c for c in "".join(out).strip() if c.isprintable())
