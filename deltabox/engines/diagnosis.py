"""Says in words why a view could not be made here, and what would cure it. Pure but for `gather`.

Asked only after a real mount failed: what the kernel answers is the probe, settings only explain
it. Must not mount, start or change anything.
"""

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deltabox.paths import display

_SETTINGS = (
    "user/max_user_namespaces",
    "user/max_mnt_namespaces",
    "kernel/unprivileged_userns_clone",
    "kernel/apparmor_restrict_unprivileged_userns",
)
_CAP_SYS_ADMIN = 21
_NAMESPACE_STEPS = ("user namespace", "mount namespace", "private propagation")

# No restriction of its own: it only lets this one program have user namespaces with rights. What the
# program then starts is confined by bubblewrap, not by AppArmor.
_APPARMOR_PROFILE = """\
abi <abi/4.0>,
include <tunables/global>

profile deltabox-view "{program}" flags=(unconfined) {{
  userns,
  include if exists <local/deltabox-view>
}}
"""


@dataclass(frozen=True, slots=True)
class Failure:
    """What the holder of the mounts answered: the step, on which path, errno, and its words."""

    step: str
    path: bytes
    code: int
    words: str


@dataclass(frozen=True, slots=True)
class Remedy:
    """What a person can do; `command` can be copied as it is, `text` says what it does."""

    text: str
    command: str = ""

    @property
    def shown(self) -> str:
        if not self.command:
            return f"{self.text}."
        return f"{self.text}:" + (
            f"\n{self.command}" if "\n" in self.command else f" `{self.command}`"
        )


@dataclass(frozen=True, slots=True)
class Explanation:
    reason: str
    remedies: tuple[Remedy, ...] = ()

    @property
    def sentence(self) -> str:
        """The reason and the first thing to do, on one line."""
        if not self.remedies:
            return f"{self.reason}. `deltabox doctor` tells more."
        first = self.remedies[0].shown
        if "\n" in first:
            first = f"{self.remedies[0].text}; `deltabox doctor` prints how."
        return f"{self.reason}. {first}"


@dataclass(frozen=True, slots=True)
class Facts:
    """What the explanation rests on. settings: sysctl values by path; absent ones are left out."""

    uid: int
    release: str
    settings: Mapping[str, str] = field(default_factory=dict)
    filesystems: frozenset[str] = frozenset()  # as /proc/filesystems names them
    upper_type: str = ""  # file system that holds the delta
    may_administer: bool = False  # CAP_SYS_ADMIN in our own user namespace
    is_filtered: bool = False  # a seccomp filter is on us: most likely a container's
    holder: Path = Path("deltabox-view")


def gather(upper: Path, holder: Path, *, proc: Path = Path("/proc")) -> Facts:
    """Read the facts; what cannot be read is left out, since this runs after a failure anyway."""
    status = dict(
        line.split(":", 1) for line in _read(proc / "self/status").splitlines() if ":" in line
    )
    capabilities = int(status.get("CapEff", "0").strip() or "0", 16)
    settings = {name: _read(proc / "sys" / name).strip() for name in _SETTINGS}
    return Facts(
        uid=os.geteuid(),
        release=os.uname().release,
        settings={name: value for name, value in settings.items() if value},
        filesystems=frozenset(
            line.split()[-1] for line in _read(proc / "filesystems").splitlines() if line
        ),
        upper_type=filesystem_of(upper, _read(proc / "self/mountinfo")),
        may_administer=bool(capabilities >> _CAP_SYS_ADMIN & 1),
        is_filtered=status.get("Seccomp", "").strip() == "2",
        holder=holder,
    )


def filesystem_of(path: Path, mountinfo: str) -> str:
    """The type of the file system at `path`: that of the last mount on its longest mounted ancestor."""
    best, kind = "", ""
    for line in mountinfo.splitlines():
        fields = line.split(" ")
        if len(fields) < 7 or "-" not in fields:
            continue
        point = fields[4].encode().decode("unicode_escape").encode("latin-1")
        text = os.fsdecode(point)
        if len(text) >= len(best) and path.is_relative_to(text):
            best, kind = text, fields[fields.index("-") + 1]
    return kind


def apparmor_profile(holder: Path) -> str:
    return _APPARMOR_PROFILE.format(program=holder)


def explain(failure: Failure, facts: Facts) -> Explanation:
    """The reason in words with what cures it; an unknown failure keeps the kernel's own words."""
    if failure.step in _NAMESPACE_STEPS:
        return _explain_namespaces(failure, facts)
    if failure.step == "overlay":
        return _explain_overlay(failure, facts)
    return _explain_place(failure)


def _explain_namespaces(failure: Failure, facts: Facts) -> Explanation:
    settings = facts.settings
    if settings.get("kernel/apparmor_restrict_unprivileged_userns") == "1" and facts.uid != 0:
        return Explanation(
            "AppArmor on this system gives ordinary users user namespaces without rights",
            (
                Remedy(
                    "Allow the program that holds deltabox's views by an AppArmor profile",
                    "sudo tee /etc/apparmor.d/deltabox-view >/dev/null <<'END'\n"
                    f"{apparmor_profile(facts.holder)}END\n"
                    "sudo apparmor_parser -r /etc/apparmor.d/deltabox-view",
                ),
            ),
        )
    if settings.get("kernel/unprivileged_userns_clone") == "0" and facts.uid != 0:
        return Explanation(
            "User namespaces are switched off for ordinary users",
            (Remedy("Switch them on", "sudo sysctl kernel.unprivileged_userns_clone=1"),),
        )
    # Root makes no user namespace, so its limit is not what stands in root's way.
    limits = ("user/max_user_namespaces", "user/max_mnt_namespaces")[facts.uid == 0 :]
    spent = [name for name in limits if settings.get(name) == "0"]
    if failure.code == errno.ENOSPC or spent:
        name = (spent or limits)[0]
        key = name.replace("/", ".")
        return Explanation(
            f"No more namespaces can be made: {key} is {settings.get(name, 'unknown')}",
            (Remedy("Raise the limit", f"sudo sysctl {key}=16384"),),
        )
    if facts.uid == 0 and not facts.may_administer:
        return Explanation(
            "Root has no right to mount here, as in most containers",
            (Remedy("Start the container with the right to mount (--cap-add SYS_ADMIN)"),),
        )
    if facts.is_filtered:
        return Explanation(
            f"A system call filter, most likely the container's, refuses a {failure.step}",
            (Remedy("Start the container with a filter that allows unshare and mount"),),
        )
    return Explanation(f"The system refuses a {failure.step}: {failure.words}")


def _explain_overlay(failure: Failure, facts: Facts) -> Explanation:
    where = display(failure.path)
    elsewhere = Remedy(
        "Set DELTABOX_STATE_DIR to a directory on another file system, such as ext4"
    )
    if facts.upper_type in ("overlay", "fuse", "nfs", "nfs4", "cifs", "9p", "vfat"):
        return Explanation(
            f"Changes cannot be kept on {facts.upper_type}, where the state directory lies",
            (elsewhere,),
        )
    if failure.code == errno.ENODEV or (facts.filesystems and "overlay" not in facts.filesystems):
        return Explanation(
            "This kernel has no overlay file system loaded",
            (Remedy("Load it", "sudo modprobe overlay"),),
        )
    if failure.code in (errno.EPERM, errno.EACCES):
        return Explanation(
            f"The kernel ({facts.release}) does not let this user mount an overlay: {failure.words}",
            (Remedy("Use a kernel of 5.12 or later, or allow overlay mounts in user namespaces"),),
        )
    return Explanation(f"The kernel refuses an overlay on {where}: {failure.words}", (elsewhere,))


def _explain_place(failure: Failure) -> Explanation:
    where = display(failure.path)
    if failure.step == "mounts below":
        return Explanation(
            f"{where}: {failure.words}",
            (Remedy(f"Unmount {where}, or run deltabox as root"),),
        )
    if failure.step == "mount point" and failure.code in (
        errno.ELOOP,
        errno.ENOTDIR,
        errno.EISDIR,
    ):
        return Explanation(
            f"Nothing can be mounted at {where}: {failure.words}",
            (Remedy("Remove it from the session's home, or start with `--new`"),),
        )
    if failure.step == "mount point" and failure.code == errno.ENOENT:
        return Explanation(
            f"Nothing can be mounted at {where}: it does not exist",
            (Remedy("Make it on the host first, or drop the option that asked for it"),),
        )
    return Explanation(f"{failure.step} {where}: {failure.words}")


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="surrogateescape")
    except OSError:
        return ""
