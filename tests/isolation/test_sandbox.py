"""What a confined command has, has not, and how it ends; each absence with the same thing present outside."""

import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from deltabox.errors import IsolationUnavailable, NotFound
from deltabox.isolation.running import Exit, Pipes
from tests.isolation.boxes import ENVIRON, Box, collect, open_box, python
from tests.places import ME, Place, run_in

pytestmark = [pytest.mark.overlay, pytest.mark.bwrap]

STATUS = "grep -E '^(Cap|NoNewPrivs|Seccomp:)' /proc/self/status"


# ---- what it has ----


async def test_command_has_no_capabilities_and_cannot_gain_any(box: Box) -> None:
    lines = dict(line.split(":\t") for line in (await box.sh(STATUS)).text.splitlines())
    assert {lines[k] for k in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert (lines["NoNewPrivs"], lines["Seccomp"]) == ("1", "2")
    assert "CapBnd:\t0000000000000000" not in Path("/proc/self/status").read_text()


async def test_command_runs_as_an_ordinary_uid_that_owns_its_files(box: Box) -> None:
    uid = ME[0] or 1000
    result = await box.sh("id -u; id -un; stat -c %u a; touch new; stat -c %u new")
    assert result.text.split() == [str(uid), "tester", str(uid), str(uid)]
    assert (box.place.upper / "new").stat().st_uid == ME[0]


async def test_command_starts_in_its_folder_and_writes_only_the_delta(box: Box) -> None:
    assert (await box.sh("pwd; echo changed > a; cat a")).text.split() == [
        str(box.place.project),
        "changed",
    ]
    assert (box.place.project / "a").read_text() == "base a"
    assert (box.place.upper / "a").read_text() == "changed\n"


async def test_home_and_tmp_are_private_and_last_between_commands(box: Box) -> None:
    outside = box.place.home_at / "outside"
    outside.write_text("secret")
    await box.sh("echo 1 > ~/kept; echo 2 > /tmp/kept")
    result = await box.sh("cat ~/kept /tmp/kept; ls ~; ls /tmp")
    assert result.text.split()[:2] == ["1", "2"]
    assert "outside" not in result.text
    assert outside.exists()
    assert not (box.place.home_at / "kept").exists()
    assert not Path("/tmp/kept").exists()


async def test_only_standard_descriptors_are_open(box: Box) -> None:
    with _inheritable_directory():
        result = await box.run(*python("import os; print(sorted(os.listdir('/proc/self/fd')))"))
    # The fourth is the listing's own.
    assert result.text == "['0', '1', '2', '3']"


@contextmanager
def _inheritable_directory() -> Iterator[None]:
    """A directory of the host open and inheritable in us: what a leak would show."""
    fd = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
    os.set_inheritable(fd, True)
    yield
    os.close(fd)


async def test_secrets_of_the_callers_environment_are_in_no_process(box: Box) -> None:
    policy = box.policy(
        box.facts(environ=ENVIRON | {"API_TOKEN": "s3cr3t-value"}),
        named_env=(("WANTED", "w4nted-value"),),
    )
    look = "cat /proc/*/environ | tr '\\0' '\\n'; cat /proc/1/environ /proc/self/environ; env"
    result = await box.sh(look, policy=policy)
    assert b"s3cr3t-value" not in result.out
    assert b"w4nted-value" in result.out  # the look finds what is there


async def test_pid_1_can_be_neither_read_nor_traced(box: Box) -> None:
    result = await box.sh(
        "cat /proc/1/environ /proc/1/maps; readlink /proc/1/exe /proc/1/cwd /proc/1/fd/2; kill -9 1; "
        "readlink /proc/self/exe && kill -0 1 && echo alive"
    )
    assert result.out.split() == [b"/usr/bin/readlink", b"alive"]
    assert result.err.count(b"Permission denied") == 2


async def test_command_line_of_pid_1_names_no_path_of_the_session(box: Box) -> None:
    result = await box.sh("tr '\\0' ' ' < /proc/1/cmdline; ls /proc | grep -c '^[0-9]'")
    assert str(box.place.session).encode() not in result.out
    assert b"--control" in result.out


# ---- what it cannot reach ----


async def test_root_holds_only_what_is_allowed(box: Box) -> None:
    result = await box.sh("ls /; ls /run /home 2>/dev/null; ls /etc")
    names = set(result.text.split())
    assert not names & {"root", "srv", "mnt", "boot", "sys", "shadow", "gshadow", "sudoers", "ssh"}
    assert {"usr", "proc", "dev", "tmp", "passwd"} <= names
    assert Path("/etc/shadow").exists()
    assert (await box.sh("cat /etc/shadow")).exit == Exit(code=1)


async def test_nothing_outside_the_views_trees_can_be_written(box: Box) -> None:
    places = "/x /etc/x /usr/x /run/x /dev/x /var/x /proc/sys/kernel/hostname"
    result = await box.sh(f"for f in {places}; do echo 1 > $f && echo wrote $f; done")
    assert result.out == b""
    assert result.err.count(b"\n") == 7
    assert (
        await box.sh("for f in /tmp/x ~/x ./x /dev/shm/x /var/tmp/x; do echo 1 > $f; done")
    ).text == ""


async def test_kernel_files_of_root_are_not_the_commands(box: Box) -> None:
    # Root outside owns them, capabilities or not: core_pattern would run a program on the host.
    look = (
        "find /proc -path '/proc/[0-9]*' -prune -o -path /proc/self -prune -o -path /proc/thread-self "
        "-prune -o -type f -writable ! -perm -o+w -print | grep -v -e /proc/sys/fs/mqueue "
        "-e /proc/sys/kernel/msg -e /proc/sys/kernel/sem -e /proc/sys/kernel/shm "
        "-e auto_msgmni -e ns_last_pid -e pid_max"
    )
    assert (await box.sh(look)).out == b""
    if ME[0] == 0:
        open_to_root = box.policy(replace(box.facts(), proc_readonly=()))
        assert b"/proc/sys/kernel/core_pattern" in (await box.sh(look, policy=open_to_root)).out
        masked = await box.sh("cat /proc/kpagecount | head -c 8 | wc -c")
        assert masked.text == "0"


async def test_memory_file_systems_are_sized(box: Box) -> None:
    result = await box.sh(
        "df --output=target,size -B1 /dev/shm /var/tmp /tmp", shm_bytes=1 << 20, tmp_bytes=2 << 20
    )
    sizes = dict(line.split() for line in result.text.splitlines()[1:])
    assert sizes["/dev/shm"] == str(1 << 20)
    assert sizes["/var/tmp"] == str(2 << 20)
    full = await box.sh("head -c 2M /dev/zero > /dev/shm/big", shm_bytes=1 << 20)
    assert b"No space left" in full.err


@pytest.fixture
def host_sockets() -> Iterator[tuple[str, str, int]]:
    """Listening sockets of the host: a path, an abstract name, a port of the loopback."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # stands outside every view here
        path, name = f"{folder}/host.sock", f"deltabox-test-{os.getpid()}"
        with (
            socket.socket(socket.AF_UNIX) as pathname,
            socket.socket(socket.AF_UNIX) as abstract,
            socket.socket(socket.AF_INET) as loopback,
        ):
            pathname.bind(path)
            abstract.bind(f"\0{name}")
            loopback.bind(("127.0.0.1", 0))
            for one in (pathname, abstract, loopback):
                one.listen()
            yield path, name, loopback.getsockname()[1]


CONNECT = """
import socket, sys
path, name, port = sys.argv[1:]
for family, address in ((1, path), (1, "\\0" + name), (2, ("127.0.0.1", int(port)))):
    try:
        socket.socket(family).connect(address)
        print("connected", end=" ")
    except OSError as exc:
        print(type(exc).__name__, end=" ")
"""


async def test_sockets_of_the_host_cannot_be_reached(
    box: Box, host_sockets: tuple[str, str, int]
) -> None:
    probe = python(CONNECT, *host_sockets)
    assert run_in(box.view, *probe).split() == ["connected"] * 3
    off = await box.run(*probe)
    assert off.text == "FileNotFoundError ConnectionRefusedError ConnectionRefusedError"
    async with box.start(*probe, network="host") as command:
        shared = await collect(command)
        if not command.is_scoped:
            pytest.skip("this kernel has no Landlock scopes, the only wall for abstract sockets")
    # The loopback is the host's when its network was asked for; the abstract name still is not.
    assert shared.text == "FileNotFoundError PermissionError connected"


async def test_network_off_has_only_an_empty_loopback(box: Box) -> None:
    interfaces = "cat /proc/net/dev | tail -n +3 | cut -d: -f1"
    assert (await box.sh(interfaces)).text.split() == ["lo"]
    assert (await box.sh("cat /etc/resolv.conf")).exit == Exit(code=1)
    shared = await box.sh("readlink /proc/self/ns/net", network="host")
    assert shared.text == os.readlink("/proc/self/ns/net")
    alone = await box.sh("readlink /proc/self/ns/net")
    assert alone.text != shared.text
    resolver = await box.sh("cat /etc/resolv.conf", network="host")
    assert resolver.out == box.facts().resolv_conf


async def test_processes_of_the_host_are_invisible(box: Box) -> None:
    result = await box.sh(
        "ls /proc | grep '^[0-9]*$' | wc -l; kill -0 $1 && echo seen", os.getpid()
    )
    assert int(result.out.split()[0]) < 8
    assert b"seen" not in result.out


async def test_user_namespaces_are_refused_unless_nested(box: Box) -> None:
    # Three walls (filter, --disable-userns, no capability), so the control is --nest.
    assert (await box.sh("unshare -Ur true")).exit.code == 1
    # As root bubblewrap covers parts of /proc, and the kernel then allows no fresh one inside.
    proc = "" if ME[0] == 0 else "--proc /proc"
    inner = f"bwrap --unshare-all --ro-bind / / {proc} --dev /dev true"
    assert (await box.sh(inner)).exit.code == 1
    assert (await box.sh("unshare -Ur true", nest=True)).exit == Exit(code=0)
    nested = await box.sh(inner, nest=True)
    assert nested.exit == Exit(code=0), nested


# ---- profiles ----


async def test_read_only_profile_leaves_only_temporary_space(box: Box) -> None:
    script = "for d in . ~ $TMPDIR; do echo 1 > $d/try-it && echo $d; done"
    result = await box.sh(script, profile="read-only")
    assert result.text == "/var/tmp"
    assert result.err.count(b"Read-only file system") == 2
    assert not (box.place.upper / "try-it").exists()
    control = await box.sh("for d in . ~ ${TMPDIR-/tmp}; do echo 1 > $d/try-it && echo $d; done")
    assert len(control.text.split()) == 3


async def test_project_outside_home_and_tmp_is_a_tree_of_its_own() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        place = Place.make(Path(folder), project="code/project")
        async with open_box(place) as box:
            assert (
                await box.sh("echo new > a; cat a dir/b; echo; ls ..; ls -A ~")
            ).text.split() == [
                *("new", "base", "b", "project"),
            ]
            result = await box.sh(
                "echo 1 > /tmp/x && cat /tmp/x; echo 1 > y; echo 1 > ~/y", profile="read-only"
            )
            assert result.out == b"1\n"
            assert result.err.count(b"Read-only file system") == 2
        assert (place.project / "a").read_text() == "base a"


# ---- streams and ends ----


async def test_output_comes_whole_and_apart(box: Box) -> None:
    size = 3_000_000
    code = (
        "import sys, os\nfor i in range(300): os.write(1, b'o' * 10000); os.write(2, b'e' * 10000)"
    )
    result = await box.run(*python(code))
    assert result.out == b"o" * size
    assert result.err == b"e" * size


async def test_input_arrives_whole_and_ends(box: Box) -> None:
    data = os.urandom(1 << 20)
    assert (await box.run("cat", stdin=data)).out == data
    async with box.start("cat", stdio=Pipes(stdin=False)) as command:
        assert command.stdin is None
        assert await command.wait() == Exit(code=0)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("exit 0", Exit(code=0)),
        ("exit 255", Exit(code=255)),
        ("exit 129", Exit(code=129)),
        ("kill -TERM $$", Exit(signal=signal.SIGTERM)),
        ("kill -KILL $$", Exit(signal=signal.SIGKILL)),
    ],
)
async def test_end_is_reported_exactly(box: Box, script: str, expected: Exit) -> None:
    assert (await box.sh(script)).exit == expected


async def test_command_that_cannot_run_ends_as_env_says(box: Box) -> None:
    missing = await box.run("no-such-command")
    assert (missing.exit.code, missing.exit.reason) == (127, "No such file or directory")
    denied = await box.run("/etc/passwd")
    assert (denied.exit.code, denied.exit.reason) == (126, "Permission denied")


async def test_absent_folder_is_named(box: Box) -> None:
    with pytest.raises(NotFound, match=r"folder cannot be entered.*No such file"):
        await box.sh("true", cwd=box.place.project / "gone")


async def test_words_that_look_like_options_are_the_commands_own(box: Box) -> None:
    result = await box.run("printf", "%s|", "--bind", "--", "--control", "", "new\nline")
    assert result.out == b"--bind|--|--control||new\nline|"


async def test_signals_reach_the_command_and_its_children(box: Box) -> None:
    script = "trap 'echo got; exit 7' TERM; echo ready; sleep 1000 & wait"
    async with box.start("/bin/bash", "-c", script) as command:
        assert command.stdout
        assert await command.stdout.receive_some() == b"ready\n"
        await command.signal(signal.SIGTERM)
        assert await command.wait() == Exit(code=7)


async def test_stop_and_continue_are_seen(box: Box) -> None:
    async with box.start("/bin/bash", "-c", "kill -STOP $$; echo on") as command:
        assert command.stdout
        assert await command.stopped() == signal.SIGSTOP
        await command.cont()
        assert await command.stdout.receive_some() == b"on\n"
        assert await command.stopped() is None
        assert await command.wait() == Exit(code=0)


async def test_freeze_stops_every_thread_and_thaw_only_what_it_stopped(box: Box) -> None:
    code = """
import os, signal, threading, time
stopped = os.fork()
if not stopped:
    os.kill(os.getpid(), signal.SIGSTOP); print("woken", flush=True); os._exit(0)
os.waitpid(stopped, os.WUNTRACED)
def count(name):
    while True:
        with open(name, "a") as f: f.write("x")
for n in "12": threading.Thread(target=count, args=(f"/tmp/{n}",), daemon=True).start()
if not os.fork(): count("/tmp/3")
while not all(os.path.exists(f"/tmp/{n}") for n in "123"): pass
print("ready", flush=True)
input()
"""
    async with box.start(*python(code)) as command:
        assert command.stdout
        assert command.stdin
        assert await command.stdout.receive_some() == b"ready\n"
        frozen = await command.freeze()
        assert frozen.running == 0
        # A second sandbox on the same view is the witness that nothing moves.
        sizes = "stat -c %s /tmp/1 /tmp/2 /tmp/3"
        before = (await box.sh(sizes)).text
        assert (await box.sh(sizes)).text == before
        await command.thaw()
        await command.stdin.send_all(b"\n")
        assert await command.wait() == Exit(code=0)
        rest = b"".join([bytes(c) async for c in command.stdout])
        assert b"woken" not in rest
    assert (await box.sh(sizes)).text != before


async def test_background_processes_die_with_the_command(box: Box) -> None:
    sleeper = "trap '' TERM HUP; echo $BASHPID > /tmp/up; exec sleep 1000"
    script = f'(setsid bash -c "{sleeper}" &); until [ -s /tmp/up ]; do :; done'
    async with box.start("/bin/bash", "-c", script) as command:
        assert command.stdout
        assert await command.wait() == Exit(code=0)
        assert await command.stdout.receive_some() == b""  # the sleeper held it too
        pid = command.pid
    assert pid is not None
    assert not Path(f"/proc/{pid}").exists()


async def test_leaving_the_context_ends_a_running_command(box: Box) -> None:
    async with box.start(
        "/bin/bash", "-c", "trap '' TERM HUP INT; echo up; while :; do sleep 1000; done"
    ) as command:
        assert command.stdout
        await command.stdout.receive_some()
        pid = command.pid
        assert Path(f"/proc/{pid}").exists()
    assert not Path(f"/proc/{pid}").exists()


async def test_cancelled_waiter_leaves_the_command_usable(box: Box) -> None:
    async with box.start("cat") as command:
        with trio.move_on_after(0) as scope:
            await command.wait()
        assert scope.cancelled_caught
        assert command.stdin
        await command.stdin.aclose()
        assert await command.wait() == Exit(code=0)


@pytest.mark.slow
async def test_command_outlives_trios_idle_worker_thread(box: Box) -> None:
    # trio ends a worker thread after 10 idle seconds; PDEATHSIG would kill what it started.
    assert (await box.sh("sleep 12; echo alive")).text == "alive"


# ---- refusals ----


async def test_bubblewraps_words_come_back_when_it_fails(box: Box) -> None:
    policy = box.policy()
    broken = replace(policy, hostname="x" * 100)
    with pytest.raises(IsolationUnavailable, match=r"bubblewrap could not.*hostname") as caught:
        await box.sh("echo never", policy=broken)
    assert "deltabox doctor" in caught.value.sentence


async def test_limits_hold(box: Box) -> None:
    result = await box.sh("ulimit -n; ulimit -c", rlimits=(("nofile", 99), ("core", 0)))
    assert result.text.split() == ["99", "0"]
