"""`demo`: a scripted "agent" works on a small real git project; each promise is checked aloud.

Everything lies in one temporary folder with its own state, so nothing of the user's is touched.
Uses the same `run` and verbs as everybody; only the answers are scripted without a terminal.
"""

import argparse
import hashlib
import os
import shutil
import stat
import sys
import tempfile
from pathlib import Path

from deltabox import process
from deltabox.cli.review import colours
from deltabox.errors import Failed

AGENT = r"""
set -eu
printf 'def greet(name):\n    return f"Hello, {name}!"\n' > greet.py          # edit
printf 'all:\n\tsh build.sh\n' > Makefile                                     # add
rm old_notes.txt                                                              # delete
git mv util.py helpers.py                                                     # rename
chmod +x build.sh                                                             # chmod
./build.sh                                                                    # build
rm -rf cache && mkdir cache && echo warm > cache/state                        # churn
echo "agent: done, $(git status --short | wc -l) paths differ from HEAD"
"""

FILES = {
    "README.md": "# Shop\n\nA tiny project.\n",
    "greet.py": 'def greet(name):\n    return "Hello " + name\n',
    "util.py": "def double(n):\n    return n * 2\n\n\ndef half(n):\n    return n / 2\n",
    "old_notes.txt": "remember the milk\n",
    "build.sh": "#!/bin/sh\nmkdir -p out\ncat greet.py helpers.py > out/bundle.py\necho built it\n",
}


def demo(args: argparse.Namespace) -> int:
    """Returns 0 when every promise held."""
    folder = Path(os.path.realpath(tempfile.mkdtemp(prefix="deltabox-demo-")))
    os.environ["DELTABOX_STATE_DIR"] = str(folder / "state")
    os.environ.pop("SUDO_UID", None)
    try:
        return _Demo(folder / "shop", ask=sys.stdin.isatty() and not args.yes).play()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Demo:
    def __init__(self, project: Path, *, ask: bool) -> None:
        self.project = project
        self.ask = ask
        self.tint = colours()
        self.failed = 0

    def play(self) -> int:
        self.step(f"a small git project in {self.project}")
        make_project(self.project)
        before = listing(self.project, times=True)
        self.step(
            "deltabox run -- sh -c '…an agent that edits, adds, deletes, renames, chmods, builds…'"
        )
        status = self.deltabox("run", "--review", "keep", "--", "sh", "-c", AGENT)
        self.check("the agent's commands worked", status == 0)
        self.check(
            "the project is untouched, byte for byte", listing(self.project, times=True) == before
        )
        self.step("the approval card")
        self.review()
        after = listing(self.project, times=False)
        if after == listing_of(before):
            self.step("nothing was approved")
            self.check(
                "the project is byte for byte as it was",
                listing(self.project, times=True) == before,
            )
            return self.end()
        self.step("deltabox undo")
        self.check("undo did it", self.deltabox("undo") == 0)
        self.check(
            "every file, mode and link is as before the commit",
            listing(self.project, times=False) == listing_of(before),
        )
        self.step("the user edits a file while the agent works on it")
        self.conflict()
        return self.end()

    def review(self) -> None:
        if self.ask:
            self.deltabox("review")
            return
        self.deltabox("review")
        self.say("no terminal: the demo approves all")
        self.check("commit did it", self.deltabox("commit") == 0)
        self.check("the edit arrived", "Hello, {name}!" in (self.project / "greet.py").read_text())
        self.check("the deleted file is gone", not (self.project / "old_notes.txt").exists())
        self.check("the rename arrived", (self.project / "helpers.py").exists())
        self.check("build.sh is executable", os.access(self.project / "build.sh", os.X_OK))
        self.check("the build's output arrived", (self.project / "out/bundle.py").exists())

    def conflict(self) -> None:
        self.deltabox(
            "run",
            "--new",
            "--review",
            "keep",
            "--",
            "sh",
            "-c",
            "echo agent >> README.md; echo x > new.txt",
        )
        with (self.project / "README.md").open("a") as file:
            file.write("the user's own line\n")
        self.check("commit refuses the conflict (status 3)", self.deltabox("commit") == 3)
        skipped = self.deltabox("commit", "--on-conflict", "skip")
        self.check(
            "the rest can be committed", skipped == 0 and (self.project / "new.txt").exists()
        )
        self.check(
            "the user's line survived",
            (self.project / "README.md").read_text().endswith("the user's own line\n"),
        )
        self.check("the agent's side can be discarded", self.deltabox("abort") == 0)

    def deltabox(self, *argv: str) -> int:
        """The command line itself, in this process, on the demo's project."""
        from deltabox.cli.main import main

        sys.stdout.flush()
        here = Path.cwd()
        os.chdir(self.project)
        try:
            return main(argv)
        finally:
            os.chdir(here)

    def step(self, words: str) -> None:
        print(f"\n{self.tint.bold}── {words}{self.tint.off}", flush=True)

    def say(self, words: str) -> None:
        print(f"{self.tint.dim}{words}{self.tint.off}", flush=True)

    def check(self, promise: str, held: bool) -> None:
        mark = f"{self.tint.green}✔{self.tint.off}" if held else f"{self.tint.red}✘{self.tint.off}"
        self.failed += not held
        print(f"  {mark} {promise}", flush=True)

    def end(self) -> int:
        if self.failed:
            raise Failed(
                f"{self.failed} promises did not hold here; please report this with its output."
            )
        print(f"\n{self.tint.green}every promise held{self.tint.off}")
        return 0


def make_project(project: Path) -> None:
    project.mkdir(parents=True)
    for name, content in FILES.items():
        (project / name).write_text(content)
    (project / "cache").mkdir()
    (project / "cache/state").write_text("warm\n")
    git = shutil.which("git")
    if git is None:
        raise Failed("The demo needs git; install it (apt install git) and try again.")
    identity = ["-c", "user.name=demo", "-c", "user.email=demo@example.invalid"]
    for words in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-q", "-m", "Start"]):
        argv = [git, "-C", str(project), *identity, *words]
        process.run_trusted([os.fsencode(word) for word in argv])


Listing = dict[str, tuple[str, int, str, int]]


def listing(project: Path, *, times: bool) -> Listing:
    """Every entry: type, mode, content hash or link target, and mtime where asked. `.git` too."""
    found: Listing = {}
    for directory, folders, files in os.walk(project):
        for name in (*folders, *files):
            path = Path(directory, name)
            st = path.lstat()
            if stat.S_ISLNK(st.st_mode):
                content = os.readlink(path)
            elif stat.S_ISREG(st.st_mode):
                content = hashlib.sha256(path.read_bytes()).hexdigest()
            else:
                content = ""
            kind = stat.filemode(st.st_mode)[0]
            mtime = st.st_mtime_ns if times else 0
            found[str(path.relative_to(project))] = (
                kind,
                stat.S_IMODE(st.st_mode),
                content,
                mtime,
            )
    return found


def listing_of(timed: Listing) -> Listing:
    """The same listing without times."""
    return {name: (*facts[:3], 0) for name, facts in timed.items()}
