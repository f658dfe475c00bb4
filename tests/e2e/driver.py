"""One user's world for end-to-end tests: a project, a home, a state folder, and the installed command.

Knows deltabox only from outside: argv, streams, files, statuses. Imports nothing of it.
"""

import contextlib
import copy
import ctypes
import json
import os
import select
import shlex
import signal
import subprocess  # noqa: TID251 - these tests are the user's shell, so they start what a user starts
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.listing import Entry

COMMAND = Path(sys.executable).parent / "deltabox"
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
# A bound on waiting for what must happen; nothing passes because of it.
PATIENCE_S = 40.0


@dataclass(frozen=True, slots=True)
class Done:
    """A finished command: what it printed on either stream, and how it ended."""

    argv: tuple[str, ...]
    status: int
    raw: bytes
    err: str

    @property
    def out(self) -> str:
        return self.raw.decode("utf-8", "surrogateescape")

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    def ok(self) -> "Done":
        return self.ended(0)

    def ended(self, status: int) -> "Done":
        typed = shlex.join(self.argv)[:300]
        shown = f"{typed} ended {self.status}, not {status}\n{self.out}\n{self.err}"
        assert self.status == status, shown
        assert "Traceback" not in self.err, shown
        return self


class Box:
    """A user with one project. `deltabox(...)` is a verb in the project, as typed in a shell."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.home = root / "home"
        self.project = root / "home" / "work" / "project"
        self.state = root / "state"
        self.meeting = root / "meeting"
        self.project.mkdir(parents=True)
        self.env = {
            "DELTABOX_STATE_DIR": str(self.state),
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "PATH": SYSTEM_PATH,
        }
        for name in os.environ:  # for a copy of the sources under test, and for measuring coverage
            if name == "PYTHONPATH" or name.startswith("COVERAGE_"):
                self.env[name] = os.environ[name]

    def second(self, name: str) -> "Box":
        """The same user and project, with a meeting place of its own for another agent."""
        other = copy.copy(self)
        other.meeting = self.root / name
        return other

    # files

    def write(self, name: str, content: str | bytes, *, mode: int | None = None) -> Path:
        path = self.project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        if mode is not None:
            path.chmod(mode)
        return path

    def read(self, name: str) -> str:
        return (self.project / name).read_text()

    def git(self, *words: str) -> str:
        return self.native("git", *words).ok().out

    def make_repository(self) -> None:
        self.git("init", "-q", "-b", "main")
        self.git("config", "user.name", "user")
        self.git("config", "user.email", "user@example.invalid")
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "start")

    # commands

    def deltabox(
        self,
        *words: str | os.PathLike[str],
        stdin: bytes = b"",
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
    ) -> Done:
        return self.native(COMMAND, *words, stdin=stdin, cwd=cwd, env=env)

    def keep(self, script: str, *flags: str, stdin: bytes = b"") -> Done:
        """Run a shell script in the workspace and leave its changes for review."""
        argv = ("run", "--review", "keep", *flags, "--", "sh", "-euc", script)
        return self.deltabox(*argv, stdin=stdin)

    def native(
        self,
        *words: str | os.PathLike[str],
        stdin: bytes = b"",
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
    ) -> Done:
        argv = tuple(os.fspath(word) for word in words)
        done = subprocess.run(
            argv,
            input=stdin,
            capture_output=True,
            cwd=cwd or self.project,
            env={**self.env, **(env or {})},
            timeout=PATIENCE_S * 2,
            check=False,
        )
        return Done(argv, done.returncode, done.stdout, done.stderr.decode("utf-8", "replace"))

    @contextlib.contextmanager
    def starting(
        self,
        *words: str | os.PathLike[str],
        env: dict[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.PIPE,
    ) -> Iterator["subprocess.Popen[bytes]"]:
        """A verb that goes on while the test does other things; killed at the end if it still lives."""
        argv = [os.fspath(COMMAND), *(os.fspath(word) for word in words)]
        with subprocess.Popen(
            argv,
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.PIPE,
            cwd=self.project,
            env={**self.env, **(env or {})},
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    @contextlib.contextmanager
    def agent(self, script: str, *flags: str) -> Iterator["Agent"]:
        """A shell script in the workspace that meets the test by name: `meet WORD` in the script."""
        with Meeting(self.meeting) as meeting:
            head = (
                f"M={shlex.quote(str(meeting.folder))}\n"
                'meet() { echo "$1" > "$M/said"; read -r _ < "$M/heard"; }\n'
            )
            argv = ("run", "--review", "keep", "--pass", f"{meeting.folder}:rw", *flags)
            with self.starting(*argv, "--", "sh", "-euc", head + script) as process:
                yield Agent(process, meeting)

    # what a user sees of reviews

    def sessions(self, *flags: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = (
            self.deltabox("sessions", "--json", *flags).ok().json["sessions"]
        )
        return rows

    def changes(self, *flags: str) -> dict[str, str]:
        """Path → kind of everything pending."""
        files = self.deltabox("diff", "--json", *flags).ok().json["files"]
        return {file["path"]: file["kind"] for file in files}

    def view(self, *flags: str) -> dict[str, Entry]:
        """The project as the next command of the agent sees it, listed from inside."""
        argv = ("run", "--review", "keep", "--net", "off", *flags, "--")
        done = self.deltabox(*argv, "/usr/bin/python3", "-c", _LISTER, self.project).ok()
        return {name: (entry[0], entry[1], entry[2]) for name, entry in done.json.items()}


# Printed as JSON by the lister's own text, run inside: the sandbox does not see this checkout.
_LISTER = (
    (Path(__file__).parent / "listing.py").read_text()
    + """
import json, sys
print(json.dumps(listing(Path(sys.argv[1]))))
"""
)


class Meeting:
    """Two fifos. The test holds both ends open, so that neither side ever blocks in open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> "Meeting":
        self.folder.mkdir(exist_ok=True)
        for name in ("said", "heard"):
            (self.folder / name).unlink(missing_ok=True)
            os.mkfifo(self.folder / name)
        self.said = os.open(self.folder / "said", os.O_RDWR)
        self.heard = os.open(self.folder / "heard", os.O_RDWR)
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self.said)
        os.close(self.heard)


class Agent:
    """A running script and the test's side of its meetings."""

    def __init__(self, process: "subprocess.Popen[bytes]", meeting: Meeting) -> None:
        self.process = process
        self.meeting = meeting
        self._rest = b""

    def reaches(self, word: str) -> None:
        """Wait until the script says `word`; fails with its output when it ends before."""
        ending = os.pidfd_open(self.process.pid)
        try:
            while b"\n" not in self._rest:
                ready, _, _ = select.select([self.meeting.said, ending], [], [], PATIENCE_S)
                if self.meeting.said not in ready:
                    self.process.kill()
                    out, err = self.process.communicate()
                    raise AssertionError(f"never reached {word!r}\n{out!r}\n{err.decode()}")
                self._rest += os.read(self.meeting.said, 4096)
        finally:
            os.close(ending)
        line, _, self._rest = self._rest.partition(b"\n")
        assert line.decode() == word

    def goes_on(self) -> None:
        os.write(self.meeting.heard, b"go\n")

    def ends(self, status: int = 0) -> Done:
        out, err = self.process.communicate(timeout=PATIENCE_S)
        argv = tuple(str(word) for word in self.process.args)  # type: ignore[union-attr]
        return Done(argv, self.process.returncode, out, err.decode("utf-8", "replace")).ended(
            status
        )


# processes


def descendants(pid: int) -> list[int]:
    """Every process below `pid`, seen from the host."""
    children = all_children()
    found: list[int] = []
    todo = [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def all_children() -> dict[int, list[int]]:
    """Each process that has children, with them."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                text = Path("/proc", entry, "stat").read_text()
                parent = int(text.rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry))
    return children


@contextlib.contextmanager
def dying(pids: Sequence[int]) -> Iterator[Callable[[], list[int]]]:
    """Hold the processes by pidfd; yields a wait that returns those that would not die."""
    held = {}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            held[os.pidfd_open(pid)] = pid
    poll = select.poll()
    for fd in held:
        poll.register(fd, select.POLLIN)

    def wait() -> list[int]:
        left = dict(held)
        deadline = time.monotonic() + PATIENCE_S
        while left and (remaining := deadline - time.monotonic()) > 0:
            for fd, _ in poll.poll(remaining * 1000):
                poll.unregister(fd)
                del left[fd]
        return list(left.values())

    try:
        yield wait
    finally:
        for fd in held:
            os.close(fd)


@contextlib.contextmanager
def adopting_orphans() -> Iterator[Callable[[], int]]:
    """Whatever loses its parent below us becomes our child; yields how many such there were.

    The count waits for each to end, so that one that is just dying counts like one that stays; one
    that stays for ever is killed, and fails the test.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    set_child_subreaper = 36
    ours = set(all_children().get(os.getpid(), []))
    assert libc.prctl(set_child_subreaper, 1, 0, 0, 0) == 0

    def count() -> int:
        number = 0
        while pids := [p for p in all_children().get(os.getpid(), []) if p not in ours]:
            number += 1
            fd = os.pidfd_open(pids[0])
            try:
                if not select.select([fd], [], [], PATIENCE_S)[0]:
                    os.kill(pids[0], signal.SIGKILL)
                    raise AssertionError(f"process {pids[0]} stays")
            finally:
                os.close(fd)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pids[0], 0)
        return number

    try:
        yield count
    finally:
        libc.prctl(set_child_subreaper, 0, 0, 0, 0)
