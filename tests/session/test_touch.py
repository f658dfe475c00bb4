"""First touches by real inotify: nothing that changed is missed, and the base's first look stays."""

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltabox.engines.delta import Fingerprint, Merged
from deltabox.engines.overlay import OverlayEngine
from deltabox.paths import Tree, WorkspacePath
from deltabox.session.touch import ABSENT, Seen, TouchWatcher, fingerprint, recorded
from tests.places import Place, run_python, sh

FOREVER = 1 << 62  # a session that began after everything: nothing has drifted
QUEUE = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())


@dataclass
class Both:
    """A base, an upper that the test writes as a mount would, and their watcher."""

    base: Path
    upper: Path
    watcher: TouchWatcher

    def drain(self) -> set[bytes]:
        return set(self.watcher.drain().paths)


def watch(base: Path, upper: Path, *, since_ns: int = FOREVER) -> TouchWatcher:
    return TouchWatcher(Tree.open(upper), Tree.open(base), since_ns=since_ns)


def close(watcher: TouchWatcher) -> None:
    watcher.close()
    watcher._base.close()


@pytest.fixture
def both(tmp_path: Path) -> Iterator[Both]:
    base, upper = tmp_path / "base", tmp_path / "upper"
    base.mkdir()
    upper.mkdir()
    (base / "file").write_text("base")
    watcher = watch(base, upper)
    yield Both(base, upper, watcher)
    close(watcher)


def paths_below(folder: Path) -> set[bytes]:
    with Tree.open(folder) as tree:
        return {bytes(path) for path, _ in tree.walk()}


def probe(both: Both) -> tuple[set[bytes], set[bytes]]:
    """A new file in every directory: what was made, and what the watcher then reports."""
    both.drain()
    folders = [
        b"",
        *(p for p in paths_below(both.upper) if (both.upper / os.fsdecode(p)).is_dir()),
    ]
    made = set()
    for number, folder in enumerate(folders):
        name = b"probe%d" % number
        path = folder + b"/" + name if folder else name
        os.mknod(os.fsencode(both.upper) + b"/" + path)
        made.add(path)
    return made, both.drain()


# what a drain brings


def test_each_sort_of_change_is_seen_once_it_has_ended(both: Both) -> None:
    up = both.upper
    assert both.drain() == set()
    (up / "new").write_text("x")
    (up / "folder").mkdir()
    (up / "link").symlink_to("nowhere")
    os.mkfifo(up / "fifo")
    assert both.drain() == {b"new", b"folder", b"link", b"fifo"}
    (up / "new").write_text("y")
    (up / "fifo").chmod(0o600)
    assert both.drain() == {b"new", b"fifo"}
    (up / "link").unlink()
    (up / "folder").rmdir()
    (up / "new").rename(up / "newer")
    assert both.drain() == {b"link", b"folder", b"new", b"newer"}
    assert both.drain() == set()


def test_what_was_there_before_the_watch_is_seen_first(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "upper" / "a" / "b").mkdir(parents=True)
    (tmp_path / "upper" / "a" / "b" / "c").touch()
    watcher = watch(tmp_path / "base", tmp_path / "upper")
    assert watcher.drain().paths == {b"a", b"a/b", b"a/b/c"}
    assert watcher.drain().paths == set()
    close(watcher)


def test_names_of_any_bytes_are_seen_as_they_are(both: Both) -> None:
    names = [b"\xff", b"a\nb", b" ", b"x" * 255, "é".encode(), b"'\"\\"]
    for name in names:
        os.mkdir(os.fsencode(both.upper) + b"/" + name)
        os.mknod(os.fsencode(both.upper) + b"/" + name + b"/in")
    assert both.drain() == {*names, *(n + b"/in" for n in names)}


def test_what_is_made_in_a_folder_before_it_can_be_watched_is_seen(both: Both) -> None:
    (both.upper / "a" / "b" / "c" / "d").mkdir(parents=True)
    (both.upper / "a" / "b" / "c" / "d" / "file").touch()
    assert both.drain() == {b"a", b"a/b", b"a/b/c", b"a/b/c/d", b"a/b/c/d/file"}
    made, seen = probe(both)
    assert seen == made


def test_a_storm_of_nested_folders_is_seen_whole_while_it_rages(both: Both) -> None:
    def storm(name: str) -> None:
        for number in range(40):
            folder = both.upper / name / str(number % 5) / str(number) / "x" / "y"
            folder.mkdir(parents=True)
            (folder / "file").touch()

    threads = [threading.Thread(target=storm, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    seen = set()
    while any(thread.is_alive() for thread in threads):
        seen |= both.drain()
    for thread in threads:
        thread.join()
    seen |= both.drain()
    assert seen == paths_below(both.upper)
    made, found = probe(both)
    assert found == made


def test_a_renamed_folder_goes_on_under_its_new_name(both: Both) -> None:
    (both.upper / "old" / "deep").mkdir(parents=True)
    (both.upper / "older").mkdir()
    both.drain()
    (both.upper / "old").rename(both.upper / "new")
    assert {b"old", b"new", b"new/deep"} <= both.drain()
    (both.upper / "new" / "deep" / "file").touch()
    (both.upper / "older" / "file").touch()  # only a name that begins alike
    assert both.drain() == {b"new/deep/file", b"older/file"}


def test_folders_that_swap_their_names_between_two_drains_are_told_apart(both: Both) -> None:
    for name in ("a", "b"):
        (both.upper / name / "sub").mkdir(parents=True)
    both.drain()
    (both.upper / "a").rename(both.upper / "t")
    (both.upper / "b").rename(both.upper / "a")
    (both.upper / "t").rename(both.upper / "b")
    (both.upper / "a" / "sub" / "in-a").touch()
    (both.upper / "b" / "sub" / "in-b").touch()
    assert {b"a/sub/in-a", b"b/sub/in-b"} <= both.drain()
    made, seen = probe(both)
    assert seen == made


def test_a_folder_that_leaves_the_upper_is_seen_at_its_old_name_only(both: Both) -> None:
    # Overlay moves a removed directory into its work folder and empties it there.
    (both.upper / "gone").mkdir()
    both.drain()
    (both.upper / "gone").rename(both.base / "gone")
    assert both.drain() == {b"gone"}
    (both.upper / "gone").mkdir()
    (both.upper / "gone" / "again").touch()
    assert both.drain() == {b"gone", b"gone/again"}


names = st.sampled_from(["a", "b", "c"])
folders = st.lists(names, max_size=3).map("/".join)
steps = st.one_of(
    st.tuples(st.just("mkdir"), folders),
    st.tuples(st.just("file"), folders),
    st.tuples(st.just("rename"), st.tuples(folders, folders)),
    st.tuples(st.just("remove"), folders),
    st.tuples(st.just("drain"), st.none()),
)


@given(st.lists(steps, max_size=25))
def test_after_any_changes_all_that_is_there_was_seen_and_every_folder_is_watched(
    tmp_path_factory: pytest.TempPathFactory, script: list[tuple[str, object]]
) -> None:
    root = tmp_path_factory.mktemp("any")
    (root / "base").mkdir()
    (root / "upper").mkdir()
    both = Both(root / "base", root / "upper", watch(root / "base", root / "upper"))
    seen: set[bytes] = set()
    try:
        for what, where in script:
            apply(both.upper, what, where)
            if what == "drain":
                seen |= both.drain()
        seen |= both.drain()
        assert paths_below(both.upper) <= seen
        made, found = probe(both)
        assert found == made
    finally:
        close(both.watcher)


def apply(upper: Path, what: str, where: object) -> None:
    """One change, as far as the tree allows it."""
    try:
        match what, where:
            case "mkdir", str(path):
                (upper / path).mkdir(parents=True, exist_ok=True)
            case "file", str(path):
                (upper / path / "f").write_text("x")
            case "rename", (str(old), str(new)):
                (upper / old).rename(upper / new)
            case "remove", str(path) if path:
                shutil.rmtree(upper / path)
    except OSError:
        return


# fingerprints


def test_the_first_fingerprint_stays_whatever_the_base_does_later(both: Both) -> None:
    first = Fingerprint.of((both.base / "file").stat())
    (both.upper / "file").write_text("agent")
    seen = both.watcher.drain()
    assert [(t.path, recorded(t)) for t in seen.first] == [(b"file", first)]
    (both.base / "file").write_text("the user's later edit")
    (both.upper / "file").write_text("agent again")
    again = both.watcher.drain()
    assert again.paths == {b"file"}
    assert again.first == []


def test_a_decided_path_is_touched_anew(both: Both) -> None:
    (both.upper / "file").write_text("agent")
    both.watcher.drain()
    both.watcher.forget([b"file"])
    (both.base / "file").write_text("committed")
    (both.upper / "file").write_text("agent once more")
    (touch,) = both.watcher.drain().first
    assert recorded(touch) == Fingerprint.of((both.base / "file").stat())


def test_known_paths_get_no_second_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "upper").mkdir()
    with Tree.open(tmp_path / "base") as base:
        watcher = TouchWatcher(
            Tree.open(tmp_path / "upper"), base, since_ns=FOREVER, known=[b"known"]
        )
        (tmp_path / "upper" / "known").touch()
        (tmp_path / "upper" / "other").touch()
        seen = watcher.drain()
        assert seen.paths == {b"known", b"other"}
        assert [t.path for t in seen.first] == [b"other"]
        watcher.close()


def test_a_path_that_the_base_lacks_is_recorded_as_absent(both: Both) -> None:
    (both.upper / "new" / "deep").mkdir(parents=True)
    (both.base / "blocked").symlink_to("/")
    (both.upper / "blocked").mkdir()
    (both.upper / "blocked" / "etc").mkdir()
    touches = {bytes(t.path): t for t in both.watcher.drain().first}
    assert {p: t.type for p, t in touches.items()} == {
        b"new": ABSENT,
        b"new/deep": ABSENT,
        b"blocked": "symlink",
        b"blocked/etc": ABSENT,  # not what a link in the base leads to
    }
    assert recorded(touches[b"new"]) is None


def change(path: Path, act: Callable[[], object]) -> None:
    """Change until the clock of file times has ticked: it stands still for some milliseconds."""
    before = path.lstat().st_ctime_ns
    while path.lstat().st_ctime_ns == before:
        act()


def test_a_base_file_that_changed_after_the_session_began_has_drifted(both: Both) -> None:
    file = both.base / "file"
    since = file.stat().st_ctime_ns
    with Tree.open(both.base) as base:
        path = WorkspacePath(b"file")
        assert not fingerprint(base, path, since_ns=since).drifted
        change(file, lambda: file.write_text("user"))
        assert fingerprint(base, path, since_ns=since).drifted
        assert not fingerprint(base, path, since_ns=file.stat().st_ctime_ns).drifted


def test_a_change_of_mode_or_of_times_set_back_is_drift_too(both: Both) -> None:
    file = both.base / "file"
    with Tree.open(both.base) as base:
        for act in (lambda: file.chmod(0o600), lambda: os.utime(file, ns=(0, 0))):
            since = file.stat().st_ctime_ns
            change(file, act)
            assert fingerprint(base, WorkspacePath(b"file"), since_ns=since).drifted


def test_a_folder_does_not_drift_by_what_comes_and_goes_in_it(both: Both) -> None:
    folder = both.base / "folder"
    folder.mkdir()
    since = folder.stat().st_ctime_ns

    def come_and_go() -> None:
        (folder / "x").touch()
        (folder / "x").unlink()

    change(folder, come_and_go)
    with Tree.open(both.base) as base:
        assert not fingerprint(base, WorkspacePath(b"folder"), since_ns=since).drifted


@pytest.mark.skipif(os.geteuid() == 0, reason="root may look everywhere")
def test_a_base_that_may_not_be_looked_at_counts_as_drifted(both: Both) -> None:
    (both.base / "shut").mkdir()
    (both.base / "shut" / "file").write_text("x")
    (both.base / "shut").chmod(0)
    try:
        (both.upper / "shut").mkdir()
        (both.upper / "shut" / "file").touch()
        touches = {bytes(t.path): t for t in both.watcher.drain().first}
    finally:
        (both.base / "shut").chmod(0o700)
    assert touches[b"shut/file"].drifted
    assert not touches[b"shut"].drifted


@pytest.mark.skipif(os.geteuid() == 0, reason="root may look everywhere")
def test_a_folder_that_gets_its_rights_back_is_watched_again(both: Both) -> None:
    folder = both.upper / "shut"
    folder.mkdir()
    folder.chmod(0)
    both.drain()
    folder.chmod(0o700)
    (folder / "sub").mkdir()
    assert both.drain() == {b"shut", b"shut/sub"}
    made, seen = probe(both)
    assert seen == made


# when inotify loses count


@pytest.mark.skipif(QUEUE > 100_000, reason="the queue here is too long to fill")
def test_what_an_overflowing_queue_lost_is_found_by_a_walk(both: Both) -> None:
    both.upper.joinpath("one").touch()
    both.upper.joinpath("two").touch()
    blind = watch(both.base, both.upper)
    for watcher in (blind, both.watcher):
        watcher.drain()
    for _ in range(QUEUE // 2 + 10):  # in turn, since equal events in a row become one
        os.utime(both.upper / "one")
        os.utime(both.upper / "two")
    (both.upper / "lost" / "deep").mkdir(parents=True)
    (both.upper / "lost" / "deep" / "file").touch()
    try:
        # The control: by events alone these paths are not to be had.
        events = Seen()
        blind._take(read_all(blind.fd), events)
        assert b"lost" not in events.paths
        assert blind._missed
    finally:
        close(blind)
    assert both.drain() == {b"one", b"two", b"lost", b"lost/deep", b"lost/deep/file"}
    made, seen = probe(both)
    assert seen == made


def read_all(fd: int) -> bytes:
    data = b""
    try:
        while piece := os.read(fd, 1 << 20):
            data += piece
    except BlockingIOError:
        return data
    return data


UNSHARE = (
    "/usr/bin/unshare", "-Ur", "/bin/sh", "-c",
    'echo 3 >/proc/sys/user/max_inotify_watches && exec "$@"', "sh",
)  # fmt: skip


@pytest.mark.bwrap
def test_past_the_limit_of_watches_every_drain_walks(both: Both) -> None:
    code = (
        "import os\nfrom pathlib import Path\nfrom deltabox.paths import Tree\n"
        "from deltabox.session.touch import TouchWatcher\n"
        "base, upper = Path(sys.argv[1]), Path(sys.argv[2])\n"
        "for n in range(6): (upper / f'd{n}').mkdir()\n"
        "w = TouchWatcher(Tree.open(upper), Tree.open(base), since_ns=0)\n"
        "w.drain()\n"
        "print(len(w._path_of))\n"
        "for n in range(6): (upper / f'd{n}' / 'x').touch()\n"
        "print(sum(b'/x' in p for p in w.drain().paths))\n"
        "w.close(); w._base.close()\n"
    )
    out = run_python(code, both.base, both.upper, under=UNSHARE)
    watches, found = map(int, out.split())
    assert watches == 3
    assert found == 6


def test_another_upper_after_a_restack_is_watched_and_nothing_is_lost_between(
    both: Both, tmp_path: Path
) -> None:
    (both.upper / "before").touch()
    other = tmp_path / "other"
    other.mkdir()
    (other / "there").mkdir()
    both.watcher.restart(Tree.open(other))
    (both.upper / "stale").touch()
    (other / "there" / "new").touch()
    seen = both.watcher.drain()
    assert seen.paths == {b"before", b"there", b"there/new"}
    assert {bytes(t.path) for t in seen.first} == {b"before", b"there", b"there/new"}


def test_a_watcher_leaves_nothing_open(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "upper").mkdir()
    before = len(os.listdir("/proc/self/fd"))
    watcher = watch(tmp_path / "base", tmp_path / "upper")
    (tmp_path / "upper" / "x").mkdir()
    watcher.drain()
    close(watcher)
    watcher.close()  # twice is fine
    assert len(os.listdir("/proc/self/fd")) == before


# through a real mount

EVERYDAY = [
    ("echo more >>a", {b"a"}),
    ("rm a", {b"a"}),
    ("chmod 600 a", {b"a"}),
    ("mv a moved", {b"a", b"moved"}),
    ("ln -s a link", {b"link"}),
    ("touch dir/b", {b"dir", b"dir/b"}),
    ("rm -r dir", {b"dir"}),
    ("rm -r dir && mkdir dir && echo x >dir/c", {b"dir", b"dir/c"}),
    ("mkdir -p x/y/z && echo 1 >x/y/z/f && mv x w", {b"w", b"w/y", b"w/y/z", b"w/y/z/f"}),
    ("sed -i s/base/agent/ a", {b"a"}),
    ("cp -a dir copy", {b"copy", b"copy/b"}),
    (": >>a", {b"a"}),
]


@pytest.mark.overlay
@pytest.mark.parametrize(("script", "expected"), EVERYDAY)
async def test_what_a_command_changes_in_a_view_is_seen_when_it_has_ended(
    place: Place, script: str, expected: set[bytes]
) -> None:
    first = {path: Fingerprint.of((place.project / path).stat()) for path in ("a", "dir", "dir/b")}
    async with OverlayEngine().mount(place.spec()) as view:
        watcher = watch(place.project, place.upper)
        try:
            assert watcher.drain().paths == set()
            sh(view, f"cd {place.project} && {script}")
            seen = watcher.drain()
            assert expected <= seen.paths
            with Tree.open(place.project) as base, Tree.open(place.upper) as upper:
                assert {t.path for t in Merged(base, [upper]).changed()} - seen.paths <= {
                    b"dir/b"  # hidden with its folder, which was seen
                }
            prints = {os.fsdecode(t.path): recorded(t) for t in seen.first}
            for path, known in first.items():
                if path in prints:
                    assert prints[path] == known
            sh(view, f"cd {place.project} && cat a dir/b >/dev/null 2>&1; ls -R >/dev/null")
            assert watcher.drain().paths == set()  # reading changes nothing
        finally:
            close(watcher)


@pytest.mark.overlay
async def test_each_command_of_a_session_is_told_its_own_changes(place: Place) -> None:
    async with OverlayEngine().mount(place.spec()) as view:
        watcher = watch(place.project, place.upper)
        try:
            sh(view, f"cd {place.project} && mkdir -p n/e/w && echo 1 >n/e/w/f && echo x >dir/b")
            assert {b"n", b"n/e", b"n/e/w", b"n/e/w/f", b"dir", b"dir/b"} == watcher.drain().paths
            sh(view, f"cd {place.project} && echo 2 >n/e/w/f")
            assert watcher.drain().paths == {b"n/e/w/f"}
            sh(view, f"cd {place.project} && mv n/e m && rm dir/b")
            assert {b"n/e", b"m", b"dir/b"} <= watcher.drain().paths
            sh(view, f"cd {place.project} && echo 3 >m/w/f")
            assert watcher.drain().paths == {b"m/w/f"}
        finally:
            close(watcher)


@pytest.mark.overlay
async def test_the_users_edit_before_the_agents_first_touch_is_drift_and_a_later_one_is_not(
    place: Place,
) -> None:
    edited, late = place.project / "a", place.project / "dir" / "b"
    async with OverlayEngine().mount(place.spec()) as view:
        since = max(edited.stat().st_ctime_ns, late.stat().st_ctime_ns)
        watcher = watch(place.project, place.upper, since_ns=since)
        try:
            change(edited, lambda: edited.write_text("the user was first"))
            sh(view, f"cd {place.project} && echo agent >a && echo agent >dir/b")
            touches = {bytes(t.path): t for t in watcher.drain().first}
            change(late, lambda: late.write_text("the user was second"))
        finally:
            close(watcher)
    assert touches[b"a"].drifted
    assert not touches[b"dir/b"].drifted
    assert recorded(touches[b"dir/b"]) != Fingerprint.of(late.stat())  # which shows as a conflict
