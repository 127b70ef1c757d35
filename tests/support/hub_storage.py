"""What the local Hub stores: repositories of models as files, with one JSON file per commit."""

import contextlib
import hashlib
import json
import os
import re
import struct
import threading
from datetime import datetime, timezone
from pathlib import Path

from hub_cards import read_metadata


LFS_THRESHOLD = 10 * 1024 * 1024
LFS_EXTENSIONS = (
    "7z arrow bin bz2 ckpt ftz gz h5 joblib mlmodel model msgpack npy npz onnx ot parquet pb pickle "
    "pkl pt pth rar safetensors tar tflite tgz wasm xz zip zst"
).split()
GITATTRIBUTES = "".join(f"*.{extension} filter=lfs diff=lfs merge=lfs -text\n" for extension in LFS_EXTENSIONS)


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def write(path: Path, data: bytes) -> None:
    """Whole or not at all: other threads read meanwhile."""
    temporary = path.with_name(f".{path.name}.{threading.get_ident()}")
    temporary.write_bytes(data)
    os.replace(temporary, path)


class HTTPError(Exception):
    """An error that the client understands: `code` becomes X-Error-Code, `message` X-Error-Message."""

    def __init__(
        self, status: int, message: str, code: str | None = None, headers: dict | None = None, extra: dict | None = None
    ):
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.headers, self.extra = headers or {}, extra or {}


class Store:
    """Repositories on disk: content-addressed blobs, one JSON file per commit, one JSON file of refs per repo."""

    def __init__(self, root: Path):
        self.root = Path(root)
        self.lock = threading.RLock()

    def blob_path(self, sha: str) -> Path:
        return self.root / "blobs" / sha[:2] / sha

    def put_blob(self, data: bytes) -> str:
        sha = hashlib.sha256(data).hexdigest()
        path = self.blob_path(sha)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, data)
        return sha

    def get(self, repo_id: str) -> "Repo | None":
        folder = self.root / "repos" / repo_id
        return Repo(self, repo_id, folder) if (folder / "repo.json").is_file() else None

    def create(self, repo_id: str, private: bool, author: str) -> None:
        folder = self.root / "repos" / repo_id
        (folder / "commits").mkdir(parents=True)
        meta = {"private": private, "gated": False, "created": now(), "heads": {}, "tags": {}}
        write(folder / "repo.json", json.dumps(meta).encode())
        repo = Repo(self, repo_id, folder)
        tree = {".gitattributes": repo.entry(GITATTRIBUTES.encode())}
        repo.commit("main", tree, "initial commit", "", author, parent=None)

    def xet_lookup(self, sha: str) -> str | None:
        """Xet hash of the file with this SHA-256, from the shards that hf_xet wrote; None if unknown."""
        for path in (self.root / "cas").rglob("*.mdb"):
            if found := read_shard(path.read_bytes()).get(sha):
                return found
        return None


class Repo:
    """A repository at the moment: commits are never changed, refs and settings (`meta`) are saved by `save`."""

    def __init__(self, store: Store, repo_id: str, folder: Path):
        self.store, self.id, self.folder = store, repo_id, folder
        self.meta = json.loads((folder / "repo.json").read_text())

    def save(self) -> None:
        write(self.folder / "repo.json", json.dumps(self.meta).encode())

    def entry(self, data: bytes) -> dict:
        return {"sha": self.store.put_blob(data), "size": len(data), "oid": git_sha1(data), "lfs": False}

    def lfs_entry(self, sha: str, size: int) -> dict:
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha}\nsize {size}\n".encode()
        return {"sha": sha, "size": size, "oid": git_sha1(pointer), "lfs": True, "pointer_size": len(pointer)}

    def read_commit(self, commit: str) -> dict:
        return json.loads((self.folder / "commits" / f"{commit}.json").read_text())

    def resolve(self, revision: str) -> str:
        """The commit of a branch, a tag, or the beginning of its own name."""
        for table, prefix in (("heads", "refs/heads/"), ("tags", "refs/tags/")):
            name = revision.removeprefix(prefix)
            if name in self.meta[table]:
                return self.meta[table][name]
        if re.fullmatch(r"[0-9a-f]{7,40}", revision):
            found = list((self.folder / "commits").glob(f"{revision}*.json"))
            if len(found) == 1:
                return found[0].stem
        raise HTTPError(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def tree(self, revision: str) -> tuple[str, dict]:
        commit = self.resolve(revision)
        return commit, self.read_commit(commit)["tree"]

    def read(self, entry: dict) -> bytes:
        return self.store.blob_path(entry["sha"]).read_bytes()

    def commit(self, branch: str, tree: dict, title: str, message: str, author: str, parent: str | None) -> str:
        content = {"parent": parent, "title": title, "message": message, "author": author, "date": now(), "tree": tree}
        data = json.dumps(content).encode()
        commit = hashlib.sha1(data + os.urandom(8)).hexdigest()
        write(self.folder / "commits" / f"{commit}.json", data)
        self.meta["heads"][branch.removeprefix("refs/heads/")] = commit
        self.save()
        return commit

    def history(self, commit: str | None):
        """(commit, its content), newest first."""
        while commit:
            content = self.read_commit(commit)
            yield commit, content
            commit = content["parent"]

    def info(self, revision: str, blobs: bool) -> dict:
        commit, tree = self.tree(revision)
        card = read_metadata(self.read(tree["README.md"]).decode("utf-8", "replace")) if "README.md" in tree else {}
        siblings = []
        for path, entry in sorted(tree.items()):
            sibling = {"rfilename": path}
            if blobs:
                sibling |= {"size": entry["size"], "blobId": entry["oid"]}
                if entry["lfs"]:
                    sizes = {"size": entry["size"], "pointerSize": entry["pointer_size"]}
                    sibling["lfs"] = {"sha256": entry["sha"], **sizes}
            siblings.append(sibling)
        config = {}
        if "config.json" in tree:
            with contextlib.suppress(ValueError):
                config = json.loads(self.read(tree["config.json"]))
        return {
            "_id": hashlib.md5(self.id.encode()).hexdigest()[:24],
            "id": self.id,
            "modelId": self.id,
            "author": self.id.split("/")[0],
            "sha": commit,
            "lastModified": self.read_commit(commit)["date"],
            "createdAt": self.meta["created"],
            "private": self.meta["private"],
            "gated": self.meta["gated"],
            "tags": list(card.get("tags") or []) + ["custom_code"] * ("auto_map" in config),
            "pipeline_tag": card.get("pipeline_tag"),
            "library_name": card.get("library_name"),
            "cardData": card,
            "config": {name: config[name] for name in ("architectures", "model_type", "auto_map") if name in config},
            "siblings": siblings,
        }


def read_shard(data: bytes) -> dict[str, str]:
    """{SHA-256: Xet hash of the file} of a Xet metadata shard: records of 48 bytes, the first of each file a header."""
    found, place = {}, 48
    while place + 48 <= len(data):
        header = data[place : place + 32]
        flags, count = struct.unpack_from("<II", data, place + 32)
        place += 48
        if header == b"\xff" * 32:
            break
        place += 48 * count * (2 if flags & (1 << 31) else 1)
        if flags & (1 << 30):
            found[xet_hex(data[place : place + 32])] = xet_hex(header)
            place += 48
    return found


def xet_hex(data: bytes) -> str:
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", data))
