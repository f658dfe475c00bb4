"""Verbs and flags: each is taken whole, a command keeps its own, mistakes are one sentence."""

import argparse

import pytest

from deltabox.cli import main
from deltabox.cli.args import parser
from deltabox.errors import BadUsage


def parse(*argv: str) -> argparse.Namespace:
    return parser().parse_args(argv)


def verbs() -> dict[str, argparse.ArgumentParser]:
    (found,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(found.choices)


def test_every_verb_has_code_and_help() -> None:
    assert set(verbs()) == set(main.VERBS)
    for module, function in main.VERBS.values():
        assert callable(getattr(__import__(module, fromlist=[function]), function))
    for verb in verbs().values():
        assert verb.format_help()


@pytest.mark.parametrize("verb", sorted(verbs()))
def test_help_ends_well_and_says_its_verb(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse(verb, "--help")
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: deltabox {verb}")


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["--", "claude", "--yes"], ["--", "claude", "--yes"]),
        (["claude", "--yes", "--net", "off"], ["claude", "--yes", "--net", "off"]),
        (["--yes", "--", "--odd"], ["--", "--odd"]),
        (["sh", "-c", "a -- b"], ["sh", "-c", "a -- b"]),
        (["--", "a", "--", "b"], ["--", "a", "--", "b"]),
        ([], []),
    ],
)
def test_what_follows_the_command_belongs_to_it(argv: list[str], command: list[str]) -> None:
    found = parse("run", *argv)
    assert found.command == command
    assert found.net is None
    assert found.yes == (argv[:1] == ["--yes"])


def test_flags_before_the_command_are_ours() -> None:
    found = parse(
        "run", "--net", "off", "--env", "A", "--env", "B=c", "--pass", "~/x:cow", "--deny", "s",
        "--ro", "v", "--limit", "tmp=1G", "--engine", "cbcow", "--isolation", "none", "--nest",
        "--profile", "read-only", "--review", "keep", "--new", "--project", "/p", "--session", "s1",
        "--durability", "strict", "--", "true",
    )  # fmt: skip
    assert (found.net, found.env, found.passes) == ("off", ["A", "B=c"], ["~/x:cow"])
    assert (found.deny, found.ro, found.limit) == (["s"], ["v"], ["tmp=1G"])
    assert (found.engine, found.isolation, found.nest) == ("cbcow", "none", True)
    assert (found.profile, found.review, found.new) == ("read-only", "keep", True)
    assert (found.project, found.session, found.durability) == ("/p", "s1", "strict")


def test_repeated_flags_do_not_reach_into_the_next_parse() -> None:
    parse("run", "--env", "A", "--", "x")
    assert parse("run", "--", "x").env == []


@pytest.mark.parametrize(
    "argv",
    [
        ["run", "--ne", "--", "x"],
        ["run", "--rev", "commit", "--", "x"],
        ["commit", "--keep"],
        ["abort", "--y"],
        ["diff", "--st"],
        ["--vers"],
    ],
)
def test_a_flag_is_never_guessed_from_its_beginning(argv: list[str]) -> None:
    with pytest.raises(BadUsage):
        parse(*argv)


@pytest.mark.parametrize(
    "argv",
    [
        ["nonsense"],
        ["run", "--engine", "best", "--", "x"],
        ["run", "--isolation", "some", "--", "x"],
        ["run", "--net", "on?", "--", "x"],
        ["run", "--project"],
        ["commit", "--on-conflict", "guess"],
        ["undo", "a", "b"],
        ["sessions", "extra"],
        ["diff", "--unknown"],
    ],
)
def test_a_mistake_is_one_sentence_that_leads_to_the_help(argv: list[str]) -> None:
    with pytest.raises(BadUsage) as found:
        parse(*argv)
    sentence = found.value.sentence
    assert sentence[0].isupper()
    assert sentence.endswith("--help`.")
    assert "\n" not in sentence


def test_a_name_that_begins_like_a_flag_can_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("diff", "--", "--odd", "-x").paths == ["--odd", "-x"]
    assert parse("commit", "--", "-x").paths == ["-x"]


# as a whole


@pytest.mark.parametrize(
    ("argv", "status"),
    [
        (["nonsense"], 2),
        ([], 2),
        (["diff", "--unknown"], 2),
        (["run"], 125),
        (["run", "--unknown", "--", "x"], 125),
        (["--version"], 0),
    ],
)
def test_the_exit_status_tells_a_wrong_call_from_a_failed_command(
    argv: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(argv) == status
    said = capsys.readouterr()
    if status:
        assert said.out == ""
        assert said.err.startswith("deltabox: ")
        assert said.err.count("\n") == 1
        assert "Traceback" not in said.err
