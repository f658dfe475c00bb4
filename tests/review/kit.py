"""Trees as plain dictionaries, written to and read from real directories, and uppers made of them.

A model maps each path to ("file", mode, content), ("dir", mode) or ("symlink", target).
"""

import os
import stat
from pathlib import Path
from typing import Any

from deltabox.engines.delta import Merged, create_layer, make_whiteout, set_opaque
from deltabox.paths import Tree, WorkspacePath
from deltabox.review.diff import build
from deltabox.review.model import Review

Model = dict[bytes, tuple[Any, ...]]
NEVER = 1 << 62  # a session start so late that no base entry is newer


def children(model: Model, directory: bytes) -> list[bytes]:
    return sorted(p for p in model if p and p.rpartition(b"/")[0] == directory)


def subtree(model: Model, path: bytes) -> Model:
    return {p: e for p, e in model.items() if p == path or p.startswith(path + b"/") or not path}


def write_entry(root: Path, path: bytes, entry: tuple[Any, ...]) -> None:
    at = os.path.join(os.fsencode(root), path)
    if entry[0] == "dir":
        os.mkdir(at, 0o700)
    elif entry[0] == "symlink":
        os.symlink(entry[1], at)
    else:
        fd = os.open(at, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(fd, entry[2])
        os.fchmod(fd, entry[1])
        os.close(fd)


def write_tree(root: Path, model: Model) -> None:
    for path in sorted(model):
        write_entry(root, path, model[path])
    for path in sorted(model, reverse=True):
        if model[path][0] == "dir":
            os.chmod(os.path.join(os.fsencode(root), path), model[path][1])


def read_tree(root: Path) -> Model:
    model: Model = {}
    with Tree.open(root) as tree:
        for path, st in tree.walk():
            if stat.S_ISDIR(st.st_mode):
                model[path] = ("dir", stat.S_IMODE(st.st_mode))
            elif stat.S_ISLNK(st.st_mode):
                model[path] = ("symlink", tree.readlink(path))
            else:
                fd = tree.open_file(path)
                with os.fdopen(fd, "rb") as file:
                    model[path] = ("file", stat.S_IMODE(st.st_mode), file.read())
    return model


def read_merged(merged: Merged) -> Model:
    model: Model = {}
    for node in merged.walk():
        if node.kind == "dir":
            model[node.path] = ("dir", stat.S_IMODE(node.st.st_mode))
        elif node.kind == "symlink":
            model[node.path] = ("symlink", node.tree.readlink(node.path))
        else:
            with os.fdopen(merged.open_file(node.path), "rb") as file:
                model[node.path] = ("file", stat.S_IMODE(node.st.st_mode), file.read())
    return model


def make_upper(
    upper: Path, below: Model, view: Model, *, opaque: frozenset[bytes] = frozenset()
) -> None:
    """The layer that turns `below` into `view`; directories named in `opaque` are made anew."""
    create_layer(upper, os.stat(upper.parent))
    modes: list[tuple[bytes, int]] = []

    def fill(tree: Tree, directory: bytes, is_hidden: bool) -> None:
        names = set(children(view, directory))
        if not is_hidden:
            names |= set(children(below, directory))
        for path in sorted(names):
            old = None if is_hidden else below.get(path)
            new = view.get(path)
            at = WorkspacePath(path)
            if new is None:
                make_whiteout(tree, at)
            elif new[0] != "dir":
                if old != new:
                    write_entry(upper, path, new)
            elif old is None or old[0] != "dir" or path in opaque:
                write_entry(upper, path, new)
                modes.append((path, new[1]))
                if old is not None:
                    set_opaque(tree, at, opaque=True)
                fill(tree, path, is_hidden=True)
            elif subtree(below, path) != subtree(view, path):
                write_entry(upper, path, new)
                modes.append((path, new[1]))
                fill(tree, path, is_hidden=False)

    with Tree.open(upper) as tree:
        fill(tree, b"", is_hidden=False)
    for path, mode in reversed(modes):
        os.chmod(os.path.join(os.fsencode(upper), path), mode)


class Bench:
    """A base and a stack of layers in one folder, with everything a review test needs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.base_path = root / "base"
        self.base_path.mkdir()
        self.base = Tree.open(self.base_path)
        self.layers: list[Tree] = []
        self.layer_paths: list[Path] = []
        self.count = 0

    def close(self) -> None:
        self.base.close()
        for tree in self.layers:
            tree.close()

    def stack(self, *views: Model, opaque: frozenset[bytes] = frozenset()) -> None:
        """New layers: the first view is made by the lowest."""
        for tree in self.layers:
            tree.close()
        self.layers, self.layer_paths = [], []
        below = read_tree(self.base_path)
        for view in views:
            self.count += 1
            path = self.root / f"layer{self.count}"
            make_upper(path, below, view, opaque=opaque)
            self.layers.insert(0, Tree.open(path))
            self.layer_paths.insert(0, path)
            below = view

    @property
    def merged(self) -> Merged:
        return Merged(self.base, self.layers)

    def review(self, **options: Any) -> Review:
        options.setdefault("fingerprints", {})
        options.setdefault("since_ns", NEVER)
        return build(self.merged, **options)

    def new_dir(self, word: str) -> str:
        self.count += 1
        return str(self.root / f"{word}{self.count}")
