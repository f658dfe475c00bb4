"""What a command needs from the host: links, interpreters, prefixes; and never too much."""

import os
import sys
from pathlib import Path

import pytest

from deltabox.errors import NotFound
from deltabox.isolation.command import Found, resolve, toolchains


@pytest.fixture
def home(tmp_path: Path) -> Path:
    made = tmp_path.resolve() / "home"
    made.mkdir()
    return made


def program(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def find(argv0: str | Path, home: Path, *, path_env: str = "/usr/bin:/bin", **how: Path) -> Found:
    hidden = [how["hidden"]] if "hidden" in how else []
    return resolve(
        str(argv0),
        path_env=path_env,
        cwd=how.get("cwd", home),
        project=how.get("project", home / "project"),
        home=home,
        hidden=hidden,
    )


def test_program_of_the_system_needs_nothing(home: Path) -> None:
    assert find("sh", home).read_only == ()


def test_program_of_the_project_needs_nothing(home: Path) -> None:
    script = program(home / "project/bin/run")
    assert find("bin/run", home, cwd=home / "project") == Found(script, ())


def test_lone_script_needs_itself_alone(home: Path) -> None:
    script = program(home / "tool.sh")
    assert find(script, home).read_only == (script,)


def test_first_executable_of_path_wins_and_relative_entries_never(home: Path) -> None:
    (home / "a").mkdir()
    (home / "a/tool").write_text("not executable")
    tool = program(home / "b/tool")
    program(home / "rel/tool")
    found = find("tool", home, path_env=f"rel:.::{home}/a:{home}/b", cwd=home / "rel")
    assert found.program == tool


def test_node_prefix_comes_whole_with_its_links(home: Path) -> None:
    prefix = home / "agents"
    cli = program(prefix / "node_modules/@x/cli/bin/cli.js", "#!/usr/bin/env sh\n")
    link = prefix / "node_modules/.bin/cli"
    link.parent.mkdir()
    link.symlink_to("../@x/cli/bin/cli.js")
    assert find(link, home) == Found(link, (prefix,))
    assert find(cli, home).read_only == (prefix,)


def test_node_modules_right_below_home_do_not_take_home(home: Path) -> None:
    program(home / "node_modules/x/cli.js")
    assert find(home / "node_modules/x/cli.js", home).read_only == (home / "node_modules",)


def test_link_in_a_bin_folder_shows_the_folder_and_the_target(home: Path) -> None:
    target = program(home / "store/tool-1.2/tool")
    link = home / ".local/bin/tool"
    link.parent.mkdir(parents=True)
    link.symlink_to(target)
    assert find("tool", home, path_env=str(link.parent)) == Found(link, (link.parent, target))


def test_link_elsewhere_is_replaced_by_its_target(home: Path) -> None:
    target = program(home / "store/tool")
    (home / "tool").symlink_to(target)
    assert find(home / "tool", home) == Found(target, (target,))


def test_venv_brings_the_interpreter_it_was_made_from(home: Path) -> None:
    base = program(home / "python/bin/python3.99")
    (home / "python/lib").mkdir()
    venv = home / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "pyvenv.cfg").write_text(f"home = {base.parent}\nversion = 3.99\n")
    (venv / "bin/python").symlink_to(base)
    script = program(venv / "bin/agent", f"#!{venv}/bin/python\n")
    assert find(script, home).read_only == (home / "python", venv)


def test_env_line_is_followed_to_the_interpreter(home: Path) -> None:
    engine = program(home / "engine/bin/engine")
    (home / "engine/lib").mkdir()
    for line in (
        "/usr/bin/env engine",
        "/usr/bin/env -S engine --flag",
        "/usr/bin/env A=1 engine",
    ):
        script = program(home / "script", f"#!{line}\n")
        found = find(script, home, path_env=f"/usr/bin:{engine.parent}")
        assert found.read_only == (home / "engine", script), line


def test_shim_brings_its_manager(home: Path) -> None:
    shim = program(home / ".pyenv/shims/python", "#!/usr/bin/env bash\n")
    assert find("python", home, path_env=str(shim.parent)).read_only == (home / ".pyenv",)


def test_folder_that_holds_the_state_is_never_given(home: Path) -> None:
    state = home / "tools/state"
    state.mkdir(parents=True)
    script = program(home / "tools/bin/agent")
    (home / "tools/lib").mkdir()
    assert find(script, home).read_only == (home / "tools",)
    assert find(script, home, hidden=state).read_only == (script,)


def test_home_itself_is_never_given(home: Path) -> None:
    script = program(home / "bin/agent")
    (home / "lib").mkdir()
    assert find(script, home).read_only == (script,)


def test_looping_links_and_interpreters_end(home: Path) -> None:
    (home / "loop").symlink_to(home / "loop")
    with pytest.raises(NotFound, match="was not found"):
        find(home / "loop", home)
    script = program(home / "self", f"#!{home}/self\n")
    assert find(script, home).read_only == (script,)


@pytest.mark.parametrize(
    ("argv0", "words"),
    [
        ("no-such-tool", "not found in PATH"),
        ("./gone", "not found;"),
        ("", "no name"),
        ("a\0b", "no name"),
    ],
)
def test_absent_program_is_said(home: Path, argv0: str, words: str) -> None:
    with pytest.raises(NotFound, match=words):
        find(argv0, home)


def test_program_without_permission_is_said(home: Path) -> None:
    (home / "data").write_text("x")
    with pytest.raises(NotFound, match="cannot be executed"):
        find("./data", home)


def test_this_interpreter_is_found_whole(home: Path) -> None:
    found = find(sys.executable, home)
    outside = not os.path.realpath(sys.executable).startswith(("/usr/", "/opt/"))
    assert bool(found.read_only) == (outside or sys.prefix != sys.base_prefix)


def test_toolchains_are_named_parts_without_credentials(home: Path) -> None:
    for name in (".cargo/bin", ".cargo/registry", ".nvm", ".ssh", ".aws", ".local/share/keyrings"):
        (home / name).mkdir(parents=True)
    (home / ".cargo/credentials.toml").write_text("secret")
    (home / ".rustup").symlink_to("/etc")
    assert toolchains(home) == (home / ".cargo/bin", home / ".nvm")
    assert toolchains(home, [home / ".nvm/state"]) == (home / ".cargo/bin",)
