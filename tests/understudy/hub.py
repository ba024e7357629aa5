"""A Hugging Face Hub on this machine, as far as `snapshot_download` speaks with one.

Owns a server with repositories of files in memory, what was asked of it, and how it fails.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

COMMIT = "5f727257" * 5


@dataclass
class Hub:
    """`files`: by repository and name. `downloads`: the names that were sent. `block`: the names
    that are begun and never finished until `release` is set."""

    files: dict[str, Mapping[str, bytes]]
    status: int | None = None  # of every answer
    block: frozenset[str] = frozenset()
    url: str = ""
    downloads: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    begun: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            hub.tokens.add(self.headers.get("Authorization"))
            if hub.status is not None:
                self.answer(hub.status)
                return
            path = urlsplit(self.path).path
            if path.startswith("/api/models/"):
                self.about(path.removeprefix("/api/models/"))
                return
            repository, _, rest = path[1:].partition("/resolve/")
            commit, _, name = rest.partition("/")
            content = hub.files.get(repository, {}).get(name)
            if content is None or commit != COMMIT:
                self.answer(404, headers={"X-Error-Code": "EntryNotFound"})
                return
            etag = hashlib.sha256(content).hexdigest()
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
            self.answer(200, content, headers, name)

        def about(self, path: str) -> None:
            repository = next((each for each in hub.files if path.startswith(each)), None)
            if repository is None:
                self.answer(401)  # as the Hub says it to somebody without a token
                return
            kind, _, revision = path.removeprefix(repository).strip("/").partition("/")
            if revision not in ("", "main", COMMIT):
                self.answer(404, headers={"X-Error-Code": "RevisionNotFound"})
                return
            files = hub.files[repository]
            tree = [
                {
                    "type": "file",
                    "path": name,
                    "size": len(content),
                    "oid": hashlib.sha1(content).hexdigest(),
                }
                for name, content in files.items()
            ]
            siblings = [{"rfilename": name} for name in files]
            info = {"id": repository, "sha": COMMIT, "siblings": siblings}
            self.answer(200, json.dumps(tree if kind == "tree" else info).encode())

        def answer(
            self,
            status: int,
            content: bytes = b"",
            headers: Mapping[str, str] | None = None,
            name: str = "",
        ) -> None:
            self.send_response(status)
            for key, value in {"Content-Type": "application/json", **(headers or {})}.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "HEAD":
                return
            if name:
                hub.downloads.append(name)
            if name in hub.block:
                self.wfile.write(content[:1])
                hub.begun.set()
                hub.release.wait(60)
                return
            self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        hub.release.set()
        server.shutdown()
        server.server_close()
        thread.join()
