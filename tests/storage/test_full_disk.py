"""A disk that is full: what is written is complete, as it was before, or absent."""

import os
import resource

import pytest
import torch
from patching_cases import build
from safetensors.torch import save_file

import hf_liere
from hf_liere.errors import InputError
from hf_liere.storage.targets import new_directory, new_file
from hf_liere.tools.cli import main
from hf_liere.tools.export import export_model


def run_with_room(limit, run):
    """The status of `run()` in a process whose files have at most `limit` bytes: 0, 1 for errors, or a signal."""
    if (child := os.fork()) == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            status = run() or 0
        except Exception:
            status = 1
        os._exit(status if isinstance(status, int) else 0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".safetensors"}


@pytest.mark.parametrize("limit", [100, 60_000])
@pytest.mark.parametrize("kind", ["own", "patched", "adapter"])
def test_an_earlier_checkpoint_stays(tiny, tmp_path, kind, limit):
    if kind == "own":
        model = hf_liere.LieREViTModel(tiny(position_encoding="liere"))
    else:
        model = hf_liere.patch(
            build("vit")[0], hf_liere.RotaryPatchConfig(position_encoding="comrope_ld", block_size=8)
        )
    save = (
        (lambda: hf_liere.save_rotary(model, tmp_path))
        if kind == "adapter"
        else lambda: model.save_pretrained(tmp_path)
    )
    save()
    before = content(tmp_path)
    if kind == "adapter":
        before |= {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with torch.no_grad():
        next(iter(model.parameters())).add_(1.0)
    assert run_with_room(100 if kind == "adapter" else limit, save) == 1
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert all(after[name] == value for name, value in before.items())
    assert before.keys() | {"model.safetensors"} >= after.keys()


def test_new_files_are_absent(tiny, tmp_path):
    model = hf_liere.LieREViTModel(tiny(position_encoding="none", num_hidden_layers=1))
    runs = (
        lambda: main(["bundle", "layer", str(tmp_path / "lie.py")]),
        lambda: bool(export_model(model, tmp_path / "model.pt2")),
    )
    assert [run_with_room(3000, run) for run in runs] == [1, 1]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("target", [new_file, new_directory])
def test_weights_that_do_not_fit_are_one_sentence(tmp_path, target):
    def run():
        with (
            pytest.raises(InputError, match="weights cannot be written: .*large"),
            target(tmp_path / "weights") as partial,
        ):
            save_file({"a": torch.zeros(9999)}, partial / "file" if target is new_directory else partial)

    assert run_with_room(3000, run) == 0
    assert not list(tmp_path.iterdir())
