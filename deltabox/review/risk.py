"""How dangerous a change is to the person who takes it, judged by what changed in the content.

Pure: gets bytes, gives a tier and a reason. Must not decide what is committed; the plan does.
"""

import json
from typing import Any

from deltabox.paths import WorkspacePath, display, name
from deltabox.review.model import Risk, Tier

# Read by a shell at start, or by direnv on `cd`: they run without any further act of a person.
_SHELL_START = frozenset(
    b".envrc .bashrc .bash_profile .bash_login .bash_logout .bash_aliases .profile .zshrc .zshenv"
    b" .zprofile .zlogin .zlogout .kshrc .cshrc .tcshrc .login .xprofile .xinitrc .inputrc".split()
)
# Run by an editor, a language's start-up or a tool as soon as the folder is opened or used.
_AUTOMATIC = {
    b".mcp.json": "starts programs for agents that trust this folder",
    b".exrc": "is run by vi when the folder is opened",
    b".vimrc": "is run by vim",
    b".nvim.lua": "is run by neovim when the folder is opened",
    b".lvimrc": "is run by vim plug-ins",
    b".dir-locals.el": "is evaluated by Emacs",
    b"sitecustomize.py": "is run at every start of Python",
    b"usercustomize.py": "is run at every start of Python",
    b"devcontainer.json": "runs commands when the container is made",
    b".devcontainer.json": "runs commands when the container is made",
    b".pre-commit-config.yaml": "names programs that run at git commit",
    b".yarnrc.yml": "can replace the package manager's own program",
    b".npmrc": "changes what the package manager runs and whom it asks",
    b"mise.toml": "can run hooks when the folder is entered",
    b".mise.toml": "can run hooks when the folder is entered",
    b".gdbinit": "is run by gdb",
    b".lldbinit": "is run by lldb",
}
_AUTOMATIC_BELOW = {
    (b".vscode", b"tasks.json"): "holds tasks that the editor can run by itself",
    (b".vscode", b"launch.json"): "holds programs that the editor starts",
    (b".vscode", b"settings.json"): "can name programs that the editor starts",
    (b".zed", b"tasks.json"): "holds tasks that the editor can run",
    (b".cargo", b"config.toml"): "can name programs that cargo starts",
    (b".cargo", b"config"): "can name programs that cargo starts",
    (b".cursor", b"mcp.json"): "starts programs for the editor's agent",
    (b".vscode", b"mcp.json"): "starts programs for the editor's agent",
}
_AUTOMATIC_DIRS = {
    b".husky": "runs at git commit",
    b".idea": "can hold programs that the editor starts",
    b".githooks": "runs at git commit where hooks are kept here",
}
_AGENT_SETTINGS = {
    (b".claude", b"settings.json"),
    (b".claude", b"settings.local.json"),
    (b".gemini", b"settings.json"),
    (b".codex", b"config.toml"),
}
_NOTED = {
    b"Makefile": "build recipe",
    b"makefile": "build recipe",
    b"GNUmakefile": "build recipe",
    b"justfile": "build recipe",
    b"Dockerfile": "build recipe",
    b".gitlab-ci.yml": "continuous integration",
    b".travis.yml": "continuous integration",
    b"Jenkinsfile": "continuous integration",
    b"AGENTS.md": "instructions to agents",
    b"CLAUDE.md": "instructions to agents",
    b"GEMINI.md": "instructions to agents",
}

_KNOWN_NAMES = frozenset({*_AUTOMATIC, *_NOTED, b"package.json", b"config", b"config.worktree"})

# git-config(1): keys whose value is a program, or that pull in files that could hold such keys.
_PROGRAM_KEYS = frozenset(
    {
        *("core.hookspath", "core.sshcommand", "core.editor", "core.pager", "core.gitproxy"),
        *("core.askpass", "core.alternaterefscommand", "core.worktree", "core.attributesfile"),
        *("diff.external", "sequence.editor", "gpg.program", "gpg.ssh.defaultkeycommand"),
        *("interactive.difffilter", "init.templatedir", "include.path", "imap.tunnel"),
        *("uploadpack.packobjectshook", "sendemail.smtpserver", "sendemail.sendmailcmd"),
        *("sendemail.tocmd", "sendemail.cccmd", "credential.helper"),
    }
)
_PROGRAM_PATTERNS = frozenset(  # section and last part, whatever subsection stands between
    {
        *("credential helper", "diff command", "diff textconv", "merge driver", "filter clean"),
        *("filter smudge", "filter process", "gpg program", "remote uploadpack"),
        *("remote receivepack", "remote vcs", "browser cmd", "browser path", "difftool cmd"),
        *(
            "difftool path",
            "mergetool cmd",
            "mergetool path",
            "guitool cmd",
            "man cmd",
            "man path",
        ),
        *("includeif path", "trailer command", "trailer cmd", "tar command"),
    }
)


def assess(path: WorkspacePath, before: bytes | None, after: bytes | None) -> Risk | None:
    """The tier of a change of `path` from `before` to `after` (None: absent, or not a small file).

    Deletions carry no risk. Contents beyond the caller's bound come as None and are judged by name.
    """
    base_name = name(path)
    if (
        base_name not in _KNOWN_NAMES
        and not path.startswith(b".")
        and path.find(b"/.") < 0
        and not base_name.endswith(b".pth")
    ):
        return None  # nearly every file: nothing in its path could matter
    if after is None:
        return _by_name(path, base_name)
    if base_name in (b"config", b".gitmodules", b"config.worktree", b".gitconfig"):
        keys = program_keys(after) - program_keys(before or b"")
        if keys:
            shown = ", ".join(
                sorted(display(key.encode("utf-8", "surrogateescape")) for key, _ in keys)
            )
            return Risk("refused", f"git configuration that starts programs: {shown}")
    if base_name == b"package.json":
        return _package_scripts(before, after)
    if tuple(path.split(b"/")[-2:]) in _AGENT_SETTINGS:
        return _agent_settings(before, after)
    return _by_name(path, base_name)


def _by_name(path: WorkspacePath, base_name: bytes) -> Risk | None:
    parts = path.split(b"/")
    reason: str | None = None
    tier: Tier = "warned"
    if b".git" in parts[:-1]:
        inside = parts[parts.index(b".git") + 1 :]
        if inside[0] == b"modules" and b"hooks" in inside[:-1]:
            inside = inside[inside.index(b"hooks") :]
        if inside[0] == b"hooks" and not base_name.endswith(b".sample"):
            return Risk("refused", "git hook: runs on your next git command")
        if inside[-2:] in ([b"info", b"attributes"], [b"objects", b"alternates"]):
            return Risk("warned", "changes what git reads")
        return None
    if base_name == b".git":
        return Risk("refused", "redirects git to another directory")
    if base_name in _SHELL_START:
        return Risk("refused", "run by your shell at start or on entering the folder")
    if base_name in _AUTOMATIC:
        reason = _AUTOMATIC[base_name]
    elif len(parts) > 1 and (parts[-2], base_name) in _AUTOMATIC_BELOW:
        reason = _AUTOMATIC_BELOW[(parts[-2], base_name)]
    elif base_name.endswith(b".pth"):
        reason = "is read, and can be run, at every start of Python"
    else:
        for part in parts[:-1]:
            if part in _AUTOMATIC_DIRS:
                reason = _AUTOMATIC_DIRS[part]
    if reason is None:
        tier = "noted"
        reason = _NOTED.get(base_name)
        if reason is None and parts[:2] in ([b".github", b"workflows"], [b".github", b"actions"]):
            reason = "continuous integration"
        if reason is None and parts[0] in (b".circleci", b".buildkite"):
            reason = "continuous integration"
    return None if reason is None else Risk(tier, reason)


def _json(data: bytes | None) -> dict[str, Any]:
    try:
        value = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _package_scripts(before: bytes | None, after: bytes) -> Risk | None:
    old, new = _json(before).get("scripts") or {}, _json(after).get("scripts") or {}
    if old == new:
        return None
    if not isinstance(new, dict) or not isinstance(old, dict):
        return Risk("noted", "package scripts changed")
    changed = sorted(k for k in old.keys() | new.keys() if old.get(k) != new.get(k))
    hooks = {"preinstall", "install", "postinstall", "prepare", "prepublish"} & set(changed)
    words = "scripts that run at install changed" if hooks else "package scripts changed"
    return Risk("noted", words)


def _agent_settings(before: bytes | None, after: bytes) -> Risk | None:
    if not after.lstrip().startswith(b"{"):
        return Risk("warned", "settings of an agent")
    old, new = _json(before), _json(after)
    if not new:
        return Risk("warned", "settings of an agent")
    starts = ("hooks", "mcpServers", "statusLine", "apiKeyHelper", "env", "permissions")
    changed = [key for key in starts if new.get(key) and old.get(key) != new.get(key)]
    return Risk("warned", f"settings of an agent: {', '.join(changed)}") if changed else None


def program_keys(config: bytes) -> set[tuple[str, str]]:
    """The (key, value) pairs of a git configuration that start programs or include more of it.

    Parses the way git does as far as it matters: section headers with and without subsection,
    several on a line, continuation lines, quotes, comments. What cannot be read is no key: git
    would refuse such a file too.
    """
    return {(key, value) for key, value in parse_config(config) if starts_program(key, value)}


def starts_program(key: str, value: str) -> bool:
    section, _, rest = key.partition(".")
    subsection, _, last = rest.rpartition(".")
    if section == "alias" or (section == "submodule" and last == "update"):
        return value.lstrip().startswith("!")
    if section == "pager":
        return value.lower() not in ("true", "false", "yes", "no", "on", "off", "1", "0", "")
    if key == "core.fsmonitor":  # true is git's own daemon
        return value.lower() not in ("true", "false", "yes", "no", "on", "off", "1", "0", "")
    if section == "protocol":
        return last == "allow"
    if section in ("remote", "url", "submodule") and value.lstrip().startswith("ext::"):
        return True
    if section == "url" and subsection.startswith("ext::"):
        return True
    return key in _PROGRAM_KEYS or f"{section} {last}" in _PROGRAM_PATTERNS


def parse_config(config: bytes) -> list[tuple[str, str]]:
    """(key, value) in file order; key is `section.last` or `section.Subsection.last`."""
    text = config.decode("utf-8", "surrogateescape").replace("\r\n", "\n").removeprefix("\ufeff")
    pairs: list[tuple[str, str]] = []
    section = ""
    lines = iter(text.split("\n"))
    for line in lines:
        rest = line.strip()
        while rest.startswith("["):
            section, rest = _header(rest)
        if not rest or rest[0] in "#;":
            continue
        key, equals, value = rest.partition("=")
        value = value.lstrip()
        while value.endswith("\\") and (len(value) - len(value.rstrip("\\"))) % 2:
            value = value[:-1] + next(lines, "")
        pairs.append((f"{section}.{key.strip().lower()}", _value(value) if equals else "true"))
    return pairs


def _header(rest: str) -> tuple[str, str]:
    """A `[section "Sub"]` at the start of `rest`: its dotted name, and what follows it."""
    quoted = False
    out = []
    at = 1
    while at < len(rest):
        ch = rest[at]
        if quoted and ch == "\\" and at + 1 < len(rest):
            at += 1
            out.append(rest[at])
        elif ch == '"':
            quoted = not quoted
            out.append("\0")
        elif ch == "]" and not quoted:
            break
        else:
            out.append(ch)
        at += 1
    head, _, sub = "".join(out).partition("\0")
    dotted = head.strip().lower()
    if sub:
        dotted += "." + sub.rstrip("\0")
    return dotted, rest[at + 1 :].strip()


def _value(raw: str) -> str:
    """Unquote a value; a comment ends it outside quotes."""
    out, quoted, escaped = [], False, False
    for ch in raw:
        if escaped:
            out.append({"n": "\n", "t": "\t", "b": "\b"}.get(ch, ch))
            escaped = False
        elif ch == "\\":
            escaped = True
        elif ch == '"':
            quoted = not quoted
        elif ch in "#;" and not quoted:
            break
        else:
            out.append(ch)
    return "".join(out).strip()
