"""A double of the Hugging Face Hub on 127.0.0.1: the endpoints that huggingface_hub uses to create a repository, to
upload (preupload, LFS, commit) and to download. Everything lies in memory and is gone with the process.

Tests use `HubDouble`; `python tests/hub_double.py` serves one to play with and says which variables point to it.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_double"
LARGE = (".safetensors", ".png")  # what goes by way of LFS


@dataclass
class Repository:
    """`commits`: sha -> files; `branches`: name -> sha. A `private` one is seen by who is allowed, a `gated` one is
    seen, but not read, by others.
    """

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        sha = hashlib.sha1(f"{len(self.commits)} {branch}".encode()).hexdigest()
        self.commits[sha] = self.commits.get(self.branches.get(branch, ""), {}) | files
        self.branches[branch] = sha
        return sha

    def sha(self, revision: str) -> str | None:
        return self.branches.get(revision, revision if revision in self.commits else None)


class HubDouble(ThreadingHTTPServer):
    """`repositories` by id; `requests`: what was asked, as "METHOD /path"; `drop_uploads`: how many of the next uploads
    end with the connection; `organizations` in which the user may write too.
    """

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.repositories: dict[str, Repository] = {}
        self.uploaded: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.drop_uploads = 0
        self.organizations: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubDouble

    def log_message(self, *args: Any) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        path = unquote(urlsplit(self.path).path)
        if path == "/api/whoami-v2":
            self.answer(200 if self.allowed else 401, {"name": "user", "type": "user", "orgs": []})
        elif path.startswith("/api/models/"):
            self.describe(path.removeprefix("/api/models/"))
        elif "/resolve/" in path:
            self.send_entry(path)
        else:
            self.fail(404, "EntryNotFound", f"no endpoint {path}")

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        path, body = unquote(urlsplit(self.path).path), self.body()
        if path == "/api/validate-yaml":
            self.answer(200, {"errors": [], "warnings": []})
        elif not self.allowed:
            self.fail(401, None, "Invalid username or password.")
        elif path == "/api/repos/create":
            self.create(json.loads(body))
        elif path.endswith(".git/info/lfs/objects/batch"):
            self.offer_uploads(json.loads(body))
        elif path.startswith("/api/models/") and "/preupload/" in path:
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            self.in_repository(path, lambda repository, revision: self.answer(200, {"files": files}))
        elif path.startswith("/api/models/") and "/commit/" in path:
            lines = [json.loads(line) for line in body.splitlines()]
            self.in_repository(path, lambda repository, revision: self.commit(path, repository, revision, lines))
        elif path.startswith("/api/models/") and "/branch/" in path:
            self.in_repository(path, self.branch)
        else:
            self.fail(404, "EntryNotFound", f"no endpoint {path}")

    def do_PUT(self) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        if self.server.drop_uploads:
            self.server.drop_uploads -= 1
            self.rfile.read(min(1024, int(self.headers["Content-Length"])))
            self.close_connection = True
            self.connection.close()
            return
        contents = self.body()
        oid = self.path.rpartition("/")[2]
        if hashlib.sha256(contents).hexdigest() != oid:
            self.fail(400, None, "the content is not what was announced")
            return
        self.server.uploaded[oid] = contents
        self.answer(200, {})

    # What is asked for

    @property
    def allowed(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def repository(self, id: str) -> Repository | None:
        """The repository, or an answer that says why not."""
        repository = self.server.repositories.get(id)
        if repository is None or (repository.private and not self.allowed):
            self.fail(404 if self.allowed else 401, "RepoNotFound", "Repository not found")
            return None
        return repository

    def in_repository(self, path: str, act: Any) -> None:
        parts = path.removeprefix("/api/models/").split("/")
        repository = self.repository("/".join(parts[:2]))
        if repository is not None:
            act(repository, "/".join(parts[3:]))

    def create(self, asked: dict[str, Any]) -> None:
        id = f"{asked.get('organization') or 'user'}/{asked['name']}"
        url = f"{self.server.url}/{id}"
        if id.partition("/")[0] not in {"user", *self.server.organizations}:
            self.fail(403, None, f"You don't have the rights to create a model under the namespace {id.split('/')[0]}")
        elif id in self.server.repositories:
            self.answer(409, {"error": "You already created this model repo", "url": url})
        else:
            made = Repository(private=bool(asked.get("private")) or asked.get("visibility") == "private")
            made.commit("main", {".gitattributes": b""})
            self.server.repositories[id] = made
            self.answer(200, {"url": url, "id": id, "name": id})

    def branch(self, repository: Repository, branch: str) -> None:
        if branch in repository.branches:
            self.answer(409, {"error": "Reference already exists"})
            return
        repository.branches[branch] = repository.branches["main"]
        self.answer(201, {})

    def offer_uploads(self, asked: dict[str, Any]) -> None:
        objects: list[dict[str, Any]] = []
        for wanted in asked["objects"]:
            offer: dict[str, Any] = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.server.uploaded:
                offer["actions"] = {"upload": {"href": f"{self.server.url}/upload/{wanted['oid']}", "header": {}}}
            objects.append(offer)
        self.answer(200, {"transfer": "basic", "objects": objects})

    def commit(self, path: str, repository: Repository, revision: str, lines: list[dict[str, Any]]) -> None:
        if revision not in repository.branches:
            self.fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        files = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.uploaded[value["oid"]]
        sha = repository.commit(revision, files)
        id = "/".join(path.removeprefix("/api/models/").split("/")[:2])
        self.answer(200, {"success": True, "commitOid": sha, "commitUrl": f"{self.server.url}/{id}/commit/{sha}"})

    def describe(self, path: str) -> None:
        parts = path.split("/")
        repository = self.repository("/".join(parts[:2]))
        if repository is None:
            return
        revision = "/".join(parts[3:]) if len(parts) > 3 else "main"
        sha = repository.sha(revision.partition("/")[0] if parts[2:3] == ["tree"] else revision)
        if sha is None:
            self.fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        files = repository.commits[sha]
        if parts[2:3] == ["tree"]:
            entries = [
                {"type": "file", "oid": hashlib.sha1(data).hexdigest(), "size": len(data), "path": name}
                for name, data in files.items()
            ]
            self.answer(200, entries)
            return
        siblings = [{"rfilename": name} for name in sorted(files)]
        gated: Any = "auto" if repository.gated else False
        self.answer(200, {"id": "/".join(parts[:2]), "sha": sha, "gated": gated, "siblings": siblings, "tags": []})

    def send_entry(self, path: str) -> None:
        id, _, rest = path.removeprefix("/").partition("/resolve/")
        repository = self.repository(id)
        if repository is None:
            return
        if repository.gated and not self.allowed:
            self.fail(401, "GatedRepo", f"Access to model {id} is restricted.")
            return
        branch = next((name for name in repository.branches if rest.startswith(f"{name}/")), rest.partition("/")[0])
        sha, name = repository.sha(branch), rest.removeprefix(f"{branch}/")
        if sha is None:
            self.fail(404, "RevisionNotFound", f"Invalid rev id: {branch}")
        elif name not in repository.commits[sha]:
            self.fail(404, "EntryNotFound", f"{name} does not exist", {"X-Repo-Commit": sha})
        else:
            data = repository.commits[sha][name]
            digest = hashlib.sha256(data).hexdigest()
            self.send(200, data, {"ETag": f'"{digest}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"})

    # Answers

    def fail(self, status: int, code: str | None, message: str, headers: dict[str, str] | None = None) -> None:
        named = {"X-Error-Message": message} | ({} if code is None else {"X-Error-Code": code})
        self.send(status, json.dumps({"error": message}).encode(), named | (headers or {}))

    def answer(self, status: int, fields: Any) -> None:
        self.send(status, json.dumps(fields).encode(), {"Content-Type": "application/json"})

    def send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@contextmanager
def serving(port: int = 0) -> Iterator[HubDouble]:
    with HubDouble(port) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description="A Hub to try uploads with, on this machine alone.")
    parser.add_argument("--port", type=int, default=8020)
    with serving(parser.parse_args().port) as server:
        print("For a shell that is to use it; Ctrl-C ends it:")  # noqa: T201
        print(f"export HF_ENDPOINT={server.url} HF_TOKEN={TOKEN} HF_HUB_DISABLE_XET=1")  # noqa: T201
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            pass


if __name__ == "__main__":
    main()
