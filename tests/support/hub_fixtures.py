"""Fixtures: a local Hub that the clients of this process reach, and how it stores large files."""

import pytest
from hub_client import online
from hub_server import HubServer


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
