"""The overlay engine: views mounted by the kernel, held by native/view.c for as long as they are used.

Only asks the holder and keeps its descriptors. Must not write a layer that is mounted, look into a
view, or decide what a view is made of.
"""

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import trio

from deltabox.engines import delta
from deltabox.engines.base import Capabilities, Entrance, Graft, ViewSpec
from deltabox.engines.diagnosis import Failure, explain, gather
from deltabox.errors import EngineUnavailable
from deltabox.paths import Tree, WorkspacePath, display
from deltabox.process import Control, end, native_program, open_process

# A mount takes a millisecond; the slowest seen, with 400 layers on a busy machine, 30 ms. Past this
# the kernel hangs on a file system (a dead network mount), and waiting longer helps nobody.
_ANSWER_S = 30
_GRACE_S = 5.0  # the end of the life-line ends it within a millisecond


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an engine works for one pair of project and state directory, found by doing it."""

    usable: bool
    reason: str
    remedies: tuple[str, ...] = ()


class OverlayView:
    """A mounted view (engines/base.py `View`). Not made by hand: `OverlayEngine.mount` yields it."""

    def __init__(self, holder: "_Holder", spec: ViewSpec, fds: dict[str, int]) -> None:
        self._holder = holder
        self._spec = spec
        self._fds = fds
        self._turn = trio.Lock()

    @property
    def root_fd(self) -> int:
        return self._fds["project"]

    @property
    def enter(self) -> Entrance:
        return Entrance(self._fds.get("user"), self._fds["mount"], self._spec.owner)

    @property
    def pid(self) -> int:
        """The holder's, for doctor and tests; a number, not a right to it."""
        return self._holder.process.pid

    def is_alive(self) -> bool:
        return self._holder.process.poll() is None

    async def restack(self, lowers: Sequence[Path], upper: Path, work: Path) -> None:
        """Replace the layers under the project; /tmp, home and grafts stay as they are.

        The mask layer stays first. `upper` and `work` are made when missing and may be the ones
        mounted now. Costs about 1 ms. No process of the session may live: it would go on with the
        old stack.
        Raises: EngineUnavailable; the old stack then stands, unless `is_alive()` is false.
        Cancellation: before the request or after the answer, never between.
        """
        async with self._turn:
            with trio.CancelScope(shield=True):
                prepare_layers(upper, work, self._spec.project)
                layers = _layer_fields(self._spec.mask, lowers, upper, work)
                fds = await self._holder.ask(b"restack", layers, self._spec)
            old, self._fds["project"] = self._fds["project"], fds["project"]
            os.close(old)

    def close(self) -> None:
        """Give up the descriptors. Before the holder's end, so that its end is the mounts' end."""
        while self._fds:
            os.close(self._fds.popitem()[1])


class OverlayEngine:
    """Views by overlayfs (engines/base.py `Engine`)."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        name="overlay",
        live_base=False,
        directory_rename=False,
        block_cow=False,
        notes=(
            "renaming a directory of the project answers EXDEV to programs that do not copy instead",
            "a file whose owner is not the user's own cannot be changed (EOVERFLOW)",
            "hard links of the project split when one of them is changed",
            "a descriptor opened before the first write to a file goes on showing the old content",
            "changes the user makes meanwhile to files the agent has not touched may show late",
        ),
    )

    @asynccontextmanager
    async def mount(self, spec: ViewSpec) -> AsyncIterator[OverlayView]:
        """Mount for the life of the context; on exit no mount, process or descriptor of it is left.

        Makes upper and work (of copy-on-write grafts too) where missing. Costs 2-4 ms.
        Raises: EngineUnavailable with the step, the path and the reason, before anything is mounted.
        Cancellation: at any point; the exit is shielded and bounded.
        """
        prepare_layers(spec.upper, spec.work, spec.project)
        grafts = [await _prepared(graft, spec.owner) for graft in spec.grafts]
        async with _open_holder() as holder:
            fds = await holder.ask(b"mount", _mount_fields(spec, grafts), spec)
            view = OverlayView(holder, spec, fds)
            try:
                yield view
            finally:
                view.close()


def prepare_layers(upper: Path, work: Path, base: Path) -> None:
    """Make `upper` and `work` where missing; the upper's root gets the base root's mode and owner.

    An overlay shows its upper's root as the project's own, so a private mode there would show.
    Raises: EngineUnavailable.
    """
    try:
        if not upper.exists():
            delta.create_layer(upper, os.stat(base))
        with suppress(FileExistsError):
            work.mkdir(mode=0o700)
    except OSError as exc:
        where = display(os.fsencode(upper))
        raise EngineUnavailable(
            f"The delta at {where} cannot be made ({exc.strerror}); make its directory writable, "
            "or set DELTABOX_STATE_DIR elsewhere."
        ) from exc


async def usable(project: Path, state_dir: Path) -> Verdict:
    """Whether views of `project` work with deltas in `state_dir`: mounts one and writes into it.

    The trial lives in a temporary directory of `state_dir` and never writes the project. Costs
    about 5 ms.
    """
    try:
        trial = Path(tempfile.mkdtemp(prefix="trial-", dir=state_dir))
    except OSError as exc:
        return Verdict(False, f"The state directory {state_dir} cannot be used: {exc.strerror}.")
    for name in ("home", "home-at"):
        (trial / name).mkdir(mode=0o700)
    spec = ViewSpec(
        project=project,
        upper=trial / "upper",
        work=trial / "work",
        home=trial / "home",
        home_at=trial / "home-at",
        tmp_bytes=1 << 20,
        owner=(os.geteuid(), os.getegid()),
    )
    try:
        async with OverlayEngine().mount(spec) as view:
            return _try_write(view.root_fd, spec.upper)
    except EngineUnavailable as exc:
        return Verdict(False, exc.sentence, tuple(exc.data.get("remedies", ())))
    finally:
        delta.remove_layers(trial)


def _try_write(root_fd: int, upper: Path) -> Verdict:
    name = WorkspacePath(b".deltabox-trial")
    try:
        with Tree(os.dup(root_fd)) as view:
            os.close(view.open_at(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode=0o600))
    except OSError as exc:
        # A project that its user may not write is as readable and as unwritable in a view.
        if exc.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            return Verdict(False, f"A file could not be made in a trial view: {exc.strerror}.")
        return Verdict(True, "overlay works; the project's own directory is not yours to write.")
    if not (upper / os.fsdecode(name)).exists():
        return Verdict(False, "A file made in a trial view did not land in the delta.")
    return Verdict(True, "overlay works here.")


async def _prepared(graft: Graft, owner: tuple[int, int]) -> Graft:
    """The graft with what it needs on disk. A file cannot be overlaid: `cow` binds a copy of it."""
    if graft.access != "cow":
        return graft
    if graft.upper is None or graft.work is None:
        raise EngineUnavailable(
            f"The graft of {graft.source} has no place for its changes; give it an upper and a work."
        )
    if not graft.source.is_file():
        prepare_layers(graft.upper, graft.work, graft.source)
        return graft
    graft.upper.mkdir(mode=0o700, exist_ok=True)
    copy = graft.upper / graft.source.name
    if not copy.exists():
        await trio.to_thread.run_sync(_copy_file, graft.source, copy, owner)
    return Graft(copy, graft.dest, "rw")


def _copy_file(source: Path, copy: Path, owner: tuple[int, int]) -> None:
    """Appears under its name only when whole: a copy cut short must not pass for the file."""
    with tempfile.NamedTemporaryFile(dir=copy.parent, prefix=".copy-", delete=False) as partial:
        with source.open("rb") as original:
            shutil.copyfileobj(original, partial)
            mode = stat.S_IMODE(os.fstat(original.fileno()).st_mode) & 0o777
        if os.geteuid() == 0:
            os.fchown(partial.fileno(), *owner)
        os.fchmod(partial.fileno(), mode)
    Path(partial.name).rename(copy)


def _layer_fields(
    mask: Path | None, lowers: Sequence[Path], upper: Path, work: Path
) -> list[str | Path]:
    fields: list[str | Path] = ["upper", upper, "work", work]
    for layer in ((mask,) if mask else ()) + tuple(lowers):
        fields += ["lower", layer]
    return fields


def _mount_fields(spec: ViewSpec, grafts: Sequence[Graft]) -> list[str | Path]:
    """The request of native/view.c, whose head describes the format."""
    uid, gid = spec.owner
    fields: list[str | Path] = ["project", spec.project, "home", spec.home, spec.home_at]
    fields += ["tmp", str(spec.tmp_bytes), "owner", str(uid), str(gid)]
    for graft in grafts:
        if graft.access == "cow" and graft.upper and graft.work:
            fields += ["cow", graft.source, graft.dest, graft.upper, graft.work]
        else:
            fields += ["graft", graft.access, graft.source, graft.dest]
    if spec.legacy_mount:
        fields.append("legacy")
    return fields + _layer_fields(spec.mask, spec.lowers, spec.upper, spec.work)


@dataclass(frozen=True, slots=True)
class _Holder:
    process: trio.Process
    line: Control

    async def ask(self, word: bytes, fields: list[str | Path], spec: ViewSpec) -> dict[str, int]:
        """One request and its answer: descriptors by name, the caller's to close.

        Raises: EngineUnavailable, also when the holder has died or does not answer.
        """
        request = os.memfd_create("deltabox-request")
        try:
            _write_all(request, b"".join(os.fsencode(field) + b"\0" for field in fields))
            with trio.fail_after(_ANSWER_S):
                await self.line.send(word, [request])
                answer = await self.line.receive()
        except (BrokenPipeError, ConnectionResetError):
            answer = None
        except trio.TooSlowError:
            # Not known what it has done: a holder in this state must not be used again.
            self.process.kill()
            raise EngineUnavailable(
                f"The view of {display(os.fsencode(spec.project))} could not be mounted within "
                f"{_ANSWER_S} s; look for a file system that hangs."
            ) from None
        finally:
            os.close(request)
        status, *rest = answer.data.split(b"\0")[:-1] if answer else [b""]
        if answer and status == b"ready":
            return dict(zip((name.decode() for name in rest), answer.fds, strict=True))
        raise _unavailable(spec, rest)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _unavailable(spec: ViewSpec, answer: list[bytes]) -> EngineUnavailable:
    """The holder's error in a person's words, with what to do next."""
    project = display(os.fsencode(spec.project))
    if len(answer) != 4:
        return EngineUnavailable(
            f"The program that holds the view of {project} has ended; start the session again."
        )
    step, path, code, words = answer
    failure = Failure(step.decode(), path, int(code), display(words))
    told = explain(failure, gather(spec.upper, native_program("view")))
    return EngineUnavailable(
        f"No view of {project}: {told.sentence}",
        step=failure.step,
        path=display(path),
        errno=failure.code,
        remedies=[remedy.shown for remedy in told.remedies],
    )


@asynccontextmanager
async def _open_holder() -> AsyncIterator[_Holder]:
    """A started holder; on exit it has ended, with its namespaces and mounts."""
    program = native_program("view")
    line, theirs = Control.pair()
    try:
        with theirs:
            process = await open_process([os.fsencode(program)], stdin=theirs.fileno())
        try:
            yield _Holder(process, line)
        finally:
            line.close()  # the life-line: it ends by itself
            await end(process, grace_s=_GRACE_S)
    finally:
        line.close()
