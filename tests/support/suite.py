"""Fixtures and settings of all tests, here and of the laboratory (`training/evidence/tests`)."""

import contextlib
import gc
import os


# Nothing in the tests may reach a hub; the local server of the hub tests sets its own endpoint. The libraries read it
# when they are imported.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import transformers
from browser import browser, chromium  # noqa: F401 (fixtures)
from checkout import ROOT
from hub_client import hub, storage  # noqa: F401 (fixtures)

import hf_liere
from hf_liere.fast.dispatch import as_on_accelerators, ask_backend


SHARED = ROOT.parent / "shared"
# What tests may lack on a machine: kernels for CPUs, a browser, and the sources of transformers for its common tests.
REQUIREMENTS = ("kernels", "browser", "common")
# Objects that a module of tests leaves, above which they are frozen too: compiled graphs are hundreds of thousands.
MANY_OBJECTS = 100_000
REQUIRED = [name for name in os.environ.get("HF_LIERE_REQUIRE", "").split(",") if name]


def pytest_configure():
    # While tests are collected, nothing is garbage.
    gc.disable()
    if not set(REQUIRED) <= set(REQUIREMENTS):
        accepted = ", ".join(REQUIREMENTS)
        raise pytest.UsageError(f"HF_LIERE_REQUIRE is {','.join(REQUIRED)!r}; accepted, with commas: {accepted}.")


def pytest_collection_finish():
    # Every run of a Trainer collects garbage: among all objects of libraries and tests that takes a second.
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True, scope="module")
def freeze_what_is_left():
    yield
    if len(gc.get_objects()) > MANY_OBJECTS:
        gc.collect()
        gc.freeze()


def pytest_report_header():
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{versions}; required (HF_LIERE_REQUIRE): {', '.join(REQUIRED) or 'nothing'}"


@pytest.fixture(scope="session")
def lacking():
    """Ends a test for want of one of `REQUIREMENTS`: it is skipped, or fails where HF_LIERE_REQUIRE names it."""

    def end(requirement, reason):
        assert requirement in REQUIREMENTS
        (pytest.fail if requirement in REQUIRED else pytest.skip)(reason)

    return end


@pytest.fixture(scope="session")
def compiled_kernels(lacking):
    """For tests of the kernels for CPUs, which a compiler builds when the package is installed."""
    _, refusal = ask_backend("apply_rotation", torch.zeros(1), 8)
    if refusal:
        lacking("kernels", f"there are no kernels for CPUs here: {refusal}")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(params=["compiled", "plain", "accelerator"])
def every_path(request):
    """On CPUs, by the compiled kernels, by plain operations, and by those of accelerators."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_LIERE_CPU_KERNELS", str(int(request.param == "compiled")))
        if request.param == "compiled":
            request.getfixturevalue("compiled_kernels")
        with as_on_accelerators() if request.param == "accelerator" else contextlib.nullcontext():
            yield


@pytest.fixture
def fresh_compiler():
    """Graphs of other tests' models count towards the compiler's limit of graphs for one function."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


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
