"""What the local hub stores: repositories as files with one JSON file per commit, and what it checks in a card."""

import contextlib
import hashlib
import json
import os
import re
import struct
import threading
from datetime import datetime, timezone
from pathlib import Path

import yaml


LFS_THRESHOLD = 10 * 1024 * 1024
LFS_EXTENSIONS = (
    "7z arrow bin bz2 ckpt ftz gz h5 joblib mlmodel model msgpack npy npz onnx ot parquet pb pickle "
    "pkl pt pth rar safetensors tar tflite tgz wasm xz zip zst"
).split()
GITATTRIBUTES = "".join(f"*.{e} filter=lfs diff=lfs merge=lfs -text\n" for e in LFS_EXTENSIONS) + (
    "saved_model/**/* filter=lfs diff=lfs merge=lfs -text\n*tfevents* filter=lfs diff=lfs merge=lfs -text\n"
)
KNOWN_LICENSES = set(
    "apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m afl-3.0 artistic-2.0 bsl-1.0 bsd "
    "bsd-2-clause bsd-3-clause cc cc0-1.0 cc-by-2.0 cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 "
    "cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-4.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 ecl-2.0 epl-1.0 "
    "epl-2.0 gpl gpl-2.0 gpl-3.0 agpl-3.0 lgpl lgpl-2.1 lgpl-3.0 isc mpl-2.0 ms-pl ncsa odbl ofl-1.1 pddl "
    "postgresql unlicense wtfpl zlib llama2 llama3 llama3.1 llama3.2 llama3.3 gemma other unknown".split()
)


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def lfs_pointer(sha: str, size: int) -> bytes:
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha}\nsize {size}\n".encode()


class HTTPError(Exception):
    """An error the client understands: `code` becomes X-Error-Code, `message` X-Error-Message."""

    def __init__(
        self, status: int, message: str, code: str | None = None, headers: dict | None = None, extra: dict | None = None
    ):
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.headers, self.extra = headers or {}, extra or {}


def repo_not_found(authenticated: bool) -> HTTPError:
    # huggingface.co answers 404 to a valid token and 401 to an anonymous caller. The client turns a bare 401
    # into RepositoryNotFoundError only for https:// URLs, so over http:// the explicit code is needed.
    if authenticated:
        return HTTPError(404, "Repository not found", "RepoNotFound")
    return HTTPError(401, "Invalid username or password.", "RepoNotFound")


class Store:
    """Repositories on disk: content-addressed blobs, one JSON file per commit, one JSON file of refs per repo."""

    def __init__(self, root: Path):
        self.root = Path(root)
        (self.root / "blobs").mkdir(parents=True, exist_ok=True)
        (self.root / "repos").mkdir(parents=True, exist_ok=True)
        self.lock = threading.RLock()

    # blobs
    def blob_path(self, sha: str) -> Path:
        return self.root / "blobs" / sha[:2] / sha

    def put_blob(self, data: bytes) -> str:
        sha = hashlib.sha256(data).hexdigest()
        p = self.blob_path(sha)
        if not p.exists():
            p.parent.mkdir(exist_ok=True)
            tmp = p.with_name(f".{sha}.{threading.get_ident()}")
            tmp.write_bytes(data)
            os.replace(tmp, p)
        return sha

    def adopt_blob(self, tmp: Path, sha: str) -> None:
        p = self.blob_path(sha)
        p.parent.mkdir(exist_ok=True)
        os.replace(tmp, p)

    # repos
    def repo_dir(self, rtype: str, rid: str) -> Path:
        return self.root / "repos" / (rtype + "s") / rid

    def get(self, rtype: str, rid: str) -> "Repo | None":
        d = self.repo_dir(rtype, rid)
        return Repo(self, rtype, rid, d) if (d / "repo.json").is_file() else None

    def xet_lookup(self, sha: str) -> str | None:
        """Xet hash of the file with this sha256, from the shards hf_xet wrote under root/cas; None when unknown."""
        for p in (self.root / "cas").rglob("*.mdb"):
            hit = shard_files(p.read_bytes()).get(sha)
            if hit:
                return hit
        return None

    def create(self, rtype: str, rid: str, private: bool, author: str) -> "Repo":
        d = self.repo_dir(rtype, rid)
        (d / "commits").mkdir(parents=True, exist_ok=True)
        meta = {"private": private, "gated": False, "created": now(), "heads": {}, "tags": {}}
        (d / "repo.json").write_text(json.dumps(meta))
        repo = Repo(self, rtype, rid, d)
        data = GITATTRIBUTES.encode()
        repo.commit("main", {".gitattributes": repo.entry(data)}, "initial commit", "", author, parent=None)
        return repo


class Repo:
    def __init__(self, store: Store, rtype: str, rid: str, d: Path):
        self.store, self.type, self.id, self.dir = store, rtype, rid, d
        self.meta = json.loads((d / "repo.json").read_text())

    @property
    def prefix(self) -> str:
        return "" if self.type == "model" else self.type + "s/"

    def save(self) -> None:
        tmp = self.dir / f".repo.{threading.get_ident()}"
        tmp.write_text(json.dumps(self.meta))
        os.replace(tmp, self.dir / "repo.json")

    def entry(self, data: bytes) -> dict:
        return {"sha": self.store.put_blob(data), "size": len(data), "oid": git_sha1(data), "lfs": False}

    def lfs_entry(self, sha: str, size: int) -> dict:
        ptr = lfs_pointer(sha, size)
        return {"sha": sha, "size": size, "oid": git_sha1(ptr), "lfs": True, "ptr": len(ptr)}

    def read_commit(self, oid: str) -> dict:
        return json.loads((self.dir / "commits" / f"{oid}.json").read_text())

    def resolve(self, rev: str) -> str:
        rev = rev or "main"
        for table, prefix in (("heads", "refs/heads/"), ("tags", "refs/tags/")):
            name = rev.removeprefix(prefix)
            if name in self.meta[table]:
                return self.meta[table][name]
        if re.fullmatch(r"[0-9a-f]{7,40}", rev):
            hits = list((self.dir / "commits").glob(f"{rev}*.json"))
            if len(hits) == 1:
                return hits[0].stem
        raise HTTPError(404, f"Invalid rev id: {rev}", "RevisionNotFound")

    def tree(self, rev: str) -> tuple[str, dict]:
        oid = self.resolve(rev)
        return oid, self.read_commit(oid)["tree"]

    def read(self, entry: dict) -> bytes:
        return self.store.blob_path(entry["sha"]).read_bytes()

    def commit(self, branch: str, tree: dict, title: str, message: str, author: str, parent: str | None) -> str:
        c = {"parent": parent, "title": title, "message": message, "author": author, "date": now(), "tree": tree}
        oid = hashlib.sha1(json.dumps(c, sort_keys=True).encode() + os.urandom(8)).hexdigest()
        for e in tree.values():
            e.setdefault("last", oid)
        (self.dir / "commits" / f"{oid}.json").write_text(json.dumps(c))
        self.meta["heads"][branch.removeprefix("refs/heads/")] = oid
        self.save()
        return oid

    def history(self, oid: str | None):
        while oid:
            c = self.read_commit(oid)
            yield oid, c
            oid = c["parent"]

    def card(self, tree: dict) -> dict:
        e = tree.get("README.md")
        if not e:
            return {}
        block = front_matter(self.read(e).decode("utf-8", "replace"))
        try:
            data = yaml.safe_load(block) if block else {}
        except Exception:
            data = {}
        return data if isinstance(data, dict) else {}

    def info(self, rev: str, blobs: bool) -> dict:
        oid, tree = self.tree(rev)
        c = self.read_commit(oid)
        card = self.card(tree)
        sib = []
        for path, e in sorted(tree.items()):
            s: dict = {"rfilename": path}
            if blobs:
                s.update(size=e["size"], blobId=e["oid"])
                if e["lfs"]:
                    s["lfs"] = {"size": e["size"], "sha256": e["sha"], "pointerSize": e["ptr"]}
            sib.append(s)
        tags = list(card.get("tags") or [])
        out = {
            "_id": hashlib.md5(f"{self.type}/{self.id}".encode()).hexdigest()[:24],
            "id": self.id,
            "author": self.id.split("/")[0],
            "sha": oid,
            "lastModified": c["date"],
            "createdAt": self.meta["created"],
            "private": self.meta["private"],
            "gated": self.meta["gated"],
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": tags,
            "cardData": card,
            "siblings": sib,
            "usedStorage": sum(e["size"] for e in tree.values()),
        }
        if self.type == "model":
            out.update(
                modelId=self.id, pipeline_tag=card.get("pipeline_tag"), library_name=card.get("library_name"), spaces=[]
            )
            if "model-index" in card:
                out["model-index"] = card["model-index"]
            if "config.json" in tree:
                with contextlib.suppress(ValueError):
                    cfg = json.loads(self.read(tree["config.json"]))
                    out["config"] = {k: cfg[k] for k in ("architectures", "model_type", "auto_map") if k in cfg}
                    if "auto_map" in cfg:
                        tags.append("custom_code")
        return out


def _xet_hex(b: bytes) -> str:
    return "".join(f"{w:016x}" for w in struct.unpack("<4Q", b))


def shard_files(data: bytes) -> dict[str, str]:
    """{sha256: xet file hash} of a Xet metadata shard: 48-byte records, one header per file."""
    out, at = {}, 48
    while at + 48 <= len(data):
        head = data[at : at + 32]
        flags, n = struct.unpack_from("<II", data, at + 32)
        at += 48
        if head == b"\xff" * 32:
            break
        at += 48 * n * (2 if flags & (1 << 31) else 1)
        if flags & (1 << 30):
            out[_xet_hex(data[at : at + 32])] = _xet_hex(head)
            at += 48
    return out


def front_matter(text: str) -> str | None:
    m = re.match(r"^\ufeff?---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|$)", text, re.S)
    return m.group(1) if m else None


def validate_card(content: str, repo_type: str) -> tuple[list[str], list[str]]:
    """A subset of the checks huggingface.co makes on README.md metadata: (errors, warnings)."""
    block = front_matter(content)
    if block is None:
        return [], [
            "empty or missing yaml metadata in repo card (https://huggingface.co/docs/hub/model-cards#model-card-metadata)"
        ]
    try:
        data = yaml.safe_load(block)
    except yaml.YAMLError as e:
        return [f"Invalid YAML: {str(e).splitlines()[0]}"], []
    if data is None:
        return [], ["empty or missing yaml metadata in repo card"]
    if not isinstance(data, dict):
        return ["metadata must be a mapping"], []
    err: list[str] = []
    lic = data.get("license")
    for one in lic if isinstance(lic, list) else [lic]:
        if one is not None and one not in KNOWN_LICENSES:
            err.append(f'"license" must be one of [{", ".join(sorted(KNOWN_LICENSES)[:6])}, ...]')
    for key in ("tags", "datasets", "metrics", "language"):
        v = data.get(key)
        if v is None or (isinstance(v, str) and key != "tags"):
            continue
        if not isinstance(v, list):
            err.append(f'"{key}" must be an array')
        elif any(not isinstance(x, str) for x in v):
            err.append(f'"{key}[{next(i for i, x in enumerate(v) if not isinstance(x, str))}]" must be a string')
    for key in ("pipeline_tag", "library_name"):
        if key in data and not isinstance(data[key], str):
            err.append(f'"{key}" must be a string')
    index = data.get("model-index")
    if index is not None and repo_type == "model":
        if not isinstance(index, list):
            err.append('"model-index" must be an array')
        else:
            for i, m in enumerate(index):
                if not isinstance(m, dict) or not isinstance(m.get("name"), str) or not m.get("name"):
                    err.append(f'"model-index[{i}].name" is required')
                    continue
                if not isinstance(m.get("results"), list):
                    err.append(f'"model-index[{i}].results" is required')
                    continue
                for j, r in enumerate(m["results"]):
                    at = f"model-index[{i}].results[{j}]"
                    if not (r.get("task") or {}).get("type"):
                        err.append(f'"{at}.task.type" is required')
                    for k in ("name", "type"):
                        if "dataset" in r and not (r["dataset"] or {}).get(k):
                            err.append(f'"{at}.dataset.{k}" is required')
                    if not isinstance(r.get("metrics"), list):
                        err.append(f'"{at}.metrics" is required')
                        continue
                    for n, x in enumerate(r["metrics"]):
                        if not x.get("type"):
                            err.append(f'"{at}.metrics[{n}].type" is required')
                        if x.get("value") is None:
                            err.append(f'"{at}.metrics[{n}].value" is required')
    return err, []
