"""What goes in and out of a command: exact bytes, its own status, signals, readers that leave."""

import hashlib
import os
import signal
import subprocess  # noqa: TID251 - a shell's pipeline is what is tested

import pytest

from tests.e2e.driver import COMMAND, Box

MIB = 1 << 20
# A shell's `wait` is what a trapped signal interrupts at once.
WAITS = 'sleep 1000 & echo ready > "$M/said"; wait'


def test_stdout_holds_only_what_the_command_printed(box: Box) -> None:
    done = box.keep("printf out; printf err >&2; echo x > f").ok()
    assert done.raw == b"out"
    assert "err" in done.err
    assert "deltabox: session" in done.err
    assert "kept: 1 change" in done.err
    for mode in ("commit", "abort"):
        again = box.deltabox("run", "--review", mode, "--", "sh", "-c", "printf out; echo >> f")
        assert again.ok().raw == b"out", mode


def test_bytes_pass_exactly_in_both_directions(box: Box) -> None:
    data = os.urandom(20 * MIB) + bytes(range(256)) + b"\r\n\x1b[0m\xff\xfe no newline at end"
    done = box.deltabox("run", "--", "cat", stdin=data).ok()
    assert hashlib.sha256(done.raw).digest() == hashlib.sha256(data).digest()


def test_both_output_streams_at_once_lose_nothing(box: Box) -> None:
    script = (
        "head -c 4000000 /dev/zero | tr '\\0' e >&2 & head -c 4000000 /dev/zero | tr '\\0' o; wait"
    )
    done = box.deltabox("run", "--", "sh", "-c", script).ok()
    assert done.raw == b"o" * 4_000_000
    assert done.err.count("e" * 1000) >= 1
    assert done.err.count("e") >= 4_000_000


def test_end_of_input_reaches_the_command(box: Box) -> None:
    assert box.deltabox("run", "--", "wc", "-c", stdin=b"").ok().out == "0\n"
    done = box.deltabox(
        "run", "--", "sh", "-c", "read a; read b; cat; echo $a-$b", stdin=b"1\n2\n3\n"
    )
    assert done.ok().out == "3\n1-2\n"


def test_input_nobody_reads_does_not_hold_the_end(box: Box) -> None:
    read, write = os.pipe()
    try:  # the write end stays open: no end of input ever comes
        with box.starting("run", "--", "echo", "done", stdin=read) as process:
            out, _ = process.communicate(timeout=30)
    finally:
        os.close(read)
        os.close(write)
    assert (process.returncode, out) == (0, b"done\n")
    assert box.deltabox("run", "--", "true", stdin=b"x" * MIB).status == 0


def test_status_is_the_commands_own(box: Box) -> None:
    for status in (1, 3, 125, 255):
        assert box.deltabox("run", "--", "sh", "-c", f"exit {status}").status == status


def test_command_killed_by_a_signal_ends_as_a_shell_says_it(box: Box) -> None:
    numbers = (signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV)
    for number in numbers:
        done = box.deltabox("run", "--", "sh", "-c", f"echo x >> f; kill -{int(number)} $$")
        assert done.status == 128 + number
    turns = box.deltabox("diff", "--json").ok().json["turns"]
    assert [(turn["code"], turn["signal"]) for turn in turns] == [(None, n) for n in numbers]


@pytest.mark.parametrize("name", ["INT", "TERM", "HUP"])
def test_signal_to_deltabox_reaches_the_command_which_decides(box: Box, name: str) -> None:
    script = f"trap 'echo got {name}; exit 7' {name}\necho x > f\n{WAITS}"
    with box.agent(script) as agent:
        agent.reaches("ready")
        agent.process.send_signal(signal.Signals[f"SIG{name}"])
        assert f"got {name}" in agent.ends(7).out
    assert box.changes() == {"f": "added"}


def test_interrupt_ends_a_command_without_a_handler_and_keeps_its_changes(box: Box) -> None:
    with box.agent(f"echo x > f\n{WAITS}\necho late > late") as agent:
        agent.reaches("ready")
        agent.process.send_signal(signal.SIGINT)
        agent.ends(130)
    assert box.changes() == {"f": "added"}


def test_reader_that_leaves_early_ends_nothing_else(box: Box) -> None:
    line = f"'{COMMAND}' run -- sh -c 'seq 1000000; echo x > f' | head -n 2"
    piped = box.native("bash", "-c", f"{line}; echo ${{PIPESTATUS[0]}}").ended(0)
    lines = piped.out.split()
    assert lines[:2] == ["1", "2"]
    assert "Traceback" not in piped.err
    assert lines[2] in ("0", "141")
    for verb in ("diff", "log", "sessions", "--help"):
        closed = box.native("bash", "-c", f"'{COMMAND}' {verb} | true; echo ${{PIPESTATUS[0]}}")
        assert "Traceback" not in closed.err, verb
        assert "Exception" not in closed.err, verb


def test_redirections_and_closed_streams(box: Box) -> None:
    box.write("in", "given\n")
    out, err = box.root / "out", box.root / "err"
    box.native(
        "sh", "-c", f"'{COMMAND}' run -- sh -c 'cat; echo e >&2' < in > '{out}' 2> '{err}'"
    ).ok()
    assert out.read_text() == "given\n"
    assert "e\n" in err.read_text()
    box.native("sh", "-c", f"'{COMMAND}' run -- cat <&- >&- 2>&-").ended(0)
    box.native("sh", "-c", f"'{COMMAND}' run -- sh -c 'echo lost' > /dev/full").ended(0)


def test_descriptors_of_the_caller_do_not_go_in(box: Box) -> None:
    secret = box.root / "secret"
    secret.write_text("hush\n")
    # The control: an ordinary command inherits it.
    inherit = "exec 9< '{}'; {} sh -c 'cat <&9; ls /proc/self/fd'"
    assert "hush" in box.native("sh", "-c", inherit.format(secret, "")).out
    done = box.native("sh", "-c", inherit.format(secret, f"'{COMMAND}' run --"))
    assert "hush" not in done.out


def test_output_of_what_stays_behind_does_not_hold_the_end(box: Box) -> None:
    """A background child that keeps stdout open dies with the command's session."""
    with box.starting("run", "--", "sh", "-c", "sleep 1000 & echo done") as process:
        out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, b"done\n")
    assert isinstance(process, subprocess.Popen)
