"""What the commands and the Hub do with models of diffusers that have learned rotations."""

import json
import math

import pytest
import torch
from hub_client import WRITE
from huggingface_hub import ModelCard, hf_api

from hf_liere import is_patched, patch, rotary_parameters, save_rotary, unpatch
from hf_liere.storage.saved_model import SavedModel
from hf_liere.tools.cli import main
from hf_liere.tools.hub.cards import push_card
from hf_liere.tools.hub.publishing import publish


diffusers = pytest.importorskip("diffusers", reason="diffusers needs Python 3.11")
from diffusion_cases import BLOCKS, BY_NAME, CASES, OTHER_PARTS, PLANES, make_pipeline, run  # noqa: E402

from hf_liere.tools.rope_check.reading import find_diffusion_rotations  # noqa: E402


FLUX = BY_NAME["FluxTransformer2DModel"]


def learned_flux():
    """With frequencies that are doubled on the second axis."""
    model = patch(FLUX.build(), PLANES)
    axes = torch.tensor(model.rotary_patch.planes.axes)
    with torch.no_grad():
        for _, factors in rotary_parameters(model):
            factors[:, axes == 1] = math.log(2)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A pipeline with rotations, its transformer alone, the plain transformer, and the rotations alone."""
    folder, model = tmp_path_factory.mktemp("saved"), learned_flux()
    make_pipeline(model).save_pretrained(folder / "pipeline")
    model.save_pretrained(folder / "patched")
    save_rotary(model, folder / "rotations")
    unpatch(model).save_pretrained(folder / "plain")
    return folder


def test_frequencies_are_read_from_a_configuration_alone(tmp_path):
    for case in (case for case in CASES if case.rotates):
        case.build().save_config(tmp_path / case.name)
        (found,) = find_diffusion_rotations(tmp_path / case.name, with_weights=False)
        torch.testing.assert_close(found.rotation.frequencies, case.frequencies(), rtol=1e-12, atol=0)
        assert type(found.rope).__name__ == case.name and found.layers


def test_rope_describes_transformers_and_pipelines(folders, tmp_path, capsys):
    assert main(["rope", str(folders / "plain")]) == 0
    plain = capsys.readouterr().out
    for line in (
        "(FluxTransformer2DModel of diffusers)\npos_embed\n",
        "  layers      4 rotate\n",
        "  channels    16 of 16 rotate, adjacent pairs (0, 1), (2, 3), …\n",
        "  axes        3, by plane 2×0 2×1 4×2\n",
        " 6.28 … 628 positions\n",
    ):
        assert line in plain, plain
    assert "note" not in plain
    assert main(["rope", str(folders / "patched")]) == 0
    assert "learned rotations lie beside the model (rotary_config.json)" in capsys.readouterr().out
    assert main(["rope", str(folders / "pipeline"), "--weights"]) == 0
    whole = capsys.readouterr().out
    assert "\ntransformer.pos_embed\n" in whole and "compared with the cos and sin" in whole
    assert "learned factors of these frequencies: 1 … 1 on axis 0, 2 … 2 on axis 1, 1 … 1 on axis 2" in whole
    patch(FLUX.build(), BLOCKS).save_pretrained(tmp_path / "blocks")
    assert main(["rope", str(tmp_path / "blocks"), "--weights"]) == 0
    assert "liere with blocks of 4 has replaced this rotation" in capsys.readouterr().out


def test_rope_refuses_what_does_not_rotate_or_is_not_known(tmp_path, capsys):
    BY_NAME["SD3Transformer2DModel"].build().save_config(tmp_path / "sd3")
    assert main(["rope", str(tmp_path / "sd3")]) == 1
    assert "SD3Transformer2DModel adds a table of sines and cosines and does not rotate" in capsys.readouterr().err
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "DDPMPipeline", "unet": ["diffusers", "U"]}))
    assert main(["rope", str(tmp_path)]) == 1
    assert "contains the DDPMPipeline of diffusers, and how it rotates is not known; accepted: FluxTr" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("kind", ["plain", "patched", "pipeline"])
def test_other_commands_refuse_models_of_diffusers(folders, kind, tmp_path, capsys):
    source, output = str(folders / kind), str(tmp_path / "output")
    commands = [["inspect", source, "--output", output], ["push", source, "me/model"], ["verify", source, "me/model"]]
    commands += [["export", source, f"{output}.onnx"], ["convert", source, output]]
    commands += [["rope", source, "--vectors", output]]
    for command in commands:
        assert main(command) == 1, command
        (line,) = capsys.readouterr().err.splitlines()
        name = "FluxPipeline" if kind == "pipeline" else "FluxTransformer2DModel"
        assert f"contains the {name} of diffusers; accepted here are models with an Auto class" in line, command


@pytest.fixture
def local_hub(hub, monkeypatch):
    # diffusers and the cards' code use the client that was made before the local Hub.
    monkeypatch.setattr(hf_api.api, "endpoint", hub.url)
    return hub


def test_rotations_alone_are_published_with_a_card_of_diffusers(folders, local_hub, tmp_path):
    push_card(SavedModel(folders / "rotations"), "tester/rotations").write(folders / "rotations")
    # As `hf-liere push` does after its search for secrets, which takes half a minute to prepare.
    publish(folders / "rotations", "tester/rotations", message="Publish rotations")
    assert main(["verify", str(folders / "rotations"), "tester/rotations"]) == 0
    assert main(["pull", "tester/rotations", str(tmp_path / "pulled")]) == 0
    card = ModelCard.load(tmp_path / "pulled" / "README.md")
    assert card.data.library_name == "diffusers"
    code = card.text.split("```")[1]
    assert "from diffusers import FluxTransformer2DModel" in code and "AutoModel" not in code
    # What it runs, with the base in the place of BASE.
    FLUX.build().save_pretrained(tmp_path / "base" / "transformer")
    names = {}
    exec(code.removeprefix("python").replace('"BASE"', repr(str(tmp_path / "base"))), names)
    with torch.no_grad():
        assert torch.equal(run(names["model"].eval(), FLUX.inputs()), run(learned_flux(), FLUX.inputs()))


def test_models_and_pipelines_on_the_hub_restore_their_rotations(local_hub, tmp_path, capsys):
    model, inputs = learned_flux(), FLUX.inputs()
    expected = run(model, inputs)
    model.save_pretrained(str(tmp_path / "saved"), push_to_hub=True, repo_id="tester/saved", token=WRITE)
    model.push_to_hub("tester/pushed", token=WRITE)
    make_pipeline(model).push_to_hub("tester/pipeline", token=WRITE)
    unpatch(model).push_to_hub("tester/plain", token=WRITE)
    cache = {"cache_dir": tmp_path / "cache"}
    for name, subfolder in (("saved", None), ("pushed", None), ("pipeline", "transformer")):
        loaded = type(model).from_pretrained(f"tester/{name}", subfolder=subfolder, **cache)
        assert torch.equal(run(loaded, inputs), expected), name
    assert not is_patched(type(model).from_pretrained("tester/plain", **cache))
    # The same files again, without a connection.
    offline = type(model).from_pretrained("tester/saved", local_files_only=True, **cache)
    assert torch.equal(run(offline, inputs), expected)
    pipeline = diffusers.FluxPipeline.from_pretrained("tester/pipeline", cache_dir=tmp_path / "other", **OTHER_PARTS)
    assert torch.equal(run(pipeline.transformer, inputs), expected)
    assert main(["rope", "tester/pipeline"]) == 0
    assert "(FluxTransformer2DModel of diffusers)\ntransformer.pos_embed" in capsys.readouterr().out
    assert main(["inspect", "tester/plain", "--output", str(tmp_path / "report")]) == 1
    assert "tester/plain contains the FluxTransformer2DModel of diffusers" in capsys.readouterr().err
