"""`deltabox demo`: ends 0, says each promise with its check, leaves nothing behind."""

from tests.e2e.driver import Box
from tests.e2e.listing import timed_listing

PROMISES = (
    "the project is untouched, byte for byte",
    "commit did it",
    "the edit arrived",
    "the deleted file is gone",
    "the rename arrived",
    "build.sh is executable",
    "the build's output arrived",
    "undo did it",
    "every file, mode and link is as before the commit",
    "commit refuses the conflict (status 3)",
    "the rest can be committed",
    "the user's line survived",
    "the agent's side can be discarded",
)


def test_demo_holds_every_promise_and_leaves_nothing(box: Box) -> None:
    before = timed_listing(box.project)
    temporary = box.root / "temporary"
    temporary.mkdir()
    done = box.deltabox("demo", env={"TMPDIR": str(temporary)}).ok()
    assert "✘" not in done.out
    for promise in PROMISES:
        assert f"✔ {promise}" in done.out
    assert "every promise held" in done.out
    assert "deltabox review" in done.out, "the card"
    assert timed_listing(box.project) == before
    assert not box.state.exists()
    assert list(temporary.iterdir()) == []


def test_demo_without_git_says_so(box: Box) -> None:
    empty = box.root / "empty"
    empty.mkdir()
    done = box.deltabox("demo", env={"PATH": str(empty)}).ended(1)
    assert "git" in done.err
