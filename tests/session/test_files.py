"""File calls on a real view: what is read and written, and that no name leads out of it."""

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from deltabox.errors import (
    AmbiguousEdit,
    BadPath,
    BadUsage,
    DeltaboxError,
    EditNotFound,
    FileExists,
    FileFailed,
    IsDirectory,
    NotDirectory,
    NotFound,
    NotRegularFile,
    PermissionDenied,
    Refused,
    StaleVersion,
    TooLarge,
)
from deltabox.paths import Tree, WorkspacePath, parse
from deltabox.session import content
from deltabox.session.changes import Change, EditableFiles
from deltabox.session.target import OnHost, locate
from tests.places import ME, listing
from tests.session.here import open_here

pytestmark = pytest.mark.overlay

HASH_BYTES = content.HASH_BYTES


def p(path: str | bytes) -> WorkspacePath:
    return parse(path)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    made = tmp_path / "home" / "project"
    (made / "src").mkdir(parents=True)
    (made / "a").write_text("one\ntwo\n")
    (made / "src" / "b").write_text("b\n")
    (tmp_path / "outside").write_text("outside\n")
    return made


def written(files: EditableFiles, path: str, data: bytes, **how: object) -> Change:
    change = Change()
    files.write(p(path), data, change, **how)  # type: ignore[arg-type]
    return change


# reading and versions


async def test_a_write_lands_in_the_view_and_the_project_is_as_before(
    tmp_path: Path, project: Path
) -> None:
    before = listing(project)
    async with open_here(tmp_path) as workspace:
        with workspace.files() as files:
            written(files, "a", b"new\n")
            written(files, "src/deep/er/c", b"c")
        with workspace.files() as files:
            assert files.read(p("a")).data == b"new\n"
            assert files.read(p("src/deep/er/c")).data == b"c"
            assert [n for n, _, _ in files.listing(p("src"), limit=9)[0]] == [b"b", b"deep"]
        assert listing(project) == before


async def test_a_version_outlives_copy_up_and_chmod_and_ends_with_the_content(
    tmp_path: Path, project: Path
) -> None:
    async with open_here(tmp_path) as workspace:
        with workspace.files() as files:
            first = files.stat(p("a")).version
            files.chmod(p("a"), 0o600, Change())  # copies it up: another inode, another ctime
            assert files.stat(p("a")).version == first
            # Same size, within the same clock tick: only the content tells them apart.
            two = written(files, "a", b"one\nTWO\n").version
            three = written(files, "a", b"one\nTwO\n").version
            assert len({first, two, three}) == 3
            assert files.read(p("a")).version == files.lstat(p("a")).version == three


async def test_a_stale_version_is_refused_before_anything_is_written(
    tmp_path: Path, project: Path
) -> None:
    async with open_here(tmp_path) as workspace:
        with workspace.files() as files:
            version = files.read(p("a")).version
            current = written(files, "a", b"theirs").version
            state = files.lstat(p("a")), files.tree.names()
            acts: list[Callable[[Change], None]] = [
                lambda c: files.write(p("a"), b"mine", c, expected=version),
                lambda c: files.edit(p("a"), b"theirs", b"mine", c, expected=version),
                lambda c: files.remove(p("a"), c, expected=version),
                lambda c: files.rename(p("a"), p("z"), c, expected=version),
                lambda c: files.write(p("absent"), b"mine", c, expected=version),
                lambda c: files.edit(p("absent"), b"x", b"y", c, expected=version),
            ]
            for act in acts:
                with pytest.raises(StaleVersion):
                    act(Change())
            assert (files.lstat(p("a")), files.tree.names()) == state
            # The control: with the right one each does its work.
            edited = Change()
            files.edit(p("a"), b"theirs", b"mine", edited, expected=current)
            files.write(p("a"), b"again", Change(), expected=edited.version)


async def test_a_large_file_s_version_changes_with_every_change_of_it(
    tmp_path: Path, project: Path
) -> None:
    (project / "big").write_bytes(b"x" * (HASH_BYTES + 1))
    async with open_here(tmp_path) as workspace:
        with workspace.files() as files:
            version = files.stat(p("big")).version
            assert files.read(p("big")).version == version
            assert written(files, "big", b"y" * (HASH_BYTES + 1)).version != version
            with pytest.raises(StaleVersion):
                written(files, "big", b"", expected=version)


@pytest.mark.parametrize(
    ("size", "window"), [(5000, (4090, 20)), (HASH_BYTES + 5000, (HASH_BYTES, 9)), (10, (50, 5))]
)
def test_a_window_of_bytes_is_exactly_those(
    tmp_path: Path, size: int, window: tuple[int, int]
) -> None:
    data = bytes(i % 251 for i in range(size))
    (tmp_path / "f").write_bytes(data)
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    try:
        offset, length = window
        found = content.read_bytes(fd, offset, length)
    finally:
        os.close(fd)
    assert found.data == data[offset : offset + length]
    assert (found.size, found.eof) == (size, offset + length >= size)


@pytest.mark.parametrize("filler", [0, 3 * content.CHUNK])
@pytest.mark.parametrize("ending", [b"", b"\n", b"\r\n"])
@pytest.mark.parametrize(("first", "count"), [(1, 1), (1, 99), (2, 2), (3, 1), (4, 5), (400, 2)])
def test_a_window_of_lines_is_what_splitlines_would_give(
    tmp_path: Path, filler: int, ending: bytes, first: int, count: int
) -> None:
    data = b"x" * filler + b"one\r\ntwo\n\nfour" + ending
    (tmp_path / "f").write_bytes(data)
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    try:
        found = content.read_lines(fd, first, count, content.MAX_BYTES)
    finally:
        os.close(fd)
    lines = data.split(b"\n")
    ends = [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    wanted = ends[first - 1 : first - 1 + count]
    assert found.data == b"".join(wanted)
    assert found.lines == len(wanted)
    assert found.eof == (first - 1 + count >= len(ends))
    assert found.at == len(b"".join(ends[: first - 1]))
    if not filler:
        assert found.version == content.hashed(data)


async def test_more_than_one_message_carries_is_refused_and_names_the_way_on(
    tmp_path: Path, project: Path
) -> None:
    with open(project / "sparse", "wb") as file:
        file.truncate(content.MAX_BYTES + 1)
    async with open_here(tmp_path) as workspace:
        with workspace.files() as files, pytest.raises(TooLarge) as told:
            files.read(p("sparse"))
        assert told.value.data["use"] == "fs.readRange"
        with workspace.files() as files:
            assert files.read(p("sparse"), limit=content.MAX_BYTES + 1).size > content.MAX_BYTES


async def test_a_listing_is_in_the_order_of_bytes_and_comes_in_pages(
    tmp_path: Path, project: Path
) -> None:
    names = [b"B", b"a", b"\xff\xfe", b"\xc3\xa9", b"new\nline", b"x" * 255]
    for name in names:
        (project / "src" / os.fsdecode(name)).touch()
    os.symlink("a", project / "src" / "link")
    async with open_here(tmp_path) as workspace:
        with workspace.files() as files:
            found, more = files.listing(p("src"), limit=100)
            assert [n for n, _, _ in found] == sorted([*names, b"b", b"link"])
            assert not more
            assert [link for n, _, link in found if n == b"link"] == [b"a"]
            page, more = files.listing(p("src"), limit=3)
            assert more
            rest, more = files.listing(p("src"), after=page[-1][0], limit=100)
            assert not more
            assert [n for n, _, _ in [*page, *rest]] == sorted([*names, b"b", b"link"])


# writing


async def test_a_replaced_file_keeps_its_mode_and_a_new_one_has_the_umask_s(
    tmp_path: Path, project: Path
) -> None:
    (project / "a").chmod(0o754)
    before = os.umask(0o027)
    try:
        async with open_here(tmp_path) as workspace:
            with workspace.files() as files:
                written(files, "a", b"x")
                written(files, "n", b"x")
                written(files, "m", b"x", mode=0o600)
                modes = [files.stat(p(name)).mode for name in ("a", "n", "m")]
    finally:
        os.umask(before)
    assert modes == [0o754, 0o640, 0o600]


async def test_a_reader_sees_the_old_content_or_the_new_and_no_scratch_stays(
    tmp_path: Path, project: Path
) -> None:
    async with open_here(tmp_path) as workspace:
        with workspace.files() as files:
            written(files, "f", b"old")
            reader = files.open(p("f"))
            written(files, "f", b"new and longer")
            assert os.read(reader, 100) == b"old"
            os.close(reader)
            with pytest.raises(FileExists):
                written(files, "f", b"x", exclusive=True)
            with pytest.raises(NotFound):
                written(files, "g", b"x", create=False)
            with pytest.raises(IsDirectory):
                written(files, "src", b"x")
            with pytest.raises(NotDirectory):
                written(files, "a/below", b"x")
            with pytest.raises(NotFound):
                written(files, "no/such", b"x", parents=False)
            names = [n for n, _, _ in files.listing(p(""), limit=99)[0]]
        assert names == [b"a", b"f", b"src"]


@pytest.mark.parametrize(
    ("before", "old", "new", "after"),
    [
        (b"one\r\ntwo\r\n", b"one\ntwo", b"1\n2\n3", b"1\r\n2\r\n3\r\n"),
        (b"one\r\ntwo\n", b"two\n", b"2\n", b"one\r\n2\n"),  # mixed: as it is
        (b"one\ntwo", b"two", b"2", b"one\n2"),  # no final newline, and none is made
        (b"\xff\xfe\0one", b"one", b"two", b"\xff\xfe\0two"),
    ],
)
async def test_an_edit_changes_its_text_and_not_one_byte_more(
    tmp_path: Path, project: Path, before: bytes, old: bytes, new: bytes, after: bytes
) -> None:
    (project / "f").write_bytes(before)
    async with open_here(tmp_path) as workspace:
        with workspace.files() as files:
            files.edit(p("f"), old, new, Change())
            assert files.read(p("f")).data == after


async def test_an_edit_counts_what_it_replaces(tmp_path: Path, project: Path) -> None:
    (project / "f").write_bytes(b"x x x")
    async with open_here(tmp_path) as workspace:
        with workspace.files() as files:
            with pytest.raises(AmbiguousEdit) as told:
                files.edit(p("f"), b"x", b"y", Change())
            assert told.value.data["found"] == 3
            with pytest.raises(AmbiguousEdit):
                files.edit(p("f"), b"x", b"y", Change(), count=2)
            with pytest.raises(EditNotFound):
                files.edit(p("f"), b"[x]", b"y", Change())
            with pytest.raises(BadUsage):
                files.edit(p("f"), b"", b"y", Change())
            assert files.read(p("f")).data == b"x x x"
            change = Change()
            files.edit(p("f"), b"x", b"y", change, replace_all=True)
            assert (change.count, files.read(p("f")).data) == (3, b"y y y")


async def test_remove_deletes_links_themselves_and_full_folders_only_when_told(
    tmp_path: Path, project: Path
) -> None:
    (project / "src" / "deep").mkdir()
    (project / "src" / "deep" / "f").write_text("f")
    os.symlink("src", project / "to-src")
    os.symlink(tmp_path / "outside", project / "src" / "out")
    async with open_here(tmp_path) as workspace:
        with workspace.files() as files:
            files.remove(p("to-src"), Change())
            assert files.stat(p("src/deep/f")).size == 1
            with pytest.raises(FileExists):
                files.remove(p("src"), Change())
            files.remove(p("src"), Change(), recursive=True)
            with pytest.raises(NotFound):
                files.lstat(p("src"))
            with pytest.raises(NotFound):
                files.remove(p("src"), Change())
            files.remove(p("src"), Change(), missing_ok=True)
            with pytest.raises(BadUsage):
                files.remove(p(""), Change(), recursive=True)
    assert (tmp_path / "outside").read_text() == "outside\n"


async def test_a_folder_of_the_base_is_renamed_whole_with_modes_times_and_links(
    tmp_path: Path, project: Path
) -> None:
    (project / "src" / "deep").mkdir()
    (project / "src" / "deep" / "x").write_text("x")
    (project / "src" / "deep" / "x").chmod(0o751)
    os.utime(project / "src" / "deep" / "x", ns=(10**18, 10**18))
    os.symlink("deep/x", project / "src" / "link")
    async with open_here(tmp_path) as workspace:
        with workspace.files() as files:
            files.rename(p("src"), p("lib"), Change())
            assert [n for n, _, _ in files.listing(p(""), limit=99)[0]] == [b"a", b"lib"]
            moved = files.stat(p("lib/link"))
            assert (moved.mode, moved.mtime_ns, moved.size) == (0o751, 10**18, 1)
            with pytest.raises(BadUsage):
                files.rename(p("lib"), p("lib/deep/lib"), Change())
            with pytest.raises(FileExists):
                files.rename(p("a"), p("lib/b"), Change())
            files.rename(p("a"), p("lib/b"), Change(), overwrite=True)
            assert files.read(p("lib/b")).data == b"one\ntwo\n"


async def test_a_folder_that_cannot_be_moved_whole_stays_whole(
    tmp_path: Path, project: Path
) -> None:
    os.mkfifo(project / "src" / "pipe")
    async with open_here(tmp_path) as workspace:
        with workspace.files() as files:
            with pytest.raises(NotRegularFile):
                files.rename(p("src"), p("lib"), Change())
            assert [n for n, _, _ in files.listing(p(""), limit=99)[0]] == [b"a", b"src"]
            assert [n for n, _, _ in files.listing(p("src"), limit=99)[0]] == [b"b", b"pipe"]


async def test_denied_and_read_only_paths_are_refused_also_as_part_of_a_tree(
    tmp_path: Path, project: Path
) -> None:
    os.symlink("src/b", project / "way-in")
    async with open_here(tmp_path, deny=("src/b",), ro=("a",)) as workspace:
        with workspace.files() as files:
            for act in (
                lambda: files.read(p("src/b")),
                lambda: files.read(p("way-in")),
                lambda: files.lstat(p("src/b")),
                lambda: written(files, "src/b", b"x"),
                lambda: written(files, "a", b"x"),
                lambda: files.remove(p("src"), Change(), recursive=True),
                lambda: files.rename(p("src"), p("lib"), Change()),
            ):
                with pytest.raises(Refused):
                    act()
            assert files.read(p("a")).data == b"one\ntwo\n"
            written(files, "src/c", b"the control")


# names that lead elsewhere


async def test_links_inside_the_project_are_followed_into_the_view_only(
    tmp_path: Path, project: Path
) -> None:
    os.symlink("src", project / "rel")
    os.symlink(project / "a", project / "abs")  # absolute, and still the view's own file
    os.symlink("../../project/rel/../src/b", project / "src" / "round")
    os.symlink("src/fresh", project / "dangling")
    before = listing(project)
    async with open_here(tmp_path) as workspace:
        with workspace.files() as files:
            written(files, "abs", b"through abs")
            written(files, "rel/b", b"through rel")
            written(files, "dangling", b"made")
            assert files.read(p("a")).data == b"through abs"
            assert files.lstat(p("abs")).type == "symlink"
            assert files.read(p("src/round")).data == b"through rel"
            assert files.read(p("rel/b")).data == b"through rel"
            assert files.stat(p("rel/b")) == files.lstat(p("rel/b")) == files.stat(p("src/b"))
            assert files.read(p("src/fresh")).data == b"made"
            assert files.resolved(p("src/round")) == b"src/b"
            assert [n for n, _, _ in files.listing(p("rel"), limit=9)[0]] == [
                b"b",
                b"fresh",
                b"round",
            ]
    assert listing(project) == before


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("/etc/passwd", "evil"),
        ("../../outside", "evil"),
        ("/etc", "evil/passwd"),
        ("..", "evil/../outside"),
        ("..", "evil/evil2"),
        ("/proc/self/root", "evil/etc/passwd"),
        ("/proc/self/cwd", "evil/x"),
        ("/dev/stdin", "evil"),
        ("hop", "evil"),
        ("/", "evil/etc/passwd"),
    ],
)
async def test_a_link_out_of_the_project_is_followed_by_no_call(
    tmp_path: Path, project: Path, target: str, name: str
) -> None:
    os.symlink("../../../../../../../../../../etc/passwd", project / "hop")
    os.symlink(target, project / "evil")
    outside = listing(tmp_path / "home").keys(), (tmp_path / "outside").read_bytes()
    path = WorkspacePath(name.encode())  # as a hostile caller would, past every parser
    async with open_here(tmp_path) as workspace:
        with workspace.files() as files:
            for act in (
                lambda: files.read(path),
                lambda: files.stat(path),
                lambda: files.listing(path, limit=9),
                lambda: files.write(path, b"owned", Change()),
                lambda: files.edit(path, b"root", b"owned", Change()),
                lambda: files.chmod(path, 0o777, Change()),
            ):
                with pytest.raises((Refused, NotDirectory, BadPath)):
                    act()
            # The control: the same calls work on a link that stays inside.
            os.symlink("a", project / "good")
        with workspace.files() as files:
            written(files, "good", b"fine")
            assert files.read(p("good")).data == b"fine"
    assert (tmp_path / "outside").read_bytes() == outside[1]
    assert Path("/etc/passwd").read_bytes() != b"owned"


async def test_links_that_go_round_end_in_an_error(tmp_path: Path, project: Path) -> None:
    os.symlink("loop", project / "loop")
    os.symlink("pong/x", project / "ping")
    os.symlink("ping/x", project / "pong")
    async with open_here(tmp_path) as workspace:
        with workspace.files() as files:
            for name in ("loop", "ping", "ping/x"):
                with pytest.raises(FileFailed, match="loop"):
                    files.read(p(name))
            assert files.lstat(p("loop")).type == "symlink"


async def test_a_parent_that_keeps_turning_into_a_link_never_leads_a_write_out(
    tmp_path: Path, project: Path
) -> None:
    """The agent swaps a folder and a link to a folder outside, as fast as it can."""
    victim = tmp_path / "victim"
    victim.mkdir()
    async with open_here(tmp_path) as workspace:
        with Tree(os.dup(workspace.view.root_fd)) as tree:
            os.mkdir(b"real", dir_fd=tree.fd)
            os.symlink(os.fsencode(victim), b"link", dir_fd=tree.fd)
            root = os.dup(tree.fd)
        stop = threading.Event()
        swaps = 0

        def swap() -> None:
            nonlocal swaps
            moves = [(b"real", b"dir"), (b"dir", b"real"), (b"link", b"dir"), (b"dir", b"link")]
            while not stop.is_set():
                for old, new in moves:
                    os.rename(old, new, src_dir_fd=root, dst_dir_fd=root)
                swaps += 1

        agent = threading.Thread(target=swap)
        agent.start()
        outcomes: set[str] = set()
        try:
            # Until both faces were met, or 20,000 tries: the assertion below does not need them met.
            for n in range(20_000):
                with workspace.files() as files:
                    try:
                        written(files, "dir/f", b"x", parents=False)
                        outcomes.add("written")
                    except DeltaboxError as exc:
                        outcomes.add(exc.host_code)
                if {"written", "FS_SANDBOX_DENIED"} <= outcomes and n > 500:
                    break
        finally:
            stop.set()
            agent.join()
            os.close(root)
        assert swaps > 0
        assert os.listdir(victim) == []
        # The control: a plain write by name goes out through that very link.
        os.symlink(victim, tmp_path / "dir")
        (tmp_path / "dir" / "f").write_text("x")
        assert os.listdir(victim) == ["f"]


@pytest.mark.parametrize("kind", ["fifo", "socket", "device"])
async def test_what_is_no_file_is_never_opened_and_never_waited_for(
    tmp_path: Path, project: Path, kind: str
) -> None:
    made = project / "odd"
    if kind == "fifo":
        os.mkfifo(made)
    elif kind == "socket":
        os.mknod(made, 0o644 | stat.S_IFSOCK)
    elif os.geteuid() != 0:
        pytest.skip("only root can make a device")
    else:
        os.mknod(made, 0o644 | stat.S_IFCHR, os.makedev(1, 5))
    async with open_here(tmp_path) as workspace:
        with workspace.files() as files:
            assert files.stat(p("odd")).type == "other"
            for act in (
                lambda: files.read(p("odd")),
                lambda: files.edit(p("odd"), b"a", b"b", Change()),
                lambda: written(files, "odd", b"x"),
            ):
                with pytest.raises(NotRegularFile):
                    act()
            files.remove(p("odd"), Change())


async def test_names_of_any_bytes_and_any_length_work_and_longer_ones_are_refused(
    tmp_path: Path, project: Path
) -> None:
    names = [b"\xff\xfe", b"new\nline", b"-rf", b"x" * 255, b"\xe2\x80\xae", b" ", b"*", b"a\\b"]
    async with open_here(tmp_path) as workspace:
        with workspace.files() as files:
            for name in names:
                files.write(WorkspacePath(b"n/" + name), name, Change())
            for name in names:
                assert files.read(WorkspacePath(b"n/" + name)).data == name
            assert [n for n, _, _ in files.listing(p("n"), limit=99)[0]] == sorted(names)
            with pytest.raises(BadPath):
                files.write(WorkspacePath(b"x" * 256), b"", Change())
        with pytest.raises(BadPath):
            parse(b"x" * 256)


async def test_a_tree_deeper_than_a_path_may_be_long_is_written_read_and_removed(
    tmp_path: Path, project: Path
) -> None:
    deep = b"/".join([b"d" * 200] * 30)  # 6,000 bytes; the kernel takes 4,096 at once
    async with open_here(tmp_path) as workspace:
        with workspace.files() as files:
            files.write(WorkspacePath(deep + b"/f"), b"deep", Change())
            assert files.read(WorkspacePath(deep + b"/f")).data == b"deep"
            files.remove(WorkspacePath(b"d" * 200), Change(), recursive=True)
            assert [n for n, _, _ in files.listing(p(""), limit=9)[0]] == [b"a", b"src"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
async def test_modes_forbid_what_they_forbid_and_the_error_is_not_a_policy_s(
    tmp_path: Path, project: Path
) -> None:
    (project / "a").chmod(0)
    (project / "src").chmod(0o500)
    try:
        async with open_here(tmp_path) as workspace:
            with workspace.files() as files:
                with pytest.raises(PermissionDenied):
                    files.read(p("a"))
                assert files.stat(p("a")).size == 8
                with pytest.raises(PermissionDenied):
                    written(files, "src/n", b"x")
                written(files, "n", b"the control")
    finally:
        (project / "src").chmod(0o700)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has rights to lend")
async def test_root_lends_the_agent_no_rights_over_files(tmp_path: Path, project: Path) -> None:
    """A project of an ordinary user, opened by root: file calls have that user's rights."""
    for path in (tmp_path / "home", project, project / "src", project / "a", project / "src/b"):
        os.chown(path, 1001, 1001)
    (project / "roots").write_text("secret")
    (project / "roots").chmod(0o600)
    async with open_here(tmp_path) as workspace:
        with workspace.files() as files:
            with pytest.raises(PermissionDenied):
                files.read(p("roots"))
            written(files, "a", b"x")
            written(files, "sub/new", b"x")
            for name in ("a", "sub", "sub/new"):
                st = files.tree.lstat(p(name))
                assert (st.st_uid, st.st_gid) == (1001, 1001)
        # The control, and nothing of the lending stays: root itself reads on.
        assert (project / "roots").read_text() == "secret"


# what a name means


# A sent path → the project's own path, or None for the host's.
NAMES: dict[bytes, bytes | None] = {
    b"": b"",
    b".": b"",
    b"a": b"a",
    b"./a//b/": b"a/b",
    b"a/../b": b"b",
    b"/h/p": b"",
    b"/h/p/": b"",
    b"/h/p/a": b"a",
    b"/h//p/./x/../a": b"a",
    b"../p/a": b"a",
    b"..": None,
    b"../pp": None,
    b"/h/pp/a": None,
    b"/h/p/../q": None,
    b"/": None,
    b"/etc/passwd": None,
    b"a/../../../etc/passwd": None,
    b"..a": b"..a",
}


def test_a_name_means_the_view_exactly_when_it_lies_below_the_project() -> None:
    for raw, meant in NAMES.items():
        found = locate(raw, b"/h/p")
        assert (None if isinstance(found, OnHost) else found) == meant, raw
    for bad in (b"a\0b", b"/h/p/a\0", b"x" * 300):
        with pytest.raises(BadPath):
            locate(bad, b"/h/p")


def test_files_of_another_tree_are_closed_with_it(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    (tmp_path / "f").write_text("x")
    with EditableFiles(Tree.open(tmp_path), os.fsencode(tmp_path), ME) as files:
        files.write(p("d/e"), b"x", Change())
        files.read(p("d/e"))
        with pytest.raises(NotFound):
            files.read(p("none"))
    assert len(os.listdir("/proc/self/fd")) == before
