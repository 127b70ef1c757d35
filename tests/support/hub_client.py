"""The local Hub as a fixture, a client of it in this process, and processes of users."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.constants as constants
import pytest
from checkout import ROOT
from fresh_process import run_warm
from hub_server import HubServer
from huggingface_hub import HfApi


# Waits before another attempt, of seconds, are so much shorter in the process of the tests.
WAITS = 0.1
WRITE, READ, OTHER = "hf_tester_write", "hf_tester_read", "hf_other_write"


@pytest.fixture(params=["lfs", "xet"])
def storage(request):
    if request.param == "xet":
        pytest.importorskip("hf_xet", reason="the client for Xet storage is not installed")
    return request.param


@pytest.fixture
def hub(tmp_path, monkeypatch, request):
    """By LFS, or by the `storage` that the test asks for too."""
    xet = "storage" in request.fixturenames and request.getfixturevalue("storage") == "xet"
    with HubServer(tmp_path / "hub", xet=xet) as server:
        online(monkeypatch, server, tmp_path / "home")
        yield server
        assert not server.errors, server.errors[0]


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
    hurried = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: time.sleep(seconds * WAITS)})
    for module in ("hf_liere.storage.client", "huggingface_hub.utils._http"):
        patch.setattr(f"{module}.time", hurried, raising=False)
    # Newer releases keep the client of the first Hub that a process reached.
    patch.setattr("transformers.utils.hub._hf_api", None, raising=False)


def client(hub, token: str | bool | None = WRITE) -> HfApi:
    return HfApi(endpoint=hub.url, token=token)


def variables_of(hub, home: Path, token: str | None, environment: dict[str, str]) -> dict[str, str | None]:
    """The environment of a user with an empty cache."""
    return {**hub.env(home, token), "OMP_NUM_THREADS": "1", **environment} | ({} if token else {"HF_TOKEN": None})


def start(command: list[str], hub, home: Path, token: str | None = WRITE, **environment: str) -> subprocess.Popen:
    """A process of a user, in a folder of its own."""
    variables = {**os.environ, **variables_of(hub, home, token, environment), "PYTHONPATH": str(ROOT)}
    variables = {name: value for name, value in variables.items() if value is not None}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *command], env=variables, cwd=home, **pipes)


def run_as_user(command: list[str], hub, home: Path, token: str | None = WRITE, **environment: str) -> tuple[str, str]:
    """Output and error output of a process of a user that must succeed."""
    done = run_warm(*command, variables=variables_of(hub, home, token, environment), cwd=home)
    return done.stdout, done.stderr


def history(hub, repo_id="tester/model"):
    """Titles, oldest first, without the commit that made the repository."""
    with hub.store.lock:
        repo = hub.repo(repo_id)
        return repo and [commit["title"] for _, commit in repo.history(repo.resolve("main"))][-2::-1]
