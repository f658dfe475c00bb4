"""What a session's view is made of: layers, masks, home, grafts. Makes the masks, mounts nothing."""

import contextlib
import json
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

from deltabox.config import Config, Places
from deltabox.engines import delta
from deltabox.engines.base import Access, Graft, ViewSpec
from deltabox.errors import BadUsage, Refused
from deltabox.isolation import policy
from deltabox.paths import Tree, WorkspacePath, display, parse
from deltabox.session.folder import Folder, make_private
from deltabox.store import Session

# Made for each command by the sandbox; a host path shown there would hide it or be hidden.
_SANDBOXS_OWN = tuple(Path("/", name) for name in ("dev", "etc", "proc", "run", "sys", "var/tmp"))


def owner_of(where: Places, project: Path) -> tuple[int, int]:
    """Whom the sandbox's processes belong to outside: the invoking user; for a plain root the

    project's owner, so that root's powers over files are not lent to an agent.
    """
    if os.geteuid() != 0 or where.uid != 0:
        return where.uid, where.gid
    st = os.stat(project)
    return st.st_uid, st.st_gid


def view_spec(
    where: Places,
    session: Session,
    settings: Config,
    folder: Folder,
    owner: tuple[int, int],
    read_only: Iterable[Path],
) -> ViewSpec:
    """What the view is made of: layers, private home, and grafts of what the command needs."""
    grafts = [
        Graft(path, path, "ro")
        for path in read_only
        if policy.is_graft(path, session.project, where.home)
        and not path.is_relative_to(session.project)
    ]
    for number, wish in enumerate(settings.passes):
        source, access = _passed(wish, where, session.project)
        if not policy.is_graft(source, session.project, where.home):
            continue  # the sandbox shows it: `passed_outside`
        upper = work = None
        if access == "cow":
            place = folder.grafts / str(number)
            make_private(place, owner)
            upper, work = place / "upper", place / "work"
        grafts.append(Graft(source, source, access, upper, work))
    lowers = tuple(folder.layers / name for name in json.loads(session.stack))
    mask = folder.mask if settings.deny else None
    if mask is not None:
        make_mask(mask, session.project, settings.deny)
    return ViewSpec(
        project=session.project,
        upper=folder.upper,
        work=folder.work,
        home=folder.home,
        home_at=where.home,
        tmp_bytes=settings.limits.tmp,
        owner=owner,
        lowers=lowers,
        mask=mask,
        grafts=tuple(_without_nested(grafts)),
    )


def _without_nested(grafts: Sequence[Graft]) -> list[Graft]:
    """Later wishes win over earlier ones of the same place; a read-only one inside another goes."""
    by_dest = {graft.dest: graft for graft in grafts}
    return [
        g
        for g in by_dest.values()
        if not (
            g.access == "ro"
            and any(
                o.dest != g.dest and o.access == "ro" and g.dest.is_relative_to(o.dest)
                for o in by_dest.values()
            )
        )
    ]


def passed_outside(settings: Config, where: Places, project: Path) -> list[Path]:
    """The passed paths that lie where no view stands; the sandbox itself binds them, read-only."""
    sources = [_passed(wish, where, project)[0] for wish in settings.passes]
    return [s for s in sources if not policy.is_graft(s, project, where.home)]


def _passed(wish: str, where: Places, project: Path) -> tuple[Path, Access]:
    """`PATH[:ro|cow|rw]` as the real path and the access. Raises: BadUsage, Refused."""
    text, colon, access = wish.rpartition(":")
    if not colon or access not in ("ro", "cow", "rw"):
        text, access = wish, "ro"
    named = Path(where.home, text[2:]) if text.startswith("~/") else Path(text)
    if not named.is_absolute():
        raise BadUsage(f"--pass {wish}: give an absolute path or one that begins with ~/.")
    source = Path(os.path.realpath(named))
    if not source.exists():
        raise BadUsage(f"--pass {wish}: {display(os.fsencode(named))} does not exist.")
    for forbidden in (where.home, where.state, project, Path("/")):
        if forbidden.is_relative_to(source):
            raise Refused(
                f"--pass {wish}: {display(os.fsencode(source))} holds your home, the project or "
                "deltabox's state; pass a folder below it."
            )
    if source.is_relative_to(where.state):
        raise Refused(f"--pass {wish}: deltabox's own state cannot be shown to a command.")
    if not policy.is_graft(source, project, where.home):
        if access != "ro":
            raise Refused(
                f"--pass {wish}: outside your home, /tmp and the project a path can only be shown "
                "read-only; leave out the access, or pass a folder below one of them."
            )
        if any(source.is_relative_to(own) or own.is_relative_to(source) for own in _SANDBOXS_OWN):
            raise Refused(
                f"--pass {wish}: the sandbox has its own {display(os.fsencode(source))} or parts of "
                "it; copy what the command needs to a folder below your home."
            )
    return source, cast(Access, access)


def make_mask(mask: Path, project: Path, denied: Iterable[str]) -> None:
    """A top lower layer with an empty mode-000 entry for each denied path that exists.

    Never a whiteout: git in the view would record a deletion. Directories are opaque, so that the
    base's content does not show through. Raises: BadUsage for a path outside the project.
    """
    if not mask.exists():
        delta.create_layer(mask, os.stat(project))
    with Tree.open(project) as base, Tree.open(mask) as layer:
        for word in denied:
            path = parse(word)
            st = base.lstat_or_none(path)
            if st is None or layer.lstat_or_none(path) is not None:
                continue
            made = b""
            for part in path.split(b"/")[:-1]:
                made = made + b"/" + part if made else part
                folder = WorkspacePath(made)
                like = base.lstat(folder)
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, like.st_mode & 0o7777, dir_fd=layer.parent_fd(folder))
                    if os.geteuid() == 0:
                        os.chown(part, like.st_uid, like.st_gid, dir_fd=layer.parent_fd(folder))
            leaf = path.rpartition(b"/")[2]
            at = layer.parent_fd(path)
            if stat.S_ISDIR(st.st_mode):
                os.mkdir(leaf, 0o700, dir_fd=at)
                delta.set_opaque(layer, path, opaque=True)
                os.chmod(leaf, 0, dir_fd=at)
            else:
                os.close(os.open(leaf, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0, dir_fd=at))
