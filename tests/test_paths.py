"""Paths: nothing leaves a tree, nothing is followed, and no two names look alike."""

import errno
import os
import stat
import string
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deltabox import paths
from deltabox.errors import BadPath
from deltabox.paths import ROOT, Tree, WorkspacePath, parse

SECRET = b"the user's secret"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret").write_bytes(SECRET)
    return folder


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    root = tmp_path / "tree"
    (root / "dir" / "sub").mkdir(parents=True)
    (root / "dir" / "file").write_bytes(b"content")
    with Tree.open(root) as opened:
        yield opened


def plain_open(tree: Tree, path: bytes) -> bytes:
    """The control: what a program that knows nothing of escapes would read."""
    fd = os.open(path, os.O_RDONLY, dir_fd=tree.fd)
    with open(fd, "rb") as file:
        return file.read()


# parse

names = st.binary(min_size=1, max_size=12).filter(
    lambda n: b"/" not in n and b"\0" not in n and n not in (b".", b"..")
)
wholes = st.lists(names, max_size=6)


@given(wholes, st.lists(st.sampled_from([b"/", b"//", b"/./", b"/.//./"]), min_size=6, max_size=6))
def test_parse_folds_dots_and_doubled_slashes_to_one_form(
    parts: list[bytes], seps: list[bytes]
) -> None:
    spelled = b"".join(part + sep for part, sep in zip(parts, seps, strict=False))
    assert parse(spelled) == b"/".join(parts)
    assert parse(parse(spelled)) == parse(spelled)


@given(st.binary(max_size=40))
@example(b"..")
@example(b"a/../../b")
@example(b"a\0b")
@example(b"/etc/passwd")
def test_parse_gives_a_path_that_cannot_leave_or_refuses(raw: bytes) -> None:
    try:
        path = parse(raw)
    except BadPath:
        assert raw.startswith(b"/") or b"\0" in raw or b".." in raw.split(b"/")
        return
    assert not path.startswith(b"/")
    assert b"\0" not in bytes(path)
    parts = bytes(path).split(b"/")
    assert path == ROOT or not {b"", b".", b".."} & set(parts)


def test_parse_refuses_a_name_that_no_file_can_have() -> None:
    assert parse("x" * 255) == b"x" * 255
    with pytest.raises(BadPath):
        parse("dir/" + "x" * 256)


def test_parse_refuses_text_that_stands_for_no_bytes() -> None:
    assert parse("a\udcff") == b"a\xff"
    with pytest.raises(BadPath):
        parse("a\ud800")


# display

TRICKY = [
    b"a\x1b[31m", b"a\nb", b"a\rb", b"a\tb", b"\xff", b"\\xff", b'"', b"a\\", b" ", b"a ", b" a", b"a  b",
    "\u202egpj.exe".encode(), "a\u200bb".encode(), "\u2066x\u2069".encode(), "\x80".encode(), b"\x80",
    "\xa0".encode(), b"\xa0", "é".encode(), "e\u0301".encode(), "\u3164".encode(), "a\ufe0f".encode(),
    "\U000e0100".encode(), "\u2800".encode(), "\u212b".encode(), "\xc5".encode(), "\ufeffa".encode(), b"a",
]  # fmt: skip


def is_safe(shown: str) -> bool:
    """One line, in the order of its letters, nothing that acts on a terminal."""
    return all(unicodedata.category(ch)[0] not in "C" and ch not in "\u2028\u2029" for ch in shown)


@given(
    st.one_of(
        st.binary(min_size=1, max_size=20),
        st.text(min_size=1, max_size=20).map(lambda t: t.encode("utf-8", "surrogatepass")),
    )
)
def test_display_never_emits_a_control_format_or_bidi_character(path: bytes) -> None:
    shown = paths.display(path)
    assert is_safe(shown), ascii(shown)
    assert shown.isprintable()
    assert shown.strip() == shown


def test_the_check_for_safe_text_notices_each_kind_of_danger() -> None:
    assert not any(is_safe(bad) for bad in ("\x1b", "\n", "\u202e", "\u2066", "\u200b", "\x9b"))


@pytest.mark.parametrize("name", TRICKY)
def test_names_that_could_deceive_are_shown_in_quotes_or_plain_and_whole(name: bytes) -> None:
    shown = paths.display(name)
    assert is_safe(shown)
    assert shown.startswith('"') == (name not in ("é".encode(), "\xc5".encode(), b"a"))


def test_no_two_tricky_names_are_shown_alike() -> None:
    shown = [unicodedata.normalize("NFC", paths.display(name)) for name in TRICKY]
    assert len(set(shown)) == len(TRICKY)


alphabet = st.sampled_from(
    [b"a", b"\\", b'"', b"x", b"u", b"{", b"8", b"0", b"}", b"\x80", b"\xc2\x80", b"\xff", b"\n", b"n",
     b" ", b"e", "\u0301".encode(), "\u202e".encode(), "é".encode()]
)  # fmt: skip
lookalikes = st.lists(alphabet, min_size=1, max_size=8).map(b"".join)


@given(lookalikes, lookalikes)
@example(b"\x80", b"\xc2\x80")
@example(b"\xff", b"\\xff")
@example(b"e\xcc\x81", b"\xc3\xa9")
def test_two_different_names_are_never_shown_alike(one: bytes, other: bytes) -> None:
    first = unicodedata.normalize("NFC", paths.display(one))
    second = unicodedata.normalize("NFC", paths.display(other))
    assert (first == second) == (one == other)


@given(st.text(string.ascii_letters + string.digits + "._-äöü漢 ", min_size=1, max_size=20))
def test_everyday_names_are_shown_as_they_are(name: str) -> None:
    if name == name.strip() and "  " not in name:
        assert paths.display(name.encode()) == name


# relations


@given(wholes, wholes)
def test_is_within_is_true_of_a_path_and_what_lies_below_and_of_nothing_else(
    one: list[bytes], other: list[bytes]
) -> None:
    inside = one[: len(other)] == other
    assert paths.is_within(b"/".join(one), b"/".join(other)) == inside
    absolute = (b"/" + b"/".join(one), b"/" + b"/".join(other))
    assert paths.is_within(*absolute) == inside


@given(wholes.filter(bool))
def test_parent_and_name_take_apart_what_join_puts_together(parts: list[bytes]) -> None:
    path = WorkspacePath(b"/".join(parts))
    assert paths.join(paths.parent(path), paths.name(path)) == path


# escapes, each with the plain open that shows it would work


def test_dotdot_does_not_leave_the_tree(tree: Tree, outside: Path) -> None:
    assert plain_open(tree, b"../outside/secret") == SECRET
    with pytest.raises(OSError, match=os.strerror(errno.EXDEV)):
        tree.open_at(WorkspacePath(b"../outside/secret"), os.O_RDONLY)


def test_an_absolute_path_does_not_leave_the_tree(tree: Tree, outside: Path) -> None:
    target = os.fsencode(outside / "secret")
    assert plain_open(tree, target) == SECRET
    with pytest.raises(OSError, match=os.strerror(errno.EXDEV)):
        tree.open_at(WorkspacePath(target), os.O_RDONLY)


@pytest.mark.parametrize("target", ["absolute", "relative", "inside"])
def test_a_link_as_last_component_is_not_followed(tree: Tree, outside: Path, target: str) -> None:
    secret = str(outside / "secret")
    ways = {"absolute": secret, "relative": "../outside/secret", "inside": "dir/file"}
    to = ways[target]
    os.symlink(to, "link", dir_fd=tree.fd)
    assert plain_open(tree, b"link") in (SECRET, b"content")
    for flags in (os.O_RDONLY, os.O_WRONLY | os.O_CREAT, os.O_WRONLY | os.O_TRUNC):
        with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
            tree.open_at(WorkspacePath(b"link"), flags)
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        tree.open_file(WorkspacePath(b"link"))
    assert (outside / "secret").read_bytes() == SECRET
    assert tree.readlink(WorkspacePath(b"link")) == os.fsencode(to)
    assert stat.S_ISLNK(tree.lstat(WorkspacePath(b"link")).st_mode)


@pytest.mark.parametrize("target", ["absolute", "relative", "inside"])
def test_a_link_in_the_middle_is_not_followed(tree: Tree, outside: Path, target: str) -> None:
    to = {"absolute": str(outside), "relative": "../outside", "inside": "dir"}[target]
    os.symlink(to, "way", dir_fd=tree.fd)
    name = b"file" if target == "inside" else b"secret"
    assert plain_open(tree, b"way/" + name) in (SECRET, b"content")
    path = WorkspacePath(b"way/" + name)
    for act in (tree.lstat, tree.open_file, tree.readlink, tree.parent_fd):
        with pytest.raises(
            OSError, match=f"{os.strerror(errno.ELOOP)}|{os.strerror(errno.ENOTDIR)}"
        ):
            act(path)
    assert tree.lstat_or_none(path) is None


def test_a_link_planted_where_a_walk_is_about_to_descend_does_not_lead_it_out(
    tree: Tree, outside: Path
) -> None:
    walk = tree.walk()
    assert next(walk)[0] == b"dir"
    os.rename("dir", "moved", src_dir_fd=tree.fd, dst_dir_fd=tree.fd)
    os.symlink(outside, "dir", dir_fd=tree.fd)
    assert plain_open(tree, b"dir/secret") == SECRET
    with pytest.raises(OSError, match=f"{os.strerror(errno.ELOOP)}|{os.strerror(errno.ENOTDIR)}"):
        list(walk)


def test_a_link_planted_after_a_lookup_does_not_redirect_the_next_call(
    tree: Tree, outside: Path
) -> None:
    path = WorkspacePath(b"dir/secret")
    assert tree.lstat_or_none(path) is None
    os.rename("dir", "moved", src_dir_fd=tree.fd, dst_dir_fd=tree.fd)
    os.symlink(outside, "dir", dir_fd=tree.fd)
    # The parent held open goes on meaning the directory it was; walked again, it is refused.
    assert tree.lstat_or_none(path) is None
    tree.forget()
    assert tree.lstat_or_none(path) is None
    assert plain_open(tree, bytes(path)) == SECRET


def test_a_magic_link_of_proc_is_not_followed(outside: Path) -> None:
    with open(outside / "secret", "rb") as file, Tree.open(f"/proc/{os.getpid()}") as proc:
        path = WorkspacePath(b"fd/%d" % file.fileno())
        assert plain_open(proc, bytes(path)) == SECRET
        with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
            proc.open_at(path, os.O_RDONLY)


def test_a_tree_of_one_filesystem_stops_at_a_mount() -> None:
    path = WorkspacePath(b"proc/version")
    with Tree.open("/") as whole, Tree.open("/", one_filesystem=True) as one:
        assert whole.lstat_or_none(path) is not None
        with pytest.raises(OSError, match=os.strerror(errno.EXDEV)):
            one.lstat(path)


def test_a_tree_is_not_opened_through_a_link(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "link").symlink_to(outside)
    with pytest.raises(NotADirectoryError):
        Tree.open(tmp_path / "link")


def test_a_nul_in_a_path_does_not_cut_it(tree: Tree) -> None:
    assert tree.lstat_or_none(WorkspacePath(b"dir/file")) is not None
    with pytest.raises(OSError, match="NUL"):
        tree.open_at(WorkspacePath(b"dir/file\0.txt"), os.O_RDONLY)


def test_a_fifo_is_refused_without_waiting_for_its_writer(tree: Tree) -> None:
    os.mkfifo("fifo", dir_fd=tree.fd)
    with pytest.raises(OSError, match="not a regular file"):
        tree.open_file(WorkspacePath(b"fifo"))


# walks and descriptors


def test_walk_gives_parents_first_and_siblings_in_byte_order(tree: Tree) -> None:
    for name in (b"b", b"a", b"\xff", b"a b", b"Z", b"dir/sub/x", b"a.b"):
        os.close(os.open(name, os.O_CREAT | os.O_WRONLY, dir_fd=tree.fd))
    seen = [path for path, _ in tree.walk()]
    assert seen[:7] == [b"Z", b"a", b"a b", b"a.b", b"b", b"dir", b"\xff"]
    assert seen[7:] == [b"dir/file", b"dir/sub", b"dir/sub/x"]
    assert tree.names() == seen[:7]


shapes: st.SearchStrategy[Any] = st.recursive(
    st.just({}), lambda inner: st.dictionaries(names, inner, max_size=4), max_leaves=12
)


@given(shape=shapes)
def test_walk_gives_everything_once_and_each_parent_before_its_children(
    tmp_path_factory: pytest.TempPathFactory, shape: dict[bytes, object]
) -> None:
    root = os.fsencode(tmp_path_factory.mktemp("shape"))
    made = set()

    def make(at: bytes, inside: dict[bytes, object]) -> None:
        for name, below in inside.items():
            made.add(at + name)
            os.mkdir(root + b"/" + at + name)
            make(at + name + b"/", below)  # type: ignore[arg-type]

    make(b"", shape)
    with Tree.open(root) as tree:
        seen = [bytes(path) for path, _ in tree.walk()]
    assert set(seen) == made
    assert len(seen) == len(made)
    for number, path in enumerate(seen):
        assert (
            not paths.parent(WorkspacePath(path))
            or paths.parent(WorkspacePath(path)) in seen[:number]
        )
    for folder in {paths.parent(WorkspacePath(p)) for p in seen}:
        siblings = [p for p in seen if paths.parent(WorkspacePath(p)) == folder]
        assert siblings == sorted(siblings)


def test_a_walk_whose_directory_vanishes_says_so(tree: Tree) -> None:
    walk = tree.walk()
    assert next(walk)[0] == b"dir"
    os.rename("dir", "away", src_dir_fd=tree.fd, dst_dir_fd=tree.fd)
    with pytest.raises(FileNotFoundError):
        list(walk)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_walk_that_may_not_read_a_directory_says_so(tree: Tree) -> None:
    os.chmod("dir", 0, dir_fd=tree.fd)
    try:
        with pytest.raises(PermissionError):
            list(tree.walk())
    finally:
        os.chmod("dir", 0o700, dir_fd=tree.fd)


def test_a_tree_deeper_than_the_kernels_longest_path_is_walked_and_opened(tmp_path: Path) -> None:
    root = tmp_path / "deep"
    root.mkdir()
    name = b"d" * 200
    at = os.open(root, os.O_RDONLY)
    for _ in range(30):
        os.mkdir(name, dir_fd=at)
        below = os.open(name, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(os.open("leaf", os.O_CREAT | os.O_WRONLY, dir_fd=at))
    os.close(at)
    leaf = WorkspacePath(b"/".join([name] * 30 + [b"leaf"]))
    with Tree.open(root) as tree:
        with pytest.raises(OSError, match=os.strerror(errno.ENAMETOOLONG)):
            paths.openat2(tree.fd, leaf, os.O_RDONLY)
        os.close(tree.open_file(leaf))
        assert [path for path, _ in tree.walk()][-1] == leaf
        assert tree.lstat(leaf).st_size == 0


def test_a_long_way_through_a_link_is_refused_like_a_short_one(tmp_path: Path) -> None:
    root = tmp_path / "deep"
    root.mkdir()
    parts = [b"d" * 200] * 25
    at = os.open(root, os.O_RDONLY)
    for part in parts:
        os.mkdir(part, dir_fd=at)
        below = os.open(part, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.symlink(tmp_path, "way", dir_fd=at)
    os.close(at)
    with Tree.open(root) as tree:
        for tail in ([b"way", b"deep"], [b".."] * 27):
            with pytest.raises(
                OSError, match=f"{os.strerror(errno.ELOOP)}|{os.strerror(errno.EXDEV)}"
            ):
                tree.open_at(WorkspacePath(b"/".join([*parts, *tail])), os.O_PATH)


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_a_tree_leaves_no_descriptor_open_whatever_fails(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_text("x")
    (tmp_path / "link").symlink_to("d")
    before = open_fds()
    with Tree.open(tmp_path) as tree:
        list(tree.walk())
        tree.lstat(WorkspacePath(b"d/f"))
        os.mkfifo(tmp_path / "fifo")
        for bad in (b"link/f", b"fifo", b"none/x", b"d", b"d/f/x", (b"x/" * 2500) + b"y"):
            with pytest.raises(OSError):  # noqa: PT011 - every sort of refusal
                tree.open_file(WorkspacePath(bad))
    assert open_fds() == before


# renames that os.rename cannot ask for


def test_renameat2_without_replacing_refuses_what_plain_rename_would_destroy(tree: Tree) -> None:
    os.close(os.open("other", os.O_CREAT | os.O_WRONLY, dir_fd=tree.fd))
    with pytest.raises(FileExistsError):
        paths.renameat2(
            tree.fd,
            b"other",
            tree.parent_fd(WorkspacePath(b"dir/file")),
            b"file",
            paths.RENAME_NOREPLACE,
        )
    assert plain_open(tree, b"dir/file") == b"content"
    os.rename("other", "dir/file", src_dir_fd=tree.fd, dst_dir_fd=tree.fd)
    assert plain_open(tree, b"dir/file") == b""


def test_renameat2_exchanges_two_entries_at_once(tree: Tree) -> None:
    os.symlink("x", "other", dir_fd=tree.fd)
    paths.renameat2(tree.fd, b"other", tree.fd, b"dir", paths.RENAME_EXCHANGE)
    assert tree.readlink(WorkspacePath(b"dir")) == b"x"
    assert stat.S_ISDIR(tree.lstat(WorkspacePath(b"other")).st_mode)


def test_openat2_names_the_kernels_reason_and_closes_on_exec(tree: Tree) -> None:
    fd = paths.openat2(tree.fd, b"dir", os.O_RDONLY)
    try:
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)
    with pytest.raises(FileNotFoundError) as found:
        paths.openat2(tree.fd, b"none", os.O_RDONLY)
    assert found.value.filename == b"none"
