"""Finding files and lines in a real view, with ripgrep and without it: the same answers."""

import os
from pathlib import Path

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from deltabox.errors import BadUsage
from deltabox.paths import WorkspacePath, parse
from deltabox.session import pattern, search
from deltabox.session.changes import Change
from deltabox.session.search import Asked, Hit, Text, Tool
from deltabox.session.workspace import Workspace
from tests.session.here import open_here

pytestmark = [pytest.mark.overlay, pytest.mark.bwrap]

TOOLS = [
    pytest.param("ripgrep", marks=pytest.mark.skipif(search.ripgrep() is None, reason="no rg")),
    "plain",
]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    made = tmp_path / "home" / "project"
    for path, data in {
        "a.py": b"import os\nneedle here\r\n",
        "src/b.py": b"no\n\tneedle\n",
        "src/c.txt": b"needle",
        "src/skip.log": b"needle\n",
        "build/out.py": b"needle\n",
        "src/keep.log": b"needle\n",
        ".hidden/h.py": b"needle\n",
        ".git/config": b"needle\n",
        ".gitignore": b"*.log\n/build/\n",
        "src/.gitignore": b"!keep.log\n",
        "bin": b"needle\0needle\n",
    }.items():
        (made / path).parent.mkdir(parents=True, exist_ok=True)
        (made / path).write_bytes(data)
    return made


async def found(workspace: Workspace, glob: bytes, at: bytes = b"", **how: object) -> list[bytes]:
    paths: list[bytes] = []

    async def deliver(batch: list[bytes]) -> None:
        paths.extend(batch)

    await search.glob(workspace, Asked(parse(at), **how), glob, deliver)  # type: ignore[arg-type]
    return paths


async def hits(
    workspace: Workspace, what: Text, at: bytes = b"", **how: object
) -> tuple[list[Hit], bool]:
    got: list[Hit] = []

    async def deliver(batch: list[Hit]) -> None:
        got.extend(batch)

    asked = Asked(parse(at), **how)  # type: ignore[arg-type]
    return got, await search.grep(workspace, asked, what, deliver)


@pytest.mark.parametrize("tool", TOOLS)
async def test_globs_see_the_view_and_honour_ignore_files(
    tmp_path: Path, project: Path, tool: Tool
) -> None:
    async with open_here(tmp_path) as workspace:
        with workspace.files() as files:
            files.write(parse("src/new.py"), b"needle", Change())
            files.remove(parse("a.py"), Change())
            files.write(WorkspacePath(b"src/\xff\nodd.py"), b"", Change())
        odd = b"src/\xff\nodd.py"
        python = [b".hidden/h.py", b"src/b.py", b"src/new.py", odd]
        assert await found(workspace, b"*.py", tool=tool) == python
        assert await found(workspace, b"src/*.py", tool=tool) == python[1:]
        assert await found(workspace, b"*.py", b"src", tool=tool) == python[1:]
        assert await found(workspace, b"*.{txt,log}", tool=tool) == [b"src/c.txt", b"src/keep.log"]
        assert await found(workspace, b"*.py", tool=tool, hidden=False) == python[1:]
        every = [b".hidden/h.py", b"build/out.py", *python[1:]]
        assert await found(workspace, b"*.py", tool=tool, ignore=False) == every
        assert await found(workspace, b"**/config", tool=tool, ignore=False) == []
        assert await found(workspace, b"*.py", tool=tool, limit=2) == python[:2]


@pytest.mark.parametrize("tool", TOOLS)
async def test_lines_are_found_in_order_with_exact_bytes(
    tmp_path: Path, project: Path, tool: Tool
) -> None:
    async with open_here(tmp_path) as workspace:
        odd = WorkspacePath(b"src/new\nline\xff.txt")
        with workspace.files() as files:
            files.write(odd, b"x\nneedle \xfe end\n", Change())
        got, more = await hits(workspace, Text(b"need(le|les)"), tool=tool)
        assert [(h.path, h.line, h.text) for h in sorted(got, key=lambda h: h.path)] == [
            (b".hidden/h.py", 1, b"needle"),
            (b"a.py", 2, b"needle here"),
            (b"src/b.py", 2, b"\tneedle"),
            (b"src/c.txt", 1, b"needle"),
            (b"src/keep.log", 1, b"needle"),
            (odd, 2, b"needle \xfe end"),
        ]
        assert not more
        got, more = await hits(workspace, Text(b"needle"), tool=tool, limit=2)
        assert (len(got), more) == (2, True)
        got, _ = await hits(workspace, Text(b"NEEDLE", ignore_case=True), b"src", tool=tool)
        assert len(got) == 4
        got, _ = await hits(workspace, Text(b"needle", include=(b"*.py",)), tool=tool)
        assert {h.path for h in got} == {b".hidden/h.py", b"a.py", b"src/b.py"}
        got, _ = await hits(
            workspace, Text(b"needle"), b"src/c.txt", tool=tool, is_directory=False
        )
        assert [h.path for h in got] == [b"src/c.txt"]


@pytest.mark.parametrize("tool", TOOLS)
async def test_a_pattern_is_never_an_option_and_a_bad_one_is_the_caller_s_fault(
    tmp_path: Path, project: Path, tool: Tool
) -> None:
    (project / "opts").write_text("--pre=/bin/sh (x\n-f\n")
    async with open_here(tmp_path) as workspace:
        got, _ = await hits(workspace, Text(b"--pre=/bin/sh"), tool=tool)
        assert [h.path for h in got] == [b"opts"]
        got, _ = await hits(workspace, Text(b"-f"), tool=tool)
        assert [h.line for h in got] == [2]
        got, _ = await hits(workspace, Text(b"(x", literal=True), tool=tool)
        assert [h.line for h in got] == [1]
        with pytest.raises(BadUsage):
            await hits(workspace, Text(b"(x"), tool=tool)
        with pytest.raises(BadUsage):
            await hits(workspace, Text(b"a\nb"), tool=tool)


@pytest.mark.parametrize("tool", TOOLS)
async def test_a_search_opens_no_review_and_is_no_turn(
    tmp_path: Path, project: Path, tool: Tool
) -> None:
    async with open_here(tmp_path) as workspace:
        assert (await hits(workspace, Text(b"needle"), tool=tool))[0]
        assert await found(workspace, b"*.py", tool=tool)
        assert workspace._store.review_of(workspace.session.id) is None
        assert workspace._store.turns(workspace.session.id) == []
        assert workspace.running_commands() == []
        # The control: a change is both.
        async with workspace.mutation("fs.write", parse("n")) as mutation:
            with workspace.files() as files:
                files.write(parse("n"), b"", mutation.change)
        assert workspace._store.review_of(workspace.session.id) is not None
        assert len(workspace._store.turns(workspace.session.id)) == 1


@pytest.mark.parametrize("tool", TOOLS)
async def test_links_and_special_files_are_passed_over(
    tmp_path: Path, project: Path, tool: Tool
) -> None:
    (tmp_path / "outside.py").write_text("needle")
    os.symlink(tmp_path, project / "out")
    os.symlink(tmp_path / "outside.py", project / "link.py")
    os.mkfifo(project / "pipe.py")
    async with open_here(tmp_path) as workspace:
        assert await found(workspace, b"*.py", tool=tool) == [
            b".hidden/h.py",
            b"a.py",
            b"src/b.py",
        ]
        got, _ = await hits(workspace, Text(b"needle", include=(b"*.py",)), tool=tool)
        assert {h.path for h in got} == {b".hidden/h.py", b"a.py", b"src/b.py"}


@pytest.mark.parametrize("tool", TOOLS)
async def test_a_search_that_nobody_waits_for_ends_with_its_processes(
    tmp_path: Path, project: Path, tool: Tool
) -> None:
    lines = b"needle\n" * 200_000
    (project / "many").write_bytes(lines)
    async with open_here(tmp_path) as workspace:
        with trio.CancelScope() as scope:

            async def stop(batch: list[Hit]) -> None:
                scope.cancel()
                await trio.lowlevel.checkpoint()

            await search.grep(
                workspace, Asked(parse(""), limit=10**6, tool=tool), Text(b"x*"), stop
            )
        assert scope.cancelled_caught
        assert workspace._running == []
        got, more = await hits(
            workspace, Text(b"needle"), b"many", tool=tool, limit=300, is_directory=False
        )
        assert (len(got), more) == (300, True)


async def test_a_line_without_end_is_cut_and_one_beyond_bounds_passed_over(
    tmp_path: Path, project: Path
) -> None:
    (project / "long").write_bytes(b"needle" + b"y" * 10_000 + b"\n")
    (project / "vast").write_bytes(b"needle" + b"y" * (3 << 20) + b"\nneedle\n")
    async with open_here(tmp_path) as workspace:
        got, _ = await hits(workspace, Text(b"needle"), b"long", is_directory=False)
        assert [(len(h.text), h.is_cut) for h in got] == [(search.MAX_LINE_BYTES, True)]
        got, _ = await hits(workspace, Text(b"needle"), b"vast", is_directory=False)
        assert [h.line for h in got] == [2]


@pytest.mark.parametrize(
    ("glob", "yes", "no"),
    [
        (b"*.py", [b"a.py", b"x/y/a.py", b".py"], [b"a.pyc", b"a.py/b"]),
        (b"src/*.py", [b"src/a.py"], [b"src/x/a.py", b"x/src/a.py"]),
        (b"./src/*", [b"src/a"], [b"src/a/b"]),
        (b"**/a", [b"a", b"x/a", b"x/y/a"], [b"xa", b"a/x"]),
        (b"src/**", [b"src/a", b"src/x/a"], [b"src", b"srcx/a"]),
        (b"a/**/b", [b"a/b", b"a/x/b", b"a/x/y/b"], [b"ab", b"a/xb"]),
        (b"?", [b"a", b"x/a"], [b"ab"]),
        (b"[a-c]x", [b"bx"], [b"dx", b"-x"]),
        (b"[!a-c]x", [b"dx"], [b"bx", b"/x"]),
        (b"[]x]y", [b"]y", b"xy"], [b"y"]),
        (b"*.{js,ts{,x}}", [b"a.js", b"a.ts", b"a.tsx"], [b"a.jsx", b"a.{js"]),
        (b"a{b", [b"a{b"], [b"ab"]),
        (b"\\*", [b"*"], [b"a"]),
        (b"[", [b"["], [b"a"]),
        (b"a.b", [b"a.b"], [b"axb"]),
        (b"\xff*", [b"\xff\xfe"], [b"\xfe"]),
        (b"*", [b"new\nline", b"a/b"], []),
    ],
)
def test_a_glob_means_what_shells_mean(glob: bytes, yes: list[bytes], no: list[bytes]) -> None:
    made = pattern.compiled(glob)
    assert [p for p in yes if not made.fullmatch(p)] == []
    assert [p for p in no if made.fullmatch(p)] == []


@given(st.binary(max_size=40).filter(lambda b: b"\0" not in b))
@settings(deadline=None)
def test_any_bytes_are_a_glob_or_refused(glob: bytes) -> None:
    try:
        made = pattern.compiled(glob)
    except BadUsage:
        return
    made.fullmatch(b"a/b/c")


def test_a_glob_with_too_many_choices_is_refused() -> None:
    with pytest.raises(BadUsage, match="choices"):
        pattern.compiled(b"{a,b}" * 20)
