"""What stands below a folder, entry by entry. Its text also runs by itself inside a sandbox (`python3 -c`).

Imports the standard library alone, and nothing of the project.
"""

import hashlib
import os
import stat
from pathlib import Path

Entry = tuple[str, int, str]
Timed = tuple[str, int, str, int, int]


def listing(root: Path) -> dict[str, Entry]:
    """Everything below `root`: kind, mode, content hash or link target. The root itself is `.`."""
    return {name: entry[:3] for name, entry in timed_listing(root).items()}


def timed_listing(root: Path) -> dict[str, Timed]:
    """The same with mtime and inode: equal before and after means that nobody wrote at all."""
    found: dict[str, Timed] = {".": _entry(root)}
    for directory, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(directory, name)
            found[str(path.relative_to(root))] = _entry(path)
    return dict(sorted(found.items()))


def _entry(path: Path) -> Timed:
    st = path.lstat()
    content = ""
    if stat.S_ISREG(st.st_mode):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
    elif stat.S_ISLNK(st.st_mode):
        content = str(path.readlink())
    kind = stat.filemode(st.st_mode)[0]
    return kind, stat.S_IMODE(st.st_mode), content, st.st_mtime_ns, st.st_ino
