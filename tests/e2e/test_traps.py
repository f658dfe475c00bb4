"""The traps of the design, sprung for real: each test has a control that shows the trap would close."""

import os
import shutil
import subprocess  # noqa: TID251 - the type of a started command
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.driver import COMMAND, SYSTEM_PATH, Box, adopting_orphans
from tests.e2e.listing import listing, timed_listing


@pytest.fixture(scope="module", autouse=True)
def long_command(shared: Box) -> Iterator["subprocess.Popen[bytes]"]:
    """Runs beside all tests of this file, since it only has to last; judged by the last of them."""
    with shared.starting("run", "--", "sh", "-c", "sleep 12; echo alive") as process:
        yield process


PLANTED = ("bwrap", "git", "sh", "env", "less", "nsenter", "python3", "fusermount3")


def plant(folder: Path, marker: Path) -> None:
    folder.mkdir(parents=True)
    for name in PLANTED:
        (folder / name).write_text(f"#!/bin/sh\ntouch '{marker}'\nexec /usr/bin/{name} \"$@\"\n")
        (folder / name).chmod(0o755)


def test_programs_planted_in_the_project_never_run_outside(box: Box) -> None:
    marker = box.root / "ran-outside"
    plant(box.project / ".venv/bin", marker)
    path = f"{box.project}/.venv/bin:{SYSTEM_PATH}"
    box.native("git", "--version", env={"PATH": path}).ok()
    assert marker.exists(), "the control: planted programs are first in PATH, and they work"
    marker.unlink()

    first = box.deltabox("run", "--", "/bin/sh", "-c", "echo x > f", env={"PATH": path})
    assert first.status in (0, 125), first
    if first.status == 125:
        assert ".venv/bin" in first.err
        box.keep("echo x > f").ok()
    for words in (
        ["diff"],
        ["sessions"],
        ["doctor"],
        ["log"],
        ["commit"],
        ["gc", "--yes"],
        ["undo"],
    ):
        box.deltabox(*words, env={"PATH": path})
        assert not marker.exists(), words


def test_programs_that_the_agent_plants_never_run_outside(box: Box) -> None:
    marker = box.root / "ran-outside"
    plant(box.root / "kit", marker)
    path = f"{box.project}/bin:{box.home}/.local/bin:{SYSTEM_PATH}"
    kit = f"{box.root / 'kit'}"
    box.keep(
        f"mkdir -p ~/.local; cp -r '{kit}' bin; cp -r '{kit}' ~/.local/bin", "--pass", kit
    ).ok()
    box.deltabox("run", "--review", "keep", "--", "/bin/true", env={"PATH": path})
    assert not marker.exists()
    box.deltabox("commit", env={"PATH": path}).ok()
    assert (box.project / "bin/bwrap").exists()
    box.deltabox("run", "--", "/bin/true", env={"PATH": path})
    assert not marker.exists()


def test_writes_through_links_reach_neither_base_nor_outside(box: Box) -> None:
    outside = box.root / "outside"
    outside.mkdir()
    (outside / "file").write_text("outside\n")
    (box.project / "to-file").symlink_to(outside / "file")
    (box.project / "to-folder").symlink_to(outside)
    (box.project / "to-base").symlink_to(box.project / "README.md")
    script = f"""
    P='{box.project}'
    echo evil > to-file; echo evil > to-folder/new; echo evil > to-base
    echo evil > "$P/src/main.py"; echo evil > "/proc/self/root$P/src/util.py"
    echo evil > /proc/self/cwd/via-cwd; cd /; echo evil > "$P/absolute"
    rm -rf "$P/src/../to-folder/"*
    true
    """
    box.native("sh", "-c", "echo fine > to-folder/new").ok()
    assert (outside / "new").read_text() == "fine\n", (
        "the control: outside deltabox the link leads there"
    )
    before, around = timed_listing(box.project), timed_listing(outside)
    box.deltabox("run", "--review", "keep", "--", "sh", "-uc", script)
    assert timed_listing(box.project) == before
    assert timed_listing(outside) == around
    assert {"README.md", "src/main.py", "via-cwd", "absolute"} <= box.changes().keys()
    box.deltabox("commit").ok()
    assert timed_listing(outside) == around


def test_folder_that_the_user_turns_into_a_link_is_not_followed(box: Box) -> None:
    outside = box.root / "outside"
    outside.mkdir()
    (outside / "main.py").write_text("outside\n")
    box.keep("echo agent > src/main.py; echo agent > src/new.py; echo x > fine").ok()
    (box.project / "src").rename(box.project / "was")
    (box.project / "src").symlink_to(outside)
    before = timed_listing(outside)
    box.deltabox("commit").ended(3)
    box.deltabox("diff").ok()
    box.deltabox("commit", "--on-conflict", "skip").ok()
    assert box.read("fine") == "x\n"
    assert timed_listing(outside) == before
    box.deltabox("abort").ok()
    assert timed_listing(outside) == before


def test_link_that_the_agent_puts_over_a_folder_is_not_followed_by_a_commit(box: Box) -> None:
    outside = box.root / "outside"
    outside.mkdir()
    box.keep(f"mkdir new; echo x > new/f; rm -rf src; ln -s '{outside}' src").ok()
    box.deltabox("commit").ok()
    assert (box.project / "src").readlink() == outside
    assert list(outside.iterdir()) == []
    box.keep("rm src; mkdir src; echo x > src/f").ok()
    box.deltabox("commit").ok()
    assert box.read("src/f") == "x\n"
    assert list(outside.iterdir()) == []


def test_home_that_the_agent_turns_into_links_makes_nothing_outside(box: Box) -> None:
    """The next run mounts the project below what the agent made of its home."""
    outside = box.root / "outside"
    outside.mkdir()
    before = listing(box.root / "home")
    for target in (
        f"/oldroot{outside}",
        str(outside),
    ):
        box.keep(
            f"echo x >> f; cd ~; mv work aside-$$ || rm -rf work; ln -s '{target}' work; ls -l"
        )
        box.deltabox("run", "--review", "keep", "--", "sh", "-c", "echo y >> f")
        assert list(outside.iterdir()) == []
        assert listing(box.root / "home") == before


def test_secrets_of_the_environment_are_in_no_process_inside(box: Box) -> None:
    look = "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline | tr '\\0' '\\n' | grep -c hush-hush || true"
    env = {"API_TOKEN": "hush-hush", "LD_LIBRARY_HINT": "hush-hush"}
    found = box.deltabox(
        "run", "--", "sh", "-c", look.replace("hush-hush", "hush-[h]ush"), env=env
    )
    assert found.ok().out == "0\n"
    named = ("run", "--env", "API_TOKEN", "--", "sh", "-c")
    control = box.deltabox(*named, look.replace("hush-hush", "hush-[h]ush"), env=env).ok()
    assert int(control.out) >= 1, "the control: what is passed by name can be found this way"


def mounts() -> list[str]:
    return Path("/proc/self/mountinfo").read_text().splitlines()


def test_hosts_mount_table_is_the_same_during_and_after(box: Box) -> None:
    mine = str(box.root)
    before = [line for line in mounts() if mine in line]
    assert before == []
    with box.agent("grep -c ' overlay ' /proc/self/mountinfo; meet here") as agent:
        agent.reaches("here")
        during = [line for line in mounts() if mine in line]
        agent.goes_on()
        done = agent.ends()
    assert int(done.out) >= 1, "the control: inside there is such a mount"
    assert during == before
    assert [line for line in mounts() if mine in line] == before


def test_no_process_is_left_after_a_run(box: Box) -> None:
    with adopting_orphans() as orphans:
        script = (
            "sleep 1000 & (trap '' TERM HUP; setsid sleep 1000) & nohup sleep 1000 & echo x > f"
        )
        # The control: an ordinary shell leaves its background children to us.
        box.native("sh", "-c", "sleep 0.01 >/dev/null 2>&1 & true").ok()
        assert orphans() == 1
        box.keep(script).ok()
        box.deltabox("diff").ok()
        box.deltabox("commit").ok()
        assert orphans() == 0
    assert box.read("f") == "x\n"


# Counting calls shows growth at any size; the nightly run takes the sizes of real projects.
SMALL, LARGE = (8_000, 100_000) if os.environ.get("DELTABOX_NIGHTLY") else (1_000, 16_000)


def fill(project: Path, files: int) -> None:
    """Empty files, a thousand to a folder."""
    for number in range(files // 1000):
        folder = project / f"many{number}"
        folder.mkdir()
        fd = os.open(folder, os.O_RDONLY)
        for n in range(1000):
            os.mknod(f"f{n}", 0o644, dir_fd=fd)
        os.close(fd)


def calls_below(box: Box, *words: str | Path) -> int:
    """System calls of a command and everything below it, counted by strace."""
    report = box.root / "calls"
    options = ("-f", "-qq", "-c", "-U", "calls,name", "-o", report)
    box.native("strace", *options, *words).ok()
    rows = [line.split() for line in report.read_text().splitlines()]
    return sum(
        int(row[0]) for row in rows if len(row) == 2 and row[0].isdigit() and row[1] != "total"
    )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="no strace here")
def test_work_of_a_start_does_not_grow_with_the_project(box: Box) -> None:
    run = ("run", "--review", "keep", "--", "sh", "-c", "echo x > f; rm f")
    box.deltabox(*run).ok()  # the first one makes the state
    fill(box.project, SMALL)
    small = calls_below(box, COMMAND, *run)
    control = calls_below(box, "find", box.project / "many0", "-size", "1")
    fill_more = box.project / "more"
    fill_more.mkdir()
    fill(fill_more, LARGE - SMALL)
    try:
        large = calls_below(box, COMMAND, *run)
    finally:
        shutil.rmtree(fill_more)
    assert control > 1000, "the control: the count sees a walk"
    assert small > 1000
    # Some calls are waits, whose number is the scheduler's; a look at each entry would add 15,000.
    assert large < small + 2000


@pytest.mark.slow  # a sandbox that hangs on the thread which started it dies after ten seconds
def test_command_of_twelve_seconds_lives(long_command: "subprocess.Popen[bytes]") -> None:
    out, err = long_command.communicate(timeout=60)
    assert (long_command.returncode, out) == (0, b"alive\n"), err
