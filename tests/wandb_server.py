"""A server of Weights & Biases on this machine, as far as wandb asks it: it keeps runs, and can refuse or be gone."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ENTITY = "ada"


@dataclass
class Run:
    """What was sent of a run. steps: the lines of its history, by step."""

    project: str
    name: str | None
    config: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)
    exit_code: int | None = None


@dataclass
class WandbServer:
    """refuses: the status that answers every request, or 0. runs: by id."""

    address: str = ""
    refuses: int = 0
    runs: dict[str, Run] = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)

    def answer(self, operation: str, given: dict[str, Any], host: str) -> dict[str, Any]:
        """The data of an answer to one of wandb's queries, by its name."""
        if operation == "RunResumeStatus":
            run = self.runs.get(given["name"])
            return {
                "model": {
                    **_named("P", given["project"]),
                    "entity": _named("E", ENTITY),
                    "bucket": run and _resumed(given, run),
                }
            }
        if operation == "UpsertBucket":
            run = self.runs.setdefault(given["name"], Run(given["project"], given["displayName"], {}))
            run.config |= {name: each["value"] for name, each in json.loads(given["config"] or "{}").items()}
            project = {**_named("P", given["project"]), "entity": _named("E", ENTITY)}
            bucket = {**_named("B", given["name"]), "displayName": run.name, "config": "{}", "project": project}
            return {"upsertBucket": {"bucket": {**bucket, "historyLineCount": len(run.steps)}, "inserted": True}}
        if operation == "CreateRunFiles":
            files = [{"name": each, "uploadUrl": f"http://{host}/upload/{each}"} for each in given["files"]]
            return {"createRunFiles": {"runID": "B", "uploadHeaders": [], "files": files}}
        return {"serverInfo": {"features": []}}

    def stream(self, run: Run, sent: dict[str, Any]) -> None:
        """Keep what a run sends."""
        lines = sent.get("files", {}).get("wandb-history.jsonl", {}).get("content", ())
        run.steps += map(json.loads, lines)
        if sent.get("complete"):
            run.exit_code = sent["exitcode"]


def _named(number: str, name: str) -> dict[str, Any]:
    return {"id": number, "name": name}


def _resumed(given: dict[str, Any], run: Run) -> dict[str, Any]:
    tail = json.dumps([json.dumps({"_step": run.steps[-1]["_step"], "_runtime": 1})] if run.steps else [])
    config = json.dumps({name: {"value": each} for name, each in run.config.items()})
    return {
        **_named("B", given["name"]), "displayName": run.name, "summaryMetrics": "{}", "logLineCount": 0,
        "historyLineCount": len(run.steps), "eventsLineCount": 0, "historyTail": tail, "eventsTail": "[]",
        "config": config, "tags": [], "notes": None, "wandbConfig": '{"t": {}}',
    }  # fmt: skip


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    """A server while the block runs."""
    known = WandbServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
            asked = json.loads(body) if body.startswith(b"{") else {}
            known.keys.add(self.headers.get("Authorization", ""))
            found: dict[str, Any] = {}
            if self.path == "/graphql" and not known.refuses:
                host = self.headers["Host"]
                found = {"data": known.answer(asked.get("operationName", ""), asked.get("variables") or {}, host)}
            elif self.path.endswith("/file_stream"):
                known.stream(known.runs[self.path.split("/")[4]], asked)
            content = json.dumps(found or {"errors": []}).encode()
            self.send_response(known.refuses or 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_PUT = do_POST
        do_GET = do_POST

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        known.address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield known
        finally:
            server.shutdown()
            thread.join()
