"""Line counts: the short way has to say what libgit2 says, for any two contents."""

from hypothesis import example, given
from hypothesis import strategies as st

from deltabox.review.patch import line_stats, make

TEXTS = st.lists(st.sampled_from([b"a", b"b", b"\n", b"ab\n", b"\r\n"]), max_size=14).map(b"".join)


@given(TEXTS, TEXTS)
@example(b"a", b"a\nb\n")
@example(b"a\nb", b"b")
@example(b"x\na\nb\n", b"a\nb\n")
@example(b"ba\n", b"a\n")
@example(b"", b"\n")
def test_line_counts_are_those_of_libgit2(old: bytes, new: bytes) -> None:
    _, added, removed = make(old, new, 0).line_stats
    assert line_stats(old, new) == (removed, added)


@given(TEXTS, TEXTS, TEXTS)
def test_lines_added_in_the_middle_or_taken_out_are_counted(
    start: bytes, middle: bytes, end: bytes
) -> None:
    start, middle = start + b"\n", middle + b"\n"
    count = middle.count(b"\n")
    assert line_stats(start + end, start + middle + end) == (0, count)
    assert line_stats(start + middle + end, start + end) == (count, 0)
