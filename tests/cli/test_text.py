"""Lines for a person: true to what changed, and with nothing in them that acts on the terminal."""

import io
import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from deltabox.cli import text
from deltabox.cli.text import COLOUR, PLAIN
from deltabox.paths import WorkspacePath
from deltabox.review import risk
from deltabox.review.model import Change, Conflict, GitUnit, Review
from deltabox.session import present

OURS = re.compile(r"\x1b\[\d*m")

hostile = st.one_of(
    st.binary(min_size=1, max_size=12),
    st.sampled_from(
        [
            b"\x1b[2J",
            b"\x1b]0;t\x07",
            b"a\rb",
            b"\xe2\x80\xaegpj",
            b"\x9b2J",
            b"\xc2\x9b2J",
            b"\n+ x",
        ]
    ),
).map(lambda b: b.replace(b"\0", b"") or b"x")


def is_one_safe_line(line: str) -> bool:
    return OURS.sub("", line).isprintable()


def test_the_check_for_a_safe_line_notices_what_is_not() -> None:
    assert is_one_safe_line("\x1b[31mred\x1b[0m")
    assert not any(map(is_one_safe_line, ("a\nb", "\x1b[2J", "\u202e", "a\rb", "\x07")))


@given(st.lists(hostile, min_size=6, max_size=6), st.sampled_from([PLAIN, COLOUR]))
def test_no_name_of_an_agent_reaches_the_terminal_as_it_is(
    names: list[bytes], colours: text.Palette
) -> None:
    path, origin, link, other, left, unit = names
    review = Review(
        digest="d",
        changes=[
            Change(path=path, kind="renamed", type="file", origin=origin, added=1, removed=2),
            Change(path=link, kind="added", type="symlink", link=other),
            Change(path=left, kind="added", type="special", refused="a fifo stays out"),
            Change(
                path=other,
                kind="modified",
                type="file",
                conflict=Conflict(other, "edited", "edited"),
            ),
        ],
        units=[GitUnit(path=unit, kind="modified", count=1, words=["2 objects"])],
    )
    lines = list(text.stat(present.result(review), colours))
    assert len(lines) >= 6
    assert all(map(is_one_safe_line, lines)), lines


def test_what_a_git_configuration_is_warned_of_is_escaped() -> None:
    config = b'[filter "\x1b[2J\xff"]\n\tclean = evil\n'
    found = risk.assess(WorkspacePath(b".git/config"), None, config)
    assert found is not None
    assert "clean" in found.reason
    assert found.reason.isprintable()


# one change


def a_file(**facts: object) -> dict[str, object]:
    return {"path": "a", "display": "a", "kind": "modified", "added": 0, "removed": 0, **facts}


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({"kind": "added", "added": 3}, "+ a  +3 -0"),
        ({"kind": "deleted", "removed": 2}, "- a  +0 -2"),
        ({}, "~ a"),
        ({"kind": "renamed", "fromDisplay": "b"}, "> b → a"),
        ({"kind": "mode", "what": "mode 644 → 755"}, "m a  mode 644 → 755"),
        ({"kind": "type", "what": "file became symlink"}, "t a  file became symlink"),
        ({"kind": "git", "summary": "2 commits"}, "g a  2 commits"),
        ({"binary": True, "sizeBefore": None, "sizeAfter": 2048}, "~ a  binary, 0 B → 2.0 KiB"),
        (
            {"risk": {"tier": "refused", "reason": "runs at login"}},
            "~ a  [refused unless named: runs at login]",
        ),
    ],
)
def test_a_change_is_one_line_with_what_matters(facts: dict[str, object], line: str) -> None:
    assert text.file_line(a_file(**facts)) == line
    assert OURS.sub("", text.file_line(a_file(**facts), COLOUR)) == line


def test_every_kind_of_change_has_a_mark_of_its_own() -> None:
    assert len(set(text.MARKS.values())) == len(text.MARKS)
    assert set(text.RANKS) == {"refused", "warned", "noted"}


def test_the_totals_count_each_kind_and_the_lines() -> None:
    files = [
        a_file(kind="added", added=2),
        a_file(kind="deleted", removed=3),
        a_file(kind="added", added=5, removed=1),
    ]
    assert text.totals(files) == "3 changes: 2 added, 1 deleted, +7 -4 lines"
    assert text.totals([a_file(kind="mode")]) == "1 change: 1 mode"
    assert text.totals([]) == "no changes"


def test_conflicts_refusals_and_notes_are_never_cut() -> None:
    long = "word " * 60
    result = {
        "conflicts": [{"display": "c", "agent": long, "project": "deleted"}] * 50,
        "refused": [{"display": "r", "reason": long}] * 50,
        "notes": [long] * 3,
    }
    lines = list(text.remarks(result, width=60))
    assert sum(line.startswith("! conflict c: agent: word") for line in lines) == 50
    assert sum(line.startswith("x left out r: word") for line in lines) == 50
    assert " ".join(lines).count("word") == 50 * 60 + 50 * 60 + 3 * 60
    assert all(len(line) <= 60 for line in lines if line.startswith(("·", " ")))


@pytest.mark.parametrize("width", range(-5, 30))
def test_notes_are_told_on_a_terminal_of_any_width(width: int) -> None:
    told = list(text.remarks({"notes": ["some words of a note"]}, width=width))
    assert " ".join(" ".join(told).split()) == "· some words of a note"


# numbers


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1 << 20, "1.0 MiB"),
        (3 << 30, "3.0 GiB"),
        (1 << 50, "1024.0 TiB"),
    ],
)
def test_sizes_are_in_words(count: int, words: str) -> None:
    assert text.size(count) == words


def test_times_are_in_words() -> None:
    second = 10**9
    assert [text.duration(n * second) for n in (0, 1, 59, 119, 120, 7200)] == [
        "0.0 s", "1.0 s", "59 s", "119 s", "2 min", "120 min",
    ]  # fmt: skip
    assert [text.age(n * second) for n in (-5, 0, 60, 7200, 172800)] == [
        "just now", "just now", "1 min ago", "2 h ago", "2 d ago",
    ]  # fmt: skip


def test_outcomes_are_in_words() -> None:
    assert text.outcome(0, None) == "exit 0"
    assert text.outcome(None, 9) == "killed by signal 9"
    assert text.outcome(None, None) == "unfinished"


# colours


@pytest.mark.parametrize(
    ("is_terminal", "environ", "coloured"),
    [
        (True, {"TERM": "xterm"}, True),
        (False, {"TERM": "xterm"}, False),
        (True, {"TERM": "dumb"}, False),
        (True, {}, False),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (True, {"TERM": "xterm", "NO_COLOR": ""}, True),
    ],
)
def test_colours_are_for_terminals_that_want_them(
    is_terminal: bool, environ: dict[str, str], coloured: bool
) -> None:
    found = text.palette(is_terminal=is_terminal, environ=environ)
    assert found == (COLOUR if coloured else PLAIN)


patches = st.text(st.sampled_from("ab +-@\\\n\f\u2028\x85"), max_size=40)


@given(patches)
def test_colouring_a_patch_changes_nothing_but_colours(patch: str) -> None:
    assert OURS.sub("", text.coloured_patch(patch, COLOUR)) == patch
    assert text.coloured_patch(patch, PLAIN) == patch


def test_added_content_cannot_pass_for_a_files_heading() -> None:
    lines = text.coloured_patch("M a\n@@ -1 +1,2 @@\n+++ b/other\n--- a/other\n", COLOUR).split(
        "\n"
    )
    assert lines[0].startswith(COLOUR.bold)
    assert lines[1].startswith(COLOUR.cyan)
    assert lines[2].startswith(COLOUR.green)
    assert lines[3].startswith(COLOUR.red)


# commands

words = st.lists(
    st.one_of(st.text(max_size=8), st.binary(max_size=8).map(os.fsdecode)), min_size=1, max_size=4
)


@given(words)
def test_a_command_is_one_safe_line_of_bounded_length(argv: list[str]) -> None:
    shown = text.command_line(argv, 30)
    assert shown.isprintable()
    assert len(shown) <= 30


def test_a_command_is_shown_as_it_would_be_typed() -> None:
    assert text.command_line(["grep", "-r", "a b", "."]) == "grep -r 'a b' ."
    assert text.command_line(["echo", "\x1b[2J"]) == "echo '\\x1b[2J'"
    assert text.command_line(["x" * 100], 10) == "x" * 9 + "…"


# progress


class Terminal(io.StringIO):
    @override
    def isatty(self) -> bool:
        return True


def test_quick_work_and_what_is_no_terminal_see_no_progress() -> None:
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        progress = text.Progress(stream, "committing")
        if stream is file:
            progress.PATIENCE_S = 0
            progress._next = 0
        progress(1, 3)
        progress(3, 3)
    assert (terminal.getvalue(), file.getvalue()) == ("", "")


def test_long_work_is_counted_and_wiped_away() -> None:
    terminal = Terminal()
    progress = text.Progress(terminal, "committing")
    progress._next = 0  # as if the time had passed
    progress(1, 3)
    assert "committing 1/3" in terminal.getvalue()
    progress.end()
    assert terminal.getvalue().endswith("\r\x1b[K")
