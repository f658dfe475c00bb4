"""Errors: each names one thing to do differently, by codes that no other has."""

import ast
import inspect
import json
from pathlib import Path

import pytest

from deltabox import errors
from deltabox.errors import DeltaboxError
from tests.places import REPOSITORY

CLASSES = [
    cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, DeltaboxError) and cls is not DeltaboxError
]


def test_no_two_errors_share_a_host_code() -> None:
    codes = [cls.host_code for cls in CLASSES]
    assert sorted(codes) == sorted(set(codes))


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_has_a_status_that_the_command_line_documents(cls: type[DeltaboxError]) -> None:
    assert cls.exit_status in (1, 2, 3, 4)
    assert cls.rpc_code < 0
    assert cls.host_code == cls.host_code.upper()
    assert cls.__doc__


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_keeps_its_sentence_and_facts_whatever_they_are_called(
    cls: type[DeltaboxError],
) -> None:
    error = cls("What happened; what next.", sentence="x", self="y", args="z", path="p")
    assert error.sentence == str(error) == "What happened; what next."
    assert error.data == {"sentence": "x", "self": "y", "args": "z", "path": "p"}
    assert json.loads(json.dumps(error.data)) == error.data


def raised_sentences() -> list[tuple[str, str]]:
    """The literal first text of every deliberate error that the package raises, with its place."""
    names = {cls.__name__ for cls in CLASSES}
    found = []
    for file in sorted((REPOSITORY / "deltabox").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.Call) and node.args):
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else None
            called = node.func.id if isinstance(node.func, ast.Name) else called
            if called not in names:
                continue
            parts = (
                node.args[0].values if isinstance(node.args[0], ast.JoinedStr) else [node.args[0]]
            )
            last = parts[-1]
            if isinstance(last, ast.Constant) and isinstance(last.value, str):
                place = f"{file.relative_to(REPOSITORY)}:{node.lineno}"
                found.append((place, last.value))
    return found


def test_every_error_is_a_sentence_with_an_end() -> None:
    sentences = raised_sentences()
    assert len(sentences) > 50  # the search finds what it looks for
    assert [place for place, text in sentences if not text.endswith((".", "?"))] == []


def test_the_module_imports_nothing_of_deltabox() -> None:
    tree = ast.parse(Path(inspect.getfile(errors)).read_text())
    imported = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert imported <= {"typing"}
