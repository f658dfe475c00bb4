"""The session's folder: its lock excludes whoever it should for as long as it should; its end is whole."""

import contextlib
import os
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltabox.errors import Failed, SessionBusy
from deltabox.session.folder import (
    Folder,
    is_locked,
    locked,
    make_private,
    owner_of,
    process_start,
    remove_tree,
)
from tests.places import ME, run_python

HOLD = (
    "from pathlib import Path\n"
    "from deltabox.session.folder import locked\n"
    "with locked(Path(sys.argv[1]), what='It'):\n"
    "    print(__import__('os').getpid())\n"
    "    {then}\n"
)


def held_elsewhere(lock: Path, then: str, *args: object) -> int:
    """Another process holds the lock, then does `then`; its pid."""
    return int(run_python(HOLD.format(then=then), lock, *args).split()[0])


# the lock


def test_a_second_holder_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    code = (
        "from pathlib import Path\n"
        "from deltabox.session.folder import is_locked, locked\n"
        "from deltabox.errors import SessionBusy\n"
        "lock = Path(sys.argv[1])\n"
        "print(is_locked(lock))\n"
        "try:\n    with locked(lock, what='Session s1'): print('got it')\n"
        "except SessionBusy as exc: print(exc)\n"
    )
    with locked(lock, what="Session s1"):
        told = run_python(code, lock)
    assert told.splitlines()[0] == "True"
    assert told.splitlines()[1].startswith(f"Session s1 is in use by process {os.getpid()};")
    assert run_python(code, lock).splitlines() == ["False", "got it"]


def test_the_same_process_is_refused_too_and_its_looks_do_not_free_the_lock(
    tmp_path: Path,
) -> None:
    # POSIX record locks fail both: they let the process in, and any close() frees them.
    lock = tmp_path / "lock"
    with locked(lock, what="It"):
        assert is_locked(lock)
        with pytest.raises(SessionBusy), locked(lock, what="It"):
            pass
        assert is_locked(lock)
        assert "True" in run_python(
            "from pathlib import Path\nfrom deltabox.session.folder import is_locked\n"
            "print(is_locked(Path(sys.argv[1])))",
            lock,
        )
    assert not is_locked(lock)


def test_threads_exclude_each_other(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    refused = []

    def other() -> None:
        try:
            with locked(lock, what="It"):
                refused.append(False)
        except SessionBusy:
            refused.append(True)

    with locked(lock, what="It"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    other()
    assert refused == [True, False]


def test_looking_never_makes_a_start_fail(tmp_path: Path) -> None:
    # A look that took the lock for a moment would make somebody else's start busy now and then.
    lock = tmp_path / "lock"
    with locked(lock, what="It"):
        pass
    over = threading.Event()
    looks = 0

    def look() -> None:
        nonlocal looks
        while not over.is_set():
            assert is_locked(lock) in (True, False)
            looks += 1

    thread = threading.Thread(target=look)
    thread.start()
    try:
        starts = 0
        while looks < 500:
            with locked(lock, what="It"):
                starts += 1
    finally:
        over.set()
        thread.join()
    assert starts > 0


@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), 9)"])
def test_a_dead_holders_lock_is_free(tmp_path: Path, end: str) -> None:
    lock = tmp_path / "lock"
    then = f"import os, sys; sys.stdout.flush(); {end}"
    try:
        pid = str(held_elsewhere(lock, then))
    except Failed:  # killed, as it should be
        pid = lock.read_text().strip()
    assert owner_of(lock) == f"process {pid}"
    assert not is_locked(lock)
    with locked(lock, what="It"):
        assert owner_of(lock) == f"process {os.getpid()}"


def test_programs_that_a_holder_starts_do_not_keep_its_lock(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    script = "exec >/dev/null 2>&1; read x <$0"
    then = (
        "import os, sys; sys.stdout.flush()\n"
        f"    if os.fork() == 0: os.execv('/bin/sh', ['sh', '-c', '{script}', sys.argv[2]])\n"
        "    os._exit(0)"
    )
    held_elsewhere(tmp_path / "lock", then, fifo)
    with open(fifo, "w") as child:  # opens once the child reads: it outlives the holder
        assert not is_locked(tmp_path / "lock")
        child.write("done\n")


def test_a_lock_whose_file_was_removed_meanwhile_is_not_held(tmp_path: Path) -> None:
    lock = tmp_path / "lock"

    def opener() -> None:
        """Opens the file, then loses it: what a session's end does to one who waits."""
        real = os.open

        def then_removed(*args: object, **kwargs: object) -> int:
            fd: int = real(*args, **kwargs)  # type: ignore[arg-type]
            lock.unlink()
            return fd

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "open", then_removed)
            with locked(lock, what="Session s1"):
                pass

    with pytest.raises(SessionBusy, match="just been ended"):
        opener()


def test_a_link_in_the_locks_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "lock").symlink_to("precious")
    with pytest.raises(OSError, match="symbolic links"), locked(tmp_path / "lock", what="It"):
        pass
    assert (tmp_path / "precious").read_text() == "kept"


def test_a_missing_lock_is_free_and_not_made_by_looking(tmp_path: Path) -> None:
    assert not is_locked(tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files for others")
def test_a_lock_made_by_root_can_be_taken_by_the_folders_owner(tmp_path: Path) -> None:
    folder = tmp_path / "session"
    folder.mkdir()
    os.chown(folder, 1234, 1235)
    with locked(folder / "lock", what="It"):
        st_ = (folder / "lock").stat()
    assert (st_.st_uid, st_.st_gid) == (1234, 1235)
    assert stat.S_IMODE(st_.st_mode) == 0o600


# the folder


def test_a_created_folder_is_private_and_removed_without_rest(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "deep" / "sessions" / "s1")
    before = os.umask(0)
    try:
        folder.create(ME)
    finally:
        os.umask(before)
    for made in (folder.root, folder.home, folder.layers, folder.common, folder.grafts):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
    folder.create(ME)  # once more is fine
    folder.remove()
    assert not folder.root.exists()
    assert folder.root.parent.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files for others")
def test_under_sudo_every_new_part_of_the_way_belongs_to_the_user(tmp_path: Path) -> None:
    make_private(tmp_path / "a" / "b", (1234, 1235))
    assert [
        (p.stat().st_uid, p.stat().st_gid) for p in (tmp_path / "a", tmp_path / "a" / "b")
    ] == [(1234, 1235)] * 2
    assert tmp_path.stat().st_uid == 0


@pytest.fixture
def hostile(tmp_path: Path) -> Iterator[Path]:
    """What an agent may leave: no rights, names of all sorts, links that lead out."""
    root = tmp_path / "hostile"
    (root / "shut" / "below").mkdir(parents=True)
    (root / "shut" / "below" / "file").write_text("x")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept").write_text("kept")
    (root / "way").symlink_to(tmp_path / "outside")
    (root / "shut" / "way").symlink_to("../../outside")
    os.mkfifo(root / "fifo")
    (Path(os.fsdecode(os.fsencode(root) + b"/\xff\n"))).write_text("x")
    (root / "shut" / "below").chmod(0)
    (root / "shut").chmod(0)
    yield root
    if root.exists():
        (root / "shut").chmod(0o700)
        (root / "shut" / "below").chmod(0o700)


def test_a_hostile_tree_is_removed_and_nothing_that_it_links_to(hostile: Path) -> None:
    remove_tree(hostile)
    assert not os.path.lexists(hostile)
    assert (hostile.parent / "outside" / "kept").read_text() == "kept"


def test_a_link_given_as_the_tree_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "kept").write_text("kept")
    (tmp_path / "link").symlink_to("real")
    with contextlib.suppress(Failed):  # refused, or only the link removed: both are right
        remove_tree(tmp_path / "link")
    assert (tmp_path / "real" / "kept").read_text() == "kept"


def test_a_tree_deeper_than_recursion_and_than_a_path_can_be_is_removed(tmp_path: Path) -> None:
    memory = Path("/dev/shm")  # a thousand folders cost seconds on a busy disk
    root = Path(tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else tmp_path))
    at = os.open(root, os.O_RDONLY)
    for _ in range(1010):
        os.mkdir("dddd", dir_fd=at)
        below = os.open("dddd", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    remove_tree(root)
    assert not root.exists()


def test_removing_what_is_not_there_is_fine(tmp_path: Path) -> None:
    remove_tree(tmp_path / "none")


# processes


def test_a_processes_start_names_it_and_a_dead_one_has_none() -> None:
    mine = process_start(os.getpid())
    assert mine is not None
    assert mine == process_start(os.getpid())
    other = int(run_python("import os; print(os.getpid())"))
    assert process_start(other) is None


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0/"), min_size=1, max_size=15))
def test_a_processes_name_cannot_forge_its_start(name: str) -> None:
    # The name stands in /proc/<pid>/stat in brackets, and may hold brackets, blanks and numbers.
    comm = f"/proc/{os.getpid()}/comm"
    with open(comm, "rb") as file:
        before = file.read()
    expected = process_start(os.getpid())
    try:
        with open(comm, "wb") as file:
            file.write(name.encode()[:15])
        assert process_start(os.getpid()) == expected
    finally:
        with open(comm, "wb") as file:
            file.write(before.strip())
