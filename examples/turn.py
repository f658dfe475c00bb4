"""One whole turn through deltabox's Python API.

python examples/turn.py PROJECT

Changes a.txt and makes notes.txt in PROJECT's workspace, commits a.txt alone, and drops the rest.
"""

import sys

import trio

import deltabox
from deltabox.errors import StaleVersion


async def main(project: str) -> None:
    async with deltabox.open(project) as session:
        print(f"session {session.id} on {session.info['logicalRoot']}")

        # Files: read, edit under the version that was read, write, find.
        before = await session.call("fs.read", path="a.txt")
        version = before["version"]
        edit = {"oldText": "one", "newText": "ONE", "expectedVersion": version}
        await session.call("fs.edit", path="a.txt", **edit)
        await session.write("notes.txt", "remember ONE\n")
        found = await session.call("fs.glob", pattern="*.txt")
        assert sorted(hit["path"] for hit in found["paths"]) == ["a.txt", "notes.txt"]
        hits = await session.call("fs.grep", pattern="ONE")
        assert len(hits["matches"]) == 2

        # A version that is no longer there: refused before anything is written.
        try:
            await session.write("a.txt", "lost", expectedVersion=version)
        except StaleVersion as refused:
            print(f"refused: {refused}")

        # A command that talks back: its output as it comes, its input as we like.
        command = "echo ready; sed s/ONE/TWO/ a.txt -"
        async with session.exec(command, stdin="pipe") as running:
            await running.write("ONE more\n", close=True)
            told = b"".join([data async for channel, data in running if channel == "stdout"])
        assert told == b"ready\nTWO\ntwo\nTWO more\n"

        # A command nobody waits for: cancelling the call ends it.
        with trio.move_on_after(0.1):
            await session.run("sleep 1000")

        # The review: look, take one file of two, see that older handles are stale, drop the rest.
        review = await session.diff()
        for file in review["files"]:
            print(f"{file['kind']} {file['display']} +{file['added']} -{file['removed']}")
        commit = await session.commit("a.txt", digest=review["digest"])
        assert [file["path"] for file in commit["committed"]] == ["a.txt"]
        try:
            await session.run("true", generation=session.info["generation"])
        except StaleVersion as refused:
            print(f"refused: {refused}")
        dropped = await session.abort()
        assert dropped["discarded"] == 1
    print("the turn is done")


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
