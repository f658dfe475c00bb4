"""JSON-RPC 2.0 in lines: bytes in, envelopes out, and back. Sans-IO; never reads, writes or waits.

A line is one object. What is wrong with a line makes one `Malformed` and the stream goes on at the
next newline: garbage, half UTF-8, nesting past MAX_DEPTH, a line past MAX_LINE. Batches are refused.
"""

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from deltabox.errors import DeltaboxError

MAX_LINE = 16 * 1024 * 1024  # an 8 MiB fs.write in base64 is 11 MiB
MAX_DEPTH = 64  # no message of the protocol nests past 8; a decoder's stack is not to be tested

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603
CANCELLED = -32800

Id = str | int | None


class Request(msgspec.Struct, frozen=True):
    """A call, or a notification when `notification` is set (it has no id and gets no answer)."""

    method: str
    params: dict[str, Any]
    id: Id = None
    notification: bool = False


class Response(msgspec.Struct, frozen=True):
    """An answer: `error` is None or {code, message, data?}."""

    id: Id
    result: Any = None
    error: dict[str, Any] | None = None


class Malformed(msgspec.Struct, frozen=True):
    """A line that is no message. `id` is the request's where it could be read, for the reply."""

    code: int
    message: str
    id: Id = None
    data: dict[str, Any] | None = None


Frame = Request | Response | Malformed

_decoder = msgspec.json.Decoder()
_encoder = msgspec.json.Encoder()
# A string, or what begins like one and has no end. Possessive, since a line is hostile: backing up
# would take time in its square (40 KB of \\" took 7 s) and memory a hundred times its size.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


class Decoder:
    """Turns chunks of any size into frames. Memory: at most one line of `limit` bytes plus a chunk."""

    def __init__(self, limit: int = MAX_LINE) -> None:
        self._limit = limit
        self._parts: list[bytes] = []
        self._size = 0
        self._skipping = False

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Frames completed by `data`, in order."""
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            piece = data[start:end]
            start = end + 1
            if self._skipping:
                # The error was given when the limit was crossed; this newline ends that line.
                self._skipping = False
                continue
            if self._size + len(piece) > self._limit:
                self._reset()
                yield self._too_long()
                continue
            line = b"".join([*self._parts, piece])
            self._reset()
            if line.strip():
                yield decode(line)
        rest = data[start:]
        if self._skipping or not rest:
            return
        self._size += len(rest)
        if self._size > self._limit:
            self._reset()
            self._skipping = True
            yield self._too_long()
        else:
            self._parts.append(rest)

    def _reset(self) -> None:
        self._parts.clear()
        self._size = 0

    def _too_long(self) -> Malformed:
        return Malformed(
            INVALID_REQUEST,
            f"A line is longer than {self._limit} bytes; send large content in pieces.",
            data={"code": "LINE_TOO_LONG", "limit": self._limit},
        )


def decode(line: bytes) -> Frame:
    """One line without its newline."""
    if line.count(b"[") + line.count(b"{") > MAX_DEPTH and _is_too_deep(line):
        return Malformed(
            INVALID_REQUEST,
            f"The message nests deeper than {MAX_DEPTH} levels.",
            data={"code": "TOO_DEEP", "limit": MAX_DEPTH},
        )
    try:
        message = _decoder.decode(line)
    except (ValueError, RecursionError) as exc:  # msgspec.DecodeError is a ValueError
        return Malformed(PARSE_ERROR, f"The line is no JSON object: {exc}.")
    if not isinstance(message, dict):
        return Malformed(INVALID_REQUEST, "A message is one JSON object; batches are not spoken.")
    return _envelope(message)


def _envelope(message: dict[str, Any]) -> Frame:
    ident = message.get("id")
    if isinstance(ident, bool) or not isinstance(ident, (str, int, type(None))):
        return Malformed(INVALID_REQUEST, "id must be a string or an integer.")
    if message.get("jsonrpc", "2.0") != "2.0":
        return Malformed(INVALID_REQUEST, 'jsonrpc must be "2.0".', ident)
    method = message.get("method")
    if method is None and ("result" in message or "error" in message):
        error = message.get("error")
        if error is not None and not isinstance(error, dict):
            return Malformed(INVALID_REQUEST, "error must be an object.", ident)
        return Response(ident, message.get("result"), error)
    if not isinstance(method, str):
        return Malformed(INVALID_REQUEST, "method must be a string.", ident)
    params = message.get("params")
    if params is None:
        params = {}
    if not isinstance(params, dict):
        return Malformed(INVALID_PARAMS, "params must be an object with named members.", ident)
    return Request(method, params, ident, notification="id" not in message)


def _is_too_deep(line: bytes) -> bool:
    """Whether brackets outside strings nest past MAX_DEPTH; 2 s for the worst line.

    Each pass takes the innermost pairs away, in C: a loop over the brackets of one line of 16 MiB
    would hold up everybody for 6 s. What is left of a line that is no JSON is the decoder's to refuse.
    """
    left = _STRING.sub(b"", line).translate(_ONE_KIND, _NO_BRACKETS)
    for _ in range(MAX_DEPTH):
        before = len(left)
        left = left.replace(b"[]", b"")
        if len(left) == before:
            break
    return b"[]" in left or left.count(b"[") > MAX_DEPTH


def request(ident: Id, method: str, params: Any) -> bytes:
    return _line({"jsonrpc": "2.0", "id": ident, "method": method, "params": params})


def notification(method: str, params: Any) -> bytes:
    return _line({"jsonrpc": "2.0", "method": method, "params": params})


def result(ident: Id, value: Any) -> bytes:
    return _line({"jsonrpc": "2.0", "id": ident, "result": value})


def error(ident: Id, code: int, message: str, data: dict[str, Any] | None = None) -> bytes:
    body: dict[str, Any] = {"code": code, "message": message}
    if data:
        body["data"] = data
    return _line({"jsonrpc": "2.0", "id": ident, "error": body})


def error_of(ident: Id, exc: DeltaboxError) -> bytes:
    """A deliberate error as the wire has it: its rpc code, its sentence, `data.code`, its facts."""
    return error(
        ident,
        exc.rpc_code,
        exc.sentence,
        {"code": exc.host_code, "exitStatus": exc.exit_status, **exc.data},
    )


def malformed(frame: Malformed) -> bytes:
    return error(frame.id, frame.code, frame.message, frame.data)


def _line(message: dict[str, Any]) -> bytes:
    try:
        return _encoder.encode(message) + b"\n"
    except UnicodeEncodeError:
        # A name that is no UTF-8 reached a place meant for text (a project's own path, an argument).
        return _encoder.encode(_encodable(msgspec.to_builtins(message))) + b"\n"


def _encodable(value: Any) -> Any:
    """The same with lone surrogates written as escapes, since JSON text cannot hold them."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(k): _encodable(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_encodable(v) for v in value]
    return value
