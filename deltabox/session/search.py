"""Finding files and lines in the view, by ripgrep or grep in the session's own sandbox, read-only.

No pattern of a client is matched by an engine of ours that could hang, and no searching program
reads what the session's commands could not. Hits come in batches as they are found. Where ripgrep is
absent, files are listed here, in a thread, with the same ignore files.
"""

import base64
import binascii
import os
import stat
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
import trio

from deltabox.errors import BadUsage, Failed, NotDirectory, NotFound, PermissionDenied
from deltabox.isolation.running import Pipes
from deltabox.paths import Tree, WorkspacePath, join, parent
from deltabox.session import pattern as globs
from deltabox.session.workspace import Running, Workspace

Tool = Literal["ripgrep", "plain"]

# Only where the system installs programs: a name on PATH may be the project's own.
RIPGREP = ("/usr/bin/rg", "/usr/local/bin/rg", "/bin/rg")
MAX_RECORD = (
    1 << 20
)  # one line of a tool's output; a longer one is a minified file, and passed over
MAX_LINE_BYTES = 4096  # of a hit's text; a model needs no more of one line
MAX_IGNORE_BYTES = 1 << 20
MAX_WORDS = 16 * 1024  # of a tool's complaint
SIGKILL = 9


@dataclass(frozen=True, slots=True)
class Asked:
    """Where and how much: `at` is what is searched; limit bounds the hits, batch one delivery."""

    at: WorkspacePath
    is_directory: bool = True
    ignore: bool = True
    hidden: bool = True
    limit: int = 1000
    batch: int = 200
    tool: Tool | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """What a line must hold: a pattern, or the bytes themselves with `literal`."""

    pattern: bytes
    literal: bool = False
    ignore_case: bool = False
    include: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Hit:
    """One matching line, without its end. column: bytes before the match, where the tool tells."""

    path: WorkspacePath
    line: int
    text: bytes
    column: int | None = None
    is_cut: bool = False


def ripgrep() -> str | None:
    """Where the host has it, outside anything that an agent can write."""
    for place in RIPGREP:
        if os.access(place, os.X_OK):
            return place
    return None


async def glob(
    workspace: Workspace,
    asked: Asked,
    pattern: bytes,
    deliver: Callable[[list[bytes]], Awaitable[None]],
) -> bool:
    """Deliver the files below `at` that fit, in the order of their bytes; True if there are more.

    Raises: BadUsage for a pattern that is none. Cancellation: ends the search.
    """
    fits = globs.compiled(pattern)
    skip = len(asked.at) + 1 if asked.at else 0
    paths = [p for p in await _files(workspace, asked) if fits.fullmatch(p[skip:])]
    for start in range(0, min(len(paths), asked.limit), asked.batch):
        await deliver(list[bytes](paths[start : min(start + asked.batch, asked.limit)]))
    return len(paths) > asked.limit


async def _files(workspace: Workspace, asked: Asked) -> list[WorkspacePath]:
    """Every file to be searched, sorted by bytes."""
    if not asked.is_directory:
        return [asked.at]
    program = ripgrep() if asked.tool != "plain" else None
    if program is None:
        return await trio.to_thread.run_sync(lambda: sorted(_walk(workspace, asked)))
    argv = [program, "--files", "--null", *_flags(asked), "--", _start(asked)]
    async with _running(workspace, argv) as (records, outcome), aclosing(records(b"\0")) as names:
        found = [_path(name) async for name in names]
    _judge(outcome(), found=bool(found))
    return sorted(found)


async def grep(
    workspace: Workspace,
    asked: Asked,
    what: Text,
    deliver: Callable[[list[Hit]], Awaitable[None]],
) -> bool:
    """Deliver matching lines, files in the order of their bytes; True if there are more.

    Raises: BadUsage for a pattern that the tool refuses, in its words. Cancellation: ends it.
    """
    if b"\0" in what.pattern or b"\n" in what.pattern:
        raise BadUsage("A line holds neither a newline nor a NUL; search for a part of one line.")
    fits = [globs.compiled(g) for g in what.include]
    skip = len(asked.at) + 1 if asked.at else 0

    def is_included(path: WorkspacePath) -> bool:
        below = path[skip:] or path.rpartition(b"/")[2]
        return not fits or any(f.fullmatch(below) for f in fits)

    batch: list[Hit] = []
    total = 0
    is_more = False
    program = ripgrep() if asked.tool != "plain" else None
    argv, names, decode = (
        await _plain_plan(workspace, asked, what, is_included)
        if program is None
        else _ripgrep_plan(program, asked, what)
    )
    async with (
        _running(workspace, argv, stdin=names) as (records, outcome),
        aclosing(records(b"\n")) as lines,
    ):
        async for line in lines:
            hit = decode(line)
            if hit is None or not is_included(hit.path):
                continue
            if total == asked.limit:
                is_more = True
                break
            batch.append(hit)
            total += 1
            if len(batch) >= asked.batch:
                await deliver(batch)
                batch = []
    if batch:
        await deliver(batch)
    if not is_more:
        _judge(outcome(), found=total > 0)
    return is_more


# ripgrep


def _flags(asked: Asked) -> list[str]:
    # No configuration and no ignore file of the person's: the same answer on each machine.
    flags = ["--no-config", "--no-messages", "--no-require-git", "--no-ignore-global"]
    flags += ["--sort=path", "--color=never"]
    if not asked.ignore:
        flags.append("--no-ignore")
    if asked.hidden:
        flags.append("--hidden")
    return [*flags, "--glob=!.git"]


def _start(asked: Asked) -> str:
    # Never a bare name, which could be taken for an option or for standard input.
    return os.fsdecode(b"./" + asked.at)


def _path(raw: bytes) -> WorkspacePath:
    return WorkspacePath(raw.removeprefix(b"./").lstrip(b"/"))


_Plan = tuple[list[str], bytes, Callable[[bytes], "Hit | None"]]


def _ripgrep_plan(program: str, asked: Asked, what: Text) -> _Plan:
    argv = [program, "--json", *_flags(asked)]
    if what.literal:
        argv.append("--fixed-strings")
    if what.ignore_case:
        argv.append("--ignore-case")
    argv += ["-e", os.fsdecode(what.pattern), "--", _start(asked)]
    return argv, b"", _decoded


def _decoded(record: bytes) -> Hit | None:
    message = msgspec.json.decode(record)
    if message.get("type") != "match":
        return None
    data = message["data"]
    text = _bytes(data["lines"]).rstrip(b"\n").removesuffix(b"\r")
    first = data["submatches"][0]["start"] if data["submatches"] else None
    return _hit(_path(_bytes(data["path"])), data["line_number"], text, first)


def _bytes(value: dict[str, str]) -> bytes:
    """ripgrep's {text} or {bytes: base64}."""
    if "text" in value:
        return value["text"].encode()
    try:
        return base64.b64decode(value["bytes"])
    except binascii.Error as exc:
        raise Failed(f"ripgrep sent what is no base64: {exc}.") from exc


def _hit(path: WorkspacePath, line: int, text: bytes, column: int | None) -> Hit:
    return Hit(path, line, text[:MAX_LINE_BYTES], column, is_cut=len(text) > MAX_LINE_BYTES)


# without ripgrep


async def _plain_plan(
    workspace: Workspace, asked: Asked, what: Text, is_included: Callable[[WorkspacePath], bool]
) -> _Plan:
    """GNU grep on the files listed here, their names by standard input."""
    files = [p for p in await _files(workspace, replace(asked, tool="plain")) if is_included(p)]
    argv = ["xargs", "-0", "-r", "grep", "-nHZIs", "-F" if what.literal else "-P"]
    if what.ignore_case:
        argv.append("-i")
    argv += ["-e", os.fsdecode(what.pattern), "--"]
    return argv, b"".join(b"./" + p + b"\0" for p in files), _Split().take


class _Split:
    """`path NUL line : text`. A newline in a name splits a record; the pieces are joined again."""

    def __init__(self) -> None:
        self._before = b""

    def take(self, piece: bytes) -> Hit | None:
        record = self._before + piece
        name, nul, rest = record.partition(b"\0")
        if not nul:
            self._before = record + b"\n"
            return None
        self._before = b""
        number, _, text = rest.partition(b":")
        return _hit(_path(name), int(number), text.removesuffix(b"\r"), None)


def _walk(workspace: Workspace, asked: Asked) -> Iterator[WorkspacePath]:
    """Files below `at` that no ignore file leaves out. In a thread; cancellable."""
    with workspace.files() as files:
        tree = files.tree
        above = _rules_above(tree, asked.at) if asked.ignore else []
        todo: list[tuple[WorkspacePath, list[tuple[WorkspacePath, Any]]]] = [(asked.at, above)]
        while todo:
            trio.from_thread.check_cancelled()
            folder, rules = todo.pop()
            if asked.ignore:
                rules = [*rules, *_rules(tree, folder)]
            try:
                found, _ = files.listing(folder, limit=1 << 62)
            except (PermissionDenied, NotFound, NotDirectory):
                continue  # what cannot be read, or has just gone, is not searched, as by the tools
            for child, st, _ in found:
                path = join(folder, child)
                is_folder = stat.S_ISDIR(st.st_mode)
                if child == b".git" or (not asked.hidden and child.startswith(b".")):
                    continue
                if _is_ignored(path, rules, is_folder=is_folder):
                    continue
                if is_folder:
                    todo.append((path, rules))
                elif stat.S_ISREG(st.st_mode):
                    yield path


def _rules_above(tree: Tree, folder: WorkspacePath) -> list[tuple[WorkspacePath, Any]]:
    """Of the folders that hold `folder`, the root's first."""
    found: list[tuple[WorkspacePath, Any]] = []
    at = folder
    while at:
        at = parent(at)
        found = [*_rules(tree, at), *found]
    return found


def _rules(tree: Tree, folder: WorkspacePath) -> list[tuple[WorkspacePath, Any]]:
    """The ignore files of one folder, the stronger last."""
    import pathspec  # 20 ms, and only where ripgrep is not

    found = []
    names = [b".gitignore", b".ignore", b".rgignore"]
    if not folder:
        names.insert(0, b".git/info/exclude")
    for name in names:
        try:
            fd = tree.open_file(join(folder, name))
        except OSError:  # none, or none that is a plain file
            continue
        try:
            lines = os.read(fd, MAX_IGNORE_BYTES).decode("utf-8", "surrogateescape").splitlines()
        finally:
            os.close(fd)
        found.append((folder, pathspec.GitIgnoreSpec.from_lines(lines)))
    return found


def _is_ignored(
    path: WorkspacePath, rules: list[tuple[WorkspacePath, Any]], *, is_folder: bool
) -> bool:
    """The strongest rule that says anything decides; the nearest file is the strongest."""
    for folder, spec in reversed(rules):
        below = path[len(folder) + 1 :] if folder else path
        verdict = spec.check_file(os.fsdecode(below) + ("/" if is_folder else "")).include
        if verdict is not None:
            return bool(verdict)
    return False


# the tool's process


@dataclass(slots=True)
class _Outcome:
    code: int | None = None
    words: bytes = b""


def _judge(outcome: _Outcome, *, found: bool) -> None:
    """Tools exit with 1 (xargs: 123) for no hit, and with 2 also for a file they may not read."""
    if found or outcome.code in (0, 1) or not outcome.words.strip():
        return
    words = outcome.words.decode("utf-8", "backslashreplace").strip().splitlines()
    raise BadUsage(f"The search was refused: {' '.join(w.strip() for w in words)[:500]}")


@asynccontextmanager
async def _running(
    workspace: Workspace, argv: list[str], *, stdin: bytes = b""
) -> AsyncIterator[tuple[Callable[[bytes], AsyncGenerator[bytes, None]], Callable[[], _Outcome]]]:
    """A tool in the sandbox, read-only: its output in records, and afterwards how it went."""
    outcome = _Outcome()
    stdio = Pipes(stdin=bool(stdin))
    async with (
        workspace.command(
            argv,
            stdio=stdio,
            cwd=workspace.session.project,
            profile="read-only",
            is_journaled=False,
        ) as running,
        trio.open_nursery() as nursery,
    ):
        command = running.command
        nursery.start_soon(_complaints, running, outcome)
        if stdin:
            nursery.start_soon(_feed, running, stdin)

        async def records(end: bytes) -> AsyncGenerator[bytes, None]:
            assert command.stdout is not None
            rest, is_skipping = b"", False
            while chunk := await command.stdout.receive_some(1 << 16):
                *whole, rest = (rest + bytes(chunk)).split(end)
                for record in whole:
                    if not is_skipping:
                        yield record
                    is_skipping = False
                if len(rest) > MAX_RECORD:
                    rest, is_skipping = b"", True
            if rest and not is_skipping:
                yield rest
            outcome.code = (await command.wait()).code

        try:
            yield records, lambda: outcome
        finally:
            if outcome.code is None:  # enough was found, or nobody waits any more
                with trio.CancelScope(shield=True), trio.move_on_after(1):
                    await command.signal(SIGKILL)
                nursery.cancel_scope.cancel()


async def _complaints(running: Running, outcome: _Outcome) -> None:
    assert running.command.stderr is not None
    while chunk := await running.command.stderr.receive_some(4096):
        outcome.words = (outcome.words + bytes(chunk))[:MAX_WORDS]


async def _feed(running: Running, data: bytes) -> None:
    assert running.command.stdin is not None
    try:
        await running.command.stdin.send_all(data)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        return  # it ended before it had read all: its status says why
    finally:
        await running.command.stdin.aclose()
