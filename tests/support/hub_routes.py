"""What the local Hub answers: accounts, repositories of models, commits, and files in LFS and Xet storage."""

import base64
import fnmatch
import hashlib
import json
import re
import time
from pathlib import PurePath
from urllib.parse import quote

from hub_cards import validate_card
from hub_connection import Connection, route
from hub_storage import LFS_PATTERNS, LFS_THRESHOLD, HTTPError, Repo


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
        repo, is_owner = self.hub.repo(repo_id), user == repo_id.split("/")[0]
        if repo is None or (repo.private and not is_owner):
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
        token = {"displayName": "test", "role": role}
        account = {"type": "user", "name": user, "orgs": []}
        self.send_json({**account, "auth": {"type": "access_token", "accessToken": token}})

    @route("POST", "/api/validate-yaml")
    def validate_yaml(self):
        errors = validate_card(self.json_body().get("content") or "")
        answer = {"errors": [{"message": error} for error in errors], "warnings": [], "error": "; ".join(errors)}
        self.send_json(answer, 400 if errors else 200)

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
            if self.hub.repo(repo_id) is not None:
                raise HTTPError(409, "You already created this model repo", **answer)
            private = asked.get("private", asked.get("visibility") in ("private", "protected"))
            self.hub.store.repos[repo_id] = Repo(self.hub.store, repo_id, bool(private), user)
        self.send_json(answer)

    @route("PUT", "/api/models/{repo}/settings")
    def settings(self, repo_id):
        asked = self.json_body()
        repo = self.repo(repo_id, write=True)
        repo.private = asked["visibility"] != "public" if "visibility" in asked else repo.private
        repo.gated = asked.get("gated", repo.gated)
        self.send_json({"private": repo.private, "gated": repo.gated})

    @route("GET", "/api/models/{repo}(?:/revision/(?P<revision>[^/]+))?")
    def repo_info(self, repo_id, revision):
        repo = self.repo(repo_id)
        commit, tree = repo.tree(revision or "main")
        siblings = []
        for path, entry in sorted(tree.items()):
            siblings.append({"rfilename": path, "size": entry["size"], "blobId": entry["oid"]})
            if entry["lfs"]:
                siblings[-1]["lfs"] = {"sha256": entry["sha"], **entry["lfs"]}
        state = {"private": repo.private, "gated": repo.gated, "lastModified": repo.commits[commit]["date"]}
        self.send_json({"id": repo_id, "sha": commit, "tags": [], "siblings": siblings, **state})

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
        def describe(names, prefix):
            return [{"name": name, "ref": prefix + name, "targetCommit": commit} for name, commit in names.items()]

        repo = self.repo(repo_id)
        refs = {"branches": describe(repo.heads, "refs/heads/"), "tags": describe(repo.tags, "refs/tags/")}
        self.send_json(refs | {"converts": []})

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
        repo = self.repo(repo_id, write=True)
        repo.heads[name] = repo.resolve(self.json_body().get("startingPoint") or "main")
        self.send_json({})

    @route("POST", "/api/models/{repo}/tag/(?P<revision>[^/]+)")
    def tag(self, repo_id, revision):
        repo = self.repo(repo_id, write=True)
        repo.tags[self.json_body()["tag"]] = repo.resolve(revision)
        self.send_json({})

    @route("POST", "/api/models/{repo}/preupload/(?P<revision>[^/]+)")
    def preupload(self, repo_id, revision):
        _, tree = self.repo(repo_id, write=True).tree(revision)
        answers = []
        for file in self.json_body()["files"]:
            path, entry = file["path"], tree.get(file["path"])
            large = file["size"] > LFS_THRESHOLD or b"\0" in base64.b64decode(file.get("sample") or "")
            named = any(fnmatch.fnmatch(PurePath(path).name, pattern) for pattern in LFS_PATTERNS)
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
            if asked["oid"] not in self.hub.store.blobs:
                upload = {"href": f"{self.hub.cdn_url}/_lfs/put/{asked['oid']}?sig=x", "header": {}}
                verify = {"href": f"{self.hub.url}/_lfs/verify/{repo_id}", "header": {}}
                answer |= {"actions": {"upload": upload, "verify": verify}, "authenticated": True}
            answers.append(answer)
        headers = {"Content-Type": "application/vnd.git-lfs+json"}
        self.send_json({"transfer": "basic", "objects": answers}, headers=headers)

    @route("PUT", "/_lfs/put/(?P<oid>[0-9a-f]{64})")
    def lfs_put(self, oid):
        found = self.hub.store.put(self.body())
        if found != oid:
            raise HTTPError(400, f"content has sha256 {found}, expected {oid}")
        self.send(200, headers={"ETag": f'"{hashlib.md5(self.body()).hexdigest()}"'})

    @route("POST", "/_lfs/verify/{repo}")
    def lfs_verify(self, repo_id):
        self.repo(repo_id, write=True)
        asked = self.json_body()
        if len(self.hub.store.blobs.get(asked["oid"], b"")) != asked["size"]:
            raise HTTPError(422, "LFS object not found or of another size")
        self.send_json({"success": True})

    @route("POST", "/api/models/{repo}/commit/(?P<revision>[^/]+)")
    def commit(self, repo_id, revision):
        header, *operations = (json.loads(line) for line in self.body().splitlines() if line.strip())
        header = header["value"]
        with self.hub.store.lock:
            repo = self.repo(repo_id, write=True)
            parent = repo.resolve(revision)
            if revision.removeprefix("refs/heads/") not in repo.heads:
                raise HTTPError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
            if not parent.startswith(header.get("parentCommit") or ""):
                raise HTTPError(412, "A commit has happened since. Please refresh and try again.")
            tree = dict(repo.commits[parent]["tree"])
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
            if value["oid"] not in self.hub.store.blobs:
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
        if repo.gated and user != repo_id.split("/")[0]:
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
            headers["Location"] = f"{self.hub.cdn_url}/_cdn/{entry['sha']}?name={quote(PurePath(path).name)}&sig=x"
            headers |= {"X-Linked-Size": entry["size"], "X-Linked-ETag": f'"{entry["sha"]}"'}
            self.send(302, b"", headers)
        else:
            self.send_file(repo.read(entry), headers)

    @route("GET", "/_cdn/(?P<sha>[0-9a-f]{64})")
    def cdn(self, sha):
        if sha not in self.hub.store.blobs:
            raise HTTPError(404, "no such object")
        self.send_file(self.hub.store.blobs[sha], {"ETag": f'"{sha}"', "Accept-Ranges": "bytes"})

    def send_file(self, data: bytes, headers: dict) -> None:
        """The whole file, or the bytes that the request asks for."""
        size, headers = len(data), {"Content-Type": "application/octet-stream", **headers}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if not asked:
            self.send(200, data, headers)
            return
        start, end = int(asked[1]), min(size, int(asked[2] or size) + 1)
        if start < size:
            self.send(206, data, {**headers, "Content-Range": f"bytes {start}-{end - 1}/{size}"}, (start, end))
        else:
            self.send(416, b"", {**headers, "Content-Range": f"bytes */{size}"})


def describe_file(path: str, entry: dict) -> dict:
    described = {"type": "file", "path": path, "oid": entry["oid"], "size": entry["size"]}
    if entry["lfs"]:
        described["lfs"] = {"oid": entry["sha"], **entry["lfs"]}
    return described | ({"xetHash": entry["xet"]} if entry.get("xet") else {})
