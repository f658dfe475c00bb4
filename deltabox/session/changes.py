"""Changes of single files and directories through the view: each happens wholly or not at all.

The mount does the copying up; nothing here writes a layer. Must not know wires, or who is credited.
"""

import contextlib
import errno
import os
import secrets
import stat
from dataclasses import dataclass, field

from deltabox.errors import (
    AmbiguousEdit,
    BadUsage,
    EditNotFound,
    FileExists,
    NotDirectory,
    NotFound,
    Refused,
    StaleVersion,
)
from deltabox.paths import (
    RENAME_NOREPLACE,
    ROOT,
    WorkspacePath,
    display,
    is_within,
    join,
    name,
    parent,
    renameat2,
)
from deltabox.session.content import (
    HASH_BYTES,
    MAX_BYTES,
    hashed,
    read_all,
    too_large,
    version_by_times,
)
from deltabox.session.files import Files, must_be_file, told
from deltabox.session.trees import copy_tree, remove_below

SCRATCH = b".deltabox-fs-"


@dataclass(slots=True)
class Change:
    """What a change did. roots: paths that it may have touched, trees as their top.

    scratch: names that are gone again. before: the content replaced, None where there was none.
    """

    roots: list[WorkspacePath] = field(default_factory=list)
    scratch: list[WorkspacePath] = field(default_factory=list)
    path: WorkspacePath = ROOT
    version: str = ""
    is_new: bool = False
    before: bytes | None = None
    after: bytes | None = None
    count: int = 0


class EditableFiles(Files):
    """Files, and the calls that change them. Each notes in `change` what it touched, also on failure."""

    __slots__ = ()

    def _changeable(self, path: WorkspacePath) -> WorkspacePath:
        if not path:
            raise BadUsage(
                "The project itself cannot be changed by a file call; name what is in it."
            )
        for closed in self._fixed:
            if is_within(path, closed):
                raise Refused(f"{display(path)} is read-only by this session's settings.")
        return path

    def _holds_no_closed(self, path: WorkspacePath) -> None:
        for closed in (*self._denied, *self._fixed):
            if is_within(closed, path):
                raise Refused(
                    f"{display(path)} holds {display(closed)}, which is denied or read-only."
                )

    def write(
        self,
        path: WorkspacePath,
        data: bytes,
        change: Change,
        *,
        expected: str | None = None,
        create: bool = True,
        exclusive: bool = False,
        parents: bool = True,
        mode: int | None = None,
    ) -> None:
        """Make the file's content `data`; readers see the old or the new one, never a part.

        A link is followed inside the project; the mode of a replaced file stays unless `mode` is
        given. Raises, with nothing changed: StaleVersion (`expected` is not what is there, or
        nothing is), FileExists (`exclusive`), NotFound (not `create`), IsDirectory, NotRegularFile.
        """
        where = self._changeable(self.resolved(path, last=not exclusive))
        with told(path):
            now = self.tree.lstat_or_none(where)
            if now is not None and exclusive:
                raise FileExists(f"{display(path)} exists already; read it before replacing it.")
            if now is not None:
                must_be_file(now, path)
                change.before = self._checked(where, path, now, expected)
            elif expected is not None:
                raise StaleVersion(f"{display(path)} is gone; look again.", found=None)
            elif not create:
                raise NotFound(f"{display(path)} does not exist, and it was not to be made.")
            elif parents:
                self._make_parents(where, change)
            change.path, change.is_new, change.after = where, now is None, data
            self._publish(where, data, now, change, mode)
            change.version = (
                hashed(data)
                if len(data) <= HASH_BYTES
                else version_by_times(self.tree.lstat(where))
            )

    def edit(
        self,
        path: WorkspacePath,
        old: bytes,
        new: bytes,
        change: Change,
        *,
        expected: str | None = None,
        replace_all: bool = False,
        count: int | None = None,
        keep_newlines: bool = True,
    ) -> None:
        """Replace `old`, which must stand there once (or `count` times, or any with `replace_all`).

        keep_newlines: in a file whose lines all end in CRLF, bare LFs of `old` and `new` mean CRLF.
        Everything else stays byte for byte. Raises: StaleVersion, also where nothing stands and a
        version was given; EditNotFound, AmbiguousEdit, TooLarge.
        """
        if not old:
            raise BadUsage("The text to replace is empty; write the whole file instead.")
        where = self._changeable(self.resolved(path))
        with told(path):
            now = self.tree.lstat_or_none(where)
            if now is None and expected is not None:
                raise StaleVersion(f"{display(path)} is gone; look again.", found=None)
            content = self.read(where)
            if expected is not None and expected != content.version:
                raise _stale(path, content.version)
            before = content.data
            if keep_newlines and _is_crlf(before) and b"\r" not in old + new:
                old, new = old.replace(b"\n", b"\r\n"), new.replace(b"\n", b"\r\n")
            found = before.count(old)
            if found == 0:
                raise EditNotFound(
                    f"The text to replace is not in {display(path)}; read it again and copy it exactly."
                )
            wanted = count if count is not None else (found if replace_all else 1)
            if found != wanted:
                raise AmbiguousEdit(
                    f"The text to replace is in {display(path)} {found} times, not {wanted}; "
                    "give more of what is around it, or replaceAll.",
                    found=found,
                )
            after = before.replace(old, new)
            if len(after) > MAX_BYTES:
                raise too_large(path, len(after), MAX_BYTES)
            change.path, change.before, change.after, change.count = where, before, after, found
            now = self.tree.lstat(where)
            if content.version != self._described(where, now).version:
                raise _stale(path, None)
            self._publish(where, after, now, change, None)
            change.version = (
                hashed(after)
                if len(after) <= HASH_BYTES
                else version_by_times(self.tree.lstat(where))
            )

    def _checked(
        self, where: WorkspacePath, path: bytes, now: os.stat_result, expected: str | None
    ) -> bytes | None:
        """The present content where it is small. Raises: StaleVersion."""
        before = None
        found = version_by_times(now)
        if now.st_size <= HASH_BYTES:
            with contextlib.suppress(PermissionError):
                fd = self.tree.open_file(where)
                try:
                    before = read_all(fd, HASH_BYTES + 1)
                finally:
                    os.close(fd)
                found = hashed(before)
        if expected is not None and expected != found:
            raise _stale(path, found)
        return before

    def _publish(
        self,
        where: WorkspacePath,
        data: bytes,
        now: os.stat_result | None,
        change: Change,
        mode: int | None,
    ) -> None:
        """A new inode beside, then one rename. `now`: what stands there; it must still do then."""
        self.tree.forget()
        folder = self.tree.parent_fd(where)
        scratch = join(parent(where), SCRATCH + secrets.token_hex(8).encode())
        temp = name(scratch)
        change.roots.append(where)
        change.scratch.append(scratch)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temp, flags, 0o666 if now is None else 0o600, dir_fd=folder)
        try:
            try:
                left = memoryview(data)
                while left:
                    left = left[os.write(fd, left) :]
                if mode is not None:
                    os.fchmod(fd, mode)
                elif now is not None:
                    os.fchmod(fd, stat.S_IMODE(now.st_mode) & 0o777)
            finally:
                os.close(fd)
            if now is None:
                renameat2(folder, temp, folder, name(where), RENAME_NOREPLACE)
                return
            there = os.stat(name(where), dir_fd=folder, follow_symlinks=False)
            if (there.st_ino, version_by_times(there)) != (now.st_ino, version_by_times(now)):
                raise _stale(where, None)  # noqa: TRY301 - the clean-up below is for this too
            os.rename(temp, name(where), src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temp, dir_fd=folder)
            raise

    def _make_parents(self, where: WorkspacePath, change: Change) -> None:
        missing = []
        at = parent(where)
        while at and (st := self.tree.lstat_or_none(at)) is None:
            missing.append(at)
            at = parent(at)
        if at and not stat.S_ISDIR(st.st_mode):  # type: ignore[union-attr]
            raise NotDirectory(f"{display(at)} is no directory, so nothing can be made in it.")
        for folder in reversed(missing):
            change.roots.append(folder)
            with contextlib.suppress(FileExistsError):
                os.mkdir(name(folder), 0o777, dir_fd=self.tree.parent_fd(folder))

    def mkdir(
        self,
        path: WorkspacePath,
        change: Change,
        *,
        parents: bool = False,
        mode: int | None = None,
    ) -> None:
        """Make a directory; with `parents` also those above, and an existing one is fine.

        Raises: FileExists, NotFound (a parent is missing).
        """
        where = self._changeable(self.resolved(path, last=parents))
        with told(path):
            there = self.tree.lstat_or_none(where)
            if parents and there is not None and stat.S_ISDIR(there.st_mode):
                change.path = where
                return
            if parents:
                self._make_parents(where, change)
            change.roots.append(where)
            change.path, change.is_new = where, True
            folder = self.tree.parent_fd(where)
            os.mkdir(name(where), 0o777, dir_fd=folder)
            if mode is not None:
                self._chmod(where, mode)

    def symlink(self, path: WorkspacePath, target: bytes, change: Change) -> None:
        """Make a link, which the review shows with its target; it may point anywhere, as a command's.

        Raises: FileExists, BadUsage for a target that no link can have.
        """
        if not target or b"\0" in target or len(target) > 4095:
            raise BadUsage("A link's target is 1 to 4095 bytes without NUL.")
        where = self._changeable(self.resolved(path, last=False))
        with told(path):
            change.roots.append(where)
            change.path, change.is_new, change.version = where, True, hashed(target)
            os.symlink(target, name(where), dir_fd=self.tree.parent_fd(where))

    def chmod(self, path: WorkspacePath, mode: int, change: Change) -> None:
        """Set the permission bits of a file or directory; links followed inside the project."""
        where = self._changeable(self.resolved(path))
        with told(path):
            change.roots.append(where)
            change.path = where
            self._chmod(where, mode)

    def _chmod(self, where: WorkspacePath, mode: int) -> None:
        fd = self.tree.open_at(where, os.O_PATH)
        try:
            if stat.S_ISLNK(os.fstat(fd).st_mode):
                raise OSError(errno.ELOOP, "a link", where)
            # By what was opened: there is no chmod that refuses links by name before Linux 6.6.
            os.chmod(b"/proc/self/fd/%d" % fd, mode)
        finally:
            os.close(fd)

    def remove(
        self,
        path: WorkspacePath,
        change: Change,
        *,
        recursive: bool = False,
        expected: str | None = None,
        missing_ok: bool = False,
    ) -> None:
        """Delete what stands there; a link itself, never what it points to. Costs grow with the tree.

        Raises: NotFound, StaleVersion, FileExists for a directory with content and not `recursive`.
        A failure in the middle of a tree leaves the rest of it.
        """
        where = self._changeable(self.resolved(path, last=False))
        self._holds_no_closed(where)
        with told(path):
            change.path = where
            st = self.tree.lstat_or_none(where)
            if st is None:
                if expected is not None:
                    raise StaleVersion(f"{display(path)} is gone; look again.", found=None)
                if missing_ok:
                    return
                raise NotFound(f"{display(path)} does not exist.")
            if expected is not None and (v := self._described(where, st).version) != expected:
                raise _stale(path, v)
            change.roots.append(where)
            if recursive and stat.S_ISDIR(st.st_mode):
                remove_below(self.tree, where)
            if stat.S_ISDIR(st.st_mode):
                os.rmdir(name(where), dir_fd=self.tree.parent_fd(where))
            else:
                os.unlink(name(where), dir_fd=self.tree.parent_fd(where))

    def rename(
        self,
        path: WorkspacePath,
        to: WorkspacePath,
        change: Change,
        *,
        overwrite: bool = False,
        expected: str | None = None,
    ) -> None:
        """Give it another name; a link is moved itself. A directory of the base is moved by copy
        where the engine cannot rename it: its old name goes only after all of it stands anew.

        Raises: NotFound, StaleVersion, FileExists (unless `overwrite`), BadUsage into itself.
        """
        where = self._changeable(self.resolved(path, last=False))
        there = self._changeable(self.resolved(to, last=False))
        self._holds_no_closed(where)
        if is_within(there, where):
            if there == where:
                raise BadUsage(f"{display(path)} has that name already.")
            raise BadUsage(f"{display(path)} cannot be moved into itself.")
        with told(path):
            st = self.tree.lstat(where)
            if expected is not None and (v := self._described(where, st).version) != expected:
                raise _stale(path, v)
            if self.tree.lstat_or_none(there) is not None:
                if not overwrite:
                    raise FileExists(f"{display(to)} exists already; ask for overwrite.")
                self._holds_no_closed(there)
            with told(to):
                new_folder = self.tree.open_at(parent(there), os.O_PATH | os.O_DIRECTORY)
            try:
                change.roots += [where, there]
                change.path = there
                self._move(where, there, new_folder, st, change, overwrite=overwrite)
            finally:
                os.close(new_folder)

    def _move(
        self,
        where: WorkspacePath,
        there: WorkspacePath,
        new_folder: int,
        st: os.stat_result,
        change: Change,
        *,
        overwrite: bool,
    ) -> None:
        flags = 0 if overwrite else RENAME_NOREPLACE
        old_folder = self.tree.parent_fd(where)
        try:
            renameat2(old_folder, name(where), new_folder, name(there), flags)
        except OSError as exc:
            if exc.errno != errno.EXDEV or not stat.S_ISDIR(st.st_mode):
                raise
        else:
            return
        scratch = join(parent(there), SCRATCH + secrets.token_hex(8).encode())
        change.scratch.append(scratch)
        try:
            copy_tree(self.tree, where, scratch)
            renameat2(new_folder, name(scratch), new_folder, name(there), flags)
        except BaseException:
            with contextlib.suppress(OSError):
                remove_below(self.tree, scratch)
                os.rmdir(name(scratch), dir_fd=new_folder)
            raise
        remove_below(self.tree, where)
        os.rmdir(name(where), dir_fd=self.tree.parent_fd(where))


def _is_crlf(data: bytes) -> bool:
    ends = data.count(b"\n")
    return ends > 0 and data.count(b"\r\n") == ends


def _stale(path: bytes, found: str | None) -> StaleVersion:
    return StaleVersion(
        f"{display(path)} changed since it was read; read it again, then retry.", found=found
    )
