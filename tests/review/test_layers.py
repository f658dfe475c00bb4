"""Layers made one show what they showed together, over any base; laying paths back is exact."""

import os
import stat
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from deltabox.engines.delta import Merged, create_layer, remove_layers
from deltabox.paths import Tree, WorkspacePath, is_within
from deltabox.review import abort
from deltabox.review.layers import lay, squash
from tests.review.kit import Bench, Model, make_upper, read_merged, write_tree

NAMES = [b"a", b"b", b"\xff\n"]


@st.composite
def trees(draw: st.DrawFn) -> Model:
    """Up to three levels of the same few names, so that every change of type comes up."""
    model: Model = {}

    def fill(directory: bytes, depth: int) -> None:
        for name in NAMES:
            path = directory + b"/" + name if directory else name
            kind = draw(st.sampled_from(("", "", "file", "dir", "symlink")))
            if kind == "file":
                model[path] = ("file", draw(st.sampled_from((0o644, 0o755))), draw(contents))
            elif kind == "symlink":
                model[path] = ("symlink", draw(st.sampled_from((b"a", b"/nowhere"))))
            elif kind == "dir" and depth < 2:
                model[path] = ("dir", draw(st.sampled_from((0o755, 0o700))))
                fill(path, depth + 1)

    fill(b"", 0)
    return model


contents = st.sampled_from((b"", b"one", b"two"))


@given(
    base=trees(),
    other=trees(),
    views=st.lists(trees(), min_size=1, max_size=4),
    remade=st.sets(st.sampled_from([b"a", b"b", b"a/a", b"a/b", b"b/a"])),
    share=st.booleans(),
)
def test_squashed_layers_show_the_same_over_this_and_any_base(
    base: Model, other: Model, views: list[Model], remade: set[bytes], share: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        write_tree(bench.base_path, base)
        bench.stack(*views, opaque=frozenset(remade))
        assert read_merged(bench.merged) == views[-1]
        into = Path(folder, "squashed")
        squash(bench.layers, into, like=os.stat(bench.base_path), share=share)
        elsewhere = Path(folder, "other")
        elsewhere.mkdir()
        write_tree(elsewhere, other)
        with Tree.open(into) as one, Tree.open(elsewhere) as foreign:
            assert read_merged(Merged(bench.base, [one])) == views[-1]
            there = read_merged(Merged(foreign, bench.layers))
            assert read_merged(Merged(foreign, [one])) == there
        bench.close()


def test_squash_that_copies_shares_no_inode_and_one_that_shares_does(bench: Bench) -> None:
    bench.stack({b"f": ("file", 0o644, b"f")}, {b"f": ("file", 0o644, b"f"), b"g": F})
    for share in (True, False):
        into = Path(bench.new_dir("squashed"))
        squash(bench.layers, into, like=os.stat(bench.base_path), share=share)
        olds = {p.stat().st_ino for layer in bench.layer_paths for p in layer.iterdir()}
        news = {p.stat().st_ino for p in into.iterdir()}
        assert len(news) == 2
        assert (news <= olds) is share
        assert share or not news & olds


F = ("file", 0o600, b"g" * 1000)


def test_squash_keeps_modes_times_attributes_and_links(bench: Bench) -> None:
    bench.stack({b"d": ("dir", 0o755), b"d/f": F, b"l": ("symlink", b"\xff")})
    layer = bench.layer_paths[0]
    os.setxattr(layer / "d/f", "user.note", b"kept")
    os.utime(layer / "d/f", ns=(1, 123456789))
    os.utime(layer / "d", ns=(1, 987654321))
    (layer / "d").chmod(0o500)
    into = Path(bench.new_dir("squashed"))
    squash(bench.layers, into, like=os.stat(bench.base_path), share=False)
    assert os.getxattr(into / "d/f", "user.note") == b"kept"
    assert (into / "d/f").stat().st_mtime_ns == 123456789
    assert (into / "d").stat().st_mtime_ns == 987654321
    assert stat.S_IMODE((into / "d").stat().st_mode) == 0o500
    assert os.readlink(os.fsencode(into / "l")) == b"\xff"
    remove_layers(into, layer)


def test_fifo_in_a_layer_is_shared_or_left_out_and_never_opened(bench: Bench) -> None:
    bench.stack({b"f": F})
    os.mkfifo(bench.layer_paths[0] / "pipe")
    linked, copied = Path(bench.new_dir("linked")), Path(bench.new_dir("copied"))
    squash(bench.layers, linked, like=os.stat(bench.base_path), share=True)
    squash(bench.layers, copied, like=os.stat(bench.base_path), share=False)
    assert sorted(p.name for p in linked.iterdir()) == ["f", "pipe"]
    assert [p.name for p in copied.iterdir()] == ["f"]


@given(
    base=trees(),
    then=trees(),
    now=trees(),
    chosen=st.sampled_from([b"a", b"b", b"a/a", b"\xff\n"]),
)
def test_paths_laid_back_show_what_they_showed_and_the_rest_is_as_it_was(
    base: Model, then: Model, now: Model, chosen: bytes
) -> None:
    path = WorkspacePath(chosen)
    above = chosen.rpartition(b"/")[0]
    if above and any(m.get(above, ("",))[0] != "dir" for m in (then, now)):
        return  # the folder above is gone or something else: then it has to be named itself
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        bench = Bench(root)
        write_tree(bench.base_path, base)
        make_upper(root / "then", base, then)
        make_upper(root / "now", base, now)
        create_layer(root / "upper", os.stat(bench.base_path))
        (root / "scrap").mkdir()
        with (
            Tree.open(root / "then") as old,
            Tree.open(root / "now") as lower,
            Tree.open(root / "upper") as upper,
            Tree.open(root / "scrap") as scrap,
        ):
            abort.discard(bench.base, upper, [lower], [path], scrap)
            lay(Merged(bench.base, [old]), Merged(bench.base, [upper, lower]), [path])
            shown = read_merged(Merged(bench.base, [upper, lower]))
        expected = {p: e for p, e in now.items() if not is_within(p, path)}
        expected |= {p: e for p, e in then.items() if is_within(p, path)}
        assert shown == expected
        bench.close()
