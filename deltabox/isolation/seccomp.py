"""The system call filter, as BPF bytes assembled from a table. Pure: loads and decides nothing else.

It takes away what no build, editor, debugger or agent needs and what reaches kernel code or objects
that namespaces do not separate. Debuggers stay: ptrace inside the own pid namespace is allowed.
Source of the numbers: the kernel's unistd tables (tests compare them with the installed headers).
"""

import errno
import struct
from dataclasses import dataclass

from deltabox.errors import IsolationUnavailable

# Classic BPF, see linux/filter.h and linux/bpf_common.h.
_LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_AT_LEAST = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_ANY_BIT = 0x45  # BPF_JMP | BPF_JSET | BPF_K
_RETURN = 0x06  # BPF_RET | BPF_K
# struct seccomp_data; both architectures are little-endian, so an argument's low half comes first.
_NUMBER_AT, _ARCH_AT, _ARGS_AT = 0, 4, 16

_ALLOW = 0x7FFF0000
_KILL = 0x80000000  # the whole process: a thread that dies alone leaves its locks behind


def _fail_with(code: int) -> int:
    return 0x00050000 | code


@dataclass(frozen=True, slots=True)
class _Machine:
    audit_arch: int
    column: int  # in _NUMBERS
    x32_bit: int  # numbers with it belong to the x32 table; 0 where there is none


_MACHINES = {"x86_64": _Machine(0xC000003E, 0, 0x40000000), "aarch64": _Machine(0xC00000B7, 1, 0)}

# name: (x86_64, aarch64); None where the architecture never had it.
_NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "clock_settime": (227, 112),
    "clone": (56, 220),
    "clone3": (435, 435),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioctl": (16, 29),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "memfd_secret": (447, 447),
    "migrate_pages": (256, 238),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "uselib": (134, None),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
}

# A call that came after this table may be a new way to mount or to enter a namespace: it does not
# exist here, and libraries fall back as they do on an older kernel.
FIRST_UNKNOWN = 470

# ENOSYS where callers have an older way: clone3's flags lie in memory that BPF cannot read, and
# io_uring does socket and file calls behind the filter's back.
_ABSENT = ("clone3", "io_uring_enter", "io_uring_register", "io_uring_setup")

# The kernel keyring and its keys are the user's, not the namespace's; handles reach files by
# number, past every mount; the rest is privileged or kernel attack surface without a use here.
_DENIED = (
    "acct",
    "add_key",
    "bpf",
    "clock_settime",
    "delete_module",
    "finit_module",
    "init_module",
    "ioperm",
    "iopl",
    "kexec_file_load",
    "kexec_load",
    "keyctl",
    "lookup_dcookie",
    "memfd_secret",
    "migrate_pages",
    "move_pages",
    "open_by_handle_at",
    "perf_event_open",
    "pidfd_getfd",
    "quotactl",
    "quotactl_fd",
    "reboot",
    "request_key",
    "settimeofday",
    "swapoff",
    "swapon",
    "syslog",
    "uselib",
    "userfaultfd",
    "vhangup",
)

# Only a nested sandbox (`--nest`) has a use for these, and they then act in its own namespaces.
_DENIED_UNLESS_NESTED = (
    "fsconfig",
    "fsmount",
    "fsopen",
    "fspick",
    "mount",
    "mount_setattr",
    "move_mount",
    "open_tree",
    "open_tree_attr",
    "pivot_root",
    "setns",
    "umount2",
)

# CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}; CLONE_NEWTIME is a bit of clone's exit signal.
_NEW_NAMESPACE = 0x7E020000
_NEW_TIME_NAMESPACE = 0x80

# Pushing input into a terminal: TIOCSTI, TIOCLINUX. The kernel looks at the low 32 bits only.
_TERMINAL_INPUT = (0x5412, 0x541C)

# UNIX, INET, INET6, NETLINK (getifaddrs). Not VSOCK, which leaves an empty network namespace.
_FAMILIES = (1, 2, 10, 16)


class _Code:
    """Instructions in order; jumps only over the next one or two, so offsets stay readable."""

    def __init__(self) -> None:
        self.instructions: list[tuple[int, int, int, int]] = []

    def load(self, offset: int) -> None:
        self.instructions.append((_LOAD, 0, 0, offset))

    def leave(self, action: int) -> None:
        self.instructions.append((_RETURN, 0, 0, action))

    def leave_if(self, test: int, value: int, action: int) -> None:
        self.instructions.append((test, 0, 1, value))
        self.leave(action)

    def when_call(self, number: int, body: "_Code") -> None:
        """`body` must leave in every case, as it overwrites the loaded number."""
        self.instructions.append((_EQUAL, 0, len(body.instructions), number))
        self.instructions.extend(body.instructions)

    def bytes(self) -> bytes:
        return b"".join(struct.pack("=HBBI", *one) for one in self.instructions)


def _argument(index: int) -> int:
    return _ARGS_AT + 8 * index


def _refuse_bits(index: int, bits: int) -> _Code:
    code = _Code()
    code.load(_argument(index))
    code.leave_if(_ANY_BIT, bits, _fail_with(errno.EPERM))
    code.leave(_ALLOW)
    return code


def _refuse_values(index: int, values: tuple[int, ...]) -> _Code:
    code = _Code()
    code.load(_argument(index))
    for value in values:
        code.leave_if(_EQUAL, value, _fail_with(errno.EPERM))
    code.leave(_ALLOW)
    return code


def _allow_values(index: int, values: tuple[int, ...], otherwise: int) -> _Code:
    code = _Code()
    code.load(_argument(index))
    for value in values:
        code.leave_if(_EQUAL, value, _ALLOW)
    code.leave(_fail_with(otherwise))
    return code


def program(*, nest: bool, machine: str) -> bytes:
    """The filter for seccomp(2). Raises: IsolationUnavailable for a machine without a table.

    A call of another architecture (int 0x80) or of x32 kills the process: its numbers mean other
    calls. Calls without arguments to look at are decided by number alone, which the kernel caches.
    """
    known = _MACHINES.get(machine)
    if known is None:
        raise IsolationUnavailable(
            f"deltabox has no system call table for {machine}, so it cannot confine commands here; "
            f"it has one for {' and '.join(_MACHINES)}."
        )

    def number(name: str) -> int | None:
        return _NUMBERS[name][known.column]

    code = _Code()
    code.load(_ARCH_AT)
    code.instructions.append((_EQUAL, 1, 0, known.audit_arch))
    code.leave(_KILL)
    code.load(_NUMBER_AT)
    if known.x32_bit:
        # -1 is how a tracer skips a call; it has every bit, but belongs to no table.
        code.leave_if(_EQUAL, 0xFFFFFFFF, _ALLOW)
        code.leave_if(_AT_LEAST, known.x32_bit, _KILL)

    looked_at = {
        "ioctl": _refuse_values(1, _TERMINAL_INPUT),
        "socket": _allow_values(0, _FAMILIES, errno.EAFNOSUPPORT),
        "socketpair": _allow_values(0, _FAMILIES, errno.EAFNOSUPPORT),
    }
    if not nest:
        looked_at["clone"] = _refuse_bits(0, _NEW_NAMESPACE)
        looked_at["unshare"] = _refuse_bits(0, _NEW_NAMESPACE | _NEW_TIME_NAMESPACE)
    for name, body in looked_at.items():
        called = number(name)
        if called is not None:
            code.when_call(called, body)
    denied = _DENIED if nest else _DENIED + _DENIED_UNLESS_NESTED
    for names, action in ((_ABSENT, errno.ENOSYS), (denied, errno.EPERM)):
        for name in names:
            called = number(name)
            if called is not None:
                code.leave_if(_EQUAL, called, _fail_with(action))
    code.leave_if(_AT_LEAST, FIRST_UNKNOWN, _fail_with(errno.ENOSYS))
    code.leave(_ALLOW)
    return code.bytes()
