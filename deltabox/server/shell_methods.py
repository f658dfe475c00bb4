"""session.exec and exec.*: wire parameters → one command of the session → wire result.

Output is passed on as it comes; what a command may do is the workspace's business.
"""

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trio

from deltabox.errors import BadUsage, Failed
from deltabox.protocol import messages as m
from deltabox.server.connection import Call
from deltabox.server.dispatch import Method
from deltabox.server.host import Live
from deltabox.session.execs import Asked, Channel, Exec, NeverStarted, shell
from deltabox.session.output import Captured

MAX_CHANGED = 10_000  # names in one reply; changedTotal has the number, review.diff all of them


def queued(params: m.Exec) -> bool:
    """Whether it waits in the queue: foreground commands without a terminal do."""
    return not params.background and params.terminal is None


async def execute(call: Call, params: m.Exec) -> m.ExecStarted | m.ExecResult:
    """Run a command in the workspace. Foreground commands and file mutations of a session queue, one
    at a time; background commands and terminals run beside them.

    Without `stream` or `background` the reply is the whole result. `$/cancel` of the request (or
    exec.cancel) ends the command, and the reply then tells what it had done, with `cancelled`;
    one that had not started yet is answered with error CANCELLED. When the connection ends, its
    foreground commands end; background ones go on until the session ends.
    """
    live = call.live(params.session)
    asked = _asked(live, params)
    streams = params.stream

    async def output(one: Exec, channel: Channel, seq: int, data: bytes) -> None:
        await call.replied.wait()
        text, encoding = m.text_of(data)
        await call.notify(
            "exec.output",
            m.ExecOutput(
                session=live.id,
                exec_id=one.id,
                channel=channel,
                seq=seq,
                data=text,
                encoding=encoding,
            ),
        )

    async def ended(one: Exec) -> None:
        await call.replied.wait()
        if one.turn is not None or one.settled is not None:
            await call.notify("exec.exit", _exit(live, one))

    one = live.execs.begin(
        asked,
        ticket=call.take_ticket(),
        check=lambda: call.check(params),
        sink=output if streams else None,
        ended=ended if streams or params.background else None,
        window=params.window if streams else None,
    )
    if not params.background:
        call.connection.own(one)
    call.on_cancel = one.cancel
    try:
        if streams or params.background:
            await one.started.wait()
            if one.turn is None and one.error is not None:
                raise one.error
            return m.ExecStarted(exec_id=one.id, turn=one.turn)
        await one.finished.wait()
    except trio.Cancelled:
        one.cancel()
        raise
    return result(live, one)


def _asked(live: Live, params: m.Exec) -> Asked:
    if (params.command is None) == (not params.argv):
        raise BadUsage("session.exec takes either `command` or a non-empty `argv`.")
    argv = tuple(params.argv) if params.argv else tuple(shell(params.command or ""))
    if any("\0" in word for word in argv):
        raise BadUsage("An argument of a command cannot hold a NUL character.")
    project = live.workspace.session.project
    stdin = b"" if params.input is None else m.bytes_of(params.input, params.encoding)
    terminal = params.terminal
    return Asked(
        argv=argv,
        cwd=project if params.cwd is None else Path(_join(project, params.cwd)),
        env=tuple({**dict(live.env), **params.env}.items()),
        profile=params.profile,
        timeout_s=params.timeout_ms / 1000,
        background=params.background,
        stdin=stdin,
        keep_stdin=params.stdin == "pipe" or terminal is not None,
        terminal=None if terminal is None else (terminal.rows, terminal.columns),
        collect_bytes=0 if params.stream else params.max_bytes,
        id=params.exec_id,
    )


def _join(project: Path, cwd: str) -> str:
    if "\0" in cwd:
        raise BadUsage("cwd cannot hold a NUL character.")
    try:
        cwd.encode()
    except UnicodeEncodeError as exc:
        raise BadUsage(f"cwd {cwd[:80]!a} is no file name.") from exc
    return str(project / cwd)


def _done(live: Live, one: Exec) -> dict[str, Any]:
    settled = one.settled
    assert settled is not None
    return {
        "exec_id": one.id,
        "turn": one.turn,
        "code": settled.exit.code,
        "signal": settled.exit.signal,
        "reason": settled.exit.reason,
        "timed_out": settled.timed_out,
        "cancelled": settled.cancelled,
        "duration_ms": settled.duration_ns / 1e6,
        "changed": [m.named(p) for p in settled.changed[:MAX_CHANGED]],
        "changed_total": len(settled.changed),
        "shared": settled.shared,
        "generation": live.workspace.generation,
    }


def _exit(live: Live, one: Exec) -> m.ExecExit:
    if one.settled is not None:
        counts = {str(name): found.total for name, found in one.settled.output.items()}
        return m.ExecExit(session=live.id, bytes=counts, **_done(live, one))
    error = one.error or Failed("The session ended.")
    return m.ExecExit(
        session=live.id,
        exec_id=one.id,
        turn=one.turn,
        code=None,
        signal=None,
        reason=None,
        timed_out=one.timed_out,
        cancelled=one.cancelled,
        duration_ms=0,
        changed=[],
        changed_total=0,
        shared=False,
        generation=live.workspace.generation,
        bytes={},
        error={"message": error.sentence, "data": {"code": error.host_code, **error.data}},
    )


def result(live: Live, one: Exec) -> m.ExecResult:
    """Of a finished exec. Raises: what kept it from running."""
    if one.settled is None:
        raise one.error or NeverStarted(f"Exec {one.id} was ended with its session.")
    nothing = Captured(b"", 0, truncated=False, spill=None)
    out = one.settled.output.get("stdout") or one.settled.output.get("terminal") or nothing
    err = one.settled.output.get("stderr", nothing)
    stdout, stdout_encoding = m.text_of(out.head)
    stderr, stderr_encoding = m.text_of(err.head)
    return m.ExecResult(
        stdout=stdout,
        stdout_encoding=stdout_encoding,
        stdout_bytes=out.total,
        stdout_file=str(out.spill) if out.spill else None,
        stderr=stderr,
        stderr_encoding=stderr_encoding,
        stderr_bytes=err.total,
        stderr_file=str(err.spill) if err.spill else None,
        truncated=out.truncated or err.truncated,
        **_done(live, one),
    )


def _find(call: Call, params: m.OfExec) -> Exec:
    return call.live(params.session).execs.get(params.exec_id)


async def wait(call: Call, params: m.OfExec) -> m.ExecResult:
    """Wait for a command and get its result, as often as asked, among the session's last 256."""
    one = _find(call, params)
    await one.finished.wait()
    return result(call.live(params.session), one)


async def write(call: Call, params: m.ExecWrite) -> dict[str, Any]:
    """Write to a command's standard input or terminal, and close it if asked. Answered when the
    bytes have been taken, so a command that does not read holds only this request up."""
    data = m.bytes_of(params.data, params.encoding)
    await _find(call, params).write(data, close=params.close)
    return {}


async def cancel(call: Call, params: m.ExecCancel) -> dict[str, Any]:
    """End a command: TERM, and after the grace the end of everything it started. Answered at once."""
    _find(call, params).cancel(grace_s=params.grace_ms / 1000)
    return {}


async def send_signal(call: Call, params: m.ExecSignal) -> dict[str, Any]:
    """Send a signal to the command's process group, or to the foreground group of its terminal."""
    await _find(call, params).signal(_number(params.signal))
    return {}


def _number(named: int | str) -> int:
    try:
        if isinstance(named, str):
            return signal.Signals["SIG" + named.upper().removeprefix("SIG")]
        return signal.Signals(named)
    except (KeyError, ValueError):
        raise BadUsage(
            f"There is no signal {named!r}; give a number or a name like INT."
        ) from None


async def resize(call: Call, params: m.ExecResize) -> dict[str, Any]:
    """Tell a command's terminal its new size."""
    _find(call, params).resize(params.rows, params.columns)
    return {}


async def acknowledge(call: Call, params: m.ExecAck) -> dict[str, Any]:
    """Give room for `bytes` more of output, where the command was started with a `window`."""
    _find(call, params).acknowledge(params.bytes)
    return {}


async def listing(call: Call, params: m.OfSession) -> m.ExecRows:
    """The session's commands: queued, running, and the last ones done."""
    return m.ExecRows(execs=[row(one) for one in call.live(params.session).execs.all()])


def row(one: Exec) -> m.Running:
    done = one.finished.is_set()
    return m.Running(
        exec_id=one.id,
        turn=one.turn,
        argv=list(one.asked.argv),
        state="done" if done else ("running" if one.started.is_set() else "queued"),
        background=one.asked.background,
        started_ns=one.started_ns,
    )


METHODS: Mapping[str, Method] = {
    "session.exec": Method(
        m.Exec,
        execute,
        is_read=False,
        queued=queued,
        waits_itself=True,
        result=(m.ExecResult, m.ExecStarted),
    ),
    "exec.wait": Method(m.OfExec, wait, is_read=True, result=m.ExecResult),
    "exec.write": Method(m.ExecWrite, write, is_read=True, result=m.Nothing),
    "exec.cancel": Method(m.ExecCancel, cancel, is_read=True, result=m.Nothing),
    "exec.signal": Method(m.ExecSignal, send_signal, is_read=True, result=m.Nothing),
    "exec.resize": Method(m.ExecResize, resize, is_read=True, result=m.Nothing),
    "exec.ack": Method(m.ExecAck, acknowledge, is_read=True, result=m.Nothing),
    "exec.list": Method(m.OfSession, listing, is_read=True, result=m.ExecRows),
}
