"""The on-disk format of a delta and the merged tree it makes with the base; read without a mount.

The format is overlayfs's own, with `userxattr` (docs/delta.md). Only quiescent, unmounted layers are
ever written here: a mounted upper belongs to its mount. Must not know what a review is, and never
writes to a base.
"""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, Self

import msgspec

from deltabox.paths import ROOT, Tree, WorkspacePath, join, name, parent

Kind = Literal["file", "dir", "symlink", "special"]

XATTR_PREFIX = "user.overlay."
OPAQUE = "user.overlay.opaque"
WHITEOUT = "user.overlay.whiteout"

_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


_KINDS: dict[int, Kind] = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "symlink"}


def kind_of(mode: int) -> Kind:
    """The four kinds a review tells apart; devices, fifos and sockets are all `special`."""
    return _KINDS.get(mode & 0o170000, "special")


class Fingerprint(msgspec.Struct, frozen=True, array_like=True):
    """What is remembered of a base entry, to notice later that somebody else changed it.

    mode: permission bits only. A directory's size and times change with its children, so two
    directories are the same when type and mode agree (`same_as`).
    """

    type: Kind
    ino: int
    size: int
    mtime_ns: int
    ctime_ns: int
    mode: int

    @classmethod
    def of(cls, st: os.stat_result) -> Self:
        mode = st.st_mode
        return cls(
            kind_of(mode), st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns, mode & 0o7777
        )

    def same_as(self, other: "Fingerprint | None") -> bool:
        """True when nobody changed the entry between the two looks."""
        if other is None or self.type != other.type:
            return False
        return self.mode == other.mode if self.type == "dir" else self == other

    def moved_from(self, other: "Fingerprint") -> bool:
        """True when this is `other` after a rename of ours, which changes ctime and nothing else."""
        if self.type == "dir":
            return (self.type, self.ino, self.mode) == (other.type, other.ino, other.mode)
        return (self.type, self.ino, self.size, self.mtime_ns, self.mode) == (
            other.type,
            other.ino,
            other.size,
            other.mtime_ns,
            other.mode,
        )


class Node(msgspec.Struct, frozen=True):
    """One entry as one tree holds it. layer: index into the layers, top first; -1 is the base."""

    path: WorkspacePath
    kind: Kind
    st: os.stat_result
    tree: Tree
    layer: int


class Touched(msgspec.Struct, frozen=True):
    """A path that some layer mentions or hides: what the base has there, what the view shows."""

    path: WorkspacePath
    before: Node | None
    after: Node | None


def is_whiteout(tree: Tree, path: WorkspacePath, st: os.stat_result) -> bool:
    """A 0/0 character device, or an empty regular file that carries `user.overlay.whiteout`."""
    mode = st.st_mode
    if stat.S_ISCHR(mode):
        return st.st_rdev == 0
    if not stat.S_ISREG(mode) or st.st_size:
        return False
    return _xattr(tree, path, WHITEOUT) is not None


def is_opaque(fd: int) -> bool:
    """True when the directory hides everything below it in lower layers (value `y`; `x` is not)."""
    try:
        return os.getxattr(fd, OPAQUE) == b"y"
    except OSError as exc:
        if exc.errno in (errno.ENODATA, errno.EOPNOTSUPP):
            return False
        raise


def is_foreign_xattr(attribute: str) -> bool:
    """True for what a program can have set and a project could carry: user.*, capabilities, ACLs.

    Inside a view `user.overlay.x` is stored as `user.overlay.overlay.x`; the rest is overlay's own.
    """
    if attribute.startswith(XATTR_PREFIX):
        return attribute.startswith(XATTR_PREFIX + "overlay.")
    return (
        attribute.startswith(("user.", "system.posix_acl_")) or attribute == "security.capability"
    )


def foreign_xattrs(tree: Tree, path: WorkspacePath) -> list[str]:
    """Names of extended attributes that the agent's programs set; overlay's own are left out."""
    fd = tree.open_at(path, os.O_PATH)
    try:
        names = os.listxattr(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return sorted(n for n in names if is_foreign_xattr(n))


def _xattr(tree: Tree, path: WorkspacePath, attribute: str) -> bytes | None:
    fd = tree.open_at(path, os.O_PATH)
    try:
        # An O_PATH descriptor has no fgetxattr; its /proc name is followed to that very inode.
        return os.getxattr(f"/proc/self/fd/{fd}", attribute)
    except OSError as exc:
        if exc.errno in (errno.ENODATA, errno.EOPNOTSUPP):
            return None
        raise
    finally:
        os.close(fd)


class Merged:
    """A base and its layers (top first) as one tree, the way the kernel would show it.

    Borrows the trees; they must outlive it. Directory stacks are remembered, so an instance serves
    one look at a quiet or frozen delta: make a new one for the next look. Unreadable directories
    met by `changed` are gathered in `unreadable`, never silently skipped.
    """

    def __init__(self, base: Tree, layers: Sequence[Tree]) -> None:
        self.base = base
        self.layers = tuple(layers)
        self.unreadable: list[WorkspacePath] = []
        self._trees = (*self.layers, base)
        self._stacks: dict[WorkspacePath, tuple[int, ...]] = {ROOT: tuple(range(len(self._trees)))}

    def _node(self, path: WorkspacePath, st: os.stat_result, index: int) -> Node:
        layer = index if index < len(self.layers) else -1
        return Node(path, kind_of(st.st_mode), st, self._trees[index], layer)

    def _resolve(self, path: WorkspacePath) -> tuple[Node | None, tuple[int, ...]]:
        """The entry at `path`, and the trees that contribute to it if it is a directory."""
        if not path:
            stack = self._root_stack()
            return self._node(ROOT, self._trees[stack[0]].lstat(ROOT), stack[0]), stack
        above = self._stack(parent(path))
        found: Node | None = None
        stack_here: list[int] = []
        for index in above:
            tree = self._trees[index]
            st = tree.lstat_or_none(path)
            if st is None:
                continue
            in_layer = index < len(self.layers)
            if in_layer and is_whiteout(tree, path, st):
                break
            if not stat.S_ISDIR(st.st_mode):
                if found is None:
                    found = self._node(path, st, index)
                break
            if found is None:
                found = self._node(path, st, index)
            stack_here.append(index)
            if in_layer and _xattr(tree, path, OPAQUE) == b"y":
                break
        return found, tuple(stack_here)

    def _root_stack(self) -> tuple[int, ...]:
        return self._stacks[ROOT]

    def _stack(self, directory: WorkspacePath) -> tuple[int, ...]:
        known = self._stacks.get(directory)
        if known is None:
            known = self._stacks[directory] = self._resolve(directory)[1]
        return known

    def lookup(self, path: WorkspacePath) -> Node | None:
        """The entry the view shows at `path`; None where it shows nothing. A few µs per layer."""
        return self._resolve(path)[0]

    def names(self, directory: WorkspacePath = ROOT) -> list[bytes]:
        """The names in a directory of the view, sorted. Raises: OSError ENOENT or ENOTDIR."""
        node, stack = self._resolve(directory)
        if node is None or node.kind != "dir":
            code = errno.ENOENT if node is None else errno.ENOTDIR
            raise OSError(code, os.strerror(code), directory)
        shown: dict[bytes, bool] = {}
        for index in stack:
            tree = self._trees[index]
            for child in tree.names(directory):
                if child in shown:
                    continue
                at = join(directory, child)
                shown[child] = index == len(self.layers) or not is_whiteout(
                    tree, at, tree.lstat(at)
                )
        return sorted(child for child, is_shown in shown.items() if is_shown)

    def open_file(self, path: WorkspacePath) -> int:
        """The view's regular file for reading; the caller closes it. Raises: OSError."""
        node = self.lookup(path)
        if node is None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return node.tree.open_file(path)

    def walk(self, path: WorkspacePath = ROOT) -> Iterator[Node]:
        """Everything the view shows below `path`, parents first; costs the whole tree."""
        todo = [path]
        while todo:
            directory = todo.pop()
            below = []
            for child in self.names(directory):
                node = self.lookup(join(directory, child))
                if node is None:  # vanished while we looked
                    continue
                yield node
                if node.kind == "dir":
                    below.append(node.path)
            todo.extend(reversed(below))

    def changed(self) -> Iterator[Touched]:
        """Every path that a layer mentions, and every base path that a layer hides; parents first.

        Siblings come in byte order, a directory's children together. Costs about 5 µs for each
        entry of the layers plus each hidden entry of the base; a base directory that no layer
        mentions is never opened. Entries that were touched but are equal come too: telling them
        apart needs content and is the review's job. Raises: OSError other than EACCES.
        """
        # directory, layers that hold it, whether the base shows through, whether the base has it
        todo: list[tuple[WorkspacePath, tuple[int, ...], bool, bool]] = [
            (ROOT, tuple(range(len(self.layers))), True, True)
        ]
        while todo:
            directory, stack, base_shows, base_has = todo.pop()
            entries, base_shows = self._layer_entries(directory, stack, base_shows)
            names = set(entries)
            if base_has and not base_shows:
                names |= self._base_names(directory)
            below = []
            for child in sorted(names):
                path = join(directory, child)
                after: Node | None = None
                sub: list[int] = []
                for index, st in entries.get(child, ()):
                    mode = st.st_mode
                    if stat.S_ISDIR(mode):
                        if after is None:
                            after = self._node(path, st, index)
                        sub.append(index)
                        continue
                    if after is None and not is_whiteout(self.layers[index], path, st):
                        after = self._node(path, st, index)
                    break
                else:
                    index = -1  # nothing ended the search: the base may show through
                before: Node | None = None
                if base_has:
                    base_st = self.base.lstat_or_none(path)
                    if base_st is not None:
                        before = Node(path, kind_of(base_st.st_mode), base_st, self.base, -1)
                if before is None and after is None:
                    continue
                yield Touched(path, before, after)
                base_dir = before is not None and before.kind == "dir"
                if sub:
                    shows = base_shows and base_dir and index == -1
                    below.append((path, tuple(sub), shows, base_dir))
                elif base_dir:
                    below.append((path, (), False, True))
            todo.extend(reversed(below))

    def _layer_entries(
        self, directory: WorkspacePath, stack: Sequence[int], base_shows: bool
    ) -> tuple[dict[bytes, list[tuple[int, os.stat_result]]], bool]:
        """What each layer has in a directory, top first, ending at the first opaque one."""
        entries: dict[bytes, list[tuple[int, os.stat_result]]] = {}
        for index in stack:
            try:
                fd = self.layers[index].open_at(directory, os.O_RDONLY | os.O_DIRECTORY)
            except PermissionError:
                self.unreadable.append(directory)
                return entries, base_shows
            try:
                with os.scandir(fd) as found:
                    for entry in found:
                        entries.setdefault(os.fsencode(entry.name), []).append(
                            (index, entry.stat(follow_symlinks=False))
                        )
                if is_opaque(fd):
                    return entries, False
            finally:
                os.close(fd)
        return entries, base_shows

    def _base_names(self, directory: WorkspacePath) -> set[bytes]:
        try:
            return set(self.base.names(directory))
        except PermissionError:
            self.unreadable.append(directory)
        except OSError as exc:
            if exc.errno not in _NOT_THERE:
                raise
        return set()


def create_layer(path: str | os.PathLike[str], like: os.stat_result) -> None:
    """An empty layer whose root looks like the base's (mode; owner too when the caller is root).

    Raises: FileExistsError.
    """
    os.mkdir(path, 0o700)
    if os.geteuid() == 0:
        os.chown(path, like.st_uid, like.st_gid)
    os.chmod(path, stat.S_IMODE(like.st_mode))


def make_whiteout(upper: Tree, path: WorkspacePath) -> None:
    """Hide the base's entry at `path`; its parent must stand in the layer."""
    os.mknod(name(path), stat.S_IFCHR | 0o600, 0, dir_fd=upper.parent_fd(path))


def set_opaque(upper: Tree, path: WorkspacePath, opaque: bool) -> None:
    fd = upper.open_at(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if opaque:
            os.setxattr(fd, OPAQUE, b"y")
        elif is_opaque(fd):
            os.removexattr(fd, OPAQUE)
    finally:
        os.close(fd)


def holds_opaque(upper: Tree, path: WorkspacePath) -> bool:
    """True when the layer has an opaque directory at `path`."""
    try:
        return _xattr(upper, path, OPAQUE) == b"y"
    except OSError as exc:
        if exc.errno in _NOT_THERE:
            return False
        raise


def prune(
    base: Tree,
    upper: Tree,
    lowers: Sequence[Tree],
    committed: Mapping[WorkspacePath, Fingerprint | None],
) -> list[WorkspacePath]:
    """Drop from a quiescent, unmounted upper what the base has just come to equal.

    committed: each path with the fingerprint that the *delta's* file or link had when it was copied
    (None for deletions and directories). An entry that was written since, one that hides something
    of a lower layer, and one that stands below an opaque directory which still hides base entries
    all stay: the next review finds them equal or changed. The view never looks different before
    and after, also when this is killed in the middle. Returns: the paths that were dropped.
    """
    dropped: list[WorkspacePath] = []
    blocked: dict[WorkspacePath, bool] = {ROOT: False}

    def is_blocked(directory: WorkspacePath) -> bool:
        known = blocked.get(directory)
        if known is None:
            known = is_blocked(parent(directory)) or not _reveal(base, upper, directory)
            blocked[directory] = known
        return known

    parents: set[WorkspacePath] = set()
    for path in sorted(committed, key=lambda p: p.count(b"/"), reverse=True):
        st = upper.lstat_or_none(path)
        if st is None or is_blocked(parent(path)):
            continue
        if any(tree.lstat_or_none(path) is not None for tree in lowers):
            continue
        at = parent(path)
        while at not in parents:
            parents.add(at)
            at = parent(at)
        if is_whiteout(upper, path, st):
            is_equal = base.lstat_or_none(path) is None
        elif stat.S_ISDIR(st.st_mode):
            parents.add(path)
            continue
        else:
            is_equal = Fingerprint.of(st) == committed[path]
        if is_equal:
            # An entry in a read-only directory stays: it is equal, and so no change.
            with contextlib.suppress(PermissionError):
                os.unlink(name(path), dir_fd=upper.parent_fd(path))
                dropped.append(path)
    for path in sorted(parents - {ROOT}, key=lambda p: p.count(b"/"), reverse=True):
        if not is_blocked(path) and drop_plain_dir(base, upper, lowers, path):
            dropped += [path]
    return dropped


def _reveal(base: Tree, upper: Tree, directory: WorkspacePath) -> bool:
    """Make an opaque directory transparent when that shows nothing new; False when it would."""
    if not holds_opaque(upper, directory):
        return True
    base_st = base.lstat_or_none(directory)
    if base_st is not None and stat.S_ISDIR(base_st.st_mode):
        for child in base.names(directory):
            at = join(directory, child)
            above = upper.lstat_or_none(at)
            if above is None:
                return False
            if stat.S_ISDIR(above.st_mode) and not _covers(base, upper, at):
                return False
    set_opaque(upper, directory, opaque=False)
    return True


def _covers(base: Tree, upper: Tree, directory: WorkspacePath) -> bool:
    """True when merging the upper's directory with the base's would show no further name."""
    if holds_opaque(upper, directory):
        return True
    base_st = base.lstat_or_none(directory)
    if base_st is None or not stat.S_ISDIR(base_st.st_mode):
        return True
    for child in base.names(directory):
        at = join(directory, child)
        above = upper.lstat_or_none(at)
        if above is None:
            return False
        if stat.S_ISDIR(above.st_mode) and not _covers(base, upper, at):
            return False
    return True


def drop_plain_dir(base: Tree, upper: Tree, lowers: Sequence[Tree], path: WorkspacePath) -> bool:
    """Remove the upper's copy of a directory that is empty, transparent and like the base's."""
    st, base_st = upper.lstat_or_none(path), base.lstat_or_none(path)
    if st is None or base_st is None or not stat.S_ISDIR(st.st_mode):
        return False
    if st.st_mode != base_st.st_mode or upper.names(path) or holds_opaque(upper, path):
        return False
    if any(tree.lstat_or_none(path) is not None for tree in lowers):
        return False
    try:
        os.rmdir(name(path), dir_fd=upper.parent_fd(path))
    except PermissionError:
        return False
    return True


def remove_layers(*layers: Path) -> None:
    """Delete layers and work directories; also what overlay or an agent left without rights.

    Overlay leaves `work` inside its work directory with mode 000. Missing ones are fine. Neither
    links nor depth matter: folders are moved up before they are emptied, so that a tree deeper than
    any path may be long costs no more than a flat one. Costs grow with the entries. No view may
    have the layers mounted, and no process may change them.
    Raises: OSError.
    """
    for layer in layers:
        with suppress(FileNotFoundError):
            with Tree.open(layer) as tree:
                layer.chmod(0o700)
                _empty(tree)
            layer.rmdir()


def _empty(tree: Tree) -> None:
    fresh = os.fsencode(f".deltabox-{secrets.token_hex(8)}-")  # a name no agent could have taken
    moved = 0
    todo = [ROOT]
    while todo:
        folder = todo.pop()
        fd = tree.open_at(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with os.scandir(fd) as found:
                entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
            for name, is_directory in entries:
                if not is_directory:
                    os.unlink(name, dir_fd=fd)
                    continue
                os.chmod(name, 0o700, dir_fd=fd)  # also to move it: its `..` is written
                moved += 1
                todo.append(WorkspacePath(fresh + b"%d" % moved))
                os.rename(name, todo[-1], src_dir_fd=fd, dst_dir_fd=tree.fd)
        finally:
            os.close(fd)
        if folder:
            os.rmdir(folder, dir_fd=tree.fd)
