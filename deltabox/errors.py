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


# Files: DSH's names, so that a host's file tools can tell a model what to do next.


class FileExists(DeltaboxError):
    """Something stands there already, and the call was to create. Read it, then replace it."""

    rpc_code = -32040
    host_code = "FS_EXISTS"


class NotDirectory(DeltaboxError):
    """A component of the path, or what was to be listed, is no directory."""

    rpc_code = -32041
    host_code = "FS_NOT_DIRECTORY"


class IsDirectory(DeltaboxError):
    """A directory stands where a file was meant."""

    rpc_code = -32042
    host_code = "FS_IS_DIRECTORY"


class NotRegularFile(DeltaboxError):
    """A fifo, a socket or a device: it is never opened."""

    rpc_code = -32043
    host_code = "FS_NOT_REGULAR_FILE"


class TooLarge(DeltaboxError):
    """More bytes than one message may carry; `data["limit"]`. Go on with fs.readRange."""

    rpc_code = -32044
    host_code = "FS_TOO_LARGE"


class PermissionDenied(DeltaboxError):
    """The file system's own modes forbid it (not a policy of deltabox: that is Refused)."""

    rpc_code = -32045
    host_code = "FS_PERMISSION_DENIED"


class StaleVersion(DeltaboxError):
    """The file is not what the caller last read; nothing was written. Read it again and retry."""

    rpc_code = -32046
    host_code = "FS_STALE_VERSION"
    exit_status = 3


class NotText(DeltaboxError):
    """The bytes are not UTF-8 where text was asked for. Ask for base64."""

    rpc_code = -32047
    host_code = "FS_NOT_TEXT"


class EditNotFound(DeltaboxError):
    """The text to replace is not in the file."""

    rpc_code = -32048
    host_code = "FS_EDIT_NOT_FOUND"


class AmbiguousEdit(DeltaboxError):
    """The text to replace is in the file another number of times than the caller said."""

    rpc_code = -32049
    host_code = "FS_AMBIGUOUS_EDIT"


class FileFailed(DeltaboxError):
    """The file system failed: no space, an I/O error, an entry that changed under the call."""

    rpc_code = -32050
    host_code = "FS_IO_ERROR"
