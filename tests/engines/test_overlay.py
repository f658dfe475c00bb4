"""What the overlay engine mounts where, what it refuses by name, and how the kernel's overlay behaves."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from deltabox.engines import delta
from deltabox.engines.base import Graft
from deltabox.engines.delta import remove_layers
from deltabox.engines.overlay import OverlayEngine, usable
from deltabox.errors import EngineUnavailable, Failed
from deltabox.paths import Tree, parse
from deltabox.process import run_trusted
from tests.places import (
    Place,
    listing,
    mounts_at,
    names,
    namespace_users,
    read,
    run_python,
    sh,
    write,
)

pytestmark = pytest.mark.overlay
needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="mounts on the host, or gives files away"
)
both_ways = pytest.mark.parametrize("legacy", [False, True], ids=["fsmount", "mount2"])
engine = OverlayEngine()


@contextmanager
def mounted(*argv: object) -> Iterator[None]:
    """A mount of the host's, in the host's own namespace."""
    run_trusted([b"/bin/mount", *(os.fsencode(str(a)) for a in argv)])
    try:
        yield
    finally:
        run_trusted([b"/bin/umount", b"-l", os.fsencode(str(argv[-1]))])


# ---- layers


@both_ways
@pytest.mark.parametrize("count", [1, 100, 400])
async def test_many_layers_show_the_topmost_and_the_bottom(
    place: Place, count: int, legacy: bool
) -> None:
    layers = [place.session / "layers" / str(n) for n in range(count)]
    for number, layer in enumerate(layers):
        layer.mkdir(parents=True)
        (layer / "a").write_text(f"layer {number}")
        (layer / f"only{number}").touch()
    spec = place.spec(lowers=tuple(layers), legacy_mount=legacy)
    async with engine.mount(spec) as view:
        assert read(view, "a") == b"layer 0"
        assert read(view, "dir/b") == b"base b"
        assert len(names(view)) == count + 2


@both_ways
async def test_more_layers_than_the_kernel_stacks_are_refused(place: Place, legacy: bool) -> None:
    layer = place.session / "layer"
    layer.mkdir()
    spec = place.spec(lowers=(layer,) * 500, legacy_mount=legacy)
    with pytest.raises(EngineUnavailable, match="more layers than the 500"):
        async with engine.mount(spec):
            pass


@both_ways
async def test_odd_names_mean_nothing_to_the_kernels_option_parser(
    tmp_path: Path, legacy: bool
) -> None:
    odd = tmp_path / os.fsdecode(b"x:y,z\\w =\"'\n \xff,upperdir=q")
    place = Place.make(odd, project="home/p:1,lowerdir+=\\ 2")
    layer = place.session / "l:,\\ a"
    layer.mkdir()
    (layer / "from-layer").write_text("yes")
    async with engine.mount(place.spec(lowers=(layer,), legacy_mount=legacy)) as view:
        write(view, "a", b"changed")
        assert read(view, "from-layer") == b"yes"
        assert sh(view, 'cat "$1"', place.project / "a") == "changed"
        assert (place.upper / "a").read_text() == "changed"
    assert (place.project / "a").read_text() == "base a"
    remove_layers(place.session)


async def test_mask_hides_content_of_files_and_folders(place: Place) -> None:
    (place.project / "secret").write_text("the key")
    (place.project / "keys").mkdir()
    (place.project / "keys" / "one").write_text("the key")
    mask = place.session / "mask"
    (mask / "keys").mkdir(parents=True)
    os.setxattr(mask / "keys", "user.overlay.opaque", b"y")
    (mask / "keys").chmod(0)
    (mask / "secret").touch(mode=0)
    layer = place.session / "layer"  # the mask comes before the frozen layers
    layer.mkdir()
    (layer / "secret").write_text("the key, frozen")
    script = 'cat "$1/secret" "$1/keys/one" 2>/dev/null; stat -c %a "$1/secret" "$1/keys"'
    async with engine.mount(place.spec(lowers=(layer,))) as view:
        assert "the key" in sh(view, script, place.project)
        await view.restack([], place.session / "upper2", place.session / "work")
    async with engine.mount(place.spec(lowers=(layer,), mask=mask)) as view:
        assert sh(view, script, place.project).split() == ["0", "0"]
        await view.restack([layer], place.session / "upper2", place.session / "work")
        assert sh(view, script, place.project).split() == ["0", "0"]


# ---- places


@pytest.mark.parametrize("project", ["home/work/project", "beside/project", "home/p"])
async def test_writes_land_in_the_delta_wherever_the_project_stands(
    tmp_path: Path, project: str
) -> None:
    place = Place.make(tmp_path, project=project)
    before = listing(place.project)
    async with engine.mount(place.spec()) as view:
        # One below /tmp is made in the private /tmp, one in the home in the private home.
        assert sh(view, 'echo changed > "$1/dir/b"; cat "$1/dir/b"', place.project) == "changed"
        assert (place.upper / "dir/b").read_text() == "changed\n"
    assert listing(place.project) == before
    remove_layers(place.session)


@pytest.fixture
def elsewhere(place: Place) -> Iterator[Place]:
    """The same, below neither /tmp nor the home: in /dev/shm, which every user can write."""
    folder = Path("/dev/shm") / f"deltabox-test-{os.getpid()}"
    place.project.rename(place.root / "kept")
    folder.mkdir()
    (folder / "a").write_text("base a")
    yield Place(place.root, folder, place.session, place.home_at)
    remove_layers(folder)


async def test_project_outside_home_and_tmp_is_mounted_where_it_stands(elsewhere: Place) -> None:
    async with engine.mount(elsewhere.spec()) as view:
        assert sh(view, 'echo changed > "$1/a"; cat "$1/a"', elsewhere.project) == "changed"
        assert (elsewhere.upper / "a").read_text() == "changed\n"
        assert mounts_at(elsewhere.project, view.pid) == [str(elsewhere.project)]
    assert (elsewhere.project / "a").read_text() == "base a"


async def test_tmp_is_private_and_sized(place: Place) -> None:
    name = f"deltabox-test-{os.getpid()}"
    fill = 'head -c "$2" /dev/zero > "/tmp/$1" && echo fits || echo full'
    async with engine.mount(place.spec(tmp_bytes=1 << 20)) as view:
        assert sh(view, fill, name, 1 << 19) == "fits"
        assert sh(view, fill + " 2>/dev/null", name, 1 << 21) == "full"
        assert sh(view, "stat -c %a /tmp; ls /tmp | wc -l").split()[0] == "1777"
        assert not (Path("/tmp") / name).exists()


async def test_home_is_private_and_lasts(place: Place) -> None:
    (place.home_at / "secret").write_text("the user's own")
    async with engine.mount(place.spec()) as view:
        assert sh(view, 'cd "$1" && ls && echo mine > .bashrc', place.home_at) == "work"
    assert not (place.home_at / ".bashrc").exists()
    async with engine.mount(place.spec()) as view:
        assert sh(view, 'cat "$1/.bashrc"', place.home_at) == "mine"


async def test_view_ignores_set_id_bits_and_devices(place: Place) -> None:
    async with engine.mount(place.spec()) as view:
        lines = Path(f"/proc/{view.pid}/mountinfo").read_text().splitlines()
        below = [line.split() for line in lines if str(place.root) in line.split()[4]]
        assert len(below) == 2
        for fields in (*below, next(f for f in map(str.split, lines) if f[4] == "/tmp")):
            assert {"nosuid", "nodev"} <= set(fields[5].split(","))


@pytest.mark.parametrize("sort", ["link", "link to the like", "file", "dangling"])
async def test_mount_point_the_agent_replaced_is_refused_by_name(place: Place, sort: str) -> None:
    async with engine.mount(place.spec()) as view:
        assert read(view, "a") == b"base a"  # the control: unharmed, the same spec mounts
    component = place.session / "home" / "work"
    (component / "project").rmdir()
    component.rmdir()
    outside = place.root / "outside"
    outside.mkdir()
    if sort == "file":
        component.touch()
    elif sort == "dangling":
        component.symlink_to(outside / "nothing")
    else:
        component.symlink_to(outside)
        if sort == "link to the like":
            (outside / "project").mkdir()
    before = listing(outside)
    where = f"{place.home_at}/work:"
    with pytest.raises(EngineUnavailable, match=f"Nothing can be mounted at {where}"):
        async with engine.mount(place.spec()):
            pass
    assert listing(outside) == before


@pytest.mark.parametrize("which", ["project", "home"])
async def test_link_on_the_way_to_a_source_is_refused(place: Place, which: str) -> None:
    link = place.root / "link"
    link.symlink_to(place.root)
    path = link / getattr(place.spec(), which).relative_to(place.root)
    with pytest.raises(EngineUnavailable, match="symbolic link"):
        async with engine.mount(place.spec(**{which: path})):
            pass


async def test_project_that_would_hold_the_home_is_refused(place: Place) -> None:
    with pytest.raises(EngineUnavailable, match="would contain the home"):
        async with engine.mount(place.spec(project=place.root)):
            pass


# ---- mounts below the project


@needs_root
async def test_mounts_below_the_project_are_shown_read_only(place: Place) -> None:
    below = place.project / "dir" / "with space\\and\nmore"
    below.mkdir()
    file = place.project / "a"
    source = place.root / "source"
    source.write_text("bound")
    (place.root / "deeper").mkdir()
    with mounted("-t", "tmpfs", "x", below), mounted("--bind", source, file):
        (below / "inner").write_text("of the mount")
        (below / "sub").mkdir()
        with mounted("-t", "tmpfs", "x", below / "sub"):
            (below / "sub" / "deep").write_text("deep")
            script = """cd "$1/dir"; cat with*/inner with*/sub/deep ../a
                for f in with*/inner with*/sub/deep ../a; do
                  { echo x > "$f"; } 2>/dev/null && echo " wrote $f"; done; echo x > ../ok"""
            async with engine.mount(place.spec()) as view:
                assert sh(view, script, place.project) == "of the mountdeepbound"
                await view.restack([], place.upper, place.session / "work")
                assert sh(view, script, place.project) == "of the mountdeepbound"
                assert sorted(os.listdir(place.upper)) == ["ok"]


_LOCKED = """
import trio
from pathlib import Path
from deltabox.engines.overlay import usable
verdict = trio.run(usable, Path(sys.argv[1]), Path(sys.argv[2]))
print(verdict.usable, verdict.reason)
"""


def test_mount_below_the_project_is_named_where_only_root_can_stack_on_it(place: Place) -> None:
    # An ordinary user whose mounts come from a more privileged namespace, as every user's do.
    as_user = (
        "/usr/bin/unshare",
        "-Ur",
        "/usr/bin/unshare",
        "-U",
        "--map-user=1234",
        "--map-group=1234",
    )
    arguments = (place.project, place.session)
    assert run_python(_LOCKED, *arguments, under=as_user).startswith("True")
    mount = 'mount -t tmpfs x "$0" && exec "$@"'
    inside = ("/usr/bin/unshare", "-Urm", "/bin/sh", "-c", mount, str(place.project / "dir"))
    said = run_python(_LOCKED, *arguments, under=(*inside, *as_user[2:]))
    assert said.startswith("False")
    assert f"{place.project}/dir: it is mounted below the project" in said


# ---- grafts


@pytest.fixture
def tools(place: Place) -> Path:
    """What a user passes into the view: a folder with a file, and a file."""
    folder = place.root / "tools"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "f").write_text("tool")
    (place.root / "settings").write_text("user's settings")
    return folder


def _graft(place: Place, source: Path, dest: Path, access: str) -> Graft:
    pair = {}
    if access == "cow":
        pair = {name: place.session / f"graft-{dest.name}-{name}" for name in ("upper", "work")}
    return Graft(source, dest, access, **pair)  # type: ignore[arg-type]


@both_ways
@pytest.mark.parametrize("inside", ["home", "tmp"])
@pytest.mark.parametrize(
    ("access", "in_view", "outside"),
    [("ro", "tool", "tool"), ("rw", "mine", "mine"), ("cow", "mine", "tool")],
)
async def test_grafted_folder(
    place: Place, tools: Path, access: str, in_view: str, outside: str, inside: str, legacy: bool
) -> None:
    dest = (place.home_at if inside == "home" else Path("/tmp")) / "new" / "tools"
    spec = place.spec(grafts=(_graft(place, tools, dest, access),), legacy_mount=legacy)
    script = '{ printf mine > "$1/sub/f"; } 2>/dev/null; cat "$1/sub/f"'
    async with engine.mount(spec) as view:
        assert sh(view, script, dest) == in_view
    assert (tools / "sub" / "f").read_text() == outside
    async with engine.mount(spec) as view:
        assert sh(view, 'cat "$1/sub/f"', dest) == in_view


@pytest.mark.parametrize(
    ("access", "in_view", "outside"),
    [
        ("ro", "user's settings", "user's settings"),
        ("rw", "mine", "mine"),
        ("cow", "mine", "user's settings"),
    ],
)
async def test_grafted_file(
    place: Place, tools: Path, access: str, in_view: str, outside: str
) -> None:
    source = tools.parent / "settings"
    source.chmod(0o640)
    dest = place.home_at / ".config" / "settings"
    spec = place.spec(grafts=(_graft(place, source, dest, access),))
    script = '{ printf mine > "$1"; } 2>/dev/null; cat "$1"; stat -c " %a" "$1"'
    async with engine.mount(spec) as view:
        assert sh(view, script, dest) == f"{in_view} 640"
    assert source.read_text() == outside
    async with engine.mount(spec) as view:
        assert sh(view, 'cat "$1"', dest) == in_view


async def test_read_only_graft_inside_the_project_outlives_a_restack(place: Place) -> None:
    graft = Graft(place.project / "dir", place.project / "dir", "ro")
    script = '{ echo x > "$1/dir/b"; } 2>/dev/null; cat "$1/dir/b"'
    async with engine.mount(place.spec(grafts=(graft,))) as view:
        assert sh(view, script, place.project) == "base b"
        await view.restack([], place.upper, place.session / "work")
        assert sh(view, script, place.project) == "base b"


async def test_grafts_are_mounted_parents_first(place: Place, tools: Path) -> None:
    inner = place.root / "inner"
    inner.mkdir()
    (inner / "i").write_text("inner")
    grafts = (
        _graft(place, inner, place.home_at / "t" / "sub", "ro"),
        _graft(place, tools, place.home_at / "t", "ro"),
    )
    async with engine.mount(place.spec(grafts=grafts)) as view:
        assert sh(view, 'cat "$1/t/sub/i"', place.home_at) == "inner"


@pytest.mark.parametrize(
    ("dest", "access", "words"),
    [
        ("outside", "ro", "outside the home, /tmp and the project"),
        ("home/work/project/absent", "ro", "does not exist"),
        ("home/work/project/dir", "cow", "copy-on-write already"),
        ("home", "ro", "outside the home"),
        ("home/work/project", "ro", "two things"),
    ],
)
async def test_graft_that_cannot_stand_there_is_refused(
    place: Place, tools: Path, dest: str, access: str, words: str
) -> None:
    graft = _graft(place, tools, place.root / dest, access)
    # Below /tmp everything of a test is inside the private /tmp: give "outside" another meaning.
    if dest in ("outside", "home"):
        graft = _graft(place, tools, Path("/var") / dest, access)
    with pytest.raises(EngineUnavailable, match=words):
        async with engine.mount(place.spec(grafts=(graft,))):
            pass
    assert not (place.project / "absent").exists()


async def test_missing_mount_point_is_never_made_in_a_real_folder(
    place: Place, tools: Path
) -> None:
    grafts = (
        _graft(place, tools, place.home_at / "t", "rw"),
        _graft(place, place.root / "settings", place.home_at / "t" / "absent", "ro"),
    )
    with pytest.raises(EngineUnavailable, match="t/absent: it does not exist"):
        async with engine.mount(place.spec(grafts=grafts)):
            pass
    assert not (tools / "absent").exists()


# ---- restack


async def test_restack_keeps_tmp_home_and_grafts(place: Place, tools: Path) -> None:
    graft = _graft(place, tools, place.home_at / "tools", "cow")
    async with engine.mount(place.spec(grafts=(graft,))) as view:
        sh(view, 'echo t > /tmp/t; echo h > "$1/h"; echo g > "$1/tools/g"', place.home_at)
        before = view.enter.mount
        await view.restack([], place.session / "upper2", place.session / "work2")
        assert sh(view, 'cat /tmp/t "$1/h" "$1/tools/g"', place.home_at).split() == ["t", "h", "g"]
        assert view.enter.mount == before
        for _ in range(5):
            await view.restack([], place.session / "upper2", place.session / "work2")
        assert len(mounts_at(place.project, view.pid)) == 1


async def test_restack_that_fails_late_leaves_the_old_stack_able_to_copy_up(place: Place) -> None:
    # The graft's mount point is missing in the new layers: known only once they are stacked, on
    # the same upper and work as the old ones.
    graft = Graft(place.project / "dir", place.project / "dir", "ro")
    layer = place.session / "layer"
    layer.mkdir()
    (layer / "dir").write_text("a file now")
    async with engine.mount(place.spec(grafts=(graft,))) as view:
        sh(view, "echo kept > /tmp/kept")
        with pytest.raises(EngineUnavailable, match="where a directory is needed"):
            await view.restack([layer], place.upper, place.session / "work")
        write(view, "a", b"copied up")
        assert (place.upper / "a").read_bytes() == b"copied up"
        assert sh(view, 'cat "$1/a" "$1/dir/b" /tmp/kept', place.project) == "copied upbase bkept"
        assert len(mounts_at(place.project, view.pid)) == 2


async def test_restack_is_refused_when_the_agent_moved_a_folder_above_the_project(
    place: Place,
) -> None:
    async with engine.mount(place.spec()) as view:
        sh(view, 'cd "$1" && mv work moved && mkdir -p work/project', place.home_at)
        with pytest.raises(EngineUnavailable, match="no longer stands there"):
            await view.restack([], place.upper, place.session / "work")
        assert read(view, "a") == b"base a"


async def test_cancelled_view_is_gone_and_cancelled_restack_is_whole(place: Place) -> None:
    with trio.CancelScope() as scope:
        async with engine.mount(place.spec()) as view:
            namespace, holder = os.fstat(view.enter.mount).st_ino, view.pid
            with trio.CancelScope() as inner:
                inner.cancel()
                await view.restack([], place.upper, place.session / "work")
            await view.restack([], place.session / "upper2", place.session / "work")
            write(view, "a", b"second")
            assert (place.session / "upper2" / "a").exists()
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert namespace_users(namespace) == []
    assert not Path(f"/proc/{holder}").exists()


# ---- what the kernel's overlay does


async def test_deletions_and_new_folders_are_written_as_the_format_says(place: Place) -> None:
    async with engine.mount(place.spec()) as view:
        sh(view, 'cd "$1" && rm a && rm -r dir && mkdir dir && touch dir/new', place.project)
        assert names(view) == [b"dir"]
        assert names(view, "dir") == [b"new"]
    with Tree.open(place.upper) as upper:
        path = parse("a")
        assert delta.is_whiteout(upper, path, upper.lstat(path))
        assert stat.S_ISCHR(upper.lstat(path).st_mode)
        assert upper.lstat(path).st_rdev == 0
        fd = upper.open_at(parse("dir"), os.O_RDONLY | os.O_DIRECTORY)
        try:
            assert delta.is_opaque(fd)
            assert os.getxattr(fd, "user.overlay.opaque") == b"y"
        finally:
            os.close(fd)


async def test_renaming_a_base_folder_gives_exdev(place: Place) -> None:
    async with engine.mount(place.spec()) as view:
        with Tree(os.dup(view.root_fd)) as tree:
            os.mkdir("fresh", dir_fd=tree.fd)
            os.rename("fresh", "renamed", src_dir_fd=tree.fd, dst_dir_fd=tree.fd)
            with pytest.raises(OSError, match="cross-device") as caught:
                os.rename("dir", "renamed2", src_dir_fd=tree.fd, dst_dir_fd=tree.fd)
        assert caught.value.errno == errno.EXDEV


async def test_upper_root_looks_like_the_base_root(place: Place) -> None:
    place.project.chmod(0o751)
    if os.geteuid() == 0:
        os.chown(place.project, 12345, 12346)
    async with engine.mount(place.spec()) as view:
        base, seen = place.project.stat(), os.stat(view.root_fd)
        assert (seen.st_mode, seen.st_uid, seen.st_gid) == (base.st_mode, base.st_uid, base.st_gid)


@needs_root
async def test_programs_cannot_be_run_where_the_administrator_forbade_it(place: Place) -> None:
    script = 'cp /bin/true "$1/t" && { "$1/t" 2>/dev/null && echo runs || echo refused; }'
    async with engine.mount(place.spec()) as view:
        assert sh(view, script, place.project) == "runs"
    with mounted("-t", "tmpfs", "-o", "noexec", "x", place.project):
        spec = place.spec(upper=place.session / "upper2")
        async with engine.mount(spec) as view:
            assert sh(view, script, place.project) == "refused"


_UNMAPPED = """
import os, trio
from pathlib import Path
from deltabox.engines.overlay import OverlayEngine
from tests.places import Place, write

async def main():
    root = Path(sys.argv[1])
    place = Place(root, root / "home/work/project", root / "state/session", root / "home")
    async with OverlayEngine().mount(place.spec()) as view:
        write(view, "dir/b", b"mine")
        try:
            write(view, "a", b"not mine")
        except OSError as exc:
            print(exc.errno)

trio.run(main)
"""


@needs_root
def test_file_of_an_unmapped_owner_cannot_be_copied_up(tmp_path: Path) -> None:
    for folder in tmp_path.parents:
        if folder != Path("/") and not folder.stat().st_mode & stat.S_IXOTH:
            folder.chmod(folder.stat().st_mode | stat.S_IXOTH)
    tmp_path.chmod(0o755)
    place = Place.make(tmp_path)
    for path in [tmp_path, *tmp_path.rglob("*")]:
        os.chown(path, 12345, 12345)
    os.chown(place.project / "a", 0, 0)
    (place.project / "a").chmod(0o666)
    user = ("/usr/bin/setpriv", "--reuid=12345", "--regid=12345", "--clear-groups")
    assert run_python(_UNMAPPED, tmp_path, under=user) == str(errno.EOVERFLOW)


# ---- layers on disk


async def test_layers_are_removed_whatever_overlay_and_the_agent_left(place: Place) -> None:
    async with engine.mount(place.spec()) as view:
        sh(
            view,
            'cd "$1" && mkdir -p x/y && touch x/y/z && chmod 0 x/y && chmod 0 x',
            place.project,
        )
    remove_layers(place.upper, place.session / "work", place.session / "absent")
    assert sorted(os.listdir(place.session)) == ["home"]


def test_layer_deeper_than_a_path_may_be_long_is_removed(tmp_path: Path) -> None:
    layer = tmp_path / "layer"
    layer.mkdir()
    at = os.open(layer, os.O_RDONLY)
    for _ in range(1500):  # also past Python's recursion limit
        os.mkdir("deep", dir_fd=at)
        below = os.open("deep", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    remove_layers(layer)
    assert not layer.exists()


def test_removing_a_layer_does_not_follow_its_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o500)
    layer = tmp_path / "layer"
    layer.mkdir()
    (layer / "link").symlink_to(outside)
    before = listing(outside)
    remove_layers(layer)
    (tmp_path / "alias").symlink_to(outside)
    with pytest.raises(OSError, match="Not a directory"):
        remove_layers(tmp_path / "alias")
    assert listing(outside) == before
    assert not layer.exists()


async def test_trial_says_yes_and_leaves_both_directories_as_they_were(place: Place) -> None:
    before = listing(place.project), sorted(os.listdir(place.session))
    verdict = await usable(place.project, place.session)
    assert verdict.usable
    assert (listing(place.project), sorted(os.listdir(place.session))) == before


def test_state_on_an_overlay_is_named_with_its_cure(place: Place) -> None:
    for name in ("lower", "up", "wk", "merged"):
        (place.root / name).mkdir()
    mount = (
        'mount -t overlay o -o "userxattr,lowerdir=$0/lower,upperdir=$0/up,workdir=$0/wk" '
        '"$0/merged" && exec "$@"'
    )
    under = ("/usr/bin/unshare", "-Urm", "/bin/sh", "-c", mount, str(place.root))
    said = run_python(_LOCKED, place.project, place.root / "merged", under=under)
    assert said.startswith("False")
    assert "cannot be kept on overlay" in said
    assert "DELTABOX_STATE_DIR" in said
    run_trusted([b"/bin/chmod", b"700", os.fsencode(place.root / "wk" / "work")])


def test_control_for_the_helpers_a_failing_program_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(Failed):
        run_python("assert False, sys.argv", tmp_path)
