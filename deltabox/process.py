"""The only place that starts processes, talks to our native programs, and ends what was started.

A child gets exactly the descriptors named, an environment that is empty unless given, and never
PDEATHSIG: trio starts children from worker threads, and "parent death" is the death of that thread,
ten idle seconds later. Children that must not outlive us watch a socket instead (`Control`).
Must not know what a view or a sandbox is.
"""

import contextlib
import ctypes
import os
import signal
import socket
import struct
import subprocess  # noqa: TID251 - here, and nowhere else
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import trio

from deltabox.errors import Failed

NATIVE = Path(__file__).parent / "_native"
MAX_MESSAGE_BYTES = 8192  # the longest is an error with a path (4,096 bytes) and a sentence
MAX_MESSAGE_FDS = 16  # the holder of a view sends three
END_TIMEOUT_S = 5.0  # after SIGKILL only an uninterruptible wait in the kernel takes longer
_PR_SET_DUMPABLE = 4
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


@dataclass(frozen=True, slots=True)
class Message:
    """One packet. `fds` are the receiver's to close; `pid` is the sender's, in our pid namespace."""

    data: bytes
    fds: tuple[int, ...] = ()
    pid: int | None = None


class Control:
    """Our end of a SOCK_SEQPACKET pair with a native program; closing it is the order to die.

    Packets keep their bounds and order, and carry descriptors. One task receives at a time.
    """

    def __init__(self, sock: socket.socket) -> None:
        # The kernel then names each sender's pid as we see it, also one in its own pid namespace.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._sock = trio.socket.from_stdlib_socket(sock)

    @classmethod
    def pair(cls) -> tuple[Self, socket.socket]:
        """Our end, and the child's (close it here once the child has started)."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), theirs

    @classmethod
    def of(cls, sock: trio.socket.SocketType) -> Self:
        """One that has been accepted, and stays the caller's to close."""
        made = cls.__new__(cls)
        made._sock = sock  # noqa: SLF001 - its own class
        return made

    async def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Raises: BrokenPipeError or ConnectionResetError when the program is gone."""
        rights = struct.pack(f"{len(fds)}i", *fds)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if fds else []
        await self._sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)

    async def receive(self) -> Message | None:
        """The next packet, or None when the program has closed its end or is gone.

        Cancellation: safe; a packet not returned stays in the socket.
        """
        room = socket.CMSG_SPACE(4 * MAX_MESSAGE_FDS) + socket.CMSG_SPACE(_CREDENTIALS.size)
        try:
            data, ancillary, _, _ = await self._sock.recvmsg(
                MAX_MESSAGE_BYTES, room, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:  # it died with packets of ours unread
            return None
        fds: list[int] = []
        pid = None
        for level, kind, value in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(value) // 4
                fds.extend(struct.unpack(f"{whole}i", value[: whole * 4]))
            elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                pid = _CREDENTIALS.unpack(value[: _CREDENTIALS.size])[0]
        if not data and not fds:
            return None
        return Message(data, tuple(fds), pid)

    def close(self) -> None:
        """Twice is fine."""
        self._sock.close()


def native_program(name: str) -> Path:
    """Where `deltabox-<name>` is. Raises: Failed when the package was built without it."""
    program = NATIVE / f"deltabox-{name}"
    if not program.exists():
        raise Failed(
            f"deltabox's own program deltabox-{name} is missing; run `python native/build.py`, "
            "or install deltabox again with a C compiler present."
        )
    return program


async def open_process(
    argv: Sequence[bytes],
    *,
    fds: Sequence[int] = (),
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    env: Mapping[str, str] | None = None,
) -> trio.Process:
    """Start argv[0] (an absolute path; nothing is looked up) in `/`; about 1 ms.

    The child has its standard descriptors (None is /dev/null) and `fds`, under the same numbers,
    and nothing else. The caller owns every descriptor given, and ends the process with `end`.
    Raises: OSError when it cannot be executed. Cancellation: not once it has begun.
    """
    return await trio.lowlevel.open_process(
        list(argv),
        stdin=subprocess.DEVNULL if stdin is None else stdin,
        stdout=subprocess.DEVNULL if stdout is None else stdout,
        stderr=subprocess.DEVNULL if stderr is None else stderr,
        pass_fds=tuple(fds),
        env=dict(env or {}),
        cwd="/",
    )


async def end(process: trio.Process, *, grace_s: float = 0.0) -> None:
    """Wait `grace_s` for it to end by itself, then kill it and wait; bounded and shielded.

    Raises: Failed when it outlives SIGKILL by END_TIMEOUT_S.
    """
    with trio.CancelScope(shield=True):
        if grace_s > 0:
            with trio.move_on_after(grace_s):
                await process.wait()
        if process.returncode is None:
            process.kill()
        with trio.move_on_after(END_TIMEOUT_S):
            await process.wait()
            return
        raise Failed(
            f"Process {process.pid} did not end {END_TIMEOUT_S:.0f} s after being killed; "
            "it waits in the kernel, often for a file system that does not answer."
        )


def kill_quietly(pidfd: int) -> None:
    """SIGKILL by pidfd; a process that is already gone is what was wanted."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def run_trusted(
    argv: Sequence[bytes], *, fds: Sequence[int] = (), timeout_s: float = 5.0
) -> bytes:
    """Run a short program of the system for its standard output (`bwrap --version`); blocks.

    Only for programs that deltabox has chosen and argv it has written. Raises: OSError when it
    cannot be executed, Failed for another status than 0 or after `timeout_s`.
    """
    try:
        done = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={"PATH": os.defpath, "LC_ALL": "C"},
            cwd="/",
            pass_fds=tuple(fds),
            timeout=timeout_s,
            check=True,
        )
    except subprocess.TimeoutExpired as exc:
        raise Failed(f"{os.fsdecode(argv[0])} did not answer in {timeout_s:.0f} s.") from exc
    except subprocess.CalledProcessError as exc:
        words = exc.stderr.decode("utf-8", "replace").strip()[-500:]
        raise Failed(f"{os.fsdecode(argv[0])} ended with {exc.returncode}: {words}") from exc
    return done.stdout


def run_pager(argv: Sequence[str], text: str, *, env: Mapping[str, str]) -> bool:
    """Show `text` in the user's own pager on our terminal and wait; False when it cannot start.

    Runs on the host by the user's choice of PAGER, with the user's environment; `text` must have
    been escaped.
    """
    try:
        with (
            subprocess.Popen(list(argv), stdin=subprocess.PIPE, env=dict(env)) as pager,
            contextlib.suppress(BrokenPipeError),  # left before the end: no error
        ):
            pager.communicate(text.encode("utf-8", "surrogateescape"))
    except OSError:
        return False
    return True


def make_undumpable() -> None:
    """Let no other process of this user read our memory, trace us or open our descriptors.

    Our own /proc/self goes on working, and programs that we start are dumpable again after exec.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise Failed("The kernel does not let this process hide its memory (PR_SET_DUMPABLE).")
