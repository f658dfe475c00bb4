"""fs.* over the wire, to a coordinator that is a process of its own."""

import base64
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from deltabox import client, errors
from deltabox.client import Session
from tests.places import listing

pytestmark = [pytest.mark.overlay, pytest.mark.bwrap]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    made = tmp_path / "home" / "project"
    (made / "src").mkdir(parents=True)
    (made / "a").write_text("one\ntwo\n")
    (made / "src" / "b.py").write_text("needle\n")
    return made


def environ(root: Path) -> dict[str, str]:
    return {
        "HOME": str(root / "home"),
        "PATH": os.environ["PATH"],
        "DELTABOX_STATE_DIR": str(root / "state"),
        "CANARY": "canary-value",
    }


@asynccontextmanager
async def opened(root: Path, **options: Any) -> AsyncIterator[Session]:
    async with client.open(root / "home/project", environ=environ(root), **options) as session:
        yield session


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


async def review_of(session: Session) -> Any:
    return (await session.call("session.status"))["review"]


async def test_a_whole_turn_of_file_calls_ends_in_a_review_that_names_each(
    tmp_path: Path, project: Path
) -> None:
    before = listing(project)
    async with opened(tmp_path) as session:
        call = session.call
        assert await review_of(session) is None
        read = await call("fs.read", path="a")
        assert (read["data"], read["encoding"], read["size"]) == ("one\ntwo\n", "utf-8", 8)
        assert await review_of(session) is None, "a read opened a review"

        done = await call(
            "fs.write", path="a", data="1\n", expectedVersion=read["version"], withText=True
        )
        assert (done["before"], done["after"]) == ("one\ntwo\n", "1\n")
        assert done["changed"] == [{"path": "a"}]
        assert await review_of(session) is not None
        edit = await call("fs.edit", path="src/b.py", oldText="needle", newText="pin")
        assert edit["replaced"] == 1
        made = await call("fs.mkdir", path="x/y", parents=True)
        assert {c["path"] for c in made["changed"]} == {"x", "x/y"}
        await call("fs.write", path="x/y/bin", data=b64(b"\xff\0"), encoding="base64")
        moved = await call("fs.rename", path="x/y/bin", to="x/bin")
        assert {c["path"] for c in moved["changed"]} == {"x/y/bin", "x/bin"}
        await call("fs.symlink", path="x/link", target="bin")
        await call("fs.chmod", path="x/bin", mode=0o755)
        await call("fs.remove", path="x/y", recursive=True)
        whole = await call("fs.read", path="x/link")
        assert (base64.b64decode(whole["data"]), whole["encoding"]) == (b"\xff\0", "base64")

        diff = await session.diff()
        by = {f["path"]: f["by"] for f in diff["files"]}
        turns = {str(t["id"]): t["argv"] for t in diff["turns"]}
        assert [turns[t] for t in by["a"]] == [["fs.write", "a"]]
        assert [turns[t][0] for t in by["src/b.py"]] == ["fs.edit"]
        assert [turns[t][0] for t in by["x/bin"]] == ["fs.rename", "fs.chmod"]
        assert done["turn"] == int(by["a"][0])
        assert not any(".deltabox" in path for path in by)
        assert listing(project) == before
        await session.commit()
        assert (project / "a").read_text() == "1\n"
        assert os.readlink(project / "x/link") == "bin"


async def test_what_a_command_did_and_what_a_file_call_did_are_told_apart(
    tmp_path: Path, project: Path
) -> None:
    async with opened(tmp_path) as session:
        async with session.exec(
            "read x; echo c > by-command", stdin="pipe", background=True
        ) as ran:
            await session.call("fs.write", path="by-call", data="x")
            await ran.write("go\n", close=True)
            await ran.wait()
        by = {f["path"]: f["by"] for f in (await session.diff())["files"]}
        turns = {str(t["id"]): t["argv"] for t in (await session.diff())["turns"]}
        assert [turns[t][0] for t in by["by-call"]] == ["fs.write"]
        assert "fs.write" not in [turns[t][0] for t in by["by-command"]]


async def test_stale_things_are_refused_and_nothing_is_written(
    tmp_path: Path, project: Path
) -> None:
    async with opened(tmp_path) as session:
        version = (await session.call("fs.stat", path="a"))["version"]
        generation = session.info["generation"]
        await session.run("echo theirs > a")
        with pytest.raises(errors.StaleVersion):
            await session.call("fs.write", path="a", data="mine", expectedVersion=version)
        assert await session.read("a") == b"theirs\n"
        await session.abort()
        # The abort gave the old content back, so that version is right again, and the generation old.
        assert (await session.call("fs.stat", path="a"))["version"] == version
        with pytest.raises(errors.DeltaboxError, match="generation"):
            await session.call("fs.write", path="a", data="mine", generation=generation)
        await session.call("fs.write", path="a", data="mine", generation=generation + 1)


async def test_after_a_commit_the_versions_that_a_host_knows_still_hold(
    tmp_path: Path, project: Path
) -> None:
    async with opened(tmp_path) as session:
        version = (await session.call("fs.write", path="a", data="1\n"))["version"]
        await session.diff()
        await session.commit()
        await session.call("fs.write", path="a", data="2\n", expectedVersion=version)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("fs.read", {"path": "none"}, "FS_NOT_FOUND"),
    ("fs.read", {"path": "src"}, "FS_IS_DIRECTORY"),
    ("fs.read", {"path": "a/x"}, "FS_NOT_DIRECTORY"),
    ("fs.read", {"path": "pipe"}, "FS_NOT_REGULAR_FILE"),
    ("fs.read", {"path": "big"}, "FS_TOO_LARGE"),
    ("fs.read", {"path": "bin", "encoding": "utf-8"}, "FS_NOT_TEXT"),
    ("fs.read", {"path": "evil"}, "FS_SANDBOX_DENIED"),
    ("fs.read", {"path": "a", "pathB64": "YQ=="}, "BAD_REQUEST"),
    ("fs.read", {"pathB64": "%%"}, "BAD_REQUEST"),
    ("fs.read", {"path": "a\0"}, "PATH_OUTSIDE_WORKSPACE"),
    ("fs.read", {"path": "/proc/self/environ"}, "FS_SANDBOX_DENIED"),
    ("fs.read", {"path": "{home}/.ssh/id"}, "FS_SANDBOX_DENIED"),
    ("fs.read", {"path": "{home}/key"}, "FS_SANDBOX_DENIED"),
    ("fs.listDir", {"path": "{home}/.ssh"}, "FS_SANDBOX_DENIED"),
    ("fs.stat", {"path": "{home}/.ssh/none"}, "FS_SANDBOX_DENIED"),
    ("fs.listDir", {"path": "{home}/../state"}, "FS_SANDBOX_DENIED"),
    ("fs.readRange", {"path": "/dev/zero", "offset": 0}, "FS_SANDBOX_DENIED"),
    ("fs.readRange", {"path": "a"}, "BAD_REQUEST"),
    ("fs.readRange", {"path": "a", "offset": -1}, "INVALID_PARAMS"),
    ("fs.write", {"path": "{home}/out", "data": "x"}, "FS_SANDBOX_DENIED"),
    ("fs.write", {"path": "../out", "data": "x"}, "FS_SANDBOX_DENIED"),
    ("fs.write", {"path": "evil", "data": "x"}, "FS_SANDBOX_DENIED"),
    ("fs.write", {"path": "a", "data": "x", "exclusive": True}, "FS_EXISTS"),
    ("fs.write", {"path": "pipe", "data": "x"}, "FS_NOT_REGULAR_FILE"),
    ("fs.edit", {"path": "a", "oldText": "zzz", "newText": ""}, "FS_EDIT_NOT_FOUND"),
    ("fs.edit", {"path": "a", "oldText": "o", "newText": ""}, "FS_AMBIGUOUS_EDIT"),
    ("fs.mkdir", {"path": "src"}, "FS_EXISTS"),
    ("fs.remove", {"path": "src"}, "FS_EXISTS"),
    ("fs.remove", {}, "BAD_REQUEST"),
    ("fs.rename", {"path": "a", "to": "/tmp/x"}, "FS_SANDBOX_DENIED"),
    ("fs.chmod", {"path": "a", "mode": 0o4755}, "INVALID_PARAMS"),
    ("fs.grep", {"pattern": "x", "path": "/etc"}, "FS_SANDBOX_DENIED"),
    ("fs.grep", {"pattern": "(x"}, "BAD_REQUEST"),
]


async def test_each_refusal_has_its_code_and_changes_nothing(
    tmp_path: Path, project: Path
) -> None:
    home = tmp_path / "home"
    (home / ".ssh").mkdir()
    (home / ".ssh" / "id").write_text("secret")
    os.symlink(".ssh/id", home / "key")
    os.mkfifo(project / "pipe")
    os.symlink("/etc/passwd", project / "evil")
    (project / "bin").write_bytes(b"\xff")
    with open(project / "big", "wb") as file:
        file.truncate(9 << 20)
    before = listing(home)
    async with opened(tmp_path) as session:
        found = {}
        sentences = []
        for method, params, _ in REFUSED:
            sent = {k: v.format(home=home) if isinstance(v, str) else v for k, v in params.items()}
            try:
                await session.call(method, **sent)
            except errors.DeltaboxError as exc:
                sentences.append(exc.sentence)
                found[method, str(params)] = exc.data.get("code") or exc.host_code
        assert found == {(method, str(params)): code for method, params, code in REFUSED}
        assert [words for words in sentences if "secret" in words] == []
        assert await review_of(session) is None
    assert listing(home) == before


async def test_the_host_beside_the_project_can_be_read_and_is_called_so(
    tmp_path: Path, project: Path
) -> None:
    other = tmp_path / "home" / "other"
    other.mkdir()
    (other / "lib.h").write_text("header")
    os.symlink(project, tmp_path / "home" / "alias")
    async with opened(tmp_path) as session:
        call = session.call
        assert (await call("fs.read", path=f"{other}/lib.h"))["space"] == "host"
        assert (await call("fs.read", path="../other/lib.h"))["data"] == "header"
        names = [e["name"] for e in (await call("fs.listDir", path=str(other)))["entries"]]
        assert names == ["lib.h"]
        # Another name of the project means the view, never the base.
        await call("fs.write", path=f"{tmp_path}/home/alias/a", data="new")
        for path in ("a", f"{project}/a", f"{tmp_path}/home/alias/a"):
            found = await call("fs.read", path=path)
            assert (found["data"], found["space"]) == ("new", "view")
        keys = {(await call("fs.resolve", path=p))["targetKey"] for p in ("a", f"{project}/./a")}
        assert len(keys) == 1
        outside = await call("fs.resolve", path="/no/such/place")
        assert (outside["space"], outside["exists"]) == ("host", False)
    assert (project / "a").read_text() == "one\ntwo\n"


async def test_before_a_session_the_base_answers_and_none_is_made(
    tmp_path: Path, project: Path
) -> None:
    async with client.coordinator(environ=environ(tmp_path)) as plain:
        root = str(project)
        assert (await plain.call("fs.stat", projectRoot=root, path="a"))["size"] == 8
        many = await plain.call(
            "fs.statMany", projectRoot=root, paths=["a", "none", f"{root}/src"]
        )
        assert [r.get("code") or r["info"]["type"] for r in many["results"]] == [
            "file",
            "FS_NOT_FOUND",
            "directory",
        ]
        assert (await plain.call("fs.resolve", projectRoot=root, path="src"))["exists"]
        found = await plain.call("fs.listDir", projectRoot=root)
        assert [e["name"] for e in found["entries"]] == ["a", "src"]
        with pytest.raises(errors.BadUsage):
            await plain.call("fs.stat", path="a")
        with pytest.raises(errors.BadUsage):
            await plain.call("fs.read", projectRoot=root, path="a")
        assert (await plain.call("session.list"))["sessions"] == []


async def test_windows_of_a_large_file_are_exact(tmp_path: Path, project: Path) -> None:
    lines = b"".join(b"line %07d\n" % n for n in range(1_000_000))  # 13 MB
    (project / "large").write_bytes(lines)
    async with opened(tmp_path) as session:
        part = await session.call("fs.readRange", path="large", line=900_001, lines=2)
        assert part["data"] == "line 0900000\nline 0900001\n"
        assert (part["line"], part["lines"], part["eof"]) == (900_001, 2, False)
        part = await session.call("fs.readRange", path="large", offset=13_000_000 - 5, length=50)
        assert (part["data"], part["eof"]) == ("9999\n", True)
        assert part["version"] == (await session.call("fs.stat", path="large"))["version"]


async def test_names_that_are_no_text_go_both_ways_as_bytes(tmp_path: Path, project: Path) -> None:
    name = b"\xff\xfe\n.py"
    async with opened(tmp_path) as session:
        done = await session.call("fs.write", pathB64=b64(name), data="needle")
        assert base64.b64decode(done["pathB64"]) == name
        entries = (await session.call("fs.listDir"))["entries"]
        assert [base64.b64decode(e["nameB64"]) for e in entries if "nameB64" in e] == [name]
        assert (await session.call("fs.read", pathB64=b64(name)))["data"] == "needle"
        paths = (await session.call("fs.glob", pattern="*.py"))["paths"]
        assert [base64.b64decode(p["pathB64"]) for p in paths if "pathB64" in p] == [name]
        matches = (await session.call("fs.grep", pattern="needle"))["matches"]
        assert [m.get("pathB64") for m in matches] == [None, b64(name)]


async def test_hits_of_a_search_stream_in_order_before_its_reply(
    tmp_path: Path, project: Path
) -> None:
    for n in range(1200):
        (project / "src" / f"{n:04}.py").write_text("needle\n")
    async with opened(tmp_path) as session:
        whole = await session.call("fs.grep", pattern="needle", limit=1100)
        assert (whole["total"], whole["truncated"], len(whole["matches"])) == (1100, True, 1100)
        async with session.client.notifications("searchId", "s1") as hits:
            quiet = await session.call("fs.grep", pattern="needle", limit=1100, searchId="s1")
            got: list[dict[str, Any]] = []
            while len(got) < 1100:
                method, params = await hits.receive()
                assert (method, params["session"]) == ("fs.hits", session.id)
                got += params["matches"]
        assert quiet == {"total": 1100, "truncated": True}
        assert got == whole["matches"]


async def test_secrets_of_the_coordinator_s_environment_cannot_be_read(
    tmp_path: Path, project: Path
) -> None:
    async with opened(tmp_path) as session:
        own = f"/proc/{os.getpid()}/environ"
        for path in ("/proc/self/environ", own, "/proc/thread-self/environ", "/dev/fd/0"):
            with pytest.raises(errors.Refused):
                await session.call("fs.read", path=path)
        os.symlink("/proc", tmp_path / "home" / "innocent")
        with pytest.raises(errors.Refused):
            await session.call("fs.read", path=f"{tmp_path}/home/innocent/self/environ")
    # The control: the name itself is readable to this user.
    assert Path("/proc/self/environ").read_bytes()
