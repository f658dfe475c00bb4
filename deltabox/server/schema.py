"""The protocol's reference, made from the structs: JSON Schema for programs, tables for people.

What a docstring and a struct say is what the documentation says; nothing is written down twice.
"""

import inspect
import json
from collections.abc import Iterable
from typing import Any

import msgspec

from deltabox.protocol import fs_messages as f
from deltabox.protocol import messages as m
from deltabox.server import connection, owner
from deltabox.server.dispatch import Method

NOTIFICATIONS: dict[str, Any] = {
    "exec.output": m.ExecOutput,
    "exec.exit": m.ExecExit,
    "event": m.Event,
    "fs.hits": f.SearchHits,
}
ASKED: dict[str, tuple[Any, Any]] = {"approval.request": (m.Approval, m.ApprovalAnswer)}
BEGIN, END = "<!-- generated: methods -->", "<!-- end of generated -->"


def methods() -> dict[str, Method]:
    return dict(sorted({**connection.METHODS, **owner.table()}.items()))


def schema() -> dict[str, Any]:
    """{methods: {name: {params, result}}, notifications, requests, $defs}; refs point to $defs."""
    table = methods()
    types = [t for method in table.values() for t in (method.params, *_results(method))]
    types += [*NOTIFICATIONS.values(), *(t for pair in ASKED.values() for t in pair)]
    refs, defs = msgspec.json.schema_components(types, ref_template="#/$defs/{name}")
    found = iter(refs)
    described: dict[str, Any] = {}
    for name, method in table.items():
        described[name] = {"description": _about(method), "params": next(found)}
        results = [next(found) for _ in _results(method)]
        described[name]["result"] = results[0] if len(results) == 1 else {"anyOf": results}
    notifications = {name: next(found) for name in NOTIFICATIONS}
    requests = {name: {"params": next(found), "result": next(found)} for name in ASKED}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "deltabox protocol",
        "version": m.VERSION,
        "methods": described,
        "notifications": notifications,
        "requests": requests,
        "$defs": dict(sorted(defs.items())),
    }


def _results(method: Method) -> tuple[Any, ...]:
    return method.result if isinstance(method.result, tuple) else (method.result or dict,)


def as_json() -> str:
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


def as_markdown() -> str:
    """Each method with its parameters and result, by groups; the generated part of docs/protocol.md."""
    whole = schema()
    lines: list[str] = []
    group = ""
    used: set[str] = set()
    for name, method in whole["methods"].items():
        if name.partition(".")[0] != group:
            group = name.partition(".")[0]
            lines += [f"### {group}", ""]
        lines += [f"#### `{name}`", "", method["description"], ""]
        lines += _members("Parameters", method["params"], whole["$defs"], used)
        lines += _members("Result", method["result"], whole["$defs"], used)
    lines += ["### Notifications and requests to the client", ""]
    for name, shape in whole["notifications"].items():
        lines += [f"#### `{name}`", "", *_members("Members", shape, whole["$defs"], used)]
    for name, pair in whole["requests"].items():
        lines += [
            f"#### `{name}`",
            "",
            *_members("Parameters", pair["params"], whole["$defs"], used),
        ]
        lines += _members("Result", pair["result"], whole["$defs"], used)
    lines += ["### Types named above", ""]
    for name in [n for n in whole["$defs"] if n not in used]:
        lines += _members("Members", {"$ref": f"#/$defs/{name}"}, whole["$defs"], used)
    return "\n".join(lines).rstrip() + "\n"


def spliced(document: str) -> str:
    """docs/protocol.md with its generated part made anew."""
    head, begin, rest = document.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document lacks {BEGIN!r} or {END!r}")
    return f"{head}{BEGIN}\n\n{as_markdown()}\n{END}{tail}"


def _about(method: Method) -> str:
    return " ".join((inspect.getdoc(method.handle) or "").split())


def _members(
    title: str, shape: dict[str, Any], defs: dict[str, Any], used: set[str]
) -> Iterable[str]:
    lines: list[str] = []
    for name in _refs(shape):
        found = defs[name]
        members = found.get("properties", {})
        if not members:
            continue
        lines += [f"{title} (`{name}`):", ""]
        lines += [f"- {_member(key, value, found)}" for key, value in members.items()]
        lines.append("")
        if name not in used:
            used.add(name)
            about = " ".join(found.get("description", "").split())
            lines += [about, ""] if about and about != "No members." else []
    return lines


def _refs(shape: dict[str, Any]) -> list[str]:
    named = [shape, *shape.get("anyOf", [])]
    return [s["$ref"].rpartition("/")[2] for s in named if "$ref" in s]


def _member(key: str, value: dict[str, Any], owner_: dict[str, Any]) -> str:
    text = f"`{key}` {_type(value)}"
    if key in owner_.get("required", []):
        return text
    default = value.get("default")
    return f"{text} = {json.dumps(default)}" if default is not None else f"{text}, optional"


def _type(value: dict[str, Any]) -> str:
    if "$ref" in value:
        return f"`{value['$ref'].rpartition('/')[2]}`"
    if "enum" in value:
        return " \\| ".join(f'`"{v}"`' if isinstance(v, str) else f"`{v}`" for v in value["enum"])
    if "anyOf" in value:
        return " or ".join(_type(v) for v in value["anyOf"])
    kind = str(value.get("type", "any"))
    if kind == "array":
        return f"[{_type(value.get('items', {}))}]"
    bounds = [f"{value[k]}" for k in ("minimum", "maximum") if k in value]
    return f"{kind} {'…'.join(bounds)}" if len(bounds) == 2 else kind


if __name__ == "__main__":
    import sys
    from pathlib import Path

    page = Path(sys.argv[1])
    page.write_text(spliced(page.read_text("utf-8")), "utf-8")
