"""The system call filter: its table against the kernel's headers, its decisions by a second reading
of the program, and the real kernel's answers with and without it."""

import errno
import re
import signal
import struct
from pathlib import Path

import pytest

from deltabox.errors import IsolationUnavailable
from deltabox.isolation import seccomp
from deltabox.isolation.running import Exit
from tests.isolation.boxes import TERMINAL, Box, Screen, python
from tests.places import run_in

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL = 0x7FFF0000, 0x80000000
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


def decide(program: bytes, arch: int, number: int, *args: int) -> int:
    """What the kernel's classic BPF machine returns; written from its manual, not from our assembler."""
    words = [value & 0xFFFFFFFFFFFFFFFF for value in (*args, 0, 0, 0, 0, 0, 0)[:6]]
    data = struct.pack("=IIQ6Q", number & 0xFFFFFFFF, arch, 0, *words)
    accumulator, at = 0, 0
    while True:
        code, yes, no, k = struct.unpack_from("=HBBI", program, at * 8)
        at += 1
        if code == 0x06:
            return int(k)
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, k)
            continue
        taken = {
            0x15: accumulator == k,
            0x35: accumulator >= k,
            0x45: bool(accumulator & k),
        }[code]
        at += yes if taken else no


def answer(program: bytes, machine: str, name: str, *args: int) -> str:
    number = seccomp._NUMBERS[name][list(MACHINES).index(machine)]
    assert number is not None
    found = decide(program, MACHINES[machine], number, *args)
    return "allow" if found == ALLOW else errno.errorcode[found & 0xFFFF]


@pytest.mark.parametrize("machine", MACHINES)
def test_numbers_are_those_of_the_kernels_headers(machine: str) -> None:
    if not HEADERS[machine].exists():
        pytest.skip(f"{HEADERS[machine]} is not installed")
    text = HEADERS[machine].read_text()
    known = {n: int(v) for n, v in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)}
    column = list(MACHINES).index(machine)
    ours = {n: v[column] for n, v in seccomp._NUMBERS.items() if n in known}
    assert ours == {n: known[n] for n in ours}
    assert len(ours) > 40
    assert max(known.values()) < seccomp.FIRST_UNKNOWN


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("nest", [False, True])
def test_program_answers_each_call_as_the_table_says(machine: str, nest: bool) -> None:
    program = seccomp.program(nest=nest, machine=machine)
    column = list(MACHINES).index(machine)
    for name in seccomp._NUMBERS:
        if seccomp._NUMBERS[name][column] is None:
            continue
        expected = "allow"
        if name in seccomp._ABSENT:
            expected = "ENOSYS"
        elif name in seccomp._DENIED or (name in seccomp._DENIED_UNLESS_NESTED and not nest):
            expected = "EPERM"
        elif name in ("socket", "socketpair"):
            expected = "EAFNOSUPPORT"  # family 0
        assert answer(program, machine, name) == expected, name


@pytest.mark.parametrize("machine", MACHINES)
def test_arguments_are_judged_by_the_bits_the_kernel_reads(machine: str) -> None:
    program = seccomp.program(nest=False, machine=machine)
    nested = seccomp.program(nest=True, machine=machine)
    high = 1 << 32
    for request in (0x5412, 0x541C):
        assert answer(program, machine, "ioctl", 0, request) == "EPERM"
        assert answer(program, machine, "ioctl", 0, request | high) == "EPERM"
        assert answer(nested, machine, "ioctl", 0, request) == "EPERM"
    assert answer(program, machine, "ioctl", 0, 0x5413) == "allow"
    for family in range(64):
        expected = "allow" if family in (1, 2, 10, 16) else "EAFNOSUPPORT"
        assert answer(program, machine, "socket", family) == expected
        assert answer(program, machine, "socket", family | high) == expected
    for bit in (0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        for name in ("clone", "unshare"):
            assert answer(program, machine, name, bit | signal.SIGCHLD) == "EPERM"
            assert answer(nested, machine, name, bit | signal.SIGCHLD) == "allow"
    assert answer(program, machine, "clone", 0x01200011) == "allow"  # fork
    assert answer(program, machine, "clone", 0x003D0F00) == "allow"  # a thread
    assert answer(program, machine, "unshare", 0x80) == "EPERM"  # CLONE_NEWTIME
    assert answer(program, machine, "unshare", 0x400) == "allow"  # CLONE_FILES


@pytest.mark.parametrize("machine", MACHINES)
def test_other_tables_of_numbers_are_closed(machine: str) -> None:
    program = seccomp.program(nest=False, machine=machine)
    for arch in (0x40000003, 0x40000028, 0, *(a for m, a in MACHINES.items() if m != machine)):
        assert decide(program, arch, 1) == KILL
    ours = MACHINES[machine]
    assert decide(program, ours, seccomp.FIRST_UNKNOWN - 1) == ALLOW
    assert decide(program, ours, seccomp.FIRST_UNKNOWN) == 0x00050000 | errno.ENOSYS
    if machine == "x86_64":
        assert decide(program, ours, 0x40000000 | 39) == KILL
        assert decide(program, ours, -1) == ALLOW  # a tracer's way to skip a call


def test_unknown_machine_is_refused() -> None:
    with pytest.raises(IsolationUnavailable, match=r"no system call table for sparc"):
        seccomp.program(nest=False, machine="sparc")


# ---- on the real kernel ----

PROBE = """
import ctypes, errno, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    ctypes.set_errno(0)
    libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) for a in args))
    return errno.errorcode.get(ctypes.get_errno(), "none")
for item in sys.argv[1].split():
    name, number, *args = item.split(",")
    print(name, call(int(number), *(int(a, 0) for a in args)))
"""

# Called so that none can do anything: a bad address, descriptor or size. name: arguments, answer.
LIVE = {
    "add_key": ("0,0,0,0,0", "EPERM"),
    "bpf": ("99,0,0", "EPERM"),
    "clone3": ("0,0", "ENOSYS"),
    "io_uring_enter": ("-1,0,0,0,0", "ENOSYS"),
    "io_uring_register": ("-1,0,0,0", "ENOSYS"),
    "io_uring_setup": ("0,0", "ENOSYS"),
    "keyctl": ("99,0,0,0,0", "EPERM"),
    "memfd_secret": ("-1", "EPERM"),
    "move_pages": ("0,0,0,0,0,-1", "EPERM"),
    "perf_event_open": ("0,0,0,0,0", "EPERM"),
    "pidfd_getfd": ("-1,0,0", "EPERM"),
    "request_key": ("0,0,0,0", "EPERM"),
    "setns": ("-1,0", "EPERM"),
    "userfaultfd": ("-1", "EPERM"),
    "unshare": ("0x10000000", "EPERM"),
}


@pytest.mark.overlay
@pytest.mark.bwrap
async def test_kernel_refuses_with_the_filter_and_only_with_it(box: Box) -> None:
    column = list(MACHINES).index(box.facts().machine)
    calls = " ".join(f"{n},{seccomp._NUMBERS[n][column]},{args}" for n, (args, _) in LIVE.items())
    confined = dict(
        line.split() for line in (await box.run(*python(PROBE, calls))).text.splitlines()
    )
    assert confined == {name: code for name, (_, code) in LIVE.items()}
    control = dict(line.split() for line in run_in(box.view, *python(PROBE, calls)).splitlines())
    same = {name for name in LIVE if control[name] == confined[name]}
    assert not same - {"bpf"}  # closed to users by a sysctl on many hosts


FAMILIES = """
import errno, socket
kinds = {1: 1, 2: 1, 10: 1, 16: 3, 17: 3, 38: 5, 40: 1}  # UNIX INET INET6 NETLINK PACKET ALG VSOCK
for family, kind in kinds.items():
    try:
        socket.socket(family, kind)
        print(family, "open")
    except OSError as exc:
        print(family, errno.errorcode[exc.errno])
"""


@pytest.mark.overlay
@pytest.mark.bwrap
async def test_only_everyday_socket_families_open(box: Box) -> None:
    confined = dict(line.split() for line in (await box.run(*python(FAMILIES))).text.splitlines())
    assert {f for f, state in confined.items() if state == "open"} == {"1", "2", "10", "16"}
    assert {confined[f] for f in ("17", "38", "40")} == {"EAFNOSUPPORT"}
    control = dict(line.split() for line in run_in(box.view, *python(FAMILIES)).splitlines())
    assert control["17"] in ("open", "EPERM")  # the family is there, only the right may lack


OTHER_TABLE = """
import ctypes, mmap, sys
code = {"int80": b"\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3",        # mov eax, 20 (getpid); int 0x80
        "x32": b"\\xb8\\x27\\x00\\x00\\x40\\x0f\\x05\\xc3",         # mov eax, 0x40000027; syscall
        "native": b"\\xb8\\x27\\x00\\x00\\x00\\x0f\\x05\\xc3"}[sys.argv[1]]
page = mmap.mmap(-1, 4096, prot=7)
page.write(code)
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
print("survived")
"""


@pytest.mark.overlay
@pytest.mark.bwrap
async def test_other_call_tables_kill(box: Box) -> None:
    if box.facts().machine != "x86_64":
        pytest.skip("only x86-64 has other tables")
    for way in ("int80", "x32"):
        assert run_in(box.view, *python(OTHER_TABLE, way)).strip() == "survived"
        assert (await box.run(*python(OTHER_TABLE, way))).exit == Exit(signal=signal.SIGSYS)
    assert (await box.run(*python(OTHER_TABLE, "native"))).text == "survived"


PUSH = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
letter = ctypes.create_string_buffer(b"X")
for request in (0x5412, 0x5412 | 1 << 32, 0x541C):
    ctypes.set_errno(0)
    libc.ioctl(0, ctypes.c_ulong(request), letter)
    print(errno.errorcode.get(ctypes.get_errno(), "pushed"), end=";", flush=True)
"""


@pytest.mark.overlay
@pytest.mark.bwrap
async def test_input_cannot_be_pushed_into_a_terminal(box: Box) -> None:
    async with box.start(*python(PUSH), stdio=TERMINAL) as command:
        await Screen(command).until(b"EPERM;EPERM;EPERM;")
        await command.wait()
    async with box.unconfined(*python(PUSH), stdio=TERMINAL) as command:
        control = await Screen(command).until(b";")
        if control.endswith(b"EIO"):
            pytest.skip("the host itself has legacy TIOCSTI off, so there is no control")
        assert control.endswith(b"pushed")
        await command.wait()


@pytest.mark.overlay
@pytest.mark.bwrap
async def test_debuggers_and_sanitizers_work(box: Box) -> None:
    traced = await box.sh(
        "strace -f -o /tmp/trace bash -c 'true; /bin/true' && grep -c execve /tmp/trace"
    )
    assert traced.text == "2", traced
    code = "int main(void) { int *volatile p = __builtin_malloc(40); p = 0; return 0; }"
    built = await box.sh(
        'echo "$1" > /tmp/t.c && gcc -g -fsanitize=address -o /tmp/t /tmp/t.c', code
    )
    assert built.exit == Exit(code=0), built
    leaked = await box.run("/tmp/t")  # the leak check attaches with ptrace
    assert b"detected memory leaks" in leaked.err, leaked
    debugged = await box.sh(
        "gdb -batch -ex 'break main' -ex run -ex bt /tmp/t 2>&1 | grep '#0.*main'"
    )
    assert debugged.exit == Exit(code=0), debugged
