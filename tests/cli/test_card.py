"""The card: it shows what must be seen, and only a clear yes lets anything into the project."""

import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltabox import config
from deltabox.cli import card
from deltabox.cli.text import PLAIN
from deltabox.config import Config
from deltabox.engines import delta
from deltabox.paths import Tree, WorkspacePath
from deltabox.session import coordinator
from deltabox.session import project as projects
from deltabox.store import Session, Store
from tests.places import listing


@dataclass
class Case:
    """A session at rest whose agent edited `a`, deleted `b`, and made `new` and `.envrc`."""

    project: Path
    upper: Path
    store: Store
    session: Session
    desk: card.Desk
    feed: Callable[..., None]
    said: Callable[[], str]

    def decide(self, *answers: str) -> str:
        self.feed(*answers)
        return card.decide(self.desk, self.desk.diff(), PLAIN, {})

    def files(self) -> dict[str, str]:
        return {p.name: p.read_text() for p in self.project.iterdir()}

    def pending(self) -> list[str]:
        return [file["path"] for file in self.desk.diff()["files"]]


BEFORE = {"a": "base a\n", "b": "base b\n"}
AFTER = {"a": "agent a\n", "new": "new\n"}


@pytest.fixture
def case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Case]:
    project = tmp_path / "home" / "shop"
    project.mkdir(parents=True)
    for name, content in BEFORE.items():
        (project / name).write_text(content)
    where = config.places({"HOME": str(tmp_path / "home")})
    with projects.open_state(where) as store:
        session = coordinator.create(store, where, project, Config())
        upper = projects.folder_of(where, session.id).upper
        delta.create_layer(upper, project.stat())
        for name, content in {**AFTER, ".envrc": "evil\n"}.items():
            (upper / name).write_text(content)
        with Tree.open(upper) as tree:
            delta.make_whiteout(tree, WorkspacePath(b"b"))
        turn = store.begin_turn(session.id, ["agent", "\x1b[2J"], "workspace-write", "off")
        store.end_turn(turn, code=0, signal=None)
        store.open_review(session.id)

        def feed(*answers: str) -> None:
            monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{a}\n" for a in answers)))

        with projects.desk(store, where, session) as desk:
            yield Case(project, upper, store, session, desk, feed, lambda: capsys.readouterr().out)


# what it shows


def test_the_card_says_who_where_how_protected_what_ran_and_what_changed(case: Case) -> None:
    shown = card.render(case.desk.diff())
    for part in (
        str(case.project),
        f"{case.session.id} · overlay engine · bubblewrap · network host",
        "agent '\\x1b[2J'",
        "- b",
        "~ a",
        "+ new",
        "+ .envrc",
        "refused unless named",
        "4 changes: 2 added, 1 deleted, 1 modified",
    ):
        assert part in shown
    assert all(line.isprintable() for line in shown.splitlines())


def test_a_session_without_isolation_says_so_on_its_card(case: Case) -> None:
    bare = {**case.desk.diff(), "isolation": "none"}
    assert "no isolation" in card.render(bare)
    assert "no isolation" not in card.render(case.desk.diff())


def test_past_a_screenful_deletions_and_risks_still_show(case: Case) -> None:
    result = case.desk.diff()
    plain = {"display": "f", "kind": "added", "added": 1, "removed": 0}
    many = [{**plain, "display": f"file-{n:03}"} for n in range(200)]
    late = [file for file in result["files"] if file["path"] in ("b", ".envrc")]
    lines = list(card.body({**result, "files": many + late}, PLAIN))
    assert sum("file-" in line for line in lines) == card.SHOWN_FILES
    assert any("- b" in line for line in lines)
    assert any(".envrc" in line for line in lines)
    assert f"  … and {200 - card.SHOWN_FILES} more changes (d shows all)" in lines


@pytest.mark.parametrize("columns", ["0", "1", "5", "20", "300"])
def test_the_card_fits_any_terminal(
    case: Case, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    result = {**case.desk.diff(), "notes": ["a note of some length " * 10]}
    lines = card.render(result).splitlines()
    assert (lines[0][0], lines[-1][0]) == ("╭", "╰")
    assert len(lines[0]) <= min(78, int(columns) or 80)


# what an answer does


@pytest.mark.parametrize("answer", ["a", "A", "approve", " approve all "])
def test_approving_commits_all_but_the_risk_that_was_not_named(case: Case, answer: str) -> None:
    assert case.decide(answer, "no") == "committed"
    assert case.files() == AFTER
    assert case.pending() == [".envrc"]
    assert "committed 3 changes" in case.said()


def test_a_risk_goes_in_by_a_whole_yes_only(case: Case) -> None:
    assert case.decide("a", "yes") == "committed"
    assert case.files() == {**AFTER, ".envrc": "evil\n"}


@pytest.mark.parametrize("answer", ["y", "Y", "YES", "ok", "", "a"])
def test_anything_less_than_yes_leaves_the_risk_out(case: Case, answer: str) -> None:
    case.decide("a", answer)
    assert ".envrc" not in case.files()


def test_leaving_at_the_question_of_a_risk_commits_nothing(case: Case) -> None:
    assert case.decide("a") == "kept"  # the input ends at the question
    assert case.files() == BEFORE
    assert len(case.pending()) == 4
    assert "nothing was approved" in case.said()


def test_the_commit_is_undone_by_what_the_card_says(case: Case) -> None:
    case.decide("a", "no")
    commit = re.search(r"as (c[0-9a-f]{8}); `deltabox undo`", case.said())
    assert commit
    assert case.store.commit(commit[1]).state == "done"


@pytest.mark.parametrize("answer", ["r", "reject", "reject all", "abort"])
def test_rejecting_discards_into_the_trash_and_touches_nothing(case: Case, answer: str) -> None:
    before = listing(case.project)
    assert case.decide(answer) == "aborted"
    assert listing(case.project) == before
    assert case.pending() == []
    assert case.store.trash()[0].id in case.said()


@pytest.mark.parametrize("answer", ["k", "keep", "q", ""])
def test_keeping_changes_nothing_and_says_how_to_go_on(case: Case, answer: str) -> None:
    assert case.decide(answer) == "kept"
    assert case.files() == BEFORE
    assert len(case.pending()) == 4
    assert f"deltabox review --session {case.session.id}" in case.said()


def test_the_end_of_input_keeps(case: Case) -> None:
    assert case.decide() == "kept"
    assert case.files() == BEFORE


DECISIVE = {word for word, choice in card.WORDS.items() if choice in "arck"}


@given(st.text(st.characters(exclude_characters="\n\r\0", codec="utf-8"), max_size=12))
def test_no_other_word_is_a_decision(word: str) -> None:
    known = card.WORDS.get(word.strip().lower())
    assert (known is None) == (word.strip().lower() not in card.WORDS)
    if word.strip().lower() not in DECISIVE:
        assert known in (None, "d")


@pytest.mark.parametrize(
    "word", ["approval?", "ab", "y", "yes", "al", "no", "rejected not", "1", "\x1b[A"]
)
def test_what_is_not_understood_is_asked_again_and_decides_nothing(case: Case, word: str) -> None:
    assert case.decide(word, "k") == "kept"
    assert case.files() == BEFORE
    said = case.said()
    assert "is none of the choices" in said
    assert said.count("╭") == 1  # the card is not shown again for it
    assert "\x1b" not in said


def test_ctrl_c_and_bytes_that_are_no_text_keep(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(io.StringIO):
        def readline(self, *_: object) -> str:  # type: ignore[explicit-override, override]
            raise KeyboardInterrupt

    for stdin in (Interrupted(), io.TextIOWrapper(io.BytesIO(b"\xff\xfea\n"), encoding="utf-8")):
        monkeypatch.setattr(sys, "stdin", stdin)
        assert card.decide(case.desk, case.desk.diff(), PLAIN, {}) == "kept"
        assert case.files() == BEFORE


# files by number


def numbered(case: Case, *names: str) -> str:
    order = case.pending()
    return " ".join(str(order.index(name) + 1) for name in names)


def test_chosen_files_go_in_and_the_rest_stays(case: Case) -> None:
    choice = numbered(case, "a", "b")
    assert case.decide("c", choice, "k") == "partly"
    assert case.files() == {"a": "agent a\n"}
    assert sorted(case.pending()) == [".envrc", "new"]


def test_choosing_all_is_approving_all(case: Case) -> None:
    assert case.decide("c", "all", "yes") == "committed"
    assert case.files() == {**AFTER, ".envrc": "evil\n"}


def test_a_chosen_risk_is_asked_for_and_an_unchosen_one_is_not(case: Case) -> None:
    choice = numbered(case, "new")
    case.decide("c", choice, "k")
    assert "Type yes" not in case.said()
    assert "new" in case.files()
    choice = numbered(case, ".envrc")
    case.decide("c", choice, "yes", "k")
    assert "Type yes" in case.said()
    assert ".envrc" in case.files()


@pytest.mark.parametrize(
    "choice", ["", "0", "5", "1-9", "3-2", "-1", "x", "1 x", "1-2-3", "1.5", "٣٣"]
)
def test_a_choice_that_is_not_plain_approves_nothing(case: Case, choice: str) -> None:
    assert case.decide("c", choice, "k") == "kept"
    assert case.files() == BEFORE
    assert len(case.pending()) == 4


def test_ranges_and_commas_are_taken(case: Case) -> None:
    case.feed("1-2,4")
    result = case.desk.diff()
    chosen = card.choose(result, PLAIN)
    assert chosen == [result["files"][n]["path"].encode() for n in (0, 1, 3)]


# when things moved


def test_changes_after_the_card_was_shown_are_not_approved_with_it(case: Case) -> None:
    shown = case.desk.diff()
    (case.upper / "new").write_text("written behind the card\n")
    case.feed("a", "no", "k")
    assert card.decide(case.desk, shown, PLAIN, {}) == "kept"
    assert case.files() == BEFORE
    assert case.said().count("╭") == 2  # the new state is shown before it is asked for


def test_a_diff_in_between_does_not_move_what_was_shown(case: Case) -> None:
    shown = case.desk.diff()
    (case.upper / "new").write_text("written behind the card\n")
    case.feed("d", "a", "no", "k")
    assert card.decide(case.desk, shown, PLAIN, {}) == "kept"
    assert case.files() == BEFORE


def test_a_project_that_moved_is_a_conflict_and_nothing_goes_in(case: Case) -> None:
    shown = case.desk.diff()
    (case.project / "new").write_text("the user's own\n")
    case.feed("a", "no", "k")
    assert card.decide(case.desk, shown, PLAIN, {}) == "kept"
    assert case.files() == {**BEFORE, "new": "the user's own\n"}


def test_the_diff_is_printed_whole_where_there_is_no_pager(case: Case) -> None:
    case.decide("d", "k")
    said = case.said()
    assert "-base a" in said
    assert "+agent a" in said


# the pager


def test_a_pager_that_cannot_be_started_is_done_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    for pager in ("/nonexistent/pager", "'open quote", "   ", "cat"):
        card.show_paged("the text\n", {"PAGER": pager, "PATH": os.defpath})
        assert capsys.readouterr().out == "the text\n"


def test_a_pager_gets_the_text_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    out = tmp_path / "out"
    card.show_paged("é\x1b[1m\udcff\n", {"PAGER": f"sh -c 'cat >{out}'", "PATH": os.defpath})
    assert out.read_bytes() == "é\x1b[1m".encode() + b"\xff\n"


def test_a_path_that_is_no_text_comes_back_from_the_card_as_its_bytes() -> None:
    result: dict[str, Any] = {"path": "x\\xff", "pathB64": "eP8="}
    assert card.path_of(result) == b"x\xff"
    assert card.path_of({"path": "é"}) == "é".encode()


def test_an_extended_attributes_name_cannot_act_on_the_terminal(case: Case) -> None:
    try:
        os.setxattr(case.upper / "new", os.fsencode("user.\x1b[2J"), b"x")
    except OSError as exc:
        pytest.skip(f"no extended attributes here: {exc}")
    shown = card.render(case.desk.diff())
    assert "extended attributes stay out" in shown
    assert all(line.isprintable() for line in shown.splitlines())
