import os
from pathlib import Path


# Nothing in the tests may reach a hub; the local server of the hub tests sets its own endpoint. The libraries read it
# when they are imported.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import transformers
from browser import browser, chromium  # noqa: F401 (fixtures)

import hf_liere
from hf_liere import cpu_library
from hf_liere.cpu_kernels import CPU_KERNELS


SHARED = Path(__file__).resolve().parents[2] / "shared"


def pytest_report_header():
    return f"torch {torch.__version__}, transformers {transformers.__version__}"


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(scope="module", params=["compiled", "plain"])
def both_paths(request):
    """On CPUs, by the compiled kernels and by plain operations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_LIERE_CPU_KERNELS", str(int(request.param == "compiled")))
        if request.param == "compiled" and not CPU_KERNELS.is_available(torch.zeros(1), torch.float32, 2):
            pytest.skip("the kernels for CPUs need a C++ compiler")
        yield
        failed = [size for size, library in cpu_library._libraries.items() if library is None]
        assert not failed, f"Plain operations were tested twice for blocks of {failed}."


@pytest.fixture
def shared():
    """The development data beside the checkout; tests that use it are skipped where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("development data (../shared) is absent")
    return SHARED


FIELDS = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "patch_size": 4,
    "num_labels": 3,
}


@pytest.fixture
def tiny():
    """Builds a small image configuration; keyword arguments override."""
    return lambda **overrides: hf_liere.LieREViTConfig(**{**FIELDS, "image_size": 16, **overrides})


@pytest.fixture
def tiny_video():
    """Builds a small video configuration; keyword arguments override."""
    return lambda **overrides: hf_liere.LieREVideoConfig(**{**FIELDS, "image_size": 8, "num_frames": 4, **overrides})
