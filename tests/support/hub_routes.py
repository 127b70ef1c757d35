"""What the local Hub answers: accounts, repositories of models, commits, and files in LFS and Xet storage."""

import base64
import copy
import fnmatch
import hashlib
import json
import re
import time
from pathlib import Path
from urllib.parse import quote

from hub_cards import validate_card
from hub_connection import Connection, route
from hub_storage import LFS_THRESHOLD, HTTPError, Repo, now


class Routes(Connection):
    def user(self) -> tuple[str | None, str | None]:
        """Name and role of the token, if any."""
        authorization = self.headers.get("Authorization")
        if not authorization:
            return None, None
        token = authorization.split(None, 1)[-1]
        if token not in self.hub.tokens:
            raise HTTPError(401, "Invalid credentials in Authorization header")
        return self.hub.tokens[token]

    def known_user(self) -> tuple[str, str]:
        user, role = self.user()
        if user is None:
            raise HTTPError(401, "Invalid username or password.")
        return user, role

    def repo(self, repo_id: str, write: bool = False) -> Repo:
        user, role = self.user()
        repo, is_owner = self.hub.store.get(repo_id), user == repo_id.split("/")[0]
        if repo is None or (repo.meta["private"] and not is_owner):
            # The Hub answers 404 to a valid token, and 401 to a request without one. Over http:// the client
            # recognizes a missing repository only by the code.
            status, message = (404, "Repository not found") if user else (401, "Invalid username or password.")
            raise HTTPError(status, message, "RepoNotFound")
        if write:
            self.known_user()
            if not is_owner:
                raise HTTPError(403, "Authorization error.")
            if role != "write":
                raise HTTPError(403, "Forbidden: you must use a write token to upload to a repository.")
        return repo

    @route("GET", "/api/whoami-v2")
    def whoami(self):
        user, role = self.known_user()
        token = {"displayName": "test", "role": role, "createdAt": now()}
        account = {"type": "user", "name": user, "fullname": user.title(), "orgs": []}
        self.send_json({**account, "auth": {"type": "access_token", "accessToken": token}})

    @route("POST", "/api/validate-yaml")
    def validate_yaml(self):
        card = self.json_body()
        found = validate_card(card.get("content") or "")
        errors, warnings = ([{"message": message} for message in messages] for messages in found)
        answer = {"errors": errors, "warnings": warnings}
        self.send_json(answer | ({"error": "; ".join(found[0])} if errors else {}), 400 if errors else 200)

    @route("POST", "/api/repos/create")
    def create_repo(self):
        asked = self.json_body()
        user, role = self.known_user()
        owner, name = asked.get("organization") or user, asked["name"]
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,96}", name) or "--" in name or ".." in name:
            raise HTTPError(400, "Invalid repo name")
        if role != "write" or owner != user:
            raise HTTPError(403, f'You don\'t have the rights to create a model under the namespace "{owner}"')
        repo_id = f"{owner}/{name}"
        answer = {"url": f"{self.hub.url}/{repo_id}", "name": repo_id}
        with self.hub.store.lock:
            if self.hub.store.get(repo_id) is not None:
                raise HTTPError(409, "You already created this model repo", extra=answer)
            private = asked.get("private", asked.get("visibility") in ("private", "protected"))
            self.hub.store.create(repo_id, bool(private), user)
        self.send_json(answer)

    @route("PUT", "/api/models/{repo}/settings")
    def settings(self, repo_id):
        asked = self.json_body()
        with self.hub.store.lock:
            repo = self.repo(repo_id, write=True)
            if "visibility" in asked:
                repo.meta["private"] = asked["visibility"] != "public"
            repo.meta["gated"] = asked.get("gated", repo.meta["gated"])
            repo.save()
        self.send_json({name: repo.meta[name] for name in ("private", "gated")})

    @route("GET", "/api/models/{repo}(?:/revision/(?P<revision>[^/]+))?")
    def repo_info(self, repo_id, revision):
        self.send_json(self.repo(repo_id).info(revision or "main", bool(self.query.get("blobs"))))

    @route("GET", "/api/models/{repo}/tree/(?P<revision>[^/]+)(?:/(?P<folder>.*))?")
    def tree(self, repo_id, revision, folder):
        """The files of a folder, and of those in it or, unless `recursive` is set, their names."""
        commit, tree = self.repo(repo_id).tree(revision)
        prefix = f"{folder.strip('/')}/" if folder else ""
        found = {}
        for path, entry in sorted(tree.items()):
            name, _, deeper = path.removeprefix(prefix).partition("/")
            if path.startswith(prefix) and deeper and self.query.get("recursive", "").lower() not in ("true", "1"):
                found[prefix + name] = {"type": "directory", "path": prefix + name, "oid": commit, "size": 0}
            elif path.startswith(prefix):
                found[path] = describe_file(path, entry)
        if prefix and not found:
            raise HTTPError(404, f'"{folder}" does not exist on "{revision}"', "EntryNotFound")
        self.send_json(list(found.values()), headers={"X-Repo-Commit": commit})

    @route("GET", "/api/models/{repo}/refs")
    def refs(self, repo_id):
        def describe(table, prefix):
            refs = self.repo(repo_id).meta[table].items()
            return [{"name": name, "ref": prefix + name, "targetCommit": commit} for name, commit in refs]

        self.send_json(
            {"branches": describe("heads", "refs/heads/"), "tags": describe("tags", "refs/tags/"), "converts": []}
        )

    @route("GET", "/api/models/{repo}/commits/(?P<revision>[^/]+)")
    def commits(self, repo_id, revision):
        repo = self.repo(repo_id)
        self.send_json(
            [
                {"id": commit, "authors": [{"user": content["author"], "avatar": ""}]}
                | {name: content[name] for name in ("title", "message", "date")}
                for commit, content in repo.history(repo.resolve(revision))
            ]
        )

    @route("POST", "/api/models/{repo}/branch/(?P<name>[^/]+)")
    def branch(self, repo_id, name):
        asked = self.json_body()
        self.add_ref(repo_id, "heads", name, asked.get("startingPoint") or "main")

    @route("POST", "/api/models/{repo}/tag/(?P<revision>[^/]+)")
    def tag(self, repo_id, revision):
        self.add_ref(repo_id, "tags", self.json_body()["tag"], revision)

    def add_ref(self, repo_id, table, name, revision):
        with self.hub.store.lock:
            repo = self.repo(repo_id, write=True)
            if name in repo.meta[table]:
                raise HTTPError(409, f"Reference already exists: {name}")
            repo.meta[table][name] = repo.resolve(revision)
            repo.save()
        self.send_json({})

    @route("POST", "/api/models/{repo}/preupload/(?P<revision>[^/]+)")
    def preupload(self, repo_id, revision):
        repo = self.repo(repo_id, write=True)
        _, tree = repo.tree(revision)
        attributes = repo.read(tree[".gitattributes"]).decode() if ".gitattributes" in tree else ""
        patterns = [line.split()[0] for line in attributes.splitlines() if "filter=lfs" in line]
        answers = []
        for file in self.json_body()["files"]:
            path, entry = file["path"], tree.get(file["path"])
            large = file["size"] > LFS_THRESHOLD or b"\0" in base64.b64decode(file.get("sample") or "")
            named = any(fnmatch.fnmatch(name, pattern) for pattern in patterns for name in (path, Path(path).name))
            oid = entry and entry["sha" if entry["lfs"] else "oid"]
            mode = "lfs" if large or named else "regular"
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.send_json({"files": answers})

    @route("POST", r"/{repo}\.git/info/lfs/objects/batch")
    def lfs_batch(self, repo_id):
        self.repo(repo_id, write=True)
        answers = []
        for asked in self.json_body()["objects"]:
            answer = {"oid": asked["oid"], "size": asked["size"]}
            if not self.hub.store.blob_path(asked["oid"]).exists():
                upload = {"href": f"{self.hub.cdn_url}/_lfs/put/{asked['oid']}?sig=x", "header": {}}
                verify = {"href": f"{self.hub.url}/_lfs/verify/{repo_id}", "header": {}}
                answer |= {"actions": {"upload": upload, "verify": verify}, "authenticated": True}
            answers.append(answer)
        headers = {"Content-Type": "application/vnd.git-lfs+json"}
        self.send_json({"transfer": "basic", "objects": answers}, headers=headers)

    @route("PUT", "/_lfs/put/(?P<oid>[0-9a-f]{64})")
    def lfs_put(self, oid):
        found = hashlib.sha256(self.body()).hexdigest()
        if found != oid:
            raise HTTPError(400, f"content has sha256 {found}, expected {oid}")
        self.hub.store.put_blob(self.body())
        self.send(200, headers={"ETag": f'"{hashlib.md5(self.body()).hexdigest()}"'})

    @route("POST", "/_lfs/verify/{repo}")
    def lfs_verify(self, repo_id):
        self.repo(repo_id, write=True)
        asked = self.json_body()
        path = self.hub.store.blob_path(asked["oid"])
        if not path.exists() or path.stat().st_size != asked["size"]:
            raise HTTPError(422, "LFS object not found or of another size")
        self.send_json({"success": True})

    @route("POST", "/api/models/{repo}/commit/(?P<revision>[^/]+)")
    def commit(self, repo_id, revision):
        header, *operations = (json.loads(line) for line in self.body().splitlines() if line.strip())
        header = header["value"]
        with self.hub.store.lock:
            repo = self.repo(repo_id, write=True)
            parent = repo.resolve(revision)
            if revision.removeprefix("refs/heads/") not in repo.meta["heads"]:
                raise HTTPError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
            if not parent.startswith(header.get("parentCommit") or ""):
                raise HTTPError(412, "A commit has happened since. Please refresh and try again.")
            tree = copy.deepcopy(repo.read_commit(parent)["tree"])
            for operation in operations:
                self.change(repo, tree, operation["key"], operation["value"])
            user, _ = self.user()
            commit = repo.commit(revision, tree, header["summary"], header.get("description", ""), user, parent)
        self.send_json({"success": True, "commitOid": commit, "commitUrl": f"{self.hub.url}/{repo_id}/commit/{commit}"})

    def change(self, repo: Repo, tree: dict, key: str, value: dict) -> None:
        """Apply one operation of a commit to a tree."""
        path = value["path"]
        if key == "file":
            content = (
                base64.b64decode(value["content"]) if value.get("encoding") == "base64" else value["content"].encode()
            )
            if len(content) > LFS_THRESHOLD:
                raise HTTPError(400, f"{path}: files larger than 10 MiB must be uploaded with LFS")
            tree[path] = repo.entry(content)
        elif key == "lfsFile":
            tree[path] = repo.lfs_entry(value["oid"], value["size"])
            if not self.hub.store.blob_path(value["oid"]).exists():
                xet_hash = self.hub.xet_cas_url and self.hub.store.xet_lookup(value["oid"])
                if not xet_hash:
                    raise HTTPError(400, f"LFS pointer pointed to a file that does not exist: {path}")
                tree[path]["xet"] = xet_hash
        elif key in ("deletedFile", "deletedFolder"):
            gone = [each for each in tree if each == path or each.startswith(path.rstrip("/") + "/")]
            if not gone:
                raise HTTPError(404, "A file with this name doesn't exist", "EntryNotFound")
            for each in gone:
                del tree[each]
        else:
            raise HTTPError(400, f"unknown operation {key}")

    @route("GET", "/api/models/{repo}/xet-(?P<kind>write|read)-token/(?P<revision>[^/]+)")
    def xet_token(self, repo_id, kind, revision):
        self.repo(repo_id, write=kind == "write")
        if not self.hub.xet_cas_url:
            raise HTTPError(404, "there is no Xet storage: run the client with HF_HUB_DISABLE_XET=1")
        end = int(time.time()) + 3600
        address = {"X-Xet-Cas-Url": self.hub.xet_cas_url, "X-Xet-Access-Token": "xet", "X-Xet-Token-Expiration": end}
        self.send_json({"casUrl": self.hub.xet_cas_url, "accessToken": "xet", "exp": end}, headers=address)

    @route("GET", "/(?P<repo_id>[^/]+/[^/]+)/(?:resolve|raw)/(?P<revision>[^/]+)/(?P<path>.+)")
    def resolve(self, repo_id, revision, path):
        repo = self.repo(repo_id)
        user, _ = self.user()
        if repo.meta["gated"] and user != repo_id.split("/")[0]:
            message = f"Access to model {repo_id} is restricted. You must have access to it and be authenticated."
            raise HTTPError(403 if user else 401, message, "GatedRepo")
        commit, tree = repo.tree(revision)
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes", "Cache-Control": "no-store"}
        if path not in tree:
            raise HTTPError(404, "Entry not found", "EntryNotFound", headers)
        entry = tree[path]
        headers["ETag"] = f'"{entry["oid"]}"'
        if entry.get("xet"):
            address = f"{self.hub.url}/api/models/{repo_id}/xet-read-token/{commit}"
            headers |= {
                "X-Xet-Hash": entry["xet"],
                "X-Xet-Refresh-Route": address,
                "Link": f'<{address}>; rel="xet-auth"',
            }
        if entry["lfs"]:
            headers["Location"] = f"{self.hub.cdn_url}/_cdn/{entry['sha']}?name={quote(Path(path).name)}&sig=x"
            headers |= {"X-Linked-Size": entry["size"], "X-Linked-ETag": f'"{entry["sha"]}"'}
            self.send(302, b"", headers)
        else:
            self.send_file(self.hub.store.blob_path(entry["sha"]), headers)

    @route("GET", "/_cdn/(?P<sha>[0-9a-f]{64})")
    def cdn(self, sha):
        path = self.hub.store.blob_path(sha)
        if not path.exists():
            raise HTTPError(404, "no such object")
        self.send_file(path, {"ETag": f'"{sha}"', "Accept-Ranges": "bytes"})

    def send_file(self, path: Path, headers: dict) -> None:
        """The whole file, or the bytes that the request asks for."""
        size, headers = path.stat().st_size, {"Content-Type": "application/octet-stream", **headers}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if not asked:
            self.send(200, path, headers)
            return
        start, end = int(asked[1]), min(size, int(asked[2] or size) + 1)
        if start < size:
            self.send(206, path, {**headers, "Content-Range": f"bytes {start}-{end - 1}/{size}"}, (start, end))
        else:
            self.send(416, b"", {**headers, "Content-Range": f"bytes */{size}"})


def describe_file(path: str, entry: dict) -> dict:
    described = {"type": "file", "path": path, "oid": entry["oid"], "size": entry["size"]}
    if entry["lfs"]:
        described["lfs"] = {"oid": entry["sha"], "size": entry["size"], "pointerSize": entry["pointer_size"]}
    return described | ({"xetHash": entry["xet"]} if entry.get("xet") else {})
