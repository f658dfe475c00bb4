"""The ways out that were found by trying: each is tried again, with a control that shows the trap."""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from deltabox.errors import Failed, IsolationUnavailable
from deltabox.isolation import sandbox
from deltabox.isolation.policy import Bind
from deltabox.isolation.running import Exit
from deltabox.process import Control, end, open_process
from tests.isolation.boxes import ENVIRON, Box
from tests.places import REPOSITORY, Place, run_in

pytestmark = [pytest.mark.overlay, pytest.mark.bwrap]


# ---- which bubblewrap ----


def _plant(folder: Path, mark: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    fake = folder / "bwrap"
    fake.write_text(f"#!/bin/sh\necho ran >> {mark}\necho bubblewrap 9.9.9\n")
    fake.chmod(0o755)
    return fake


def test_bubblewrap_planted_in_the_project_is_passed_over(place: Place, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    fake = _plant(place.project / ".venv/bin", mark)
    environ = {"PATH": f"{fake.parent}:relative:{os.environ['PATH']}"}
    with sandbox.find_bwrap(environ, [place.project]) as found:
        assert found.path != fake
    assert not mark.exists()
    with sandbox.find_bwrap(environ) as control:
        assert (control.path, mark.exists()) == (fake, True)


async def test_bubblewrap_planted_through_the_view_never_runs(box: Box, tmp_path: Path) -> None:
    # The agent writes it at the very path of the real one it was started by, had that been looked up
    # inside; ours is a descriptor opened outside, so the command still is in the real sandbox.
    real = shutil.which("bwrap")
    assert real
    copy = box.place.project / "bwrap"
    shutil.copy(real, copy)
    with sandbox.find_bwrap({"DELTABOX_BWRAP": str(copy)}) as chosen:
        await box.sh('printf "#!/bin/sh\\necho PLANTED\\n" > bwrap')
        assert run_in(box.view, "/bin/sh", "-c", f"{copy}").strip() == "PLANTED"
        moved = Box(box.place, box.view, chosen)
        result = await moved.sh("grep NoNewPrivs /proc/self/status; cat bwrap")
        assert b"NoNewPrivs:\t1" in result.out
        assert b"PLANTED" in result.out  # the view does show the planted one


@pytest.mark.parametrize(
    ("mode", "words"),
    [(0o4755, "set-uid"), (0o2755, "set-uid"), (0o757, "changed by other users")],
)
def test_unsafe_bubblewrap_is_refused(tmp_path: Path, mode: int, words: str) -> None:
    real = shutil.which("bwrap")
    assert real
    copy = tmp_path / "bwrap"
    shutil.copy(real, copy)
    sandbox.find_bwrap({"DELTABOX_BWRAP": str(copy)}).close()
    copy.chmod(mode)
    with pytest.raises(IsolationUnavailable, match=words):
        sandbox.find_bwrap({"DELTABOX_BWRAP": str(copy)})


def test_named_bubblewrap_below_an_agents_folder_is_refused(tmp_path: Path) -> None:
    fake = _plant(tmp_path / "project", tmp_path / "mark")
    with pytest.raises(IsolationUnavailable, match="where the agent can write"):
        sandbox.find_bwrap({"DELTABOX_BWRAP": str(fake)}, [tmp_path / "project"])


def test_missing_and_old_bubblewrap_are_said_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(IsolationUnavailable, match=r"not installed.*apt install bubblewrap"):
        sandbox.find_bwrap({"PATH": str(tmp_path)})
    old = tmp_path / "bwrap"
    old.write_text("#!/bin/sh\necho bubblewrap 0.7.0\n")
    old.chmod(0o755)
    with pytest.raises(
        IsolationUnavailable, match=r"bubblewrap 0\.7\.0, and deltabox needs 0\.8\.0"
    ):
        sandbox.find_bwrap({"DELTABOX_BWRAP": str(old)})


# ---- mount destinations (CVE-2026-87766) ----


@pytest.fixture
def outside() -> Iterator[Path]:
    """A host directory that is not covered where the view stands, so that a link can reach it."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


async def test_links_made_by_the_agent_lead_no_mount_outside(box: Box, outside: Path) -> None:
    # Everything an agent can turn into a link: entries of /tmp, of home, of the project.
    prepare = (
        'for d in /tmp ~ .; do rm -rf "$d/sub"; ln -s "/oldroot$1" "$d/sub"; done; '
        'ln -s "/oldroot$1" /tmp/.deltabox; rm -rf dir; ln -s "/oldroot$1" dir'
    )
    await box.sh(prepare, outside)
    for profile in ("workspace-write", "read-only"):
        assert (await box.sh("readlink /tmp/sub dir", profile=profile)).exit == Exit(code=0)
    assert list(outside.iterdir()) == []

    real = shutil.which("bwrap")
    assert real
    destination = [*("--ro-bind", "/dev/null", "/tmp/sub/planted"), "true"]
    try:
        run_in(box.view, real, "--bind", "/", "/", *destination)
    except Failed:
        assert (
            list(outside.iterdir()) == []
        )  # a bubblewrap with the repair; the rule below holds anyway
    else:
        assert [p.name for p in outside.iterdir()] == ["planted"]


async def test_no_mount_destination_lies_where_the_agent_writes(box: Box) -> None:
    policy = box.policy()
    writable = [tree.dest for tree in policy.trees]
    made = [b.dest for b in (*policy.system, *policy.over_proc)] + [f.dest for f in policy.files]
    made += [m.dest for m in policy.memory] + [link.dest for link in policy.links]
    made += [d for d in policy.directories if d not in writable]
    assert not [m for m in made for w in writable if m.is_relative_to(w)]


async def test_source_that_became_a_link_is_refused(
    box: Box, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tool = tmp_path_factory.mktemp("host") / "tool"
    policy = box.policy()
    broken = replace(policy, system=(*policy.system, Bind(tool, Path("/srv/tool"), "host")))
    tool.symlink_to("/usr")
    with pytest.raises(IsolationUnavailable, match=r"cannot be given to the sandbox.*symbolic"):
        await box.sh("true", policy=broken)


async def test_view_covering_a_host_source_stops_the_start(box: Box) -> None:
    # Below /tmp the view has its own; bubblewrap then finds another file at the descriptor's path.
    covered = box.place.root / "covered"
    covered.mkdir()
    policy = box.policy()
    await box.sh('mkdir -p "$1" && echo planted > "$1/it"', covered)
    wrong = replace(
        policy,
        system=(*policy.system, Bind(covered, Path("/srv/covered"), "host")),
    )
    with pytest.raises(IsolationUnavailable, match="Race condition binding dirfd"):
        await box.sh("cat /srv/covered/it", policy=wrong)


# ---- the owner's death ----

OWNER = """
import socket, trio
from pathlib import Path
from tests.isolation.boxes import TERMINAL, Pipes, open_box
from tests.places import Place

async def main():
    out = socket.socket(fileno=int(sys.argv[1]))
    place = Place(*(Path(p) for p in sys.argv[2:6]))
    stdio = TERMINAL if sys.argv[6] == "tty" else Pipes()
    script = "trap '' HUP TERM INT; (setsid sleep 1000 &); (setsid sleep 1000 &); sleep 1000 & echo up; wait"
    async with open_box(place) as box:
        async with box.start("/bin/bash", "-c", script, stdio=stdio) as command:
            await (command.terminal or command.stdout).receive_some()
            out.send(str(command.pid).encode())
            await trio.sleep_forever()

trio.run(main)
"""


def _descendants(pid: int) -> list[int]:
    todo, found = [pid], []
    while todo:
        found.append(todo.pop())
        text = Path(f"/proc/{found[-1]}/task/{found[-1]}/children").read_text()
        todo += [int(word) for word in text.split()]
    return found


@pytest.mark.parametrize("stdio", ["pipes", "tty"])
async def test_owner_killed_takes_every_process_along(place: Place, stdio: str) -> None:
    control, theirs = Control.pair()
    head = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); sys.dont_write_bytecode = True\n"
    paths = [str(p) for p in (place.root, place.project, place.session, place.home_at)]
    argv = [sys.executable, "-c", head + OWNER, str(theirs.fileno()), *paths, stdio]
    owner = await open_process(
        [os.fsencode(a) for a in argv],
        fds=[theirs.fileno()],
        stderr=2,
        env=ENVIRON | {"HOME": str(place.root)},
    )
    theirs.close()
    try:
        with trio.fail_after(20):
            message = await control.receive()
            assert message is not None
            # Orphans fall to init, so its descendants are all there is.
            pids = _descendants(int(message.data))
            assert len(pids) >= 5  # init, bash and three sleepers
            handles = [os.pidfd_open(p) for p in pids]
            owner.send_signal(signal.SIGKILL)
            for handle in handles:
                await trio.lowlevel.wait_readable(handle)  # ready when the process has ended
                os.close(handle)
    finally:
        control.close()
        await end(owner)
