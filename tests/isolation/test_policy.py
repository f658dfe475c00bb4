"""The policy as data: what is refused, what goes in, in which order bubblewrap is told."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deltabox.errors import BadUsage, Refused
from deltabox.isolation import bubblewrap
from deltabox.isolation.policy import (
    Facts,
    File,
    Link,
    SandboxPolicy,
    Wish,
    build,
    is_graft,
    view_trees,
)

HOME, PROJECT = Path("/home/u"), Path("/home/u/work/p")
FACTS = Facts(
    project=PROJECT,
    home=HOME,
    user="u",
    uid=1001,
    gid=1001,
    machine="x86_64",
    system=(Path("/usr"), Path("/etc/alternatives")),
    system_links=(Link(Path("/bin"), "usr/bin"),),
    resolv_conf=b"nameserver 192.0.2.1\n",
    hosts=b"192.0.2.2 intranet\n",
    environ=(
        ("PATH", "/usr/bin:rel:/bin"),
        ("LC_ALL", "C"),
        ("AWS_SECRET", "x"),
        ("SHELL", "/bin/zsh"),
    ),
)


def policy(facts: Facts = FACTS, **wish: Any) -> SandboxPolicy:
    return build(facts, Wish(**({"cwd": PROJECT} | wish)))


def content(made: SandboxPolicy, path: str) -> bytes | None:
    return next((f.content for f in made.files if f.dest == Path(path)), None)


@pytest.mark.parametrize(
    ("project", "home", "trees"),
    [
        ("/home/u/p", "/home/u", ["/home/u", "/tmp"]),
        ("/srv/p", "/home/u", ["/home/u", "/srv/p", "/tmp"]),
        ("/tmp/p", "/tmp/h", ["/tmp"]),
        ("/home/u2", "/home/u", ["/home/u", "/home/u2", "/tmp"]),
    ],
)
def test_trees_are_the_outermost_folders(project: str, home: str, trees: list[str]) -> None:
    assert view_trees(Path(project), Path(home)) == tuple(map(Path, trees))


@pytest.mark.parametrize(
    "bad", ["/", "/usr", "/etc", "/etc/x", "/proc/1", "/sys", "/dev/shm/p", "/tmp", "/var", "/run"]
)
def test_folder_of_the_system_is_no_project(bad: str) -> None:
    with pytest.raises(Refused, match="cannot be the project"):
        policy(replace(FACTS, project=Path(bad)))


def test_project_that_holds_home_is_refused() -> None:
    for project in (HOME, Path("/home")):
        with pytest.raises(Refused, match="home directory"):
            policy(replace(FACTS, project=project))


def test_root_ids_are_refused() -> None:
    for facts in (replace(FACTS, uid=0), replace(FACTS, gid=0)):
        with pytest.raises(Refused, match="never runs as uid or gid 0"):
            policy(facts)


def test_read_write_profile_is_refused_with_another_way() -> None:
    with pytest.raises(Refused, match=r"not available yet.*--pass PATH:rw"):
        policy(profile="read-write")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/home/u/.cargo/bin", "lies where the workspace stands"),
        ("/tmp/tool", "lies where the workspace stands"),
        ("/home", "contains the home directory"),
        ("/var/lib/state/deltabox", "no sandbox may see"),
        ("/var/lib/state", "no sandbox may see"),
        ("/var/lib/state/deltabox/sessions/1", "no sandbox may see"),
        ("relative", "absolute path"),
        ("/a/../etc", "absolute path"),
    ],
)
def test_host_path_that_would_show_too_much_is_refused(path: str, words: str) -> None:
    hidden = (Path("/var/lib/state/deltabox"),)
    policy(replace(FACTS, hidden=hidden, read_only=(Path("/srv/tool"),)))
    with pytest.raises(Refused, match=words):
        policy(replace(FACTS, hidden=hidden, read_only=(Path(path),)))


def test_grafts_are_what_lies_where_the_view_stands() -> None:
    assert is_graft(Path("/home/u/.nvm"), PROJECT, HOME)
    assert is_graft(Path("/tmp/x"), PROJECT, HOME)
    assert not is_graft(Path("/home/u2/.nvm"), PROJECT, HOME)


def test_environment_is_an_allow_list() -> None:
    env = dict(policy().env)
    assert env["PATH"] == "/usr/bin:/bin"
    assert (env["HOME"], env["USER"], env["DELTABOX"], env["PWD"]) == (
        str(HOME),
        "u",
        "1",
        str(PROJECT),
    )
    assert env["LC_ALL"] == "C"
    assert "AWS_SECRET" not in env
    assert "TMPDIR" not in env
    named = dict(policy(named_env=(("AWS_SECRET", "y"), ("LD_PRELOAD", "/x.so"))).env)
    assert (named["AWS_SECRET"], named["LD_PRELOAD"]) == ("y", "/x.so")
    assert dict(policy(env=(("AWS_SECRET", "z"),)).env)["AWS_SECRET"] == "z"


@pytest.mark.parametrize(
    "name", ["LD_PRELOAD", "LD_LIBRARY_PATH", "BASH_ENV", "ENV", "NODE_OPTIONS", "GIT_SSH_COMMAND"]
)
def test_risky_variable_is_taken_from_the_command_line_only(name: str) -> None:
    with pytest.raises(Refused, match=f"write --env {name}=VALUE"):
        policy(env=((name, "x"),))
    assert name not in dict(policy(replace(FACTS, environ=((name, "x"),))).env)


@pytest.mark.parametrize("pair", [("", "x"), ("A=B", "x"), ("A", "x\0y"), ("A\0B", "x")])
def test_what_cannot_be_a_variable_is_refused(pair: tuple[str, str]) -> None:
    with pytest.raises(BadUsage, match="environment variable"):
        policy(named_env=(pair,))


def test_git_identity_goes_by_environment() -> None:
    env = dict(policy(replace(FACTS, git_identity=("A B", "a@b"))).env)
    assert {env[f"GIT_{who}_NAME"] for who in ("AUTHOR", "COMMITTER")} == {"A B"}
    assert {env[f"GIT_{who}_EMAIL"] for who in ("AUTHOR", "COMMITTER")} == {"a@b"}


def test_account_files_hold_one_user_whatever_the_name() -> None:
    made = policy(replace(FACTS, user="u:x\nroot2:x:0:0", uid=1234, gid=1235))
    text = (content(made, "/etc/passwd") or b"").decode()
    assert [line.split(":")[2] for line in text.splitlines()] == ["0", "1234", "65534"]
    assert "1234:1235" in text


def test_network_files_follow_the_network() -> None:
    off, host = policy(), policy(network="host")
    assert content(off, "/etc/resolv.conf") is None
    assert b"intranet" not in (content(off, "/etc/hosts") or b"")
    assert content(host, "/etc/resolv.conf") == FACTS.resolv_conf
    assert b"intranet" in (content(host, "/etc/hosts") or b"")


def test_own_account_files_win_over_the_hosts() -> None:
    made = policy(
        replace(FACTS, etc=(File(Path("/etc/passwd"), b"theirs"), File(Path("/etc/x"), b"y")))
    )
    assert content(made, "/etc/passwd") != b"theirs"
    assert content(made, "/etc/x") == b"y"
    assert len({f.dest for f in made.files}) == len(made.files)


def test_read_only_profile_gives_temporary_space_outside_the_trees() -> None:
    made = policy(profile="read-only")
    assert {(str(t.dest), t.writable) for t in made.trees} == {("/home/u", False), ("/tmp", True)}
    assert "TMPDIR" not in dict(made.env)
    below_tmp = policy(replace(FACTS, project=Path("/tmp/p")), profile="read-only")
    assert not any(t.writable for t in below_tmp.trees)
    assert dict(below_tmp.env)["TMPDIR"] == "/var/tmp"


def test_directories_are_made_above_mounts_and_never_below() -> None:
    made = {str(d) for d in policy(replace(FACTS, project=Path("/home/u/a/b"))).directories}
    assert {"/home", "/etc", "/var", "/run"} <= made
    assert not {d for d in made if d.startswith(("/home/u", "/tmp", "/usr", "/proc", "/dev"))}


def arguments(made: SandboxPolicy) -> list[str]:
    sources = {bind: 10 + n for n, bind in enumerate((*made.system, *made.over_proc))}
    contents = {file: 50 + n for n, file in enumerate(made.files)}
    return [a.decode() for a in bubblewrap.arguments(made, sources, contents)]


def test_bubblewrap_is_told_everything_in_order() -> None:
    args = arguments(policy(replace(FACTS, proc_readonly=(Path("/proc/sys"),))))
    assert args[:6] == [
        *("--unshare-user", "--unshare-all", "--as-pid-1", "--cap-drop", "ALL", "--disable-userns")
    ]
    assert " ".join(args).index("--ro-bind-fd 10 /") < args_at(args, "--proc /proc")
    order = [
        args_at(args, part)
        for part in (
            "--ro-bind-fd 11 /usr",
            "--proc /proc",
            "--ro-bind-fd 12 /proc/sys",
            "--size 536870912 --tmpfs /dev/shm",
            "--symlink usr/bin /bin",
            "--bind /home/u /home/u",
            "--bind /tmp /tmp",
            "--remount-ro /dev",
            "--remount-ro / --chdir /",
        )
    ]
    assert order == sorted(order)
    for never in ("--die-with-parent", "--new-session", "--share-net", "--setenv", "--dev-bind"):
        assert never not in args


def args_at(args: list[str], part: str) -> int:
    text = f"{' '.join(args)} "
    assert f"{part} " in text, part
    return text.index(f"{part} ")


def test_wishes_change_only_their_own_arguments() -> None:
    plain = arguments(policy())
    assert [a for a in plain if a != "--disable-userns"] == arguments(policy(nest=True))
    shared = arguments(policy(network="host"))
    assert shared[2] == "--share-net"
    assert "--ro-bind" in arguments(policy(profile="read-only"))


def test_packed_options_cannot_be_split() -> None:
    assert bubblewrap.packed([b"--a", b"b c\n"]) == b"--a\0b c\n\0"
    with pytest.raises(ValueError, match="NUL"):
        bubblewrap.packed([b"--a\0--b"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (b"bubblewrap 0.8.0\n", (0, 8, 0)),
        (b"bubblewrap 0.11.1", (0, 11, 1)),
        (b"", ()),
        (b"x y", ()),
    ],
)
def test_version_is_read_or_unknown(words: bytes, expected: tuple[int, ...]) -> None:
    assert bubblewrap.version(words) == expected
    assert (bubblewrap.version(words) >= bubblewrap.MINIMUM_VERSION) == bool(expected)
