"""review.* and session.status: wire parameters → one decision of the workspace → wire result."""

import base64
import binascii
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec

from deltabox.errors import BadUsage, NotFound
from deltabox.session.pending import Detail
from deltabox.session.workspace import Workspace


class _Paths(msgspec.Struct, kw_only=True, rename="camel"):
    """What every review method takes: the session, and paths as text or as base64 of their bytes."""

    session: str
    paths: list[str] = []
    paths_b64: list[str] = msgspec.field(default_factory=list, name="pathsB64")

    def chosen(self) -> list[bytes]:
        return [p.encode() for p in self.paths] + [_bytes(p) for p in self.paths_b64]


class _Diff(_Paths, kw_only=True, rename="camel"):
    detail: str = "full"


class _Commit(_Paths, kw_only=True, rename="camel"):
    digest: str | None = None
    on_conflict: str = "fail"
    allow: list[str] = []
    allow_b64: list[str] = msgspec.field(default_factory=list, name="allowB64")
    keep_mtime: bool = False


def _bytes(coded: str) -> bytes:
    try:
        return base64.b64decode(coded, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise BadUsage(f"{coded[:40]!r} is no base64; send a path's bytes in base64.") from exc


def handler(workspace: Workspace) -> Callable[[str, dict[str, Any]], Awaitable[Any]]:
    """The methods of one owner's socket."""

    async def handle(method: str, params: dict[str, Any]) -> Any:
        known = _METHODS.get(method)
        if known is None:
            raise NotFound(f"There is no method {method!r} here.")
        try:
            return await known(workspace, params)
        except msgspec.ValidationError as exc:
            raise BadUsage(f"{method}: {exc}.") from exc

    return handle


async def _diff(workspace: Workspace, params: dict[str, Any]) -> Any:
    asked = msgspec.convert(params, _Diff)
    detail = cast(Detail, asked.detail)
    return await workspace.decide(lambda desk: desk.diff(detail=detail, paths=asked.chosen()))


async def _commit(workspace: Workspace, params: dict[str, Any]) -> Any:
    asked = msgspec.convert(params, _Commit)
    allow = [p.encode() for p in asked.allow] + [_bytes(p) for p in asked.allow_b64]
    return await workspace.decide(
        lambda desk: desk.commit(
            paths=asked.chosen(),
            digest=asked.digest,
            on_conflict=asked.on_conflict,
            allow=allow,
            keep_mtime=asked.keep_mtime,
        )
    )


async def _abort(workspace: Workspace, params: dict[str, Any]) -> Any:
    asked = msgspec.convert(params, _Paths)
    return await workspace.decide(lambda desk: desk.abort(paths=asked.chosen()))


async def _status(workspace: Workspace, params: dict[str, Any]) -> Any:
    del params
    session = workspace.session
    return {
        "session": session.id,
        "project": str(session.project),
        "generation": session.generation,
        "running": workspace.running_commands(),
    }


_METHODS: dict[str, Callable[[Workspace, dict[str, Any]], Awaitable[Any]]] = {
    "review.diff": _diff,
    "review.commit": _commit,
    "review.abort": _abort,
    "session.status": _status,
}
