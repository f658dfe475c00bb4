"""Two real agents, Codex and Claude Code, under `deltabox run`, driven by a scripted model.

A whole turn each, with their shell and their own file tools: the project stays untouched until the
answer, every scripted change is in the review, commit gives what the agent left.
"""

import json
import os
import shutil
import subprocess  # noqa: TID251 - the installed command, from outside
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.agents.model import Edit, Read, Say, Script, Shell, Step, Write, serving

pytestmark = [pytest.mark.agents, pytest.mark.overlay, pytest.mark.bwrap, pytest.mark.slow]

DELTABOX = Path(__file__).parents[2] / ".venv/bin/deltabox"
LIMIT_S = 120
AGENTS = ("claude", "codex")


def steps(project: Path) -> list[Step]:
    return [
        Shell("printf 'made by shell\\n' > made.txt && pwd"),
        Shell("rm old.txt && ls"),
        Shell("git mv a.txt b.txt && git status --short"),
        Write(str(project / "notes.md"), "line one\nline two\n"),
        Read(str(project / "README.md")),
        Edit(str(project / "README.md"), "hello world", "hello delta"),
        Shell("cat README.md notes.md made.txt"),
        Say("TURN-FINISHED"),
    ]


class Bench:
    """A project, a home and a state folder of their own, and the command line to drive."""

    def __init__(self, folder: Path, installed: Path) -> None:
        self.project, self.home = folder / "project", folder / "home"
        self.installed = installed
        self.seed = folder / "seed"
        for made in (self.project, self.home, self.seed):
            made.mkdir()
        self.env = {
            "HOME": str(self.home),
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "TERM": "xterm-256color",
            "DELTABOX_STATE_DIR": str(folder / "state"),
        }
        for name, text in (("README.md", "hello world\n"), ("old.txt", "old\n"), ("a.txt", "a\n")):
            (self.project / name).write_text(text)
        git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.invalid"]
        for words in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-qm", "first"]):
            subprocess.run([*git, *words], cwd=self.project, check=True, env=self.env)

    def deltabox(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(DELTABOX), *words],
            cwd=self.project,
            env=self.env,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=LIMIT_S,
        )

    def program(self, agent: str) -> Path:
        return self.installed / agent / "node_modules/.bin" / agent

    def command(self, agent: str, port: int, *, once: bool) -> tuple[list[str], list[str]]:
        """(flags of `deltabox run`, the agent's own command)."""
        if agent == "claude":
            env = {
                "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{port}",
                "ANTHROPIC_API_KEY": "fake-key",
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "DISABLE_AUTOUPDATER": "1",
                "DISABLE_TELEMETRY": "1",
                "DISABLE_ERROR_REPORTING": "1",
            }
            own = [str(self.program(agent)), "--dangerously-skip-permissions"]
            own += ["--print", "Do the scripted work."] if once else []
        else:
            env = {"FAKE_API_KEY": "fake-key"}
            provider = (
                f'{{name="fake",base_url="http://127.0.0.1:{port}/v1",'
                'env_key="FAKE_API_KEY",wire_api="responses"}'
            )
            settings = [
                "model_provider=fake",
                f"model_providers.fake={provider}",
                "model=gpt-5.5",
                "analytics.enabled=false",
                "check_for_update_on_startup=false",
                "features.plugins=false",
                "features.remote_plugin=false",
                "features.apps=false",
            ]
            if not once:
                settings += [
                    f'projects={{"{self.project}"={{trust_level="trusted"}}}}',
                    'notice.model_migrations={"gpt-5.5"="gpt-6-sol"}',
                ]
            own = [str(self.program(agent)), "--dangerously-bypass-approvals-and-sandbox"]
            for setting in settings:
                own += ["-c", setting]
            own += ["exec", "--skip-git-repo-check", "Do the scripted work."] if once else []
        flags = [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
        return flags, own

    def listing(self) -> dict[str, tuple[int, int, bytes]]:
        found = {}
        for directory, folders, files in os.walk(self.project):
            for name in (*folders, *files):
                path = Path(directory, name)
                st = path.lstat()
                content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
                found[str(path.relative_to(self.project))] = (st.st_mode, st.st_mtime_ns, content)
        return found

    def check_review(self) -> None:
        shown = self.deltabox("diff", "--json")
        assert shown.returncode == 0, shown.stderr
        files = {f["path"]: f for f in json.loads(shown.stdout)["files"]}
        kinds = {path: f["kind"] for path, f in files.items()}
        assert kinds.pop(".git") == "git"
        assert kinds == {
            "made.txt": "added",
            "notes.md": "added",
            "old.txt": "deleted",
            "b.txt": "renamed",
            "README.md": "modified",
        }
        assert files["b.txt"]["from"] == "a.txt"
        assert (files["README.md"]["added"], files["README.md"]["removed"]) == (1, 1)

    def check_commit(self) -> None:
        done = self.deltabox("commit")
        assert done.returncode == 0, done.stderr
        read = {p.name: p.read_text() for p in self.project.iterdir() if p.is_file()}
        assert read == {
            "README.md": "hello delta\n",
            "notes.md": "line one\nline two\n",
            "made.txt": "made by shell\n",
            "b.txt": "a\n",
        }
        status = subprocess.run(
            ["git", "status", "--short"],
            cwd=self.project,
            env=self.env,
            capture_output=True,
            text=True,
            check=True,
        )
        assert "R  a.txt -> b.txt" in status.stdout


@pytest.fixture(scope="session")
def installed() -> Path:
    folder = os.environ.get("DELTABOX_AGENTS") or str(Path.home() / ".cache/deltabox-test-agents")
    if not all((Path(folder) / a / "node_modules/.bin" / a).exists() for a in AGENTS):
        if shutil.which("npm") is None:
            _absent("npm is not installed, so the agents cannot be")
        script = Path(__file__).with_name("install.sh")
        done = subprocess.run(["sh", str(script), folder], capture_output=True, text=True)
        if done.returncode != 0:
            _absent(f"the agents could not be installed: {done.stderr[-300:]}")
    return Path(folder)


def _absent(reason: str) -> None:
    if "agents" in os.environ.get("DELTABOX_REQUIRE", "").split(","):
        pytest.fail(f"agents are required here: {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture
def bench(tmp_path: Path, installed: Path) -> Bench:
    return Bench(tmp_path, installed)


@pytest.mark.parametrize("agent", AGENTS)
def test_a_whole_headless_turn_is_reviewed_and_committed(bench: Bench, agent: str) -> None:
    script = Script(steps(bench.project))
    before = bench.listing()
    with serving(script) as port:
        flags, own = bench.command(agent, port, once=True)
        ran = bench.deltabox("run", "--review", "keep", *flags, "--", *own)
    assert ran.returncode == 0, ran.stderr
    assert script.errors == []
    # What the agent saw inside: the project at its own path, git's view of the rename.
    assert str(bench.project) in script.seen[0]
    assert "R  a.txt -> b.txt" in script.seen[2]
    assert "hello delta" in script.seen[6]
    assert bench.listing() == before, "the project changed before anybody approved"
    bench.check_review()
    bench.check_commit()


class Screen:
    """A tmux server of its own with one pane."""

    def __init__(self, folder: Path) -> None:
        self._socket = str(folder / "tmux")

    def tmux(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", self._socket, "-f", "/dev/null", *words], capture_output=True, text=True
        )
        return done.stdout

    def text(self) -> str:
        return self.tmux("capture-pane", "-p")

    def until(self, holds: Callable[[str], bool], what: str) -> str:
        """Look until it holds; the limit only ends a test that has failed."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            text = self.text()
            if holds(text):
                return text
            time.sleep(0.1)
        raise AssertionError(f"never saw {what}:\n{self.text()}")

    def type(self, text: str, *keys: str) -> None:
        if text:
            self.tmux("send-keys", "-l", text)
        if keys:
            self.tmux("send-keys", *keys)


@contextmanager
def screen(bench: Bench, words: list[str]) -> Iterator[Screen]:
    import shlex

    shown = Screen(bench.home)
    env = ["env", "-i", *(f"{k}={v}" for k, v in bench.env.items())]
    line = f"cd {shlex.quote(str(bench.project))}; {shlex.join([*env, *words])}; echo LEFT-WITH-$?; cat"
    shown.tmux("new-session", "-d", "-x", "100", "-y", "30", line)
    try:
        yield shown
    finally:
        shown.tmux("kill-server")


PROMPTS = {"claude": ("bypass permissions", "for shortcuts"), "codex": ("Ask Codex", "gpt-5.5")}


@pytest.mark.parametrize("agent", AGENTS)
def test_the_terminal_interface_works_to_the_card(bench: Bench, agent: str) -> None:
    if shutil.which("tmux") is None:
        _absent("tmux is not installed")
    script = Script(steps(bench.project))
    before = bench.listing()
    with serving(script) as port:
        flags, own = bench.command(agent, port, once=False)
        if agent == "claude":
            # The private home is new; the answers to the first start's questions are seeded into it.
            trust = {"hasTrustDialogAccepted": True, "hasCompletedProjectOnboarding": True}
            seed = {
                "hasCompletedOnboarding": True,
                "theme": "dark",
                "bypassPermissionsModeAccepted": True,
                "customApiKeyResponses": {"approved": ["fake-key"]},
                "projects": {str(bench.project): trust},
            }
            (bench.seed / "claude.json").write_text(json.dumps(seed))
            flags += ["--pass", str(bench.seed), "--pass", str(bench.installed)]
            own = [
                "sh",
                "-c",
                f'cp "{bench.seed}/claude.json" ~/.claude.json; exec "$@"',
                "sh",
                *own,
            ]
        with screen(bench, [str(DELTABOX), "run", *flags, "--", *own]) as shown:
            shown.until(lambda t: any(p in t for p in PROMPTS[agent]), "the agent's prompt")
            shown.type("Do the scripted work.")
            shown.until(lambda t: "Do the scripted work." in t, "what was typed")
            shown.type("", "Enter")
            shown.until(lambda t: "TURN-FINISHED" in t, "the end of the turn")
            assert bench.listing() == before, "the project changed before anybody approved"
            wide = shown.text()
            shown.tmux("resize-window", "-x", "60", "-y", "24")
            shown.until(
                lambda t: t != wide and all(len(line) <= 60 for line in t.splitlines()),
                "a redraw at 60 columns",
            )
            deadline = time.monotonic() + LIMIT_S
            while "pprove all" not in shown.text() and time.monotonic() < deadline:
                shown.type("", "C-c")
                time.sleep(0.3)
            shown.until(lambda t: "pprove all" in t, "the approval card")
            shown.type("k", "Enter")
            shown.until(lambda t: "LEFT-WITH-" in t, "the end of deltabox")
    assert script.errors == []
    bench.check_review()
    bench.check_commit()
