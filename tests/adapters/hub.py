"""A stub of the Hugging Face hub's HTTP API, on this machine."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

SHA = "0123456789abcdef0123456789abcdef01234567"  # of every commit


class Hub(ThreadingHTTPServer):
    """It makes repositories, takes commits, and serves their files."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, dict[str, bytes]] = {}
        self.tokens: set[str | None] = set()
        self.address = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, value: Any, status: int = 200, **headers: str) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for key, text in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(key.replace("_", "-"), text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.server.tokens.add(self.headers["Authorization"])
        if self.path == "/api/repos/create":
            name = "/".join(filter(None, (json.loads(body).get("organization"), json.loads(body)["name"])))
            self.server.files.setdefault(name, {})
            self.answer({"url": f"{self.server.address}/{name}"})
        elif "/preupload/" in self.path:
            files = [file["path"] for file in json.loads(body)["files"]]
            self.answer({"files": [{"path": f, "uploadMode": "regular", "shouldIgnore": False} for f in files]})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/commit/" in self.path:
            name = self.path.removeprefix("/api/models/").partition("/commit/")[0]
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            url = f"{self.server.address}/{name}/commit/{SHA}"
            self.answer({"commitUrl": url, "commitOid": SHA, "hookOutput": ""})
        else:
            self.answer({}, 404)

    def do_GET(self) -> None:
        if self.path.startswith("/api/models/"):
            name = re.split(r"/revision/|/tree/|\?", self.path.removeprefix("/api/models/"))[0]
            if name not in self.server.files:
                self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
            elif "/tree/" in self.path:
                files = self.server.files[name].items()
                self.answer([{"type": "file", "path": n, "size": len(d), "oid": SHA} for n, d in files])
            else:
                siblings = [{"rfilename": file} for file in self.server.files[name]]
                facts = {"id": name, "modelId": name, "sha": SHA, "private": False, "tags": []}
                self.answer({**facts, "siblings": siblings})
            return
        name, _, rest = self.path.lstrip("/").partition("/resolve/")
        data = self.server.files.get(name, {}).get(rest.partition("/")[2])
        if data is None:
            self.answer({}, 404, X_Error_Code="EntryNotFound", X_Repo_Commit=SHA)
        else:
            self.answer(data, X_Repo_Commit=SHA, ETag=f'"{hash(data)}"')

    do_HEAD = do_GET


@contextmanager
def local_hub(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Generator[Hub]:
    """Inside the block huggingface_hub talks to a stub, and keeps files in `cache`."""
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    yield server
    server.shutdown()
    server.server_close()
    thread.join()
