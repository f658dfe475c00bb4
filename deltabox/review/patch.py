"""Line diffs by libgit2: counts, hunks with ids, and patch bytes. Works on bytes, opens no file."""

import functools
import hashlib
from typing import Any

from deltabox.review.model import Hunk


@functools.cache
def _patch_class() -> Any:
    """pygit2's Patch, loaded from its extension module alone.

    `import pygit2` costs 125 ms, the extension file 22 ms, and `diff --stat` has 150 in all.
    """
    import importlib.util
    import pathlib
    import sys
    from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader

    package = sys.modules.get("pygit2")
    if package is None:
        found = importlib.util.find_spec("pygit2")
        for folder in (found.submodule_search_locations or ()) if found is not None else ():
            for suffix in EXTENSION_SUFFIXES:
                file = pathlib.Path(folder) / f"_pygit2{suffix}"
                if file.is_file():
                    loader = ExtensionFileLoader("pygit2._pygit2", str(file))
                    spec = importlib.util.spec_from_loader("pygit2._pygit2", loader)
                    if spec is None:
                        break
                    module = importlib.util.module_from_spec(spec)
                    loader.exec_module(module)
                    return module.Patch
    import pygit2

    return pygit2.Patch


def make(old: bytes | None, new: bytes | None, context_lines: int = 3) -> Any:
    """libgit2's patch between two contents. The names in it are placeholders: real ones can hold
    any byte, and whoever prints a header writes it himself."""
    return _patch_class().create_from(
        old or b"", new or b"", old_as_path="a", new_as_path="a", context_lines=context_lines
    )


def line_stats(old: bytes, new: bytes) -> tuple[int, int]:
    """(removed, added) lines; about 15 µs for small files."""
    _, added, removed = make(old, new, 0).line_stats
    return removed, added


def hunks_of(path: bytes, old: bytes | None, new: bytes | None) -> list[Hunk]:
    """The hunks from `old` to `new`. An id is a hash of path, old range, old and new lines, so it
    survives changes elsewhere in the file's new side and dies with any change of its own."""
    found = []
    for n, hunk in enumerate(make(old, new).hunks, 1):
        state = hashlib.sha256(path + b"\0%d,%d\0" % (hunk.old_start, hunk.old_lines))
        for line in hunk.lines:
            state.update(line.origin.encode() + line.raw_content)
        found.append(
            Hunk(
                state.hexdigest()[:16],
                n,
                hunk.old_start,
                hunk.old_lines,
                hunk.new_start,
                hunk.new_lines,
            )
        )
    return found
