"""A small Hugging Face Hub on 127.0.0.1, with what the real client needs: push, pull, and what can go wrong."""

import base64
import contextlib
import hashlib
import json
import re
import socket
import struct
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOKEN = "hf_of_the_tests"


@dataclass(frozen=True)
class InXet:
    """A file whose content the xet client put into its own store."""

    sha256: str
    size: int


@dataclass
class Repository:
    """Commits are whole trees: the content of each path."""

    commits: dict[str, dict[str, bytes | InXet]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False

    def commit(self, branch: str, files: Mapping[str, bytes | InXet]) -> str:
        tree = {**self.commits[self.branches[branch]], **files}
        oid = hashlib.sha1(repr((len(self.commits), sorted(tree))).encode()).hexdigest()
        self.commits[oid] = tree
        self.branches[branch] = oid
        return oid


class Hub:
    """Repositories, served at `url` inside the context.

    Attributes:
        repositories: By ``owner/name``.
        xet: Folder where the real xet client puts uploads.
        requests: Method and path of every request.
        corrupted: Bytes served instead of a file's, with the file's own digest, by repository and path.
        broken: Bytes after which the next download of a path breaks off, by path.
    """

    def __init__(self, xet: Path) -> None:
        self.repositories: dict[str, Repository] = {}
        self.blobs: dict[str, bytes] = {}
        self.xet = xet
        self.requests: list[tuple[str, str]] = []
        self.ranges: list[str] = []
        self.corrupted: dict[tuple[str, str], bytes] = {}
        self.broken: dict[str, int] = {}
        self.url = ""

    def create(self, repo_id: str, private: bool = False) -> Repository:
        repository = self.repositories[repo_id] = Repository(private=private)
        repository.commits[hashlib.sha1(repo_id.encode()).hexdigest()] = {}
        repository.branches["main"] = next(iter(repository.commits))
        return repository

    @contextlib.contextmanager
    def serving(self) -> Iterator["Hub"]:
        hub = self

        class Bound(_Handler):
            pass

        Bound.hub = hub
        server = ThreadingHTTPServer(("127.0.0.1", 0), Bound)
        server.daemon_threads = True
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def xet_hash(self, sha256: str) -> str:
        """The name that xet gave a file, from the shards of its store, where it stands before the file's SHA-256."""
        # SHA-256s and names are kept as four words, least significant byte first
        wanted = struct.pack("<4Q", *(int(sha256[i : i + 16], 16) for i in range(0, 64, 16)))
        for shard in self.xet.rglob("*.mdb"):
            content = shard.read_bytes()
            end = content.find(wanted)
            # before it, 48 bytes each: the file, with the number of its segments, the segments, their verifications
            for start in range(end - 144, 0, -48):
                if 2 * struct.unpack_from("<I", content, start + 36)[0] == (end - start) // 48 - 1:
                    return "".join(f"{word:016x}" for word in struct.unpack_from("<4Q", content, start))
        raise LookupError(f"no shard below {self.xet} knows {sha256}")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: the tests look at `Hub.requests`."""

    def do_HEAD(self) -> None:
        self.answer()

    do_GET = do_POST = do_PUT = do_HEAD  # noqa: N815

    def answer(self) -> None:
        path = urllib.parse.unquote(self.path.partition("?")[0])
        self.hub.requests.append((self.command, path))
        if self.headers.get("Range"):
            self.hub.ranges.append(self.headers["Range"])
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length) if length else b""
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                self.body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        for pattern, act in self.routes:
            if match := re.fullmatch(pattern, path):
                act(self, **match.groupdict())
                return
        self.reply({"error": f"no such route: {path}"}, 404)

    def reply(self, content: Any, status: int = 200, **headers: str) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, code: str, message: str = "refused by the test's hub") -> None:
        self.reply({"error": message}, status, X_Error_Code=code, X_Error_Message=message)

    @property
    def is_authorised(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def find(self, repo: str, revision: str) -> tuple[Repository, str] | None:
        """The repository and the commit that a revision names, or an answer that says why there is none."""
        repository = self.hub.repositories.get(repo)
        if repository is None or (repository.private and not self.is_authorised):
            self.refuse(401, "RepoNotFound")
        elif repository.gated and not self.is_authorised:
            self.refuse(401, "GatedRepo")
        else:
            oid = repository.branches.get(revision, revision)
            if oid in repository.commits:
                return repository, oid
            self.refuse(404, "RevisionNotFound")
        return None

    def create(self) -> None:
        if not self.is_authorised:
            return self.refuse(401, "", "Invalid credentials")
        wanted = json.loads(self.body)
        repo_id = f"{wanted['organization']}/{wanted['name']}"
        there = repo_id in self.hub.repositories
        if not there:
            self.hub.create(repo_id, wanted.get("private") is True or wanted.get("visibility") == "private")
        return self.reply({"url": f"{self.hub.url}/{repo_id}"}, 409 if there else 200)

    def branch(self, repo: str, revision: str) -> None:
        repository = self.hub.repositories[repo]
        there = revision in repository.branches
        repository.branches.setdefault(revision, repository.branches["main"])
        self.reply({}, 409 if there else 201)

    def validate(self) -> None:
        self.reply({"errors": [], "warnings": []})

    def preupload(self, repo: str, revision: str) -> None:
        files = json.loads(self.body)["files"]
        self.reply(
            {
                "files": [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                        "shouldIgnore": False,
                    }
                    for file in files
                ]
            }
        )

    def xet_token(self, repo: str, revision: str) -> None:
        token = {"casUrl": f"local://{self.hub.xet}", "accessToken": "x", "exp": int(time.time()) + 3600}
        self.reply(
            token,
            X_Xet_Cas_Url=token["casUrl"],
            X_Xet_Access_Token=token["accessToken"],
            X_Xet_Token_Expiration=str(token["exp"]),
        )

    def lfs_batch(self, repo: str) -> None:
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            known = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.hub.blobs:
                known["actions"] = {"upload": {"href": f"{self.hub.url}/blobs/{wanted['oid']}"}}
            objects.append(known)
        self.reply({"transfer": "basic", "objects": objects})

    def put_blob(self, oid: str) -> None:
        self.hub.blobs[oid] = self.body
        self.reply({})

    def commit(self, repo: str, revision: str) -> None:
        if not self.is_authorised:
            return self.refuse(403, "", "Forbidden: you are not the owner")
        files: dict[str, bytes | InXet] = {}
        for line in self.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs.get(value["oid"], InXet(value["oid"], value["size"]))
        oid = self.hub.repositories[repo].commit(revision, files)
        return self.reply({"commitUrl": f"{self.hub.url}/{repo}/commit/{oid}", "commitOid": oid})

    def info(self, repo: str, revision: str = "main") -> None:
        if found := self.find(repo, revision):
            repository, oid = found
            siblings = [{"rfilename": path} for path in repository.commits[oid]]
            answer = {"id": repo, "sha": oid, "siblings": siblings, "private": repository.private, "xetEnabled": True}
            self.reply(answer)

    def resolve(self, repo: str, revision: str, file: str) -> None:
        found = self.find(repo, revision)
        if not found:
            return None
        repository, oid = found
        content = repository.commits[oid].get(file)
        if content is None:
            return self.reply({"error": "no such file"}, 404, X_Error_Code="EntryNotFound", X_Repo_Commit=oid)
        headers = {"X-Repo-Commit": oid, "Accept-Ranges": "bytes"}
        if isinstance(content, InXet):
            headers["ETag"] = f'"{content.sha256}"'
            headers["X-Linked-Size"] = str(content.size)
            headers["X-Xet-Hash"] = self.hub.xet_hash(content.sha256)
            headers["Link"] = f'<{self.hub.url}/api/models/{repo}/xet-read-token/{oid}>; rel="xet-auth"'
            content = b"in xet"
        else:
            headers["ETag"] = f'"{hashlib.sha256(content).hexdigest()}"'
        content = self.hub.corrupted.get((repo, file), content)
        first = int(self.headers["Range"].removeprefix("bytes=").partition("-")[0]) if "Range" in self.headers else 0
        self.send_response(206 if first else 200)
        for name, value in headers.items():
            self.send_header(name, value)
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - first))
        self.end_headers()
        if self.command == "GET":
            stop = self.hub.broken.pop(file, None)
            self.wfile.write(content[first : first + stop if stop is not None else None])
            if stop is not None:
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
        return None

    _R = r"(?P<repo>[\w.-]+/[\w.-]+)"
    _V = r"(?P<revision>[^/]+(?:/pr/\d+)?)"
    routes = (
        (r"/api/repos/create", create),
        (rf"/api/models/{_R}/branch/{_V}", branch),
        (r"/api/validate-yaml", validate),
        (rf"/api/models/{_R}/preupload/{_V}", preupload),
        (rf"/api/models/{_R}/xet-(?:read|write)-token/{_V}", xet_token),
        (rf"/{_R}\.git/info/lfs/objects/batch", lfs_batch),
        (r"/blobs/(?P<oid>\w+)", put_blob),
        (rf"/api/models/{_R}/commit/{_V}", commit),
        (rf"/api/models/{_R}/revision/{_V}", info),
        (rf"/api/models/{_R}", info),
        (rf"/{_R}/resolve/{_V}/(?P<file>.+)", resolve),
    )
