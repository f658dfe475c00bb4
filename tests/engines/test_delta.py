"""The delta format read without a mount: what the view shows, what the layers touch."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from deltabox.engines.delta import Fingerprint, Merged, is_whiteout, make_whiteout, prune
from deltabox.paths import Tree, WorkspacePath
from tests.review.kit import Bench, Model, make_upper, read_merged, read_tree, write_tree

P = WorkspacePath
BASE: Model = {
    b"a": ("file", 0o644, b"one\n"),
    b"d": ("dir", 0o755),
    b"d/x": ("file", 0o644, b"x"),
    b"d/sub": ("dir", 0o755),
    b"d/sub/y": ("file", 0o600, b"y"),
    b"l": ("symlink", b"a"),
    b"untouched": ("dir", 0o755),
    b"untouched/deep": ("file", 0o644, b"z"),
}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    write_tree(made.base_path, BASE)
    yield made
    made.close()


def touched(merged: Merged) -> dict[bytes, tuple[str | None, str | None]]:
    return {
        t.path: (t.before and t.before.kind, t.after and t.after.kind)  # type: ignore[misc]
        for t in merged.changed()
    }


def test_whiteout_hides_a_base_directory_and_lists_each_deletion_below(bench: Bench) -> None:
    bench.stack({p: e for p, e in BASE.items() if not p.startswith(b"d")})
    assert bench.merged.lookup(P(b"d/x")) is None
    assert touched(bench.merged) == {
        b"d": ("dir", None),
        b"d/sub": ("dir", None),
        b"d/sub/y": ("file", None),
        b"d/x": ("file", None),
    }


def test_opaque_directory_hides_what_the_base_has_below(bench: Bench) -> None:
    view = {p: e for p, e in BASE.items() if not p.startswith(b"d/")} | {
        b"d/n": ("file", 0o644, b"n")
    }
    bench.stack(view, opaque=frozenset([b"d"]))
    assert read_merged(bench.merged) == view
    assert touched(bench.merged)[b"d/sub/y"] == ("file", None)
    assert touched(bench.merged)[b"d/n"] == (None, "file")


def test_upper_file_wins_over_a_whiteout_in_a_lower_layer(bench: Bench) -> None:
    without = {p: e for p, e in BASE.items() if p != b"a"}
    again = without | {b"a": ("file", 0o644, b"two\n")}
    bench.stack(without, again)
    node = bench.merged.lookup(P(b"a"))
    assert node is not None
    assert node.layer == 0
    assert read_merged(bench.merged) == again
    assert touched(bench.merged) == {b"a": ("file", "file")}


def test_what_came_and_went_inside_the_layers_is_not_touched(bench: Bench) -> None:
    bench.stack(BASE | {b"new": ("file", 0o644, b"")}, BASE)
    assert touched(bench.merged) == {}
    assert bench.merged.lookup(P(b"new")) is None


def test_untouched_base_directories_are_never_opened(bench: Bench) -> None:
    bench.stack(BASE | {b"d/x": ("file", 0o644, b"changed")})
    os.chmod(bench.base_path / "untouched", 0)
    opened: list[bytes] = []

    class Watched(Tree):
        @override
        def open_at(self, path: WorkspacePath, flags: int, *, mode: int = 0) -> int:
            opened.append(path)
            return super().open_at(path, flags, mode=mode)

    with Watched(os.dup(bench.base.fd)) as base:
        assert touched(Merged(base, bench.layers)) == {
            b"d": ("dir", "dir"),
            b"d/x": ("file", "file"),
        }
    os.chmod(bench.base_path / "untouched", 0o755)
    assert opened == [b"d"]


def test_xattr_whiteout_counts_and_the_same_empty_file_without_it_does_not(bench: Bench) -> None:
    bench.stack(BASE)
    upper = bench.layers[0]
    (bench.layer_paths[0] / "a").write_bytes(b"")
    (bench.layer_paths[0] / "plain").write_bytes(b"")
    os.setxattr(bench.layer_paths[0] / "a", "user.overlay.whiteout", b"y")
    assert is_whiteout(upper, P(b"a"), upper.lstat(P(b"a")))
    assert not is_whiteout(upper, P(b"plain"), upper.lstat(P(b"plain")))
    assert bench.merged.lookup(P(b"a")) is None
    assert b"a" not in bench.merged.names()


def test_unreadable_layer_directory_is_reported_not_skipped(bench: Bench) -> None:
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    bench.stack(BASE | {b"d/x": ("file", 0o644, b"changed")})
    os.chmod(bench.layer_paths[0] / "d", 0)
    merged = bench.merged
    list(merged.changed())
    os.chmod(bench.layer_paths[0] / "d", 0o755)
    assert merged.unreadable == [b"d"]


def test_prune_keeps_an_opaque_directory_that_still_hides_something(bench: Bench) -> None:
    view = {p: e for p, e in BASE.items() if not p.startswith(b"d/")} | {
        b"d/n": ("file", 0o644, b"n")
    }
    bench.stack(view, opaque=frozenset([b"d"]))
    write_tree(bench.base_path, {b"d/n": ("file", 0o644, b"n")})
    upper = bench.layers[0]
    source = Fingerprint.of(upper.lstat(P(b"d/n")))
    assert prune(bench.base, upper, [], {P(b"d/n"): source}) == []
    assert read_merged(bench.merged) == view


def test_prune_keeps_what_was_written_since_it_was_copied(bench: Bench) -> None:
    bench.stack(BASE | {b"a": ("file", 0o644, b"two\n")})
    source = Fingerprint.of(bench.layers[0].lstat(P(b"a")))
    (bench.base_path / "a").write_bytes(b"two\n")
    (bench.layer_paths[0] / "a").write_bytes(b"three\n")
    assert prune(bench.base, bench.layers[0], [], {P(b"a"): source}) == []
    # The control: with the fingerprint of now it goes.
    now = Fingerprint.of(bench.layers[0].lstat(P(b"a")))
    assert prune(bench.base, bench.layers[0], [], {P(b"a"): now}) == [b"a"]


def test_prune_keeps_a_whiteout_that_hides_a_lower_layer(bench: Bench) -> None:
    with_new = BASE | {b"new": ("file", 0o644, b"n")}
    bench.stack(with_new, BASE)
    assert prune(bench.base, bench.layers[0], bench.layers[1:], {P(b"new"): None}) == []
    assert read_merged(bench.merged) == BASE


names = st.sampled_from([b"a", b"b", b"c\n", b"\xff"])
modes = st.sampled_from([0o644, 0o600, 0o755])
leaves = st.one_of(
    st.tuples(st.just("file"), modes, st.sampled_from([b"", b"1", b"22"])),
    st.tuples(st.just("symlink"), st.sampled_from([b"a", b"/etc/passwd", b"../x"])),
)


@st.composite
def models(draw: st.DrawFn, depth: int = 0, prefix: bytes = b"") -> Model:
    model: Model = {}
    for child in draw(st.sets(names, max_size=3)):
        path = prefix + child
        if depth < 2 and draw(st.booleans()):
            model[path] = ("dir", draw(st.sampled_from([0o755, 0o700])))
            model |= draw(models(depth + 1, path + b"/"))
        else:
            model[path] = draw(leaves)
    return model


@settings(max_examples=60, deadline=None, database=None)
@given(models(), models(), models(), st.booleans())
def test_merged_shows_the_view_that_the_layers_were_made_from(
    tmp_path_factory: pytest.TempPathFactory, below: Model, mid: Model, top: Model, is_opaque: bool
) -> None:
    bench = Bench(tmp_path_factory.mktemp("m"))
    try:
        write_tree(bench.base_path, below)
        opaque = frozenset(top) if is_opaque else frozenset()
        bench.stack(mid, top, opaque=opaque)
        assert read_merged(bench.merged) == top
        seen = touched(bench.merged)
        for path in below.keys() | top.keys():
            if below.get(path) != top.get(path):
                kinds = (below.get(path, (None,))[0], top.get(path, (None,))[0])
                assert seen[path] == kinds
        paths = list(seen)
        assert all(p.rpartition(b"/")[0] in (b"", *paths[:i]) for i, p in enumerate(paths))
        assert read_tree(bench.base_path) == below
    finally:
        bench.close()


def test_whiteout_device_can_be_made_by_an_ordinary_user(tmp_path: Path) -> None:
    make_upper(tmp_path / "u", {b"a": ("dir", 0o755)}, {})
    with Tree.open(tmp_path / "u") as tree:
        assert tree.names() == [b"a"]
        assert is_whiteout(tree, P(b"a"), tree.lstat(P(b"a")))
        make_whiteout(tree, P(b"b"))
