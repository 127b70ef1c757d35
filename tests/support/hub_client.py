"""What the tests of publishing share: the local Hub, a client of it in this process, and processes of users."""

import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants as constants
from checkout import ROOT
from huggingface_hub import HfApi


WRITE, READ, OTHER = "hf_tester_write", "hf_tester_read", "hf_other_write"


def online(patch, hub, home: Path) -> None:
    """Let the clients of this process, which tests keep offline, reach the local Hub with a cache of their own."""
    for name, value in hub.env(home).items():
        patch.setenv(name, value)
    for name, value in {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_XET_CACHE": str(home / "xet"),
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_HUB_DISABLE_XET": hub.xet_cas_url is None,
    }.items():
        patch.setattr(constants, name, value)
    # Newer releases keep the client of the first Hub that a process reached.
    patch.setattr("transformers.utils.hub._hf_api", None, raising=False)


def client(hub, token: str | bool | None = WRITE) -> HfApi:
    return HfApi(endpoint=hub.url, token=token)


def start(command: list[str], hub, home: Path, token: str | None = WRITE, **environment: str) -> subprocess.Popen:
    """A process of a user with an empty cache, in a folder of its own."""
    environment = {**os.environ, **hub.env(home, token), "OMP_NUM_THREADS": "1", **environment}
    environment["PYTHONPATH"] = str(ROOT)
    if token is None:
        environment.pop("HF_TOKEN", None)
    return subprocess.Popen(
        [sys.executable, *command], env=environment, cwd=home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen, code: int = 0) -> tuple[str, str]:
    """Output and error output of a process that must end with a code."""
    output, errors = process.communicate(timeout=300)
    assert process.returncode == code, f"{output[-3000:]}\n{errors[-5000:]}"
    return output, errors


def history(hub, repo_id="tester/model"):
    """Titles, oldest first, without the commit that made the repository."""
    with hub.store.lock:
        repo = hub.repo(repo_id)
        return repo and [commit["title"] for _, commit in repo.history(repo.resolve("main"))][-2::-1]
