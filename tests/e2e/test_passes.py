"""`--pass`: what a command sees of the host beside its project, and what of it can change."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.driver import Box
from tests.e2e.listing import timed_listing

LOOK = "cat {0}/f; echo agent > {0}/f 2>/dev/null || echo locked; cat {0}/f"


@pytest.fixture
def beside(box: Box) -> Path:
    """A folder of the user's, below home, with one file."""
    folder = box.home / "beside"
    folder.mkdir()
    (folder / "f").write_text("user\n")
    return folder


@pytest.fixture
def far() -> Iterator[Path]:
    """A folder outside home and /tmp. /var/tmp is the sandbox's own, so only root has a place."""
    parent = Path("/srv")
    if not os.access(parent, os.W_OK):
        pytest.skip("no folder outside home, /tmp and /var/tmp is writable by this user")
    with tempfile.TemporaryDirectory(dir=parent) as name:
        Path(name).chmod(0o755)
        (Path(name) / "f").write_text("user\n")
        yield Path(name)


def test_host_is_not_seen_without_a_pass(box: Box, beside: Path) -> None:
    assert box.keep(f"cat {beside}/f 2>/dev/null || echo absent").ok().out == "absent\n"


def test_read_only_pass_shows_and_keeps(box: Box, beside: Path) -> None:
    before = timed_listing(beside)
    for flag in (f"{beside}", f"{beside}:ro", "~/beside"):
        assert box.keep(LOOK.format(beside), "--pass", flag).ok().out == "user\nlocked\nuser\n"
    assert timed_listing(beside) == before


def test_copy_on_write_pass_is_writable_inside_and_untouched_outside(
    box: Box, beside: Path
) -> None:
    before = timed_listing(beside)
    done = box.keep(LOOK.format(beside) + "; echo x > p", "--pass", f"{beside}:cow").ok()
    assert done.out == "user\nagent\n"
    assert timed_listing(beside) == before
    again = box.keep(f"cat {beside}/f", "--pass", f"{beside}:cow").ok()
    assert again.out == "agent\n", "it lasts for the session"
    assert box.changes() == {"p": "added"}
    box.deltabox("commit").ok()
    assert timed_listing(beside) == before


def test_writable_pass_writes_at_once_and_only_there(box: Box, beside: Path) -> None:
    assert box.keep(LOOK.format(beside), "--pass", f"{beside}:rw").ok().out == "user\nagent\n"
    assert (beside / "f").read_text() == "agent\n"


def test_path_outside_home_can_be_shown_and_not_written(box: Box, far: Path) -> None:
    before = timed_listing(far)
    assert box.keep(LOOK.format(far), "--pass", f"{far}").ok().out == "user\nlocked\nuser\n"
    assert box.keep(f"cat {far}/f 2>/dev/null || echo absent").ok().out == "absent\n"
    for access in ("rw", "cow"):
        refused = box.keep("echo ran", "--pass", f"{far}:{access}").ended(125)
        assert "read-only" in refused.err
        assert refused.out == ""
    assert timed_listing(far) == before


def test_what_the_sandbox_makes_itself_cannot_be_passed(box: Box) -> None:
    for path in ("/etc", "/etc/shadow", "/run", "/proc", "/dev", "/var"):
        assert path in box.keep("echo ran", "--pass", path).ended(125).err
