"""Fixtures of the end-to-end tests. All of them need a view and a sandbox."""

from pathlib import Path

import pytest

from tests.e2e.driver import COMMAND, Box


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.overlay)
            item.add_marker(pytest.mark.bwrap)


@pytest.fixture
def box(tmp_path: Path) -> Box:
    """A fresh user: two files, a folder, a repository with one commit."""
    assert COMMAND.exists(), "the package is not installed beside this Python (make setup)"
    made = Box(tmp_path)
    made.write("README.md", "# Project\n\nFirst line.\n")
    made.write("src/main.py", "print('main')\n")
    made.write("src/util.py", "def twice(n):\n    return n * 2\n")
    made.make_repository()
    return made
