"""fs.*: wire parameters → one look at or change of the session's files → wire result.

Which place a path means, and what may be done there, is the session's files' business (session/).
"""

import base64
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote_from_bytes

import trio

from deltabox import config
from deltabox.errors import BadPath, BadUsage, DeltaboxError, NotFound, NotText, Refused
from deltabox.paths import Tree, WorkspacePath, display, is_within
from deltabox.protocol import fs_messages as f
from deltabox.protocol import messages as m
from deltabox.server.connection import Call
from deltabox.server.dispatch import Method
from deltabox.server.host import project_of
from deltabox.session import content, search
from deltabox.session.changes import Change, EditableFiles
from deltabox.session.files import Files, Info, type_of
from deltabox.session.hostfiles import HostFiles
from deltabox.session.target import OnHost, check_host, locate
from deltabox.session.workspace import Workspace

# What is done between two turns of the event loop: a millisecond of reading and hashing at most.
INLINE_BYTES = content.HASH_BYTES
MAX_TEXT = 256 * 1024
MAX_CHANGED = 1000
HITS_AT_ONCE = 200  # in one notification: some 20 KiB


@dataclass(frozen=True, slots=True)
class Reach:
    """The files that one call can see: a view (or, before a session, the base) and the host beside."""

    project: bytes
    owner: tuple[int, int]
    check: Callable[[bytes], None]
    view: Callable[[], Files]
    session: str | None = None

    def at(self, raw: bytes) -> tuple["Any", Any, f.Space]:
        """The files and the path in them that `raw` names. Raises: BadPath."""
        place = locate(raw, self.project)
        if not isinstance(place, OnHost):
            return self.view(), place, "view"
        inside = self.inside(place)
        if inside is not None:
            return self.view(), inside, "view"
        return HostFiles(self.project, self.owner, self.check), place.path, "host"

    def inside(self, place: OnHost) -> WorkspacePath | None:
        """The project's own path, where `place` is another name of it (a link to the project).

        Only chooses: what is opened then is opened strictly, or judged by where it really is.
        """
        real = os.path.realpath(place.path)
        if not is_within(real, self.project):
            return None
        found = locate(real, self.project)
        return None if isinstance(found, OnHost) else found


def _reach(workspace: Workspace) -> Reach:
    return Reach(
        os.fsencode(workspace.session.project),
        workspace.view.enter.owner,
        workspace.check_host,
        workspace.files,
        workspace.session.id,
    )


def _looking(call: Call, params: "f.Look | f.StatMany") -> Reach:
    """Of the session, else of the base of projectRoot. Raises: BadUsage when neither is named."""
    if params.session is not None:
        return _reach(call.session(params.session))
    if params.project_root is None:
        raise BadUsage("Name a session, or the projectRoot before there is one.")
    where = call.host.where
    path = project_of(params.project_root)
    config.check_project(path, where)
    project = os.fsencode(path)
    hidden = (os.fsencode(where.state), os.fsencode(where.runtime))
    owner = (where.uid, where.gid)
    return Reach(
        project,
        owner,
        lambda real: check_host(real, home=os.fsencode(where.home), hidden=hidden),
        lambda: Files(Tree.open(path), project, owner),
    )


def _raw(path: str | None, coded: str | None, what: str = "path") -> bytes:
    if path is None and coded is None:
        return b""
    if path is not None and coded is not None:
        raise BadUsage(f"Give {what} or {what}B64, not both.")
    return m.bytes_of(path) if path is not None else m.bytes_of(coded or "", "base64")


def _inside(workspace: Workspace, raw: bytes) -> WorkspacePath:
    """A path that is to be changed. Raises: Refused outside the project."""
    reach = _reach(workspace)
    place = locate(raw, reach.project)
    if isinstance(place, OnHost):
        inside = reach.inside(place)
        if inside is None:
            raise Refused(
                f"{display(place.path)} is outside the project, where changes need the profile "
                "read-write, which is not available yet."
            )
        return inside
    return place


# looking


async def resolve(call: Call, params: f.Look) -> f.Resolved:
    """What a path means: in the project's view, or on the host beside it. Never refuses an outside
    path, so that the refusal comes with what is to be done there. Opens no review, as no look does."""
    reach = _looking(call, params)
    files, path, space = reach.at(_raw(params.path, params.path_b64))
    exists = True
    with files:
        try:
            path = files.resolved(path)
            files.lstat(path)
        except DeltaboxError as exc:
            if isinstance(exc, BadPath):
                raise
            exists = False
    whole = path if space == "host" else os.path.join(reach.project, path).rstrip(b"/")
    where = m.named(path)
    shown = display(whole)
    return f.Resolved(
        target_key=f"{space}:{quote_from_bytes(whole, safe='/')}",
        space=space,
        path=where.path,
        path_b64=where.path_b64,
        display_path=shown,
        process_path=m.named(whole).path,
        exists=exists,
        session=reach.session,
    )


async def stat_(call: Call, params: f.Look) -> f.Info:
    """Type, size, mode, mtime and version of what stands there, links followed in the project."""
    files, path, space = _looking(call, params).at(_raw(params.path, params.path_b64))
    with files:
        return _info(files.stat(path), space)


async def lstat(call: Call, params: f.Look) -> f.Info:
    """The same, with a link at the end of the path told as a link."""
    files, path, space = _looking(call, params).at(_raw(params.path, params.path_b64))
    with files:
        return _info(files.lstat(path), space)


async def stat_many(call: Call, params: f.StatMany) -> f.Outcomes:
    """fs.stat of up to 1000 paths; each has an outcome of its own."""
    reach = _looking(call, params)
    raws = m.path_list(params.paths, params.paths_b64)
    if len(raws) > f.MAX_PATHS:
        raise BadUsage(f"Ask for at most {f.MAX_PATHS} paths at once.")

    def one(raw: bytes) -> f.Outcome:
        try:
            files, path, space = reach.at(raw)
            with files:
                info = files.stat(path) if params.follow else files.lstat(path)
            return f.Outcome(info=_info(info, space))
        except DeltaboxError as exc:
            return f.Outcome(code=exc.host_code, message=exc.sentence)

    return f.Outcomes(results=await trio.to_thread.run_sync(lambda: [one(r) for r in raws]))


def _info(found: Info, space: f.Space) -> f.Info:
    link = None if found.link is None else m.named(found.link)
    return f.Info(
        type=found.type,
        size=found.size,
        mode=found.mode,
        mtime_ns=found.mtime_ns,
        version=found.version,
        space=space,
        link=None if link is None else link.path,
        link_b64=None if link is None else link.path_b64,
    )


async def list_dir(call: Call, params: f.ListDir) -> f.Listing:
    """The entries of a folder in the order of their bytes, in pages."""
    reach = _looking(call, params)
    raw = _raw(params.path, params.path_b64)
    after = _raw(params.after, params.after_b64, "after")

    def work() -> tuple[list[tuple[bytes, os.stat_result, bytes | None]], bool, f.Space]:
        files, path, space = reach.at(raw)
        with files:
            return (*files.listing(path, after=after, limit=params.limit), space)

    found, more, space = await trio.to_thread.run_sync(work)
    return f.Listing(entries=[_entry(*row) for row in found], more=more, space=space)


def _entry(name: bytes, st: os.stat_result, link: bytes | None) -> f.Entry:
    shown = m.named(name)
    target = None if link is None else m.named(link)
    return f.Entry(
        name=shown.path,
        name_b64=shown.path_b64,
        type=type_of(st.st_mode),
        size=st.st_size,
        mode=stat.S_IMODE(st.st_mode),
        mtime_ns=st.st_mtime_ns,
        link=None if target is None else target.path,
        link_b64=None if target is None else target.path_b64,
    )


# reading


async def read(call: Call, params: f.Read) -> f.Content:
    """A whole file of at most 8 MiB; FS_TOO_LARGE above names fs.readRange. A fifo, socket or device
    is refused and never opened."""
    raw = _raw(params.path, params.path_b64)
    files, path, space = _reach(call.session(params.session)).at(raw)
    with files:
        fd = files.open(path)
    try:
        if os.fstat(fd).st_size <= INLINE_BYTES:
            found = content.read_whole(fd, raw, params.max_bytes)
        else:
            found = await trio.to_thread.run_sync(content.read_whole, fd, raw, params.max_bytes)
    finally:
        os.close(fd)
    return _content(found, space, params.encoding, raw)


async def read_range(call: Call, params: f.ReadRange) -> f.Content:
    """A window of a file of any size, by bytes or by lines. Lines cost the reading up to them."""
    raw = _raw(params.path, params.path_b64)
    if (params.offset is not None) == (params.line is not None):
        raise BadUsage("Give offset for a window of bytes, or line for one of lines.")
    files, path, space = _reach(call.session(params.session)).at(raw)
    with files:
        fd = files.open(path)

    def work() -> content.Content:
        if params.offset is not None:
            return content.read_bytes(fd, params.offset, params.length)
        return content.read_lines(
            fd,
            params.line or 1,
            params.lines or f.MAX_WINDOW,
            params.length,
            check=trio.from_thread.check_cancelled,
        )

    try:
        found = await trio.to_thread.run_sync(work)
    finally:
        os.close(fd)
    return _content(found, space, params.encoding, raw)


def _content(
    found: content.Content, space: f.Space, wanted: m.Encoding | None, path: bytes
) -> f.Content:
    data, encoding = m.text_of(found.data) if wanted != "base64" else ("", m_base64)
    if encoding == "base64" and wanted == "utf-8":
        raise NotText(f"{display(path)} is not UTF-8; ask for encoding base64.")
    if wanted == "base64":
        data = base64.b64encode(found.data).decode()
    return f.Content(
        data=data,
        encoding=encoding,
        size=found.size,
        mode=found.mode,
        version=found.version,
        space=space,
        offset=found.at,
        eof=found.eof,
        line=found.first_line,
        lines=found.lines,
    )


m_base64: m.Encoding = "base64"


# changing


async def _change(
    call: Call,
    params: f.OfFile,
    method: str,
    act: Callable[[EditableFiles, WorkspacePath, Change], None],
    *,
    is_slow: bool = False,
    with_text: bool = False,
) -> f.Changed:
    """Do it, journaled and credited. Once begun it is done whole; a cancelled call may have been."""
    workspace = call.session(params.session)
    raw = _raw(params.path, params.path_b64)
    path = _inside(workspace, raw)
    async with workspace.mutation(method, path) as mutation:

        def work() -> None:
            with workspace.files() as files:
                act(files, path, mutation.change)

        if is_slow:
            await trio.to_thread.run_sync(work)
        else:
            work()
    done = mutation.change
    changed = workspace.changed(mutation.paths)
    where = m.named(done.path)
    return f.Changed(
        path=where.path,
        path_b64=where.path_b64,
        generation=workspace.generation,
        changed=[m.named(p) for p in changed[:MAX_CHANGED]],
        changed_total=len(changed),
        version=done.version or None,
        created=done.is_new or None,
        size=None if done.after is None else len(done.after),
        turn=mutation.turn,
        replaced=done.count or None,
        before=_text(done.before) if with_text else None,
        after=_text(done.after) if with_text else None,
    )


def _text(data: bytes | None) -> str | None:
    if data is None or len(data) > MAX_TEXT or b"\0" in data:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


async def write(call: Call, params: f.Write) -> f.Changed:
    """Make a file's content this, at once for every reader: the old or the new, never a part. Through
    a link in the project, its target. FS_STALE_VERSION before anything is written."""
    data = m.bytes_of(params.data, params.encoding)
    if len(data) > f.MAX_WINDOW:
        raise content.too_large(_raw(params.path, params.path_b64), len(data), f.MAX_WINDOW)
    if params.exclusive and params.expected_version is not None:
        raise BadUsage("A file that must not exist has no version; give one of the two.")
    return await _change(
        call,
        params,
        "fs.write",
        lambda files, path, change: files.write(
            path,
            data,
            change,
            expected=params.expected_version,
            create=params.create,
            exclusive=params.exclusive,
            parents=params.parents,
            mode=params.mode,
        ),
        is_slow=len(data) > INLINE_BYTES,
        with_text=params.with_text,
    )


async def edit(call: Call, params: f.Edit) -> f.Changed:
    """Replace a piece of text, found literally and counted: FS_EDIT_NOT_FOUND, FS_AMBIGUOUS_EDIT. The
    version is judged first, and everything else of the file stays byte for byte."""
    old, new = m.bytes_of(params.old_text), m.bytes_of(params.new_text)
    return await _change(
        call,
        params,
        "fs.edit",
        lambda files, path, change: files.edit(
            path,
            old,
            new,
            change,
            expected=params.expected_version,
            replace_all=params.replace_all,
            count=params.count,
            keep_newlines=params.line_endings == "keep",
        ),
        is_slow=_is_large(call, params),
        with_text=params.with_text,
    )


def _is_large(call: Call, params: f.OfFile) -> bool:
    workspace = call.session(params.session)
    path = _inside(workspace, _raw(params.path, params.path_b64))
    try:
        with workspace.files() as files:
            return files.size(path) > INLINE_BYTES
    except NotFound:
        return False


async def mkdir(call: Call, params: f.Mkdir) -> f.Changed:
    """Make a folder."""
    return await _change(
        call,
        params,
        "fs.mkdir",
        lambda files, path, change: files.mkdir(
            path, change, parents=params.parents, mode=params.mode
        ),
    )


async def remove(call: Call, params: f.Remove) -> f.Changed:
    """Delete a file, a link or a folder (with `recursive` what is in it too)."""
    return await _change(
        call,
        params,
        "fs.remove",
        lambda files, path, change: files.remove(
            path,
            change,
            recursive=params.recursive,
            expected=params.expected_version,
            missing_ok=params.missing_ok,
        ),
        is_slow=params.recursive,
    )


async def rename(call: Call, params: f.Rename) -> f.Changed:
    """Give a file, link or folder another name in the project. A folder of the project itself may be
    moved by copying: its old name goes when all of it stands under the new one."""
    to = _inside(call.session(params.session), _raw(params.to, params.to_b64, "to"))
    if not to:
        raise BadUsage("Give `to`, the new name.")
    return await _change(
        call,
        params,
        "fs.rename",
        lambda files, path, change: files.rename(
            path, to, change, overwrite=params.overwrite, expected=params.expected_version
        ),
        is_slow=True,
    )


async def chmod(call: Call, params: f.Chmod) -> f.Changed:
    """Set permission bits; never set-id bits, which a commit would leave out."""
    return await _change(
        call,
        params,
        "fs.chmod",
        lambda files, path, change: files.chmod(path, params.mode, change),
        is_slow=True,  # the first one copies the file up, whatever its size
    )


async def symlink(call: Call, params: f.Symlink) -> f.Changed:
    """Make a link. It may say anything, as a command's may; file calls follow it inside the project."""
    target = _raw(params.target, params.target_b64, "target")
    return await _change(
        call,
        params,
        "fs.symlink",
        lambda files, path, change: files.symlink(path, target, change),
    )


# searching


async def glob(call: Call, params: f.Glob) -> f.Found:
    """Files whose path fits a pattern, in the order of their bytes. `.git` is never searched."""
    asked = _asked(call, params)
    found: list[m.Named] = []
    total = 0

    async def hits(paths: list[bytes]) -> None:
        nonlocal total
        total += len(paths)
        named = [m.named(p) for p in paths]
        if params.search_id is None:
            found.extend(named)
        else:
            await call.notify("fs.hits", _hits(params, paths=named))

    workspace = call.session(params.session)
    truncated = await search.glob(workspace, asked, m.bytes_of(params.pattern), hits)
    return f.Found(
        total=total, truncated=truncated, paths=found if params.search_id is None else None
    )


async def grep(call: Call, params: f.Grep) -> f.Found:
    """Lines that match, file by file in the order of their bytes; binary files are passed over. Runs in
    the session's sandbox, read-only: by ripgrep where the host has it, else by grep."""
    asked = _asked(call, params)
    found: list[f.Match] = []
    total = 0

    async def hits(matches: list[search.Hit]) -> None:
        nonlocal total
        total += len(matches)
        shown = [_match(hit) for hit in matches]
        if params.search_id is None:
            found.extend(shown)
        else:
            await call.notify("fs.hits", _hits(params, matches=shown))

    what = search.Text(
        m.bytes_of(params.pattern),
        literal=params.literal,
        ignore_case=params.ignore_case,
        include=tuple(m.bytes_of(g) for g in params.include),
    )
    truncated = await search.grep(call.session(params.session), asked, what, hits)
    return f.Found(
        total=total, truncated=truncated, matches=found if params.search_id is None else None
    )


def _asked(call: Call, params: f.Search) -> search.Asked:
    workspace = call.session(params.session)
    raw = _raw(params.path, params.path_b64)
    files, path, space = _reach(workspace).at(raw)
    if space == "host":
        raise Refused(
            f"{display(path)} is outside the project, which is all that is searched; "
            "run a command there instead."
        )
    with files:
        where = files.resolved(path)
        is_directory = files.lstat(where).type == "directory"
    return search.Asked(
        where,
        is_directory=is_directory,
        ignore=params.ignore,
        hidden=params.hidden,
        limit=params.limit,
        batch=HITS_AT_ONCE,
    )


def _match(hit: search.Hit) -> f.Match:
    where = m.named(hit.path)
    text, encoding = m.text_of(hit.text)
    plain = encoding == "utf-8"
    return f.Match(
        path=where.path,
        path_b64=where.path_b64,
        line=hit.line,
        text=text if plain else hit.text.decode("utf-8", "backslashreplace"),
        text_b64=None if plain else text,
        column=hit.column,
        cut=hit.is_cut,
    )


def _hits(params: f.Search, **hits: Any) -> f.SearchHits:
    return f.SearchHits(session=params.session, search_id=params.search_id or "", **hits)


METHODS: Mapping[str, Method] = {
    "fs.resolve": Method(f.Look, resolve, is_read=True, result=f.Resolved),
    "fs.stat": Method(f.Look, stat_, is_read=True, result=f.Info),
    "fs.lstat": Method(f.Look, lstat, is_read=True, result=f.Info),
    "fs.statMany": Method(f.StatMany, stat_many, is_read=True, result=f.Outcomes),
    "fs.listDir": Method(f.ListDir, list_dir, is_read=True, result=f.Listing),
    "fs.read": Method(f.Read, read, is_read=True, result=f.Content),
    "fs.readRange": Method(f.ReadRange, read_range, is_read=True, result=f.Content),
    "fs.write": Method(f.Write, write, is_read=False, result=f.Changed),
    "fs.edit": Method(f.Edit, edit, is_read=False, result=f.Changed),
    "fs.mkdir": Method(f.Mkdir, mkdir, is_read=False, result=f.Changed),
    "fs.remove": Method(f.Remove, remove, is_read=False, result=f.Changed),
    "fs.rename": Method(f.Rename, rename, is_read=False, result=f.Changed),
    "fs.chmod": Method(f.Chmod, chmod, is_read=False, result=f.Changed),
    "fs.symlink": Method(f.Symlink, symlink, is_read=False, result=f.Changed),
    "fs.glob": Method(f.Glob, glob, is_read=True, result=f.Found),
    "fs.grep": Method(f.Grep, grep, is_read=True, result=f.Found),
}
