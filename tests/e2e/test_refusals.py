"""Everything that is refused: the documented status, one clear sentence, no traceback, nothing done."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.driver import SYSTEM_PATH, Box, Done
from tests.e2e.listing import listing

RAN = "the command ran"


def check_sentence(done: Done, status: int, *words: str) -> None:
    """One sentence on stderr that names the words; the command did not run."""
    done.ended(status)
    said = [
        line
        for line in done.err.splitlines()
        # What a run announces before it can fail is not the refusal.
        if not re.match(r"deltabox: (session|continuing session) s\w+", line)
    ]
    assert said, done
    assert said[0].startswith("deltabox: "), done.err
    assert said[-1].endswith((".", "`.")) or len(said) == 1, done.err
    for word in words:
        assert word in done.err, (word, done.err)
    assert RAN not in done.out


Case = tuple[tuple[str, ...], int, tuple[str, ...]]

USAGE: dict[str, Case] = {
    "no verb": ((), 2, ("deltabox --help",)),
    "unknown verb": (("frobnicate",), 2, ("frobnicate",)),
    "unknown flag": (("diff", "--frobnicate"), 2, ("--frobnicate",)),
    "run without a command": (("run",), 125, ("deltabox run --",)),
    "run with an unknown flag": (("run", "--frobnicate", "--", "true"), 125, ("frobnicate",)),
    "run with a flag's value missing": (("run", "--engine"), 125, ("--engine",)),
    "unknown engine": (("run", "--engine", "zfs", "--", "true"), 125, ("zfs", "overlay")),
    "unknown isolation": (("run", "--isolation", "chroot", "--", "true"), 125, ("chroot",)),
    "unknown profile": (("run", "--profile", "god", "--", "true"), 125, ("god",)),
    "unknown network": (("run", "--net", "wifi", "--", "true"), 125, ("wifi",)),
    "unset variable": (("run", "--env", "NO_SUCH", "--", "true"), 125, ("NO_SUCH", "not set")),
    "variable without a name": (("run", "--env", "=x", "--", "true"), 125, ("environment",)),
    "pass of nothing": (("run", "--pass", "/no/such", "--", "true"), 125, ("/no/such", "exist")),
    "pass of a relative path": (("run", "--pass", "rel", "--", "true"), 125, ("rel", "absolute")),
    "pass of the root": (("run", "--pass", "/", "--", "true"), 125, ("--pass /",)),
    "pass of the home": (("run", "--pass", "~/", "--", "true"), 125, ("home",)),
    "limit of nothing known": (("run", "--limit", "sky=1", "--", "true"), 125, ("sky", "K=V")),
    "limit that is no size": (("run", "--limit", "tmp=big", "--", "true"), 125, ("big",)),
    "deny outside": (("run", "--deny", "../x", "--", "true"), 125, ("../x",)),
    "unknown session to run in": (("run", "--session", "s0", "--", "true"), 125, ("s0",)),
    "root as project": (("run", "--project", "/", "--", "true"), 125, ("root directory",)),
    "no such project": (("run", "--project", "/no/such", "--", "true"), 125, ("/no/such",)),
    "no such project to look at": (("diff", "--project", "/no/such"), 2, ("/no/such",)),
    "nothing to diff": (("diff",), 2, ("Nothing is pending",)),
    "nothing to review": (("review",), 2, ("Nothing is pending",)),
    "nothing to commit": (("commit",), 2, ("Nothing is pending",)),
    "nothing to abort": (("abort",), 2, ("Nothing is pending",)),
    "nothing to undo": (("undo",), 2, ("No commit",)),
    "unknown session to commit": (("commit", "--session", "s0"), 2, ("s0",)),
    "unknown commit to undo": (("undo", "c0"), 2, ("c0",)),
    "unknown answer to conflicts": (("commit", "--on-conflict", "pray"), 2, ("pray",)),
    "two forms of diff": (("diff", "--json", "--stat"), 2, ("--stat",)),
}


@pytest.mark.parametrize("name", USAGE)
def test_refused_with_its_status_and_one_sentence(shared: Box, name: str) -> None:
    words, status, named = USAGE[name]
    before = listing(shared.project)
    check_sentence(shared.deltabox(*words), status, *named)
    assert listing(shared.project) == before


def test_refused_runs_leave_no_session(shared: Box) -> None:
    for name in ("unset variable", "pass of nothing", "pass of the home", "deny outside"):
        words, status, _ = USAGE[name]
        shared.deltabox(*words).ended(status)
    assert shared.sessions() == []


def test_command_that_is_not_there_ends_127_and_not_executable_126(box: Box) -> None:
    box.write("plain", "#!/bin/sh\necho hi\n", mode=0o644)
    box.write("broken", "#!/no/such/interpreter\n", mode=0o755)
    check_sentence(box.deltabox("run", "--", "no-such-command"), 127, "no-such-command")
    check_sentence(box.deltabox("run", "--", "./plain"), 126, "plain")
    check_sentence(box.deltabox("run", "--", "./missing"), 127, "missing")
    check_sentence(box.deltabox("run", "--", "./src"), 126, "src")
    assert box.deltabox("run", "--", "./broken").status in (126, 127)
    assert box.sessions() == []


def a_home(box: Box) -> dict[str, str]:
    return {"HOME": str(box.project)}


def above_home(box: Box) -> dict[str, str]:
    return {"HOME": str(box.project / "src")}


def state_inside(box: Box) -> dict[str, str]:
    return {"DELTABOX_STATE_DIR": str(box.project / "state")}


def inside_state(box: Box) -> dict[str, str]:
    return {"DELTABOX_STATE_DIR": str(box.project.parent)}


def relative_state(_: Box) -> dict[str, str]:
    return {"DELTABOX_STATE_DIR": "state"}


def open_state(box: Box) -> dict[str, str]:
    box.state.mkdir()
    box.state.chmod(0o755)
    return {}


def file_as_state(box: Box) -> dict[str, str]:
    box.state.write_text("")
    return {}


PLACES: dict[str, tuple[Callable[[Box], dict[str, str]], tuple[str, ...]]] = {
    "the project is the home": (a_home, ("home directory",)),
    "the project holds the home": (above_home, ("home directory",)),
    "the project holds the state": (state_inside, ("state",)),
    "the project lies in the state": (inside_state, ("state",)),
    "the state is relative": (relative_state, ("DELTABOX_STATE_DIR", "absolute")),
    "the state is open to others": (open_state, ("755", "700")),
    "the state is a file": (file_as_state, ("state",)),
}


@pytest.mark.parametrize("name", PLACES)
def test_places_that_cannot_be_are_refused_before_the_command(box: Box, name: str) -> None:
    prepare, named = PLACES[name]
    env = prepare(box)
    check_sentence(box.deltabox("run", "--", "echo", RAN, env=env), 125, *named)
    assert not (box.project / "state" / "deltabox.db").exists()


CONFIGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "no TOML": ("[engine\n", ("config.toml",)),
    "unknown table": ("[colour]\nname = 'x'\n", ("config.toml", "colour")),
    "unknown key": ("[engine]\nspeed = 'x'\n", ("config.toml", "speed")),
    "unknown engine": ("[engine]\nname = 'zfs'\n", ("config.toml", "engine")),
    "wrong type": ("[isolation]\nnest = 'perhaps'\n", ("config.toml", "nest")),
    "table that is none": ("engine = 'overlay'\n", ("config.toml", "engine")),
    "limit that is no size": ("[limits]\ntmp = 'big'\n", ("big",)),
}


def test_wrong_configuration_names_the_file_and_the_key(box: Box) -> None:
    file = box.home / ".config/deltabox/config.toml"
    file.parent.mkdir(parents=True)
    for content, named in CONFIGS.values():
        file.write_text(content)
        check_sentence(box.deltabox("run", "--", "echo", RAN), 125, *named)
    check_sentence(box.deltabox("doctor"), 2, "config.toml")


WIDER = {
    "another engine": "[engine]\nname = 'git'\n",
    "no isolation": "[isolation]\nname = 'none'\n",
    "a folder": "[pass]\npaths = ['/etc']\n",
    "the network": "[network]\nmode = 'host'\n",
    "an automatic commit": "[review]\nmode = 'commit'\n",
    "limits": "[limits]\ntmp = '1T'\n",
}


def test_project_cannot_give_itself_more(box: Box) -> None:
    for content in WIDER.values():
        box.write("deltabox.toml", content)
        check_sentence(box.deltabox("run", "--", "echo", RAN), 125, "deltabox.toml")


def test_project_can_deny_and_cut_the_network(box: Box) -> None:
    box.write("secret", "hush\n")
    box.write("deltabox.toml", "[deny]\npaths = ['secret']\n[network]\nmode = 'off'\n")
    done = box.keep("cat secret 2>/dev/null || echo hidden").ok()
    assert "hush" not in done.out
    assert "hidden" in done.out
    assert "network off" in done.err


def test_agent_cannot_loosen_the_projects_file_for_its_next_run(box: Box) -> None:
    box.write("secret", "hush\n")
    box.write("deltabox.toml", "[deny]\npaths = ['secret']\n")
    box.keep("rm deltabox.toml; echo x > f").ok()
    done = box.keep("cat secret 2>/dev/null || echo hidden").ok()
    assert done.out == "hidden\n"


def test_paths_outside_the_project_are_refused(box: Box) -> None:
    box.keep("echo x > f").ok()
    outside = box.home / "other"
    outside.write_text("")
    for path in ("../outside", "/etc/passwd", str(outside)):
        for verb in ("commit", "abort", "diff"):
            check_sentence(box.deltabox(verb, path), 2, path)
    assert box.changes() == {"f": "added"}


def path_without(box: Box, program: str) -> str:
    """A search path that has all the system has but one program."""
    folder = box.root / "bin"
    folder.mkdir()
    for entry in SYSTEM_PATH.split(":"):
        for file in Path(entry).iterdir():
            if file.name != program and not os.path.lexists(folder / file.name):
                (folder / file.name).symlink_to(file)
    return str(folder)


def test_without_bubblewrap_nothing_runs_and_doctor_says_why(box: Box) -> None:
    env = {"PATH": path_without(box, "bwrap")}
    assert shutil.which("sh", path=env["PATH"])
    check_sentence(box.deltabox("run", "--", "echo", RAN, env=env), 125, "bubblewrap", "install")
    doctor = box.deltabox("doctor", env=env).ended(4)
    assert "bubblewrap" in doctor.out
    assert "not ready" in doctor.out
    # The control: with it, both work.
    box.deltabox("doctor").ok()
    assert RAN in box.deltabox("run", "--", "echo", RAN).ok().out


def test_engine_that_doctor_calls_missing_is_refused_by_name(box: Box) -> None:
    engines = box.deltabox("doctor", "--json").ok().json["engines"]
    for name in [engine["name"] for engine in engines if not engine["works"]]:
        check_sentence(box.deltabox("run", "--engine", name, "--", "echo", RAN), 125, name)


def test_doctor_reports_in_json_too(box: Box) -> None:
    report = box.deltabox("doctor", "--json").ok().json
    assert report["ready"] is True
    assert {"engines", "isolations", "recovered", "leftovers", "config"} <= report.keys()


def test_help_and_version_need_nothing(box: Box) -> None:
    assert "VERB" in box.deltabox("--help").ok().out
    assert box.deltabox("--version").ok().out.startswith("deltabox ")
    assert "--engine" in box.deltabox("run", "--help").ok().out
    assert not box.state.exists()
