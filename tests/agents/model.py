"""A model that plays a script: Anthropic Messages and OpenAI Responses, streamed, on a loopback port.

Which step to play is read from the request alone (how many answers of ours its history holds), so
retries and side requests do not disturb it. Each tool result that an agent sends back is kept in
`seen`: what the agent really saw is the tests' oracle. Must not know deltabox.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, assert_never

from typing_extensions import override

Json = dict[str, Any]


@dataclass(frozen=True)
class Shell:
    """The model asks for a shell command."""

    command: str


@dataclass(frozen=True)
class Write:
    """The model asks the agent's own file tool to make a file."""

    path: str
    content: str


@dataclass(frozen=True)
class Edit:
    """The model asks the agent's own edit tool to replace a line; the agent must have read the file."""

    path: str
    old: str
    new: str


@dataclass(frozen=True)
class Read:
    path: str


@dataclass(frozen=True)
class Say:
    """The model's last words of the turn."""

    text: str


Step = Shell | Write | Edit | Read | Say


@dataclass
class Script:
    """The steps, and what came back for each."""

    steps: list[Step]
    seen: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def step(self, answered: int) -> Step:
        return self.steps[min(answered, len(self.steps) - 1)]

    def saw(self, results: list[str]) -> None:
        """The longest history wins: requests of one turn arrive in order, side requests are short."""
        if len(results) > len(self.seen):
            self.seen = results


@contextmanager
def serving(script: Script) -> Iterator[int]:
    """The port on which the script is played, for the context."""

    class Handler(_Handler):
        played = script

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    played: Script

    def do_GET(self) -> None:
        self._json({"object": "list", "data": []})

    def do_HEAD(self) -> None:
        self._json({})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        path = self.path.partition("?")[0]
        try:
            if path.endswith("/messages"):
                self._messages(body)
            elif path.endswith("/responses"):
                self._responses(body)
            else:
                self._json({"input_tokens": 1})
        except (BrokenPipeError, ConnectionResetError):
            return  # an agent that hangs up is no error

    @override
    def log_message(self, format: str, *args: object) -> None:
        return

    # Anthropic Messages

    def _messages(self, body: Json) -> None:
        tools = {t["name"] for t in body.get("tools", ())}
        blocks = [b for m in body["messages"] for b in _blocks(m)]
        if not tools:  # a title, a summary, a probe
            self._reply_message(body, {"type": "text", "text": "ok"})
            return
        self.played.saw([_text(b["content"]) for b in blocks if b["type"] == "tool_result"])
        answered = sum(b["type"] == "tool_use" for b in blocks)
        step = self.played.step(answered)
        match step:
            case Say(text):
                block: Json = {"type": "text", "text": text}
            case Shell(command):
                block = _use("Bash", {"command": command, "description": "a scripted step"})
            case Write(path, content):
                block = _use("Write", {"file_path": path, "content": content})
            case Read(path):
                block = _use("Read", {"file_path": path})
            case Edit(path, old, new):
                block = _use("Edit", {"file_path": path, "old_string": old, "new_string": new})
            case _:
                assert_never(step)
        if block["type"] == "tool_use":
            block["id"] = f"toolu_{answered}"
        self._reply_message(body, block)

    def _reply_message(self, body: Json, block: Json) -> None:
        message: Json = {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": body.get("model"),
            "content": [block],
            "stop_reason": "tool_use" if block["type"] == "tool_use" else "end_turn",
            "stop_sequence": None,
            "usage": {"input_tokens": 1, "output_tokens": 1},
        }
        if not body.get("stream"):
            self._json(message)
            return
        if block["type"] == "text":
            empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        self._events(
            [
                {
                    "type": "message_start",
                    "message": {**message, "content": [], "stop_reason": None},
                },
                {"type": "content_block_start", "index": 0, "content_block": empty},
                {"type": "content_block_delta", "index": 0, "delta": delta},
                {"type": "content_block_stop", "index": 0},
                {
                    "type": "message_delta",
                    "delta": {"stop_reason": message["stop_reason"], "stop_sequence": None},
                    "usage": {"output_tokens": 1},
                },
                {"type": "message_stop"},
            ]
        )

    # OpenAI Responses

    def _responses(self, body: Json) -> None:
        items = [i for i in body.get("input", ()) if isinstance(i, dict)]
        offered = {t.get("name") for t in body.get("tools") or ()}
        results = [_text(i["output"]) for i in items if i.get("type", "").endswith("_call_output")]
        self.played.saw(results)
        answered = sum(i.get("type", "").endswith("_call") for i in items)
        step = self.played.step(answered)
        match step:
            case Say(text):
                content = [{"type": "output_text", "text": text, "annotations": []}]
                item: Json = {"type": "message", "role": "assistant", "content": content}
            case Write(path, content_text):
                lines = "".join(f"+{line}\n" for line in content_text.splitlines())
                item = _patch(f"*** Add File: {path}\n{lines}")
            case Edit(path, old, new):
                item = _patch(f"*** Update File: {path}\n@@\n-{old}\n+{new}\n")
            case Read(path):
                item = _call(f"cat {path}")
            case Shell(command):
                item = _call(command)
            case _:
                assert_never(step)
        if item["type"] == "custom_tool_call" and "apply_patch" not in offered:
            self.played.errors.append(f"no apply_patch among {sorted(map(str, offered))}")
        item |= {"id": f"item_{answered}", "status": "completed"}
        if item["type"] != "message":
            item["call_id"] = f"call_{answered}"
        response: Json = {
            "id": "resp_1",
            "object": "response",
            "model": body.get("model"),
            "error": None,
            "status": "completed",
            "output": [item],
            "usage": {
                "input_tokens": 1,
                "output_tokens": 1,
                "total_tokens": 2,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens_details": {"reasoning_tokens": 0},
            },
        }
        begun = {**response, "status": "in_progress", "output": [], "usage": None}
        self._events(
            [
                {"type": "response.created", "response": begun},
                {"type": "response.output_item.added", "output_index": 0, "item": item},
                {"type": "response.output_item.done", "output_index": 0, "item": item},
                {"type": "response.completed", "response": response},
            ]
        )

    # HTTP

    def _json(self, value: Json) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _events(self, events: list[Json]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for event in events:
            data = f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"
            self.wfile.write(data.encode())
        self.close_connection = True


def _blocks(message: Json) -> list[Json]:
    content = message["content"]
    return [] if isinstance(content, str) else content


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or ())


def _use(name: str, arguments: Json) -> Json:
    return {"type": "tool_use", "name": name, "input": arguments}


def _call(command: str) -> Json:
    arguments = json.dumps({"cmd": command})
    return {"type": "function_call", "name": "exec_command", "arguments": arguments}


def _patch(body: str) -> Json:
    text = f"*** Begin Patch\n{body}*** End Patch\n"
    return {"type": "custom_tool_call", "name": "apply_patch", "input": text}
