"""Wishes: merged in order, checked in words; a project's own file can only narrow."""

import contextlib
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deltabox import config
from deltabox.config import Config, Limits, Places, check_project, find_project, load, with_limits
from deltabox.errors import BadUsage, Refused


def where(tmp_path: Path, **environ: str) -> Places:
    return config.places({"HOME": str(tmp_path / "home"), **environ})


def user_file(tmp_path: Path, content: str | bytes) -> Places:
    found = where(tmp_path)
    found.config_file.parent.mkdir(parents=True, exist_ok=True)
    found.config_file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return found


def project_file(tmp_path: Path, content: str | bytes) -> Path:
    project = tmp_path / "project"
    project.mkdir(exist_ok=True)
    data = content if isinstance(content, bytes) else content.encode()
    (project / "deltabox.toml").write_bytes(data)
    return project


# places


def test_places_follow_the_environment_in_order(tmp_path: Path) -> None:
    home = (tmp_path / "home").resolve()
    plain = where(tmp_path)
    assert plain.state == home / ".local/state/deltabox"
    assert plain.runtime == plain.state / "run"
    assert plain.config_file == home / ".config/deltabox/config.toml"
    assert plain.sessions == plain.state / "sessions"
    xdg = where(
        tmp_path,
        XDG_STATE_HOME=str(tmp_path / "s"),
        XDG_CONFIG_HOME=str(tmp_path / "c"),
        XDG_RUNTIME_DIR=str(tmp_path),
    )
    assert xdg.state == tmp_path / "s" / "deltabox"
    assert xdg.config_file == tmp_path / "c" / "deltabox" / "config.toml"
    assert xdg.runtime == tmp_path / "deltabox"
    own = where(
        tmp_path,
        XDG_STATE_HOME=str(tmp_path / "s"),
        DELTABOX_STATE_DIR=str(tmp_path / "own"),
        DELTABOX_RUNTIME_DIR=str(tmp_path / "run"),
    )
    assert (own.state, own.runtime) == (tmp_path / "own", tmp_path / "run")


def test_a_runtime_folder_that_is_gone_is_not_used(tmp_path: Path) -> None:
    found = where(tmp_path, XDG_RUNTIME_DIR=str(tmp_path / "gone"))
    assert found.runtime == found.state / "run"


@pytest.mark.parametrize(
    "variable",
    [
        *("HOME", "DELTABOX_STATE_DIR", "DELTABOX_RUNTIME_DIR"),
        *("XDG_STATE_HOME", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME"),
    ],
)
def test_a_relative_path_in_the_environment_is_refused_by_name(
    tmp_path: Path, variable: str
) -> None:
    with pytest.raises(BadUsage, match=variable):
        where(tmp_path, **{variable: "relative/path"})


def test_the_state_is_known_by_its_real_path(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    found = where(tmp_path, DELTABOX_STATE_DIR=str(tmp_path / "link" / "state"))
    assert found.state == tmp_path / "real" / "state"


@pytest.mark.skipif(os.geteuid() != 0, reason="sudo runs as root")
@pytest.mark.parametrize("uid", ["", "0", "-1", "²", "x", "9" * 5000])
def test_a_strange_sudo_variable_changes_nobody(tmp_path: Path, uid: str) -> None:
    assert where(tmp_path, SUDO_UID=uid, SUDO_GID="x").uid == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="sudo runs as root")
def test_under_sudo_the_invoking_user_owns_the_session(tmp_path: Path) -> None:
    found = where(tmp_path, SUDO_UID="65534", SUDO_GID="65533")
    assert (found.uid, found.gid) == (65534, 65533)
    assert found.home != (tmp_path / "home").resolve()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may be under sudo")
def test_an_ordinary_user_cannot_become_another_by_a_variable(tmp_path: Path) -> None:
    found = where(tmp_path, SUDO_UID="0", SUDO_GID="0")
    assert (found.uid, found.gid) == (os.geteuid(), os.getegid())


# the project


def test_the_project_is_the_nearest_marked_ancestor(tmp_path: Path) -> None:
    deep = tmp_path / "outer" / "inner" / "deep"
    deep.mkdir(parents=True)
    (tmp_path / "outer" / ".git").write_text("gitdir: elsewhere")
    assert find_project(deep, None) == tmp_path / "outer"
    (tmp_path / "outer" / "inner" / "deltabox.toml").symlink_to("dangling")
    assert find_project(deep, None) == tmp_path / "outer" / "inner"
    assert find_project(deep, str(deep)) == deep


def test_the_project_is_named_by_its_real_path(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert find_project(tmp_path, str(tmp_path / "link")) == tmp_path / "real"


def test_a_named_project_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in ("file", "none"):
        with pytest.raises(BadUsage, match=name):
            find_project(tmp_path, str(tmp_path / name))


def test_projects_that_would_hold_what_must_stay_outside_are_refused(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    run = tmp_path / "shop" / "run"
    found = where(tmp_path, DELTABOX_STATE_DIR=str(tmp_path / "work" / "state"))
    for bad in (Path("/"), found.home, tmp_path, tmp_path / "work", found.state, found.sessions):
        with pytest.raises(Refused):
            check_project(bad, found)
    check_project(tmp_path / "shop", found)
    check_project(found.home / "project", found)
    check_project(Path(f"{found.state}-beside"), found)
    with pytest.raises(Refused, match="approve itself"):
        check_project(tmp_path / "shop", replace(found, runtime=run))


# the user's file


def test_the_users_file_sets_what_the_flags_would(tmp_path: Path) -> None:
    found = user_file(
        tmp_path,
        """
        [engine]
        name = "cbcow"
        [isolation]
        name = "deltabox"
        profile = "read-only"
        nest = true
        env = ["A", "B=c"]
        [network]
        mode = "off"
        [deny]
        paths = ["secrets"]
        readonly = ["vendor"]
        [pass]
        paths = ["~/.cache:cow"]
        [review]
        mode = "keep"
        durability = "strict"
        [limits]
        tmp = "512M"
        nofile = 100
        [trash]
        keep_days = 0
        """,
    )
    assert load(found) == Config(
        engine="fuse",
        isolation="bubblewrap",
        profile="read-only",
        nest=True,
        env=("A", "B=c"),
        network="off",
        deny=("secrets",),
        ro=("vendor",),
        passes=("~/.cache:cow",),
        review="keep",
        durability="strict",
        limits=Limits(tmp=512 << 20, nofile=100),
        trash=replace(Config().trash, keep_days=0),
    )


def test_without_a_file_the_defaults_hold(tmp_path: Path) -> None:
    assert load(where(tmp_path), tmp_path) == Config()


def test_a_users_file_may_be_a_link_into_a_dotfiles_folder(tmp_path: Path) -> None:
    found = user_file(tmp_path, "")
    found.config_file.unlink()
    (tmp_path / "dotfiles.toml").write_text('[network]\nmode = "off"\n')
    found.config_file.symlink_to(tmp_path / "dotfiles.toml")
    assert load(found).network == "off"
    (tmp_path / "dotfiles.toml").unlink()
    with pytest.raises(BadUsage, match="cannot be read"):  # wishes that are lost are not defaults
        load(found)


WRONG = [
    ("[engine]\nname = 'best'", "engine"),
    ("[isolation]\nname = 'native'", "isolation"),
    ("[isolation]\nprofile = 'all'", "profile"),
    ("[review]\nmode = 'yes'", "review"),
    ("[network]\nmode = 1", "network"),
    ("[deny]\npaths = 'one'", "deny"),
    ("[deny]\npaths = [1]", "deny"),
    ("[deny]\nhide = []", "hide"),
    ("[nonsense]\nx = 1", "nonsense"),
    ("engine = 'overlay'", "engine"),
    ("limits = 5", "limits"),
    ("[limits]\ntpm = 5", "tpm"),
    ("[limits]\ntmp = '12Q'", "12Q"),
    ("[limits]\ntmp = '²'", "²"),
    ("[limits]\ntmp = ''", "size"),
    ("[limits]\ntmp = 0", "tmp"),
    ("[limits]\ntmp = -1", "tmp"),
    ("[limits]\ntmp = 1.5", "tmp"),
    ("[limits]\ntmp = true", "tmp"),
    ("[limits]\nnofile = 0", "nofile"),
    ("[limits]\ncore = 99999999999999999999999999", "core"),
    ("[trash]\nkeep_days = -1", "keep_days"),
    ("[[limits]]\ntmp = 1", "limits"),
    ("[engine", "cannot be read"),
    ("x = " + "[" * 20_000, "cannot be read"),
    (b"[engine]\nname = '\xff'", "cannot be read"),
    (b"#" * (config.MAX_FILE_BYTES + 1), "longer"),
]


@pytest.mark.parametrize(("content", "named"), WRONG)
def test_a_wrong_file_is_refused_by_name_of_file_and_key(
    tmp_path: Path, content: str | bytes, named: str
) -> None:
    found = user_file(tmp_path, content)
    with pytest.raises(BadUsage) as refused:
        load(found)
    assert str(found.config_file) in refused.value.sentence
    assert named in refused.value.sentence


toml_values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.booleans(), st.integers(), st.text(max_size=5)),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)


def toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, str):
        return '"' + "".join(f"\\U{ord(c):08x}" for c in value) + '"'
    return str(value)


tables = st.sampled_from(
    ["engine", "isolation", "network", "deny", "pass", "review", "limits", "trash", "x"]
)
keys = st.sampled_from(
    ["name", "mode", "paths", "readonly", "env", "nest", "tmp", "keep_days", "y"]
)


@given(st.dictionaries(tables, st.dictionaries(keys, toml_values, max_size=3), max_size=3))
def test_any_file_is_taken_or_refused_in_words(
    tmp_path_factory: pytest.TempPathFactory, data: dict[str, dict[str, Any]]
) -> None:
    lines = []
    for table, content in data.items():
        lines += [f"[{table}]", *(f"{key} = {toml(value)}" for key, value in content.items())]
    folder = tmp_path_factory.mktemp("any")
    found = settings(user_file(folder, "\n".join(lines)), None)
    if isinstance(found, Config):
        assert all(isinstance(v, tuple) for v in (found.deny, found.ro, found.passes, found.env))
        assert all(type(v) is int and v >= 0 for v in asdict(found.limits).values())
    else:
        assert found.isprintable()
    found = settings(where(folder / "none"), project_file(folder, "\n".join(lines)))
    if isinstance(found, Config):
        assert found == replace(Config(), deny=found.deny, ro=found.ro, network=found.network)
        assert found.network in ("host", "off")
    else:
        assert found.isprintable()


def settings(found: Places, project: Path | None) -> Config | str:
    """What the files say, or the sentence of their refusal."""
    try:
        return load(found, project)
    except BadUsage as exc:
        return exc.sentence


@given(st.text(max_size=12))
@example("9" * 5000)
@example("²M")
@example("\u0661\u0662M")
@example("1_000")
@example("-5")
@example(" 12 MiB ")
def test_a_size_is_a_number_or_refused(text: str) -> None:
    number = text.strip().rstrip("iIbBkKmMgGtT")
    if not (number.isascii() and number.isdigit()):
        with pytest.raises(BadUsage):
            with_limits(Config(), [f"common={text}"])
        return
    with contextlib.suppress(BadUsage):  # too large, or letters that make no unit
        found = with_limits(Config(), [f"common={text}"])
        assert int(number) <= found.limits.common <= config.MAX_NUMBER


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("12", 12), ("1K", 1024), ("2kib", 2048), ("3M", 3 << 20), ("1g", 1 << 30), ("1TB", 1 << 40)],
)  # fmt: skip
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert with_limits(Config(), [f"common={text}"]).limits.common == size


def test_limits_by_flag_change_only_what_is_named() -> None:
    found = with_limits(Config(), ["tmp=1M", "nofile=64", "tmp=2M"])
    assert found.limits == Limits(tmp=2 << 20, nofile=64)
    assert with_limits(Config(), []) == Config()
    for wrong in ("tmp", "none=1", "=1", "tmp=", "tmp=0", "tmp=-1", "nofile=0", "tmp=99999999T"):
        with pytest.raises(BadUsage, match=r"limit|size"):
            with_limits(Config(), [wrong])


# the project's file


def test_a_projects_file_adds_to_what_is_denied_and_cuts_the_network(tmp_path: Path) -> None:
    found = user_file(tmp_path, "[deny]\npaths = ['mine']\n")
    project = project_file(
        tmp_path, "[deny]\npaths = ['secrets']\nreadonly = ['vendor']\n[network]\nmode = 'off'\n"
    )
    merged = load(found, project)
    assert merged == replace(Config(), deny=("mine", "secrets"), ro=("vendor",), network="off")


WIDER = [
    "[network]\nmode = 'host'",
    "[network]\nmode = 'off'\nmore = 1",
    "network = 'off'",
    "network = false",
    "[isolation]\nname = 'none'",
    "[isolation]\nenv = ['SECRET']",
    "[pass]\npaths = ['/']",
    "[engine]\nname = 'git'",
    "[review]\nmode = 'commit'",
    "[limits]\ntmp = 1",
    "[trash]\nkeep_days = 0",
    "[deny]\nallow = ['x']",
    "deny = ['x']",
    "[deny]\npaths = 'x'",
]


@pytest.mark.parametrize("content", WIDER)
def test_a_projects_file_can_only_narrow(tmp_path: Path, content: str) -> None:
    with pytest.raises(BadUsage, match=r"deltabox\.toml"):
        load(where(tmp_path), project_file(tmp_path, content))


def test_the_same_words_in_the_users_file_are_obeyed(tmp_path: Path) -> None:
    # The control: what is refused above is refused for whose file it is, not for its form.
    for content, check in (
        (WIDER[4], ("isolation", "none")),
        (WIDER[6], ("passes", ("/",))),
        (WIDER[8], ("review", "commit")),
    ):
        assert getattr(load(user_file(tmp_path, content)), check[0]) == check[1]


def test_a_projects_file_that_is_a_link_is_refused(tmp_path: Path) -> None:
    project = project_file(tmp_path, "")
    (project / "deltabox.toml").unlink()
    (tmp_path / "elsewhere").write_text("[deny]\npaths = []\n")
    (project / "deltabox.toml").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadUsage, match="cannot be read"):
        load(where(tmp_path), project)


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_a_projects_file_that_is_no_file_is_refused_without_waiting(
    tmp_path: Path, kind: str
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    before = len(os.listdir("/proc/self/fd"))
    if kind == "fifo":
        os.mkfifo(project / "deltabox.toml")
    else:
        (project / "deltabox.toml").mkdir()
    with pytest.raises(BadUsage, match="no regular file"):
        load(where(tmp_path), project)
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_a_strangers_file_holds_cannot_act_on_the_terminal(tmp_path: Path) -> None:
    key = '"\\u001b[2J\\u202e"'
    for content in (
        f"[{key}]\nx = 1\n",
        f"{key} = 1\n",
        f"[limits]\n{key} = 1\n",
        f"[deny]\n{key} = []\n",
    ):
        for found, project in (
            (where(tmp_path / "none"), project_file(tmp_path, content)),
            (user_file(tmp_path, content), None),
        ):
            told = settings(found, project)
            assert isinstance(told, str)
            assert told.isprintable()
