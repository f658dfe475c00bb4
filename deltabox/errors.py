"""Every deliberate error: whose fault, what was attempted, on which object, what next.

One class for each thing a caller can do differently. `rpc_code` and `host_code` go over the wire
(`host_code` is DSH's name where it has one), `exit_status` is the command line's. An error's text
is one clear sentence that ends with the next step. Nothing here logs, prints or imports.
"""

from typing import Any, ClassVar


class DeltaboxError(Exception):
    """Base of all deliberate errors; `data` carries the machine-readable facts (JSON types only)."""

    rpc_code: ClassVar[int] = -32000
    host_code: ClassVar[str] = "FAILED"
    exit_status: ClassVar[int] = 1

    def __init__(self, sentence: str, /, **data: Any) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.data = data


class Failed(DeltaboxError):
    """Something went wrong that no flag or retry is known to cure."""


class BadUsage(DeltaboxError):
    """The request itself is wrong: bad flag, unknown name, a value out of range."""

    rpc_code = -32602
    host_code = "BAD_REQUEST"
    exit_status = 2


class BadPath(BadUsage):
    """A path that cannot name anything in a project: absolute, with `..`, empty, with NUL."""

    host_code = "PATH_OUTSIDE_WORKSPACE"


class Ambiguous(DeltaboxError):
    """More than one session or review fits; the sentence lists them."""

    rpc_code = -32011
    host_code = "AMBIGUOUS"
    exit_status = 2


class NotFound(DeltaboxError):
    """No such session, review, commit or file."""

    rpc_code = -32012
    host_code = "FS_NOT_FOUND"
    exit_status = 2


class Refused(DeltaboxError):
    """Policy says no: a denied path, a refused risk, a project that may not be used."""

    rpc_code = -32020
    host_code = "FS_SANDBOX_DENIED"
    exit_status = 3


class ReviewChanged(DeltaboxError):
    """The changes differ from what was shown; nothing was applied. Look at the diff again."""

    rpc_code = -32021
    host_code = "REVIEW_CHANGED"
    exit_status = 3


class ReviewConflict(DeltaboxError):
    """The project moved under some of the paths; nothing was applied to them.

    `data["conflicts"]` lists {path, agent, project} with both sides in words.
    """

    rpc_code = -32022
    host_code = "REVIEW_CONFLICT"
    exit_status = 3


class SessionBusy(DeltaboxError):
    """Another process owns the session; the sentence names it."""

    rpc_code = -32023
    host_code = "SESSION_BUSY"
    exit_status = 3


class SessionRunning(DeltaboxError):
    """Processes of the session still live, and the request needs it quiet."""

    rpc_code = -32024
    host_code = "SESSION_RUNNING"
    exit_status = 3


class EngineUnavailable(DeltaboxError):
    """No view can be made here as asked; the sentence has the reason and the remedy."""

    rpc_code = -32030
    host_code = "ENGINE_UNAVAILABLE"
    exit_status = 4


class IsolationUnavailable(DeltaboxError):
    """Commands cannot be confined here as asked. deltabox never goes on with less."""

    rpc_code = -32031
    host_code = "ISOLATION_UNAVAILABLE"
    exit_status = 4
