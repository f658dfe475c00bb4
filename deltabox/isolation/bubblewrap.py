"""A SandboxPolicy plus descriptor numbers become bubblewrap's arguments. Pure; decides nothing.

What each mount is for stands in policy.py; here is only how bubblewrap is told, and in which order.

How `--ro-bind-fd N DEST` resolves (0.8.0 under strace, the same in the source of 0.11): bubblewrap
takes realpath("/proc/self/fd/N"), that is the path the descriptor had where it was opened; mounts
*that path* as it stands in its own mount namespace (the view's holder's); then compares device and
inode of the mount with the descriptor's and dies with "Race condition binding dirfd" if they
differ. So a descriptor opened in the host's namespace works after entering the holder's where both
show the same file at that path, and nothing that an agent or a race has put there can take its
place. Where the view covers the path (home, /tmp, project) it fails, as it should.
The trees of the view are given by path: their parents are the host's directories, which no agent
can write, and a descriptor of them would have to be opened inside the holder.
"""

from collections.abc import Mapping, Sequence

from deltabox.isolation.policy import Bind, File, SandboxPolicy

MINIMUM_VERSION = (0, 8, 0)  # --disable-userns; --size came with 0.7


def arguments(
    policy: SandboxPolicy, sources: Mapping[Bind, int], contents: Mapping[File, int]
) -> tuple[bytes, ...]:
    """The options for `--args FD`. `sources` has a descriptor for each host bind, `contents` one
    for each file, read from its current offset.

    Never --die-with-parent (it means a worker thread of ours; init watches the life-line) and never
    --new-session (init makes the session, with the terminal).
    """
    out: list[str | bytes] = ["--unshare-user", "--unshare-all"]
    if policy.network == "host":
        out.append("--share-net")
    # --as-pid-1: no reaper of bubblewrap's between us and init, so the namespace ends with init.
    out += ["--as-pid-1", "--cap-drop", "ALL"]
    if not policy.nest:
        out.append("--disable-userns")
    out += ["--uid", str(policy.uid), "--gid", str(policy.gid), "--hostname", policy.hostname]
    for path in policy.directories:
        out += ["--perms", "0755", "--dir", bytes(path)]
    for bind in policy.system:
        out += ["--ro-bind-fd", str(sources[bind]), bytes(bind.dest)]
    out += ["--proc", "/proc", "--dev", "/dev"]
    for bind in policy.over_proc:
        out += ["--ro-bind-fd", str(sources[bind]), bytes(bind.dest)]
    for memory in policy.memory:
        out += ["--perms", f"{memory.mode:04o}", "--size", str(memory.size_bytes)]
        out += ["--tmpfs", bytes(memory.dest)]
    for file in policy.files:
        out += ["--perms", f"{file.mode:04o}", "--file", str(contents[file]), bytes(file.dest)]
    for link in policy.links:
        out += ["--symlink", link.target, bytes(link.dest)]
    for tree in policy.trees:
        out += ["--bind" if tree.writable else "--ro-bind", bytes(tree.source), bytes(tree.dest)]
    # bubblewrap's own tmpfs under everything has no size limit, nor has the one under /dev.
    out += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]
    return tuple(part if isinstance(part, bytes) else part.encode() for part in out)


def packed(options: Sequence[bytes]) -> bytes:
    """NUL-terminated, as `--args` reads them. Raises: ValueError for an option with a NUL."""
    if any(b"\0" in option for option in options):
        raise ValueError("an option contains a NUL byte")
    return b"".join(option + b"\0" for option in options)


def command_line(args_fd: int, init_fd: int, init: Sequence[bytes]) -> tuple[bytes, ...]:
    """bubblewrap's argv. init is run by descriptor, so it needs no place in the sandbox's files."""
    return (b"bwrap", b"--args", b"%d" % args_fd, b"--", b"/proc/self/fd/%d" % init_fd, *init)


def version(words: bytes) -> tuple[int, ...]:
    """From `bwrap --version`; () where the words are not understood."""
    numbers = words.split()[-1:]
    try:
        return tuple(int(n) for n in numbers[0].split(b".")[:3])
    except (IndexError, ValueError):
        return ()
