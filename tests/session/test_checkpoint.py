"""Checkpoints through real mounts and commands: what the view shows is what was remembered."""

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from deltabox.engines.overlay import OverlayView
from deltabox.errors import NotFound, Refused, SessionRunning
from deltabox.isolation.running import Pipes
from deltabox.paths import Tree, WorkspacePath
from deltabox.session import checkpoint
from deltabox.session.workspace import Workspace
from tests.review.kit import Model, read_tree
from tests.session.here import open_here

pytestmark = [pytest.mark.overlay, pytest.mark.bwrap]
P = WorkspacePath


@pytest.fixture
def project(tmp_path: Path) -> Path:
    made = tmp_path / "home" / "project"
    (made / "d").mkdir(parents=True)
    (made / "a").write_text("base a\n")
    (made / "d" / "x").write_text("base x\n")
    return made


@asynccontextmanager
async def opened(project: Path, **settings: object) -> AsyncIterator[Workspace]:
    async with open_here(project.parent.parent, **settings) as workspace:
        yield workspace


async def sh(workspace: Workspace, script: str) -> str:
    """Run a script in the view; what it printed."""
    cwd = workspace.session.project
    async with workspace.command(["sh", "-euc", script], stdio=Pipes(), cwd=cwd) as running:
        command = running.command
        assert command.stdout is not None
        out = b"".join([chunk async for chunk in command.stdout])
        exit_ = await command.wait()
    assert exit_.code == 0, exit_
    return out.decode()


def shown(workspace: Workspace) -> Model:
    """The view, walked through the mount."""
    assert isinstance(workspace.view, OverlayView)
    inside = Path(f"/proc/{workspace.view.pid}/root")
    return read_tree(inside / workspace.session.project.relative_to("/"))


def commands_of(workspace: Workspace) -> list[str]:
    return [e["kind"] for e in workspace._store.journal(workspace.session.project)]


async def test_restore_shows_exactly_what_was_there_through_the_mount(project: Path) -> None:
    async with opened(project) as workspace:
        await sh(workspace, "echo one > a; mkdir n; echo n > n/f; chmod 700 n; ln -s a l")
        first = shown(workspace)
        kept = await workspace.checkpoint("one")
        await sh(workspace, "rm -r n d; mkdir d; echo new > d/y; rm l; mkdir l; echo two > a")
        second = shown(workspace)
        assert first != second
        back = await workspace.restore(kept.id)
        assert shown(workspace) == first
        assert await sh(workspace, "cat a n/f d/x; readlink l") == "one\nn\nbase x\na\n"
        await workspace.restore(back.id)
        assert shown(workspace) == second
        assert (project / "a").read_text() == "base a\n"


async def test_restore_of_paths_leaves_the_rest(project: Path) -> None:
    async with opened(project) as workspace:
        await sh(workspace, "echo one > a; echo keep > k; echo deep > d/n")
        await workspace.checkpoint("one")
        await sh(workspace, "echo two > a; echo two > k; rm -r d")
        await workspace.restore("one", [P(b"a"), P(b"d")])
        assert await sh(workspace, "cat a k d/n d/x") == "one\ntwo\ndeep\nbase x\n"


async def test_restack_keeps_tmp_and_home(project: Path) -> None:
    async with opened(project) as workspace:
        await sh(workspace, "echo t > /tmp/t; echo h > ~/h; echo x > a")
        row = await workspace.checkpoint()
        await sh(workspace, "echo y > a")
        await workspace.restore(row.id)
        assert await sh(workspace, "cat /tmp/t ~/h a") == "t\nh\nx\n"


async def test_descriptor_opened_before_a_restack_reads_what_it_had(project: Path) -> None:
    async with opened(project) as workspace:
        await sh(workspace, "echo one > a")
        with Tree(os.dup(workspace.view.root_fd)) as tree:
            fd = tree.open_file(P(b"a"))
        row = await workspace.checkpoint()
        await sh(workspace, "echo two > a")
        assert os.read(fd, 100) == b"one\n"
        os.close(fd)
        await workspace.restore(row.id)
        assert await sh(workspace, "cat a") == "one\n"


async def test_write_after_a_checkpoint_never_reaches_what_was_remembered(project: Path) -> None:
    """In place, by append, by truncation and by a second link: all copy up."""
    async with opened(project) as workspace:
        await sh(workspace, "echo one > a; ln a b; echo log > log")
        row = await workspace.checkpoint()
        before = shown(workspace)
        await sh(workspace, "echo more >> log; : > b; printf X | dd of=a conv=notrunc 2>/dev/null")
        assert shown(workspace) != before
        await workspace.restore(row.id)
        assert shown(workspace) == before


async def test_beside_a_live_command_a_copy_is_made_and_the_command_goes_on(project: Path) -> None:
    cwd = project
    script = "echo one > a; echo ready; read _; echo two > a; echo done"
    async with opened(project) as workspace:
        async with workspace.command(["sh", "-c", script], stdio=Pipes(), cwd=cwd) as running:
            command = running.command
            assert command.stdout is not None
            assert command.stdin is not None
            assert await command.stdout.receive_some(100) == b"ready\n"
            row = await workspace.checkpoint("live")
            assert row.mode == "cloned"
            with pytest.raises(SessionRunning):
                await workspace.restore("live")
            await command.stdin.send_all(b"go\n")
            assert await command.stdout.receive_some(100) == b"done\n"
            assert (await command.wait()).code == 0
        assert await sh(workspace, "cat a") == "two\n"
        await workspace.restore("live")
        assert await sh(workspace, "cat a") == "one\n"


async def test_each_command_that_changed_something_can_be_gone_back_to(project: Path) -> None:
    async with opened(project) as workspace:
        await sh(workspace, "echo one > a")
        await sh(workspace, "true")
        await sh(workspace, "cat a; rm a")
        rows = workspace._store.checkpoints(workspace.session.id)
        assert len(rows) == 1, "one change before the last command, one checkpoint"
        await workspace.restore(rows[0].id)
        assert await sh(workspace, "cat a") == "one\n"


async def test_without_automatic_checkpoints_only_those_asked_for_are_made(project: Path) -> None:
    async with opened(project, checkpoints="off") as workspace:
        await sh(workspace, "echo one > a")
        await sh(workspace, "rm a")
        assert workspace._store.checkpoints(workspace.session.id) == []


async def test_automatic_checkpoint_beside_a_live_command_is_skipped_when_too_big_and_says_so(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "CLONE_BUDGET", 1 << 16)
    async with opened(project) as workspace:
        script = "head -c 200000 /dev/zero > big; echo ready; read _"
        async with workspace.command(["sh", "-c", script], stdio=Pipes(), cwd=project) as running:
            command = running.command
            assert command.stdout is not None
            assert command.stdin is not None
            assert await command.stdout.receive_some(100) == b"ready\n"
            await sh(workspace, "true")
            assert workspace._store.checkpoints(workspace.session.id) == []
            assert "checkpoint.skipped" in commands_of(workspace)
            monkeypatch.setattr(checkpoint, "CLONE_BUDGET", 1 << 30)
            await sh(workspace, "echo small > s")
            await sh(workspace, "true")
            assert [r.mode for r in workspace._store.checkpoints(workspace.session.id)] == [
                "cloned"
            ]
            await command.stdin.send_all(b"go\n")


async def test_long_stacks_are_folded_and_every_checkpoint_still_restores(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "MAX_LAYERS", 3)
    async with opened(project) as workspace:
        seen = []
        for n in range(8):
            await sh(
                workspace, f"echo {n} > a; echo {n} > f{n}; rm -f f{n - 2}; rm -rf d; mkdir d"
            )
            row = await workspace.checkpoint(str(n))
            stack = json.loads(workspace._store.session(workspace.session.id).stack)
            assert len(stack) <= 3
            seen.append((row, shown(workspace)))
        for row, model in reversed(seen):
            await workspace.restore(row.id)
            assert shown(workspace) == model


async def test_decided_checkpoints_are_history(project: Path) -> None:
    async with opened(project) as workspace:
        await sh(workspace, "echo one > a")
        row = await workspace.checkpoint()
        await workspace.decide(lambda desk: desk.commit())
        with pytest.raises(Refused, match="undo"):
            await workspace.restore(row.id)
        with pytest.raises(NotFound, match=row.id):
            await workspace.restore("k99999999")


async def test_command_that_starts_while_layers_change_waits_for_them(project: Path) -> None:
    async with opened(project) as workspace:
        await sh(workspace, "echo one > a")

        async def change() -> None:
            for _ in range(5):
                await workspace.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(change)
            for n in range(5):
                await sh(workspace, f"echo {n} >> a")
        assert await sh(workspace, "cat a") == "one\n0\n1\n2\n3\n4\n"
