"""One blocking call to an owner's socket: for command-line verbs, which would pay 170 ms for trio.

Must not be used inside an event loop.
"""

import os
import socket
from pathlib import Path
from typing import Any

from deltabox import errors
from deltabox.protocol import jsonrpc

# A commit of thousands of files takes seconds; an owner that is stopped in a debugger takes for ever.
CALL_TIMEOUT_S = 600


def call(path: Path, method: str, params: dict[str, Any]) -> Any:
    """Send one request and return its result.

    Raises: SessionBusy when nobody answers there; the owner's error as the class it had.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        stream.settimeout(CALL_TIMEOUT_S)
        try:
            _connect(stream, path)
            stream.sendall(jsonrpc.request(1, method, params))
            return _answer(stream)
        except OSError as exc:
            raise errors.SessionBusy(
                f"The session's owner does not answer on {path} ({exc}); "
                "try again, or end that process."
            ) from exc


def _connect(stream: socket.socket, path: Path) -> None:
    """Connect by the folder's descriptor: sun_path holds 108 bytes, state folders can be deeper."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        stream.connect(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


def _answer(stream: socket.socket) -> Any:
    decoder = jsonrpc.Decoder(limit=1 << 30)
    while chunk := stream.recv(1 << 18):
        for frame in decoder.feed(chunk):
            if not isinstance(frame, jsonrpc.Response) or frame.id not in (1, None):
                continue
            if frame.error is not None:
                # Without an id it is about a line that could not be read; we sent only this one.
                raise error_from(frame.error)
            if frame.id == 1:
                return frame.result
    raise errors.SessionBusy("The session's owner went away before it answered; ask again.")


def error_from(body: dict[str, Any]) -> errors.DeltaboxError:
    """The error object of a reply as the class that made it."""
    data = body.get("data")
    if not isinstance(data, dict):
        data = {}
    classes = [
        cls
        for cls in vars(errors).values()
        if isinstance(cls, type) and issubclass(cls, errors.DeltaboxError)
    ]
    named = {cls.host_code: cls for cls in classes}
    # A finer code than the class's own (INVALID_PARAMS) stays in `data`; the number tells the class.
    numbered = {cls.rpc_code: cls for cls in reversed(classes)}
    code = str(data.get("code", ""))
    cls = named.get(code) or numbered.get(_number(body.get("code")), errors.Failed)
    rest = {
        k: v for k, v in data.items() if k != "exitStatus" and (k, v) != ("code", cls.host_code)
    }
    return cls(str(body.get("message", "The owner refused.")), **rest)


def _number(code: Any) -> int:
    return code if isinstance(code, int) else 0
