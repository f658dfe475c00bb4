"""Parameters and results of every method but fs.*: what goes over the wire, and nothing it means.

Members are camelCase on the wire. Parameters ignore what they do not know; results and notifications
have exactly these members. A `path` is text where it is UTF-8, and `pathB64` has its bytes where
it is not. docs/protocol.md and the JSON Schema are generated from here, so a docstring is documentation.
"""

import base64
import binascii
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from deltabox.errors import BadUsage

VERSION = "1"

KIB = 1 << 10
MIB = 1 << 20

MAX_IN_FLIGHT = 256  # requests of one connection; a host that has more is in a loop
MAX_OUTPUT_CHUNK = 256 * KIB
MAX_COLLECTED = (
    8 * MIB
)  # of each stream in a settled reply; two of them stay below a line's 32 MiB
DEFAULT_TIMEOUT_MS = 600_000
MAX_TIMEOUT_MS = 7 * 24 * 3600 * 1000
STOP_GRACE_MS = 2000

Encoding = Literal["utf-8", "base64"]
Profile = Literal["read-only", "workspace-write", "read-write"]
Milliseconds = Annotated[int, Meta(ge=0, le=MAX_TIMEOUT_MS)]
Bytes = Annotated[int, Meta(ge=0, le=MAX_COLLECTED)]
Count = Annotated[int, Meta(ge=0)]
Cells = Annotated[int, Meta(ge=1, le=65535)]
Seq = Annotated[int, Meta(ge=0)]
ExecName = Annotated[str, Meta(min_length=1, max_length=64)]


class Wire(msgspec.Struct, kw_only=True, rename="camel", frozen=True):
    """How all of them look on the wire."""


class Sparse(Wire, omit_defaults=True, frozen=True):
    """A result whose members are left out where they have nothing to say."""


def text_of(data: bytes) -> tuple[str, Encoding]:
    """Bytes as a JSON string: as they are where they are UTF-8, else base64."""
    try:
        return data.decode(), "utf-8"
    except UnicodeDecodeError:
        return base64.b64encode(data).decode(), "base64"


def bytes_of(text: str, encoding: str = "utf-8") -> bytes:
    """The reverse. Raises: BadUsage."""
    try:
        return base64.b64decode(text, validate=True) if encoding == "base64" else text.encode()
    except (binascii.Error, ValueError) as exc:  # a lone surrogate is a ValueError too
        kind = "base64" if encoding == "base64" else "text"
        raise BadUsage(f"{text[:40]!a} is no {kind}; send bytes in base64.") from exc


# connection


class ClientInfo(Wire, frozen=True):
    name: str = "unknown"
    version: str = ""


class ClientCapabilities(Wire, frozen=True):
    """approval: the client answers `approval.request`."""

    approval: bool = False


class Initialize(Wire, frozen=True):
    protocol_version: str = VERSION
    client_info: ClientInfo = ClientInfo()
    capabilities: ClientCapabilities = ClientCapabilities()


class Limits(Wire, frozen=True):
    line_bytes: int
    depth: int
    requests_in_flight: int
    output_chunk_bytes: int
    collected_bytes: int
    timeout_ms: int
    stop_grace_ms: int


class Initialized(Wire, frozen=True):
    """protocolVersion: the one spoken from here on; a client that cannot speak it closes."""

    protocol_version: str
    server_info: ClientInfo
    methods: list[str]
    engines: list[str]
    isolations: list[str]
    profiles: list[str]
    limits: Limits


class Cancel(Wire, frozen=True):
    id: str | int


class Nothing(Wire, frozen=True):
    """No members."""


# session.*


class Policy(Wire, frozen=True):
    """deny: project paths that are hidden; readOnly: project paths that are never committed;
    pass: `PATH[:ro|cow|rw]` host paths to show at their place."""

    deny: list[str] = []
    read_only: list[str] = []
    pass_: list[str] = msgspec.field(default_factory=list, name="pass")


class SessionStart(Wire, frozen=True):
    """projectRoot: an existing folder. session: continue this idle session instead of a new one.
    reuse: take a parked session of the project that fits. network: `off` unless asked for.
    env: added to every command's environment; names that mean code to some program are refused.
    fsMode is another name for engine. transport: accepted for hosts that send it; only `stdio`."""

    project_root: str
    owner: str | None = None
    session: str | None = None
    engine: str | None = None
    fs_mode: str | None = None
    isolation: str | None = None
    durability: Literal["fast", "strict"] | None = None
    network: Literal["off", "host"] | None = None
    profile: Profile | None = None
    policy: Policy = Policy()
    env: dict[str, str] = {}
    reuse: bool = True
    transport: str | None = None


class Shell(Wire, frozen=True):
    """A program that runs its arguments in the session, as a command prefix or a shell path."""

    program: str
    args: list[str]


class SessionCapabilities(Wire, frozen=True):
    """liveBase: changes reach the project before they are approved (git engine only)."""

    live_base: bool
    directory_rename: bool
    block_cow: bool
    confined: bool
    network: str
    notes: list[str]


class Started(Wire, frozen=True):
    """logicalRoot: where the project stands, for commands and for `path`s alike. guidance: a line
    for the model. reused: a parked session was taken. review: open changes it already has."""

    session: str
    generation: int
    logical_root: str
    engine: str
    isolation: str
    network: str
    profile: str
    durability: str
    capabilities: SessionCapabilities
    guidance: str
    shell: Shell
    reused: bool
    review: str | None


class OfSession(Wire, frozen=True):
    session: str


class SessionStop(OfSession, frozen=True):
    """graceMs: what commands get between TERM and the end."""

    grace_ms: Milliseconds = STOP_GRACE_MS


class SessionPark(OfSession, frozen=True):
    """review: what to do with open changes; with `keep` a session that has some is stopped instead
    of parked, and its review waits."""

    review: Literal["keep", "abort"] = "keep"


class SessionEnded(Wire, frozen=True):
    """state: `parked`, `idle` (a review waits) or `closed`."""

    session: str
    state: str
    generation: int
    review: str | None


class SessionList(Wire, frozen=True):
    """projectRoot: of one project; else of all. closed: those that are over too."""

    project_root: str | None = None
    closed: bool = False


class SessionRow(Wire, frozen=True):
    """state: running (its owner lives), parked, idle or closed. here: this process owns it."""

    session: str
    project: str
    state: str
    here: bool
    engine: str
    isolation: str
    network: str
    generation: int
    review: str | None
    owner: str | None
    pid: int | None
    created_ns: int
    updated_ns: int


class SessionRows(Wire, frozen=True):
    sessions: list[SessionRow]


class Running(Wire, frozen=True):
    exec_id: str
    turn: int | None
    argv: list[str]
    state: Literal["queued", "running", "done"]
    background: bool
    started_ns: int


class SessionStatus(SessionRow, frozen=True):
    running: list[Running]


# session.exec and exec.*


class Terminal(Wire, frozen=True):
    rows: Cells = 24
    columns: Cells = 80


class Exec(Wire, frozen=True):
    """One of command (run by `bash --noprofile --norc -c`) and argv. cwd: relative to the project,
    or absolute. timeoutMs: then TERM, and after two seconds the end of everything it started.

    stream: the reply comes when the command has started, output as `exec.output`, the end as
    `exec.exit`. background: it runs beside the queue, and past the request and its connection.
    execId: your own name for it, so that it can be named before the reply; unique among running ones.
    stdin: `closed`, or `pipe` to feed it by exec.write; input: written first, and then closed unless
    stdin is `pipe`. terminal: its own pseudo-terminal; implies pipe and runs beside the queue.
    maxBytes: of each stream, in the reply. window: with stream, how many bytes may be under way
    before exec.ack; without it only the connection's own back-pressure holds a command up.
    generation: refused with FS_STALE_VERSION when the session's is another.
    """

    session: str
    command: str | None = None
    argv: list[str] | None = None
    cwd: str | None = None
    env: dict[str, str] = {}
    profile: Profile | None = None
    timeout_ms: Annotated[int, Meta(ge=1, le=MAX_TIMEOUT_MS)] = DEFAULT_TIMEOUT_MS
    stream: bool = False
    background: bool = False
    exec_id: ExecName | None = None
    stdin: Literal["closed", "pipe"] = "closed"
    input: str | None = None
    encoding: Encoding = "utf-8"
    terminal: Terminal | None = None
    max_bytes: Bytes = MAX_COLLECTED
    window: Annotated[int, Meta(ge=1)] | None = None
    generation: int | None = None


class Named(Sparse, frozen=True):
    path: str
    path_b64: str | None = msgspec.field(default=None, name="pathB64")


class ExecStarted(Wire, frozen=True):
    exec_id: str
    turn: int | None


class ExecDone(Wire, frozen=True):
    """One of code and signal. reason: why it could not be run (code 126 or 127).

    changed: what changed in the workspace between its start and end; shared if other commands ran then.
    """

    exec_id: str
    turn: int | None
    code: int | None
    signal: int | None
    reason: str | None
    timed_out: bool
    cancelled: bool
    duration_ms: float
    changed: list[Named]
    changed_total: int
    shared: bool
    generation: int


class ExecExit(ExecDone, frozen=True):
    """Notification `exec.exit`, after the last `exec.output`. bytes: how much each stream printed.
    error: the command could not be started after all; the other members then say nothing."""

    session: str
    bytes: dict[str, int]
    error: dict[str, Any] | None = None


class ExecResult(ExecDone, frozen=True):
    """stdout, stderr: text, or base64 where the encoding beside says so; truncated: one of them
    is only the beginning. stdoutFile, stderrFile: host files with all of it, until the session ends.
    With a terminal all output is in stdout."""

    stdout: str
    stdout_encoding: Encoding
    stdout_bytes: int
    stdout_file: str | None
    stderr: str
    stderr_encoding: Encoding
    stderr_bytes: int
    stderr_file: str | None
    truncated: bool


class ExecOutput(Wire, frozen=True):
    """Notification `exec.output`. seq: from 0 in each channel, in order. Bytes are exact: join
    them before decoding, since a chunk may end inside a character (it is then in base64)."""

    session: str
    exec_id: str
    channel: Literal["stdout", "stderr", "terminal"]
    seq: int
    data: str
    encoding: Encoding


class OfExec(Wire, frozen=True):
    session: str
    exec_id: str


class ExecWrite(OfExec, frozen=True):
    data: str = ""
    encoding: Encoding = "utf-8"
    close: bool = False


class ExecCancel(OfExec, frozen=True):
    grace_ms: Milliseconds = STOP_GRACE_MS


class ExecSignal(OfExec, frozen=True):
    """signal: a number, or a name like `INT` or `SIGINT`."""

    signal: int | str


class ExecResize(OfExec, frozen=True):
    rows: Cells
    columns: Cells


class ExecAck(OfExec, frozen=True):
    bytes: Count


class ExecRows(Wire, frozen=True):
    execs: list[Running]


# review.* and undo.*


class OfReview(Wire, frozen=True):
    session: str
    generation: int | None = None


class OfPaths(OfReview, frozen=True):
    """paths: files and folders, relative to the project; none means all."""

    paths: list[str] = []
    paths_b64: list[str] = msgspec.field(default_factory=list, name="pathsB64")

    def chosen(self) -> list[bytes]:
        return path_list(self.paths, self.paths_b64)


class ReviewDiff(OfPaths, frozen=True):
    """detail: `stat` has counts, `full` hunks too, `patch` a text for people, `exact` one for git apply."""

    detail: Literal["stat", "full", "patch", "exact"] = "full"


class ReviewCommit(OfPaths, frozen=True):
    """digest: what was shown; the last one shown when left out. allow: refused changes to let in."""

    digest: str | None = None
    on_conflict: Literal["fail", "skip"] = "fail"
    allow: list[str] = []
    allow_b64: list[str] = msgspec.field(default_factory=list, name="allowB64")
    hunks: list[str] = []
    keep_mtime: bool = False

    def allowed(self) -> list[bytes]:
        return path_list(self.allow, self.allow_b64)


class ReviewState(Wire, frozen=True):
    """review: null when none is open. pending: entries the session has touched and not decided;
    `review.diff` says which of them are real changes."""

    session: str
    review: str | None
    generation: int
    opened_ns: int | None
    shown: str | None
    pending: int
    running: int


class ReviewRequest(OfReview, frozen=True):
    """otherwise: what happens when the client cannot answer `approval.request`."""

    otherwise: Literal["keep", "commit", "abort"] = "keep"


class Approval(Wire, frozen=True):
    """Request `approval.request`, server to client. diff: the `stat` result of review.diff."""

    session: str
    tool_name: str
    reason: str
    digest: str
    diff: dict[str, Any]
    choices: list[str]


class ApprovalAnswer(Wire, frozen=True):
    """The client's answer. `partial` takes `paths` alone."""

    outcome: Literal["allowed-once", "rejected", "cancelled", "unavailable", "partial"]
    paths: list[str] = []
    paths_b64: list[str] = msgspec.field(default_factory=list, name="pathsB64")

    def chosen(self) -> list[bytes]:
        return path_list(self.paths, self.paths_b64)


class Decided(Wire, frozen=True):
    """outcome: `committed`, `aborted`, `kept` or `empty`; result: what review.commit or review.abort said."""

    outcome: str
    generation: int
    result: dict[str, Any] | None


class UndoList(Wire, frozen=True):
    project_root: str


class UndoRow(Wire, frozen=True):
    """state: `done` ones can be undone."""

    commit: str
    session: str | None
    kind: str
    at_ns: int
    state: str
    undoes: str | None
    summary: str


class UndoRows(Wire, frozen=True):
    commits: list[UndoRow]


class UndoApply(Wire, frozen=True):
    """commit: the project's latest in force when left out."""

    project_root: str
    commit: str | None = None


class Undone(Wire, frozen=True):
    """commit: the undo itself, which can be undone. viewStale: what a live view may show as it was."""

    undone: str
    commit: str
    paths: int
    notes: list[str]
    view_stale: list[dict[str, Any]] = []


# events


class Subscribe(Wire, frozen=True):
    """after: the last seq you have; left out, only what happens from now on. subscription: your own
    name for it, so that no event comes before you know whom it is for."""

    subscription: ExecName | None = None
    after: Seq | None = None
    session: str | None = None
    project_root: str | None = None


class Subscribed(Wire, frozen=True):
    """seq: the newest event there is. Events come as notifications `event`, in order of seq."""

    subscription: str
    seq: int


class Unsubscribe(Wire, frozen=True):
    subscription: str


class Event(Wire, frozen=True):
    """Notification `event`. data: what the kind of event has to tell."""

    subscription: str
    seq: int
    at_ns: int
    session: str | None
    project: str | None
    kind: str
    data: dict[str, Any]


def path_list(paths: list[str], coded: list[str]) -> list[bytes]:
    """Raises: BadUsage."""
    return [bytes_of(p) for p in paths] + [bytes_of(p, "base64") for p in coded]


def named(path: bytes) -> Named:
    try:
        return Named(path=path.decode())
    except UnicodeDecodeError:
        text = path.decode("utf-8", "backslashreplace")
        return Named(path=text, path_b64=base64.b64encode(path).decode())
