"""What the local Hub stores, in memory: repositories of models, their commits, and the contents of files by hash."""

import hashlib
import itertools
import re
import struct
import threading
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path


LFS_THRESHOLD = 10 * 1024 * 1024
LFS_PATTERNS = [f"*.{suffix}" for suffix in "bin ckpt gz h5 model npy npz onnx parquet pt pth safetensors zip".split()]
GITATTRIBUTES = "".join(f"{pattern} filter=lfs diff=lfs merge=lfs -text\n" for pattern in LFS_PATTERNS).encode()


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class HTTPError(Exception):
    """An error that the client understands: `code` becomes X-Error-Code, the message X-Error-Message."""

    def __init__(self, status: int, message: str, code: str | None = None, headers: dict | None = None, **content):
        super().__init__(message)
        self.status, self.code, self.headers, self.content = status, code, headers or {}, content


class Store:
    """Contents of files by their SHA-256 (`blobs`), and repositories by owner/name."""

    def __init__(self, root: Path):
        # Xet's client writes there itself.
        self.cas = Path(root).resolve() / "cas"
        self.blobs: dict[str, bytes] = {}
        self.repos: dict[str, Repo] = {}
        self.lock = threading.RLock()
        self.numbers = itertools.count()

    def put(self, data: bytes) -> str:
        sha = hashlib.sha256(data).hexdigest()
        self.blobs[sha] = data
        return sha

    def xet_lookup(self, sha: str) -> str | None:
        """Xet hash of the file with this SHA-256, from the shards that hf_xet wrote; None if unknown."""
        shards = (read_shard(path.read_bytes()) for path in self.cas.rglob("*.mdb"))
        return next((shard[sha] for shard in shards if sha in shard), None)


class Repo:
    """A repository. Commits are never changed; branches (`heads`) and tags lead to one each."""

    def __init__(self, store: Store, repo_id: str, private: bool, author: str):
        self.store, self.id, self.private, self.gated = store, repo_id, private, False
        self.commits: dict[str, dict] = {}
        self.heads: dict[str, str] = {}
        self.tags: dict[str, str] = {}
        self.commit("main", {".gitattributes": self.entry(GITATTRIBUTES)}, "initial commit", "", author, None)

    def entry(self, data: bytes) -> dict:
        return {"sha": self.store.put(data), "size": len(data), "oid": git_sha1(data), "lfs": None}

    def lfs_entry(self, sha: str, size: int) -> dict:
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha}\nsize {size}\n".encode()
        return {"sha": sha, "size": size, "oid": git_sha1(pointer), "lfs": {"size": size, "pointerSize": len(pointer)}}

    def resolve(self, revision: str) -> str:
        """The commit of a branch, a tag, or the beginning of its own name."""
        for names, prefix in ((self.heads, "refs/heads/"), (self.tags, "refs/tags/")):
            if (name := revision.removeprefix(prefix)) in names:
                return names[name]
        found = [commit for commit in list(self.commits) if commit.startswith(revision)]
        if re.fullmatch(r"[0-9a-f]{7,40}", revision) and len(found) == 1:
            return found[0]
        raise HTTPError(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def tree(self, revision: str) -> tuple[str, dict]:
        commit = self.resolve(revision)
        return commit, self.commits[commit]["tree"]

    def read(self, entry: dict) -> bytes:
        return self.store.blobs[entry["sha"]]

    def commit(self, branch: str, tree: dict, title: str, message: str, author: str, parent: str | None) -> str:
        content = {"parent": parent, "title": title, "message": message, "author": author, "date": now(), "tree": tree}
        commit = hashlib.sha1(f"{next(self.store.numbers)} {content}".encode()).hexdigest()
        self.commits[commit] = content
        self.heads[branch.removeprefix("refs/heads/")] = commit
        return commit

    def history(self, commit: str | None) -> Iterator[tuple[str, dict]]:
        """(commit, its content), newest first."""
        while commit:
            yield commit, self.commits[commit]
            commit = self.commits[commit]["parent"]


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
