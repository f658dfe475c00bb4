"""Frames: the same for any cut of the stream; garbage is answered and never raised."""

import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deltabox.errors import ReviewChanged
from deltabox.protocol import jsonrpc
from deltabox.protocol.jsonrpc import Decoder, Frame, Malformed, Request, Response

LIMIT = 64  # small, so that chunks and lines meet it


def frames(data: bytes, cuts: list[int], limit: int = LIMIT) -> list[Frame]:
    decoder = Decoder(limit)
    found: list[Frame] = []
    start = 0
    for end in [*sorted(cut % (len(data) + 1) for cut in cuts), len(data)]:
        found += decoder.feed(data[start:end])
        start = end
    return found


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=3,
)
lines = st.one_of(
    st.builds(jsonrpc.request, st.integers(0, 9), st.text(max_size=4), st.fixed_dictionaries({"v": values})),
    st.builds(jsonrpc.notification, st.text(max_size=4), st.just({})),
    st.builds(jsonrpc.result, st.integers(0, 9), values),
    st.binary(max_size=90).map(lambda b: b + b"\n"),
    st.integers(60, 70).map(lambda n: b"x" * n + b"\n"),
    st.sampled_from([b"\n", b"  \r\n", b"[]\n", b'{"id":[]}\n', b'{"method":"m"'.ljust(64) + b"\n"]),
)  # fmt: skip


@given(st.lists(lines, max_size=5).map(b"".join), st.lists(st.integers(0, 500), max_size=8))
def test_a_stream_gives_the_same_frames_however_it_is_cut(stream: bytes, cuts: list[int]) -> None:
    whole = frames(stream, [])
    assert frames(stream, cuts) == whole
    assert frames(stream, list(range(len(stream)))) == whole


@given(st.binary(max_size=300))
@example(b'{"id":' + b"9" * 5000 + b"}\n")
@example(b'{"id":1e999,"method":"m"}\n')
@example(b'{"id":"\\ud800","method":"m"}\n')
@example(b"[" * 100_000 + b"\n")
@example(b'"' + b"[" * 65 + b"\\\n")
def test_garbage_is_never_raised_and_the_stream_goes_on(garbage: bytes) -> None:
    after = jsonrpc.request(7, "still.there", {})
    decoder = Decoder()
    list(decoder.feed(garbage + b"\n"))
    assert list(decoder.feed(after)) == [Request("still.there", {}, 7)]


@given(st.binary(max_size=60).filter(lambda b: b"\n" not in b and b.strip()))
def test_each_line_of_garbage_is_answered_once(garbage: bytes) -> None:
    (frame,) = frames(garbage + b"\n", [])
    if isinstance(frame, Malformed):
        answer = json.loads(jsonrpc.malformed(frame))
        assert answer["error"]["code"] == frame.code
        assert answer["jsonrpc"] == "2.0"


@given(values, st.one_of(st.integers(-(2**63), 2**63), st.text(max_size=9)))
def test_what_is_written_is_read_back(value: Any, ident: int | str) -> None:
    (asked,) = frames(jsonrpc.request(ident, "m", {"v": value}), [], 10_000)
    assert asked == Request("m", {"v": value}, ident)
    (answered,) = frames(jsonrpc.result(ident, value), [], 10_000)
    assert answered == Response(ident, value)


def test_a_newline_in_text_does_not_end_the_line() -> None:
    line = jsonrpc.request(1, "m", {"text": "a\nb\r\nc\u2028"})
    assert line.count(b"\n") == 1
    (frame,) = frames(line, [], 1000)
    assert isinstance(frame, Request)
    assert frame.params == {"text": "a\nb\r\nc\u2028"}


# limits


def test_a_line_at_the_limit_passes_and_one_byte_more_is_refused_with_the_limit() -> None:
    line = b'{"method":"' + b"m" * 40
    line += b"x" * (LIMIT - len(line) - 2) + b'"}'
    assert len(line) == LIMIT
    assert isinstance(frames(line + b"\n", [])[0], Request)
    (refused,) = frames(b" " + line + b"\n", [])
    assert isinstance(refused, Malformed)
    assert (refused.code, refused.id) == (jsonrpc.INVALID_REQUEST, None)
    assert refused.data == {"code": "LINE_TOO_LONG", "limit": LIMIT}


def test_a_line_without_end_is_answered_at_the_limit_and_kept_nowhere() -> None:
    decoder = Decoder(LIMIT)
    answers = [frame for _ in range(1000) for frame in decoder.feed(b"x" * 50)]
    assert len(answers) == 1
    assert decoder._size == 0
    assert decoder._parts == []
    assert list(decoder.feed(b"\n" + jsonrpc.notification("m", {}))) == [
        Request("m", {}, None, notification=True)
    ]


def nested(depth: int, opening: bytes = b"[", closing: bytes = b"]") -> bytes:
    inner = opening * (depth - 2) + closing * (depth - 2)
    return b'{"id":1,"method":"m","params":{"v":' + inner + b"}}"


def test_nesting_to_the_limit_passes_and_one_level_more_is_refused() -> None:
    assert isinstance(jsonrpc.decode(nested(jsonrpc.MAX_DEPTH)), Request)
    refused = jsonrpc.decode(nested(jsonrpc.MAX_DEPTH + 1))
    assert isinstance(refused, Malformed)
    assert refused.data == {"code": "TOO_DEEP", "limit": jsonrpc.MAX_DEPTH}


def depth_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max((depth_of(v) for v in value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    return 0


bushes = st.recursive(
    st.text('[]{}"\\', max_size=5),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text('[{"\\', max_size=3), inner, max_size=3),
    ),
    max_leaves=15,
)


@given(bushes, st.integers(0, jsonrpc.MAX_DEPTH + 4))
def test_depth_is_counted_as_json_has_it_whatever_stands_in_strings(bush: Any, more: int) -> None:
    for _ in range(more):
        bush = [bush]
    wide = {"method": "m", "params": {"bush": bush, "width": [[]] * jsonrpc.MAX_DEPTH}}
    frame = jsonrpc.decode(msgspec.json.encode(wide))
    assert isinstance(frame, Malformed) == (depth_of(wide) > jsonrpc.MAX_DEPTH)


def test_many_shallow_brackets_are_not_deep() -> None:
    frame = jsonrpc.decode(b'{"method":"m","params":{"v":[' + b"[]," * 500 + b'"[[[["]}}')
    assert isinstance(frame, Request)


@pytest.mark.parametrize(
    "line",
    [
        b'"' + b"[" * 65 + b'\\"' * 200_000,  # a string without end, each escape another beginning
        b"[" * 400_000,
        b"[]]]" * 100_000,
        b'{"m":"' + b"[" * 65 + b"\\\\" * 200_000,
    ],
)
def test_a_hostile_line_costs_time_in_its_length_and_not_in_its_square(line: bytes) -> None:
    # CPU time, and thousands of times what it takes: only growth by the square comes near (40 KB of
    # the first sort took 7 s, so these 400 KB would take minutes).
    before = time.process_time()
    assert isinstance(jsonrpc.decode(line), Malformed)
    assert time.process_time() - before < 5


# envelopes


@pytest.mark.parametrize(
    ("line", "code", "ident"),
    [
        (b"[]", jsonrpc.INVALID_REQUEST, None),
        (b"1", jsonrpc.INVALID_REQUEST, None),
        (b'[{"id":1,"method":"m"}]', jsonrpc.INVALID_REQUEST, None),
        (b'{"id":true,"method":"m"}', jsonrpc.INVALID_REQUEST, None),
        (b'{"id":1.5,"method":"m"}', jsonrpc.INVALID_REQUEST, None),
        (b'{"id":{},"method":"m"}', jsonrpc.INVALID_REQUEST, None),
        (b'{"id":3}', jsonrpc.INVALID_REQUEST, 3),
        (b'{"id":3,"method":7}', jsonrpc.INVALID_REQUEST, 3),
        (b'{"id":3,"jsonrpc":"1.0","method":"m"}', jsonrpc.INVALID_REQUEST, 3),
        (b'{"id":3,"method":"m","params":[1]}', jsonrpc.INVALID_PARAMS, 3),
        (b'{"id":3,"error":"text"}', jsonrpc.INVALID_REQUEST, 3),
        (b"{", jsonrpc.PARSE_ERROR, None),
        (b'{"method":"\xff"}', jsonrpc.PARSE_ERROR, None),
        (b'{"a":1}{"b":2}', jsonrpc.PARSE_ERROR, None),
    ],
)  # fmt: skip
def test_a_line_that_is_no_message_is_answered_with_its_id_where_it_had_one(
    line: bytes, code: int, ident: int | None
) -> None:
    frame = jsonrpc.decode(line)
    assert isinstance(frame, Malformed)
    assert (frame.code, frame.id) == (code, ident)


def test_only_a_message_without_an_id_is_a_notification() -> None:
    assert jsonrpc.decode(b'{"method":"m"}') == Request("m", {}, None, notification=True)
    assert jsonrpc.decode(b'{"method":"m","id":null}') == Request("m", {}, None)


def test_params_of_null_are_none_at_all() -> None:
    assert jsonrpc.decode(b'{"method":"m","id":1,"params":null}') == Request("m", {}, 1)


def test_a_deliberate_error_carries_its_codes_and_facts() -> None:
    line = jsonrpc.error_of("x", ReviewChanged("Look again.", digest="abc"))
    assert json.loads(line) == {
        "jsonrpc": "2.0",
        "id": "x",
        "error": {
            "code": ReviewChanged.rpc_code,
            "message": "Look again.",
            "data": {"code": "REVIEW_CHANGED", "exitStatus": 3, "digest": "abc"},
        },
    }
