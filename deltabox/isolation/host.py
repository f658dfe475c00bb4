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
from deltabox.isolation.policy import Facts, File, Link, within

_ROOT_NAMES = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "opt", "nix", "gnu")

# Directories below /etc that programs need and that hold no secrets.
_ETC_TREES = (
    "alternatives",
    "dotnet",
    "fonts",
    "java*",
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
# Each costs every command 0.08 ms, so what has a good default without the file is not here.
_ETC_FILES = (
    "bash.bashrc",
    "inputrc",
    "ld.so.cache",
    "locale.conf",
    "localtime",
    "lsb-release",
    "nanorc",
    "os-release",
    "profile",
    "protocols",
    "services",
    "ssl/openssl.cnf",
    "timezone",
    "zsh/*",
)
_FEW = 4
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
    """Facts for one session; about 3 ms, with /etc in the page cache.

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
        resolv_conf=_content("/etc/resolv.conf", MAX_ETC_FILE_BYTES) or b"",
        hosts=_content("/etc/hosts", MAX_ETC_FILE_BYTES) or b"",
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
    """What of the kernel's own in /proc is for root alone: to write (whole directories), to read.

    Of the unreadable ones only those that speak of other users' memory are masked: the rest are
    statistics or ask for a capability, and each mask is a mount in every command.
    """
    readonly, masked = [Path("/proc/sys")], []
    with os.scandir("/proc") as entries:
        for entry in sorted(entries, key=lambda e: e.name):
            if entry.name.isdigit() or entry.name == "sys" or entry.is_symlink():
                continue
            if entry.name.startswith("kpage"):
                masked.append(Path(entry.path))
            elif _holds_owner_only_write(entry):
                readonly.append(Path(entry.path))
    return tuple(readonly), tuple(masked)


def _holds_owner_only_write(entry: os.DirEntry[str]) -> bool:
    if entry.is_dir(follow_symlinks=False):
        with os.scandir(entry.path) as below:
            return any(_holds_owner_only_write(one) for one in below)
    mode = entry.stat(follow_symlinks=False).st_mode
    return stat.S_ISREG(mode) and bool(mode & stat.S_IWUSR) and not mode & stat.S_IWOTH


def _etc() -> tuple[tuple[Path, ...], tuple[File, ...], tuple[Link, ...]]:
    trees: list[Path] = []
    files: list[File] = []
    links: list[Link] = []
    for relative in _matches(_ETC_TREES + _ETC_FILES):
        path = f"/etc/{relative}"
        mode = os.lstat(path).st_mode
        if stat.S_ISDIR(mode):
            found = _few_files(path)
            if found is not None:
                files += found
            elif mode & 0o005 == 0o005:
                trees.append(Path(path))
            continue
        if stat.S_ISLNK(mode):
            target = os.path.realpath(path)
            # Links into /usr stay links: localtime names its zone that way.
            if target.startswith("/usr/"):
                links.append(Link(Path(path), target))
                continue
        content = _content(path, MAX_ETC_FILE_BYTES)
        if content is not None:
            files.append(File(Path(path), content))
    return tuple(trees), tuple(files), tuple(links)


def _few_files(folder: str) -> list[File] | None:
    """A folder of a few plain files as their contents: a mount costs as much as eight of those.

    None where it holds more, or anything else; such a folder is mounted whole.
    """
    files: list[File] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.is_file(follow_symlinks=False) or len(files) == _FEW:
                    return None
                content = _content(entry.path, MAX_ETC_FILE_BYTES)
                if content is not None:
                    files.append(File(Path(entry.path), content))
    except OSError:
        return None
    return files


def _matches(patterns: Iterable[str]) -> list[str]:
    """Which of the names and patterns below /etc exist, in their order."""
    listings: dict[str, list[str]] = {}
    found = []
    for pattern in patterns:
        folder, _, name = pattern.rpartition("/")
        if folder not in listings:
            try:
                listings[folder] = sorted(os.listdir(f"/etc/{folder}"))
            except OSError:
                listings[folder] = []
        prefix = f"{folder}/" if folder else ""
        if any(c in name for c in "*?["):
            found += [prefix + n for n in listings[folder] if fnmatchcase(n, name)]
        elif name in listings[folder]:
            found.append(prefix + name)
    return found


def _content(path: str, limit: int, *, for_everybody: bool = True) -> bytes | None:
    """A regular file that everybody may read, through its links; None for anything else."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return None
    try:
        st = os.fstat(fd)
        if not stat.S_ISREG(st.st_mode) or (for_everybody and not st.st_mode & stat.S_IROTH):
            return None
        chunks = []
        while limit >= 0 and (chunk := os.read(fd, limit + 1)):
            chunks.append(chunk)
            limit -= len(chunk)
    finally:
        os.close(fd)
    return b"".join(chunks) if limit >= 0 else None


def _certificates(
    environ: Mapping[str, str], trees: tuple[Path, ...]
) -> tuple[tuple[tuple[str, str], ...], tuple[File, ...]]:
    """The variables with the paths that hold inside, and the files to put there.

    A file that stands in a visible tree is only named; the same content is taken once.
    """
    paths: list[tuple[str, str]] = []
    files: dict[bytes, File] = {}
    for variable in _CA_VARIABLES:
        path = environ.get(variable, "")
        if not path.startswith("/"):
            continue
        if all(any(within(Path(p), t) for t in trees) for p in (path, os.path.realpath(path))):
            paths.append((variable, path))
            continue
        content = _content(path, MAX_CA_BYTES, for_everybody=False)
        if content is None or b"-----BEGIN CERTIFICATE-----" not in content:
            continue
        if b"PRIVATE KEY-----" in content:
            raise Refused(
                f"{variable} names {path}, which holds a private key beside its certificates; "
                "a sandbox must not see it. Name a file with certificates only."
            )
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
    for path in (f"{config_home}/git/config", f"{home}/.gitconfig"):
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
