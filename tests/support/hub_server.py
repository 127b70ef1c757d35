"""
A local server that speaks the Hub's protocol for the real clients: repositories, commits, LFS and Xet storage, tokens,
private and gated repositories, and injected faults.

    with HubServer(folder) as hub:
        subprocess.run([...], env={**os.environ, **hub.env(folder / "hf_home")})
        hub.fail("POST .*/commit/", status=503, times=2)
        assert hub.count("POST .*/commit/") == 3
"""

import base64
import contextlib
import fnmatch
import hashlib
import json
import re
import socket
import struct
import threading
import time
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit

from hub_storage import LFS_THRESHOLD, HTTPError, Repo, Store, now, repo_not_found, validate_card


DEFAULT_TOKENS = {  # token -> (user, role)
    "hf_tester_write": ("tester", "write"),
    "hf_tester_read": ("tester", "read"),
    "hf_other_write": ("other", "write"),
}
ORGS = {"tester": ["tester-org"], "other": []}  # org memberships (write)


@dataclass
class Fault:
    """One injected fault. `match` is a regex searched in "METHOD /path?query" (path still %-quoted).

    status=N      answer N instead (request body is drained first), optional headers/body
    close         close the connection without any answer
    lost          process the request, then close without sending the answer
    drop=N        send headers with the full Content-Length and N body bytes, then close (FIN)
    rst=N         like drop, but with a TCP reset
    truncate=N    send only N bytes and declare N (a consistent but too short body)
    corrupt=N     flip the byte at offset N of the body (length unchanged)
    norange       ignore the Range header (answer 200 with the whole body)
    delay=S       wait S seconds, then answer normally
    stall=N       send N body bytes, then hang for `delay` seconds (default 60) and close
    """

    match: str
    status: int = 0
    close: bool = False
    lost: bool = False
    drop: int = -1
    rst: int = -1
    truncate: int = -1
    corrupt: int = -1
    stall: int = -1
    norange: bool = False
    delay: float = 0.0
    times: int = 1  # how many matching requests to hit; -1: always
    skip: int = 0  # let that many matching requests through first
    headers: dict = field(default_factory=dict)
    body: str = ""
    hits: int = 0

    def take(self, line: str) -> bool:
        if self.times == 0 or not re.search(self.match, line):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        if self.times > 0:
            self.times -= 1
        self.hits += 1
        return True


ROUTES: list[tuple[str, re.Pattern, str]] = []
RT = r"(?P<rtype>models|datasets)"
RID = r"(?P<rid>[^/]+/[^/]+|[^/]+)"


def route(methods: str, pattern: str):
    def deco(fn):
        for m in methods.split():
            ROUTES.append((m, re.compile("^" + pattern.replace("{RT}", RT).replace("{RID}", RID) + "$"), fn.__name__))
        return fn

    return deco


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: "HubServer"

    def log_message(self, *args):
        """The requests are in `HubServer.requests`."""

    def _body_chunks(self):
        if "chunked" in self.headers.get("Transfer-Encoding", "").lower():
            while True:
                n = int(self.rfile.readline().split(b";")[0].strip() or b"0", 16)
                if n == 0:
                    while self.rfile.readline().strip():
                        pass
                    return
                yield self.rfile.read(n)
                self.rfile.readline()
        else:
            left = int(self.headers.get("Content-Length") or 0)
            while left > 0:
                data = self.rfile.read(min(left, 1 << 20))
                if not data:
                    return
                left -= len(data)
                yield data

    def body(self) -> bytes:
        if self._body is None:
            self._body = b"".join(self._body_chunks())
        return self._body

    def drain(self) -> None:
        if self._body is None:
            n = 0
            for c in self._body_chunks():
                n += len(c)
            self._body = b""

    def json_body(self) -> dict:
        return json.loads(self.body() or b"{}")

    def kill(self, reset: bool = False) -> None:
        """Close the connection now: FIN, or RST when `reset`."""
        with contextlib.suppress(OSError):
            self.wfile.flush()
            if reset:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                self.connection.shutdown(socket.SHUT_RDWR)
            self.connection.close()
        self.close_connection = True
        self._dead = True

    def send(
        self, status: int, data: bytes | Path = b"", headers: dict | None = None, span: tuple[int, int] | None = None
    ):
        """Send a whole response, applying the body faults of the current rule."""
        headers = dict(headers or {})
        f = self._fault
        self._record["status"] = status
        if f and f.lost:
            return self.kill()
        size = data.stat().st_size if isinstance(data, Path) else len(data)
        start, end = span or (0, size)
        length = end - start
        if f and f.truncate >= 0:
            length, end = min(length, f.truncate), start + min(length, f.truncate)
            if self.command == "HEAD":
                f.times += 1  # a body fault waits for a body
        headers.setdefault("Content-Length", str(length))
        headers.setdefault("X-Request-Id", f"Root=1-local-{self._record['n']:06d}")
        self.send_response(status)
        for k, v in headers.items():
            for one in v if isinstance(v, list) else [v]:
                self.send_header(k, one)
        self.end_headers()
        if self.command == "HEAD" or status in (204, 304):
            return
        cut = max(f.drop, f.rst, f.stall) if f else -1
        if cut >= 0:
            end = min(end, start + cut)
        sent = 0
        with data.open("rb") if isinstance(data, Path) else contextlib.nullcontext() as fh:
            if fh:
                fh.seek(start)
            pos = start
            while pos < end:
                n = min(1 << 18, end - pos)
                chunk = fh.read(n) if fh else data[pos : pos + n]
                if f and f.corrupt >= 0 and pos <= f.corrupt < pos + len(chunk):
                    chunk = bytearray(chunk)
                    chunk[f.corrupt - pos] ^= 0xFF
                self.wfile.write(chunk)
                sent += len(chunk)
                pos += n
        self._record["sent"] = sent
        if cut >= 0:
            if f.stall >= 0:
                self.wfile.flush()
                time.sleep(f.delay or 60)
            elif f.rst >= 0:
                self.wfile.flush()
                time.sleep(0.3)  # let the bytes arrive first: a reset discards what is still in flight
            self.kill(reset=f.rst >= 0)

    def send_json(self, obj, status: int = 200, headers: dict | None = None):
        self.send(
            status, json.dumps(obj).encode(), {"Content-Type": "application/json; charset=utf-8", **(headers or {})}
        )

    def send_err(self, e: HTTPError):
        h = dict(e.headers)
        if e.code:
            h["X-Error-Code"] = e.code
        h["X-Error-Message"] = re.sub(r"[^\x20-\x7e]", " ", e.message)
        self.send_json({"error": e.message, **e.extra}, e.status, h)

    def _dispatch(self):
        self._body, self._dead, self._fault = None, False, None
        u = urlsplit(self.path)
        self.query = {k: v[-1] for k, v in parse_qs(u.query, keep_blank_values=True).items()}
        line = f"{self.command} {self.path}"
        rec = {
            "n": 0,
            "line": line,
            "method": self.command,
            "path": u.path,
            "status": 0,
            "host": self.headers.get("Host"),
            "auth": "authorization" in {k.lower() for k in self.headers},
            "range": self.headers.get("Range"),
            "fault": None,
            "t": time.time(),
        }
        self._record = rec
        with self.hub.lock:
            self.hub.requests.append(rec)
            rec["n"] = len(self.hub.requests)
            for f in self.hub.faults:
                if f.take(line):
                    self._fault, rec["fault"] = f, asdict(f)
                    break
        f = self._fault
        try:
            if f:
                if f.delay and f.stall < 0:
                    time.sleep(f.delay)
                if f.close:
                    return self.kill()
                if f.status:
                    self.drain()
                    return self.send(
                        f.status,
                        (f.body or json.dumps({"error": f"injected {f.status}"})).encode(),
                        {"Content-Type": "application/json", **f.headers},
                    )
            for method, pat, name in ROUTES:
                if method == self.command or (method == "GET" and self.command == "HEAD"):
                    m = pat.match(u.path)
                    if m:
                        try:
                            getattr(self, name)(
                                **{k: unquote(v) if v is not None else None for k, v in m.groupdict().items()}
                            )
                        except HTTPError as e:
                            self.drain()
                            self.send_err(e)
                        return
            with self.hub.lock:
                self.hub.unrouted.append(line)
            self.drain()
            self.send_err(HTTPError(404, f"hub_server: no route for {line}"))
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        except Exception as e:  # a bug here must be visible, not a hang
            import traceback

            self.hub.errors.append(traceback.format_exc())
            if not self._dead:
                with contextlib.suppress(Exception):
                    self.send_err(HTTPError(500, f"hub_server bug: {type(e).__name__}: {e}"))
            self.close_connection = True
        finally:
            if not self._dead and not self.close_connection:
                with contextlib.suppress(Exception):
                    self.drain()

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = _dispatch

    def user(self) -> tuple[str | None, str | None]:
        h = self.headers.get("Authorization")
        if not h:
            return None, None
        token = h.split(None, 1)[-1]
        if token not in self.hub.tokens:
            raise HTTPError(401, "Invalid credentials in Authorization header")
        return self.hub.tokens[token]

    def can_write(self, user: str | None, rid: str) -> bool:
        ns = rid.split("/")[0]
        return user is not None and (ns == user or ns in ORGS.get(user, []))

    def repo(self, rtype: str, rid: str, write: bool = False) -> Repo:
        rtype = rtype.rstrip("s") if rtype.endswith("s") else rtype
        user, role = self.user()
        repo = self.hub.store.get(rtype, rid)
        if repo is None:
            raise repo_not_found(user is not None)
        owner = self.can_write(user, rid)
        if repo.meta["private"] and not owner:
            raise repo_not_found(user is not None)
        if write:
            if user is None:
                raise HTTPError(401, "Invalid username or password.")
            if role != "write" or not owner:
                raise HTTPError(
                    403,
                    "Forbidden: you must use a write token to upload to a repository."
                    if owner
                    else "Authorization error.",
                )
        return repo

    def check_gate(self, repo: Repo):
        user, _ = self.user()
        if repo.meta["gated"] and not self.can_write(user, repo.id):
            raise HTTPError(
                401 if user is None else 403,
                f"Access to {repo.type} {repo.id} is restricted. You must have access to it and be authenticated.",
                "GatedRepo",
            )

    @route("GET", "/api/whoami-v2")
    def whoami(self):
        user, role = self.user()
        if user is None:
            raise HTTPError(401, "Invalid username or password.")
        self.send_json(
            {
                "type": "user",
                "id": hashlib.md5(user.encode()).hexdigest()[:24],
                "name": user,
                "fullname": user.title(),
                "email": f"{user}@localhost",
                "isPro": False,
                "periodEnd": None,
                "avatarUrl": "",
                "orgs": [{"type": "org", "name": o, "fullname": o, "roleInOrg": "write"} for o in ORGS.get(user, [])],
                "auth": {
                    "type": "access_token",
                    "accessToken": {"displayName": "test", "role": role, "createdAt": now()},
                },
            }
        )

    @route("POST", "/api/validate-yaml")
    def validate_yaml(self):
        b = self.json_body()
        errors, warns = validate_card(b.get("content") or "", b.get("repoType") or "model")
        out = {"errors": [{"message": m} for m in errors], "warnings": [{"message": m} for m in warns]}
        if errors:
            out["error"] = "; ".join(errors)
        self.send_json(out, 400 if errors else 200)

    @route("POST", "/api/repos/create")
    def create_repo(self):
        b = self.json_body()
        user, role = self.user()
        if user is None:
            raise HTTPError(401, "Invalid username or password.")
        ns, rtype = b.get("organization") or user, b.get("type") or "model"
        rid = f"{ns}/{b['name']}"
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,96}", b["name"]) or "--" in b["name"] or ".." in b["name"]:
            raise HTTPError(400, "Invalid repo name")
        if role != "write" or not self.can_write(user, rid):
            raise HTTPError(403, f'You don\'t have the rights to create a {rtype} under the namespace "{ns}"')
        private = b.get("private", b.get("visibility") in ("private", "protected"))
        with self.hub.store.lock:
            repo = self.hub.store.get(rtype, rid)
            exists = repo is not None
            if not exists:
                repo = self.hub.store.create(rtype, rid, bool(private), user)
        url = f"{self.hub.url}/{repo.prefix}{rid}"
        out = {"url": url, "name": rid, "id": hashlib.md5(rid.encode()).hexdigest()[:24]}
        if exists:
            return self.send_err(
                HTTPError(
                    409, "You already created this model repo" if rtype == "model" else "Repo already exists", extra=out
                )
            )
        self.send_json(out)

    @route("PUT", "/api/{RT}/{RID}/settings")
    def settings(self, rtype, rid):
        b = self.json_body()
        with self.hub.store.lock:
            repo = self.repo(rtype, rid, write=True)
            if "visibility" in b:
                repo.meta["private"] = b["visibility"] != "public"
            if "gated" in b:
                repo.meta["gated"] = b["gated"]
            repo.save()
        self.send_json({k: repo.meta[k] for k in ("private", "gated")})

    @route("GET", "/api/{RT}/{RID}/revision/(?P<rev>[^/]+)")
    @route("GET", "/api/{RT}/{RID}")
    def repo_info(self, rtype, rid, rev=None):
        repo = self.repo(rtype, rid)
        self.send_json(repo.info(rev or "main", bool(self.query.get("blobs"))))

    def _file_json(self, repo, path, e, expand):
        out = {"type": "file", "oid": e["oid"], "size": e["size"], "path": path}
        if e["lfs"]:
            out["lfs"] = {"oid": e["sha"], "size": e["size"], "pointerSize": e["ptr"]}
        if e.get("xet"):
            out["xetHash"] = e["xet"]
        if expand:
            c = (
                repo.read_commit(e["last"])
                if (repo.dir / "commits" / f"{e['last']}.json").exists()
                else {"title": "", "date": now()}
            )
            out["lastCommit"] = {"id": e["last"], "title": c["title"], "date": c["date"]}
            out["securityFileStatus"] = {"status": "safe", "avScan": None, "pickleImportScan": None}
        return out

    def _dir_json(self, repo, path, tree, expand):
        below = sorted((p, e) for p, e in tree.items() if p.startswith(path + "/"))
        out = {
            "type": "directory",
            "oid": hashlib.sha1(json.dumps([(p, e["oid"]) for p, e in below]).encode()).hexdigest(),
            "size": 0,
            "path": path,
        }
        if expand:
            last = max((repo.read_commit(e["last"]) | {"id": e["last"]} for _, e in below), key=lambda c: c["date"])
            out["lastCommit"] = {"id": last["id"], "title": last["title"], "date": last["date"]}
        return out

    @route("GET", "/api/{RT}/{RID}/tree/(?P<rev>[^/]+)(?:/(?P<sub>.*))?")
    def tree(self, rtype, rid, rev, sub=None):
        repo = self.repo(rtype, rid)
        oid, tree = repo.tree(rev)
        sub = (sub or "").strip("/")

        def truthy(key):
            return self.query.get(key, "").lower() in ("true", "1")

        base = sub + "/" if sub else ""
        items: dict[str, str] = {}
        for p in tree:
            if p.startswith(base):
                parts = p[len(base) :].split("/")
                for i in range(1, len(parts)):
                    if i == 1 or truthy("recursive"):
                        items[base + "/".join(parts[:i])] = "d"
                if len(parts) == 1 or truthy("recursive"):
                    items[p] = "f"
        if sub and not items:
            raise HTTPError(404, f'"{sub}" does not exist on "{rev}"', "EntryNotFound", {"X-Repo-Commit": oid})
        out = [
            self._file_json(repo, p, tree[p], truthy("expand"))
            if k == "f"
            else self._dir_json(repo, p, tree, truthy("expand"))
            for p, k in sorted(items.items())
        ]
        page = 50 if truthy("expand") else 1000
        at = int(self.query.get("cursor", 0))
        headers = {"X-Repo-Commit": oid}
        if at + page < len(out):
            u = urlsplit(self.path)
            q = "&".join(f"{k}={quote(v)}" for k, v in {**self.query, "cursor": str(at + page)}.items())
            headers["Link"] = f'<{self.hub.url}{u.path}?{q}>; rel="next"'
        self.send_json(out[at : at + page], headers=headers)

    @route("POST", "/api/{RT}/{RID}/paths-info/(?P<rev>[^/]+)")
    def paths_info(self, rtype, rid, rev):
        repo = self.repo(rtype, rid)
        _, tree = repo.tree(rev)
        if "json" in self.headers.get("Content-Type", ""):
            b = self.json_body()
            paths, expand = b.get("paths", []), b.get("expand")
        else:
            q = parse_qs(self.body().decode())
            paths, expand = q.get("paths", []), q.get("expand", ["false"])[0].lower() == "true"
        out = []
        for p in [paths] if isinstance(paths, str) else paths:
            p = p.strip("/")
            if p in tree:
                out.append(self._file_json(repo, p, tree[p], expand))
            elif any(x.startswith(p + "/") for x in tree):
                out.append(self._dir_json(repo, p, tree, expand))
        self.send_json(out)

    @route("GET", "/api/{RT}/{RID}/refs")
    def refs(self, rtype, rid):
        m = self.repo(rtype, rid).meta

        def fmt(table, prefix):
            return [{"name": name, "ref": prefix + name, "targetCommit": commit} for name, commit in m[table].items()]

        out = {"branches": fmt("heads", "refs/heads/"), "tags": fmt("tags", "refs/tags/"), "converts": []}
        self.send_json(out)

    @route("GET", "/api/{RT}/{RID}/commits/(?P<rev>[^/]+)")
    def commits(self, rtype, rid, rev):
        repo = self.repo(rtype, rid)
        out = [
            {
                "id": o,
                "title": c["title"],
                "message": c["message"],
                "date": c["date"],
                "authors": [{"user": c["author"], "avatar": ""}],
            }
            for o, c in repo.history(repo.resolve(rev))
        ]
        at, page = int(self.query.get("p", 0)) * 50, 50
        h = {"X-Total-Count": str(len(out))}
        if at + page < len(out):
            h["Link"] = f'<{self.hub.url}{urlsplit(self.path).path}?p={at // page + 1}>; rel="next"'
        self.send_json(out[at : at + page], headers=h)

    @route("POST DELETE", "/api/{RT}/{RID}/branch/(?P<name>[^/]+)")
    def branch(self, rtype, rid, name):
        b = self.json_body()
        with self.hub.store.lock:
            repo = self.repo(rtype, rid, write=True)
            if self.command == "DELETE":
                if name == "main":
                    raise HTTPError(403, "Cannot delete the default branch")
                if repo.meta["heads"].pop(name, None) is None:
                    raise HTTPError(404, f"Invalid rev id: {name}", "RevisionNotFound")
            else:
                if name in repo.meta["heads"]:
                    raise HTTPError(409, f"Reference already exists: refs/heads/{name}")
                repo.meta["heads"][name] = repo.resolve(b.get("startingPoint") or "main")
            repo.save()
        self.send_json({})

    @route("POST DELETE", "/api/{RT}/{RID}/tag/(?P<name>[^/]+)")
    def tag(self, rtype, rid, name):
        b = self.json_body()
        with self.hub.store.lock:
            repo = self.repo(rtype, rid, write=True)
            if self.command == "DELETE":
                if repo.meta["tags"].pop(name, None) is None:
                    raise HTTPError(404, f"Invalid rev id: {name}", "RevisionNotFound")
            else:
                if b["tag"] in repo.meta["tags"]:
                    raise HTTPError(409, f"Reference already exists: refs/tags/{b['tag']}")
                repo.meta["tags"][b["tag"]] = repo.resolve(name)
            repo.save()
        self.send_json({})

    def _lfs_patterns(self, repo, tree):
        e = tree.get(".gitattributes")
        text = repo.read(e).decode("utf-8", "replace") if e else ""
        return [ln.split()[0] for ln in text.splitlines() if "filter=lfs" in ln]

    @route("POST", "/api/{RT}/{RID}/preupload/(?P<rev>[^/]+)")
    def preupload(self, rtype, rid, rev):
        repo = self.repo(rtype, rid, write=True)
        _, tree = repo.tree(rev)
        pats = self._lfs_patterns(repo, tree)
        b = self.json_body()
        out = []
        for f in b["files"]:
            p, sample = f["path"], base64.b64decode(f.get("sample") or "")
            lfs = (
                f["size"] > LFS_THRESHOLD
                or any(fnmatch.fnmatch(p, q) or fnmatch.fnmatch(p.split("/")[-1], q) for q in pats)
                or b"\0" in sample
            )
            e = tree.get(p)
            out.append(
                {
                    "path": p,
                    "uploadMode": "lfs" if lfs else "regular",
                    "shouldIgnore": False,
                    "oid": (e["sha"] if e["lfs"] else e["oid"]) if e else None,
                }
            )
        self.send_json({"files": out})

    @route("POST", "/(?P<rpath>.+)\\.git/info/lfs/objects/batch")
    def lfs_batch(self, rpath):
        rtype, rid = self._split(rpath)
        self.repo(rtype, rid, write=True)
        out = []
        for o in self.json_body()["objects"]:
            oid, size = o["oid"], o["size"]
            item: dict = {"oid": oid, "size": size}
            if not self.hub.store.blob_path(oid).exists():
                up: dict = {"href": f"{self.hub.cdn_url}/_lfs/put/{oid}?sig=x", "header": {}}
                item["actions"] = {
                    "upload": up,
                    "verify": {"href": f"{self.hub.url}/_lfs/verify/{rpath}", "header": {}},
                }
                item["authenticated"] = True
            out.append(item)
        self.send_json({"transfer": "basic", "objects": out}, headers={"Content-Type": "application/vnd.git-lfs+json"})

    def _save_stream(self, tmp: Path) -> tuple[str, int, str]:
        h, m, n = hashlib.sha256(), hashlib.md5(), 0
        with tmp.open("wb") as fh:
            for c in self._body_chunks():
                fh.write(c), h.update(c), m.update(c)
                n += len(c)
        self._body = b""
        return h.hexdigest(), n, m.hexdigest()

    @route("PUT", "/_lfs/put/(?P<oid>[0-9a-f]{64})")
    def lfs_put(self, oid):
        tmp = self.hub.store.root / f".up.{oid}.{threading.get_ident()}"
        sha, n, md5 = self._save_stream(tmp)
        if sha != oid:
            tmp.unlink()
            raise HTTPError(400, f"content has sha256 {sha}, expected {oid}")
        self.hub.store.adopt_blob(tmp, oid)
        self.send(200, headers={"ETag": f'"{md5}"'})

    @route("POST", "/_lfs/verify/(?P<rpath>.+)")
    def lfs_verify(self, rpath):
        self.repo(*self._split(rpath), write=True)
        b = self.json_body()
        p = self.hub.store.blob_path(b["oid"])
        if not p.exists() or p.stat().st_size != b["size"]:
            raise HTTPError(422, "LFS object not found or of another size")
        self.send_json({"success": True})

    @route("POST", "/api/{RT}/{RID}/commit/(?P<rev>[^/]+)")
    def commit(self, rtype, rid, rev):
        lines = [json.loads(x) for x in self.body().splitlines() if x.strip()]
        with self.hub.store.lock:
            repo = self.repo(rtype, rid, write=True)
            user, _ = self.user()
            if user is None:
                raise HTTPError(401, "Invalid username or password.")
            head = lines[0]["value"]
            parent = repo.resolve(rev)
            if rev.removeprefix("refs/heads/") not in repo.meta["heads"]:
                raise HTTPError(
                    404 if rev not in repo.meta["tags"] else 400, f"Invalid rev id: {rev}", "RevisionNotFound"
                )
            want = head.get("parentCommit")
            if want and not parent.startswith(want):
                raise HTTPError(412, "A commit has happened since. Please refresh and try again.")
            tree = json.loads(json.dumps(repo.read_commit(parent)["tree"]))
            for ln in lines[1:]:
                k, v = ln["key"], ln["value"]
                if k == "file":
                    data = base64.b64decode(v["content"]) if v.get("encoding") == "base64" else v["content"].encode()
                    if len(data) > LFS_THRESHOLD:
                        raise HTTPError(400, f"{v['path']}: files larger than 10 MiB must be uploaded with LFS")
                    tree[v["path"]] = repo.entry(data)
                elif k == "lfsFile":
                    p = self.hub.store.blob_path(v["oid"])
                    xet = None if p.exists() or not self.hub.xet_cas_url else self.hub.store.xet_lookup(v["oid"])
                    if xet:
                        tree[v["path"]] = {**repo.lfs_entry(v["oid"], v["size"]), "xet": xet}
                        continue
                    if not p.exists():
                        raise HTTPError(400, f"LFS pointer pointed to a file that does not exist: {v['path']}")
                    tree[v["path"]] = repo.lfs_entry(v["oid"], p.stat().st_size)
                elif k == "deletedFile":
                    if v["path"] not in tree:
                        raise HTTPError(404, "A file with this name doesn't exist", "EntryNotFound")
                    del tree[v["path"]]
                elif k == "deletedFolder":
                    pre = v["path"].rstrip("/") + "/"
                    gone = [p for p in tree if p.startswith(pre)]
                    if not gone:
                        raise HTTPError(404, "A file with this name doesn't exist", "EntryNotFound")
                    for p in gone:
                        del tree[p]
                else:
                    raise HTTPError(400, f"unknown operation {k}")
            oid = repo.commit(rev, tree, head["summary"], head.get("description", ""), user, parent)
        out = {
            "success": True,
            "commitOid": oid,
            "commitUrl": f"{self.hub.url}/{repo.prefix}{rid}/commit/{oid}",
            "hookOutput": "",
        }
        self.send_json(out)

    @route("GET", "/api/{RT}/{RID}/xet-(?P<kind>write|read)-token/(?P<rev>[^/]+)")
    def xet_token(self, rtype, rid, kind, rev):
        self.repo(rtype, rid, write=kind == "write")
        if not self.hub.xet_cas_url:
            raise HTTPError(404, "hub_server does not serve Xet storage: run the client with HF_HUB_DISABLE_XET=1")
        exp = int(time.time()) + 3600
        self.send_json(
            {"casUrl": self.hub.xet_cas_url, "accessToken": "xet", "exp": exp},
            headers={
                "X-Xet-Cas-Url": self.hub.xet_cas_url,
                "X-Xet-Access-Token": "xet",
                "X-Xet-Token-Expiration": str(exp),
            },
        )

    def _split(self, rpath: str) -> tuple[str, str]:
        for t in ("datasets",):
            if rpath.startswith(t + "/"):
                return t, rpath[len(t) + 1 :]
        return "models", rpath

    @route("GET", "/(?P<rpath>(?:datasets/)?[^/]+/[^/]+)/(?:resolve|raw)/(?P<rev>[^/]+)/(?P<path>.+)")
    def resolve(self, rpath, rev, path):
        repo = self.repo(*self._split(rpath))
        self.check_gate(repo)
        oid, tree = repo.tree(rev)
        e = tree.get(path)
        common = {"X-Repo-Commit": oid, "Accept-Ranges": "bytes", "Cache-Control": "no-store"}
        if e is None:
            raise HTTPError(404, "Entry not found", "EntryNotFound", common)
        if e.get("xet"):  # content lives in the local Xet store only
            rt = {"model": "models"}.get(repo.type, repo.type + "s")
            route_ = f"{self.hub.url}/api/{rt}/{repo.id}/xet-read-token/{oid}"
            common |= {"X-Xet-Hash": e["xet"], "X-Xet-Refresh-Route": route_, "Link": f'<{route_}>; rel="xet-auth"'}
            if not self.hub.store.blob_path(e["sha"]).exists() and self.command == "GET":
                raise HTTPError(501, "hub_server: this file was uploaded with Xet and can only be downloaded with Xet")
        if e["lfs"]:
            loc = f"{self.hub.cdn_url}/_cdn/{e['sha']}?name={quote(path.split('/')[-1])}&sig=x"
            return self.send(
                302,
                f"Found. Redirecting to {loc}".encode(),
                {
                    **common,
                    "Location": loc,
                    "X-Linked-Size": str(e["size"]),
                    "X-Linked-ETag": f'"{e["sha"]}"',
                    "ETag": f'"{e["oid"]}"',
                },
            )
        self._send_file(self.hub.store.blob_path(e["sha"]), path, f'"{e["oid"]}"', common)

    @route("GET", "/_cdn/(?P<sha>[0-9a-f]{64})")
    def cdn(self, sha):
        p = self.hub.store.blob_path(sha)
        if not p.exists():
            raise HTTPError(404, "no such object")
        self._send_file(p, self.query.get("name", sha), f'"{sha}"', {"Accept-Ranges": "bytes"})

    def _send_file(self, p: Path, name: str, etag: str, headers: dict):
        size = p.stat().st_size
        h = {
            **headers,
            "ETag": etag,
            "Content-Type": "application/octet-stream"
            if not name.endswith((".json", ".md", ".txt", ".py"))
            else "text/plain; charset=utf-8",
            "Content-Disposition": f"inline; filename*=UTF-8''{quote(name.split('/')[-1])}",
        }
        m = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range") or "")
        if m and not (self._fault and self._fault.norange) and (m[1] or m[2]):
            a, b = (int(m[1]), int(m[2]) + 1 if m[2] else size) if m[1] else (max(0, size - int(m[2])), size)
            b = min(b, size)
            if a >= size:
                return self.send(416, b"", {**h, "Content-Range": f"bytes */{size}"})
            return self.send(206, p, {**h, "Content-Range": f"bytes {a}-{b - 1}/{size}"}, (a, b))
        self.send(200, p, h)


class HubServer:
    """The server with what a test asks of it: `fail` injects a fault, `lines` and `count` look at the requests."""

    def __init__(self, root: Path, xet: bool = False):
        self.store = Store(root)
        self.tokens = dict(DEFAULT_TOKENS)
        # hf_xet reads and writes a local directory when the CAS address is local://DIR, so no Xet service is needed.
        self.xet_cas_url = f"local://{self.store.root.resolve()}/cas" if xet else None
        self.lock = threading.RLock()
        self.faults: list[Fault] = []
        self.requests: list[dict] = []
        self.unrouted: list[str] = []
        self.errors: list[str] = []
        hub = self

        class H(Handler):
            pass

        H.hub = hub

        class S(ThreadingHTTPServer):
            request_queue_size = 128
            daemon_threads = True

            def handle_error(self, request, client_address):  # a client that went away is not an error of ours
                pass

        self.httpd = S(("127.0.0.1", 0), H)
        self.port = self.httpd.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        # A second name for the same socket plays the CDN: another origin, so the client must not send its token there.
        self.cdn_url = f"http://localhost:{self.port}"

    def start(self) -> "HubServer":
        threading.Thread(target=self.httpd.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def stop(self) -> None:
        self.httpd.shutdown()
        self.httpd.server_close()

    __enter__ = start

    def __exit__(self, *a):
        self.stop()

    # test helpers
    def env(self, home: str | Path, token: str | None = "hf_tester_write") -> dict:
        """Environment of a client process: this endpoint, its own HF_HOME, Xet off, no proxies."""
        home = Path(home)
        home.mkdir(parents=True, exist_ok=True)
        e = {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "0" if self.xet_cas_url else "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
        }
        if token:
            e["HF_TOKEN"] = token
        return e

    def fail(self, match: str, **kw) -> Fault:
        f = Fault(match=match, **kw)
        with self.lock:
            self.faults.append(f)
        return f

    def reset(self) -> None:
        """Forget faults and the request log (repositories stay)."""
        with self.lock:
            self.faults.clear(), self.requests.clear(), self.unrouted.clear(), self.errors.clear()

    def lines(self, pattern: str = "") -> list[dict]:
        with self.lock:
            return [r for r in self.requests if re.search(pattern, r["line"])]

    def count(self, pattern: str) -> int:
        return len(self.lines(pattern))

    def repo(self, rid: str, rtype: str = "model") -> Repo | None:
        return self.store.get(rtype, rid)

    def files(self, rid: str, rev: str = "main", rtype: str = "model") -> dict:
        return self.repo(rid, rtype).tree(rev)[1]
