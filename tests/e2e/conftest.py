"""Fixtures of the end-to-end tests. All of them need a view and a sandbox."""

import shutil
from pathlib import Path

import pytest

from tests.e2e.driver import COMMAND, Box


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.overlay)
            item.add_marker(pytest.mark.bwrap)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project to copy: three files in a repository with one commit."""
    assert COMMAND.exists(), "the package is not installed beside this Python (make setup)"
    made = Box(tmp_path_factory.mktemp("template"))
    made.write("README.md", "# Project\n\nFirst line.\n")
    made.write("src/main.py", "print('main')\n")
    made.write("src/util.py", "def twice(n):\n    return n * 2\n")
    made.make_repository()
    return made.project


@pytest.fixture
def box(tmp_path: Path, template: Path) -> Box:
    """A fresh user."""
    return fresh(tmp_path, template)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, template: Path) -> Box:
    """A user whom the tests of one file share; they must leave everything as it was."""
    return fresh(tmp_path_factory.mktemp("shared"), template)


def fresh(root: Path, template: Path) -> Box:
    made = Box(root)
    shutil.copytree(template, made.project, symlinks=True, dirs_exist_ok=True)
    # Its inodes are new to git, which looks at each file again, once.
    made.git("status", "--short")
    return made
