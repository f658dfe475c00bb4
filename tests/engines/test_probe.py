"""What is said when no view can be made: the reason in words, the cure, and what this version lacks."""

import errno
from collections.abc import Mapping
from pathlib import Path

import pytest

from deltabox.engines.diagnosis import (
    Facts,
    Failure,
    apparmor_profile,
    explain,
    filesystem_of,
    gather,
)
from deltabox.engines.overlay import OverlayEngine
from deltabox.engines.probe import choose, survey
from deltabox.errors import BadUsage, EngineUnavailable
from deltabox.process import native_program
from tests.places import Place, run_python

APPARMOR = {"kernel/apparmor_restrict_unprivileged_userns": "1"}


def _facts(
    settings: Mapping[str, str] | None = None,
    *,
    uid: int = 1000,
    upper: str = "ext4",
    filtered: bool = False,
) -> Facts:
    known = frozenset({"ext4", "overlay"})
    return Facts(uid, "6.1.0", settings or {}, known, upper, uid != 0, filtered)


@pytest.mark.parametrize(
    ("failure", "facts", "reason", "cure"),
    [
        (("user namespace", errno.EPERM), _facts(APPARMOR), "AppArmor", "apparmor_parser -r"),
        (("private propagation", errno.EACCES), _facts(APPARMOR), "AppArmor", "userns,"),
        (
            ("user namespace", errno.EPERM),
            _facts({"kernel/unprivileged_userns_clone": "0"}),
            "switched off for ordinary users",
            "sysctl kernel.unprivileged_userns_clone=1",
        ),
        (
            ("user namespace", errno.ENOSPC),
            _facts({"user/max_user_namespaces": "0"}),
            "user.max_user_namespaces is 0",
            "sysctl user.max_user_namespaces=",
        ),
        (
            ("mount namespace", errno.ENOSPC),
            _facts({"user/max_user_namespaces": "9999", "user/max_mnt_namespaces": "0"}, uid=0),
            "user.max_mnt_namespaces is 0",
            "sysctl user.max_mnt_namespaces=",
        ),
        (("mount namespace", errno.EPERM), _facts(uid=0), "Root has no right", "--cap-add"),
        (("user namespace", errno.EPERM), _facts(filtered=True), "filter", "unshare and mount"),
        (("overlay", errno.EINVAL), _facts(upper="overlay"), "on overlay", "DELTABOX_STATE_DIR"),
        (("overlay", errno.EINVAL), _facts(upper="nfs4"), "on nfs4", "DELTABOX_STATE_DIR"),
        (("overlay", errno.ENODEV), _facts(), "no overlay file system", "modprobe overlay"),
        (("overlay", errno.EPERM), _facts(), "does not let this user", "5.12"),
        (("mount point", errno.ELOOP), _facts(), "a symbolic link", "--new"),
        (("mount point", errno.ENOENT), _facts(), "does not exist", "Make it on the host"),
        (("mounts below", errno.EINVAL), _facts(), "/p: ", "Unmount /p"),
    ],
)
def test_failure_is_explained_with_its_cure(
    failure: tuple[str, int], facts: Facts, reason: str, cure: str
) -> None:
    told = explain(Failure(failure[0], b"/p", failure[1], "a symbolic link stands there"), facts)
    assert reason in told.reason
    assert cure in "\n".join(remedy.shown for remedy in told.remedies)
    assert "\n" not in told.sentence


def test_unknown_failure_keeps_the_kernels_words_and_escapes_the_path() -> None:
    told = explain(Failure("attach", b"/a\nb", errno.EIO, "Input/output error"), _facts())
    assert told.sentence.startswith('attach "/a\\nb": Input/output error.')


def test_limits_that_hold_are_not_blamed() -> None:
    settings = {"user/max_user_namespaces": "5000", "kernel/unprivileged_userns_clone": "1"}
    told = explain(Failure("user namespace", b"", errno.EPERM, "no"), _facts(settings))
    assert told.reason == "The system refuses a user namespace: no"
    assert told.remedies == ()


def test_profile_names_the_program_and_allows_only_user_namespaces() -> None:
    lines = [
        line.strip() for line in apparmor_profile(Path("/opt/a b/deltabox-view")).splitlines()
    ]
    assert 'profile deltabox-view "/opt/a b/deltabox-view" flags=(unconfined) {' in lines
    assert "userns," in lines


def test_file_system_is_that_of_the_innermost_and_last_mount() -> None:
    table = (
        "1 0 8:1 / / rw - ext4 /dev/x rw\n"
        "2 1 0:1 / /ho\\040me rw shared:1 - tmpfs t rw\n"
        "3 2 0:2 / /ho\\040me rw - overlay o rw\n"
        "4 1 0:3 / /home2 rw - xfs o rw\n"
    )
    assert filesystem_of(Path("/ho me/x"), table) == "overlay"
    assert filesystem_of(Path("/home22"), table) == "ext4"
    assert filesystem_of(Path("/home2"), table) == "xfs"
    assert filesystem_of(Path("/x"), "") == ""


def test_facts_of_this_machine_are_read(tmp_path: Path) -> None:
    facts = gather(tmp_path, native_program("view"))
    assert facts.upper_type
    assert "proc" in facts.filesystems
    nothing = gather(tmp_path, native_program("view"), proc=tmp_path)
    assert (nothing.settings, nothing.upper_type, nothing.may_administer) == ({}, "", False)


_LIMITED = """
import trio
from pathlib import Path
from deltabox.engines.overlay import usable
name, project, state = sys.argv[1:]
Path("/proc/sys/user", name).write_text("0")
print(trio.run(usable, Path(project), Path(state)))
"""


@pytest.mark.overlay
def test_kernel_limit_of_zero_is_found_and_named(place: Place) -> None:
    # The limit is set inside a user namespace of its own, where it holds for that one alone.
    under = ("/usr/bin/unshare", "-Urm")
    said = run_python(_LIMITED, "max_mnt_namespaces", place.project, place.session, under=under)
    assert "usable=False" in said
    assert "user.max_mnt_namespaces is 0" in said
    assert "sudo sysctl user.max_mnt_namespaces=16384" in said


@pytest.mark.parametrize("name", ["auto", "overlay"])
def test_auto_takes_overlay_without_a_trial(name: str) -> None:
    assert isinstance(choose(name), OverlayEngine)


@pytest.mark.parametrize("name", ["fuse", "git"])
def test_engine_of_another_version_is_refused_as_such(name: str) -> None:
    with pytest.raises(EngineUnavailable, match=f"{name} engine is not in this version"):
        choose(name)


def test_unknown_engine_is_bad_usage() -> None:
    with pytest.raises(BadUsage, match="auto, overlay, fuse, git"):
        choose("zfs")


@pytest.mark.overlay
async def test_survey_tells_what_works_and_what_is_not_there(place: Place) -> None:
    reports = {report.name: report for report in await survey(place.project, place.session)}
    assert reports["overlay"].usable
    assert not reports["fuse"].usable
    assert "not in this version" in reports["fuse"].reason
    assert "not in this version" in reports["git"].reason


@pytest.mark.overlay
async def test_survey_of_an_absent_state_directory_says_so(place: Place) -> None:
    overlay, *_ = await survey(place.project, place.session / "absent")
    assert not overlay.usable
    assert "absent cannot be used" in overlay.reason
