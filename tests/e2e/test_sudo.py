"""Under sudo the command is the invoking user's, and so is everything that stays behind."""

import os
import stat
from pathlib import Path

import pytest

from tests.e2e.driver import Box

USER = 54321  # nobody's here: only numbers count

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be sudo")


def owners(folder: Path) -> set[int]:
    """Whose everything is, but for whiteouts: the kernel makes those as whoever mounted, and the
    owner of their folder can remove them."""
    entries = [p.lstat() for p in (folder, *folder.rglob("*"))]
    return {st.st_uid for st in entries if not stat.S_ISCHR(st.st_mode)}


def sudo(box: Box) -> None:
    box.env |= {"SUDO_UID": str(USER), "SUDO_GID": str(USER)}
    for directory, folders, files in os.walk(box.home):
        for name in (*folders, *files):
            os.chown(os.path.join(directory, name), USER, USER, follow_symlinks=False)


def test_command_and_all_it_leaves_belong_to_the_invoking_user(box: Box) -> None:
    box.write("old", "old\n")
    sudo(box)
    ran = box.keep("id -u; echo new > new; rm old; ls -n new")
    assert ran.ok().out.splitlines()[0] == str(USER)
    assert owners(box.state) == {USER}
    box.deltabox("commit").ok()
    assert (box.project / "new").stat().st_uid == USER
    assert owners(box.state) == {USER}
    box.deltabox("undo").ok()
    assert owners(box.project) == {USER}
    assert box.read("old") == "old\n"


def test_plain_root_lends_its_powers_to_nobody(box: Box) -> None:
    box.write("file", "text\n")
    sudo(box)
    del box.env["SUDO_UID"], box.env["SUDO_GID"]
    # Without sudo's word for it the project's owner is whom the command acts as.
    assert box.keep("id -u; echo more >> file").ok().out.splitlines()[0] == str(USER)
    box.deltabox("commit").ok()
    assert (box.project / "file").stat().st_uid == USER
