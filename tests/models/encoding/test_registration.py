"""An encoding, a start and coordinates of a user, in a file of her own."""

import shutil
import sys

import own_rotations
import pytest
import torch
from fresh_process import run_code
from transformers import CLIPVisionConfig, CLIPVisionModel

import hf_liere
from hf_liere import LieREViTConfig, LieREViTForImageClassification, RotaryPatchConfig
from hf_liere.errors import InputError
from hf_liere.models.encoding.kinds import ENCODINGS, Convention
from hf_liere.models.encoding.registration import import_file
from training.common.arguments import RunArguments
from training.common.command_line import parse_arguments


OWN = {"position_encoding": "two_parameters", "block_size": 4, "rotary_init": "tenth", "coordinates": "squares"}
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
PIXELS = {"image_size": 16, "patch_size": 4}


def save(folder):
    """A model with everything of the user's, trained a step; its logits of an image of ones."""
    model = LieREViTForImageClassification(LieREViTConfig(**OWN, **SIZES, **PIXELS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(pixel_values=torch.randn(2, 3, 16, 16), labels=torch.tensor([0, 1])).loss.backward()
    assert model.liere.rotary_encoding.generators.grad.abs().min() > 0
    optimizer.step()
    model.save_pretrained(folder)
    with torch.no_grad():
        torch.save(model.eval()(torch.ones(1, 3, 16, 16)).logits, folder / "logits.pt")


def test_rotations_are_those_of_the_class():
    """R(p) of a plane turns by Σ_a p_a f_a: with the start, by a tenth of the sum of the coordinates."""
    model = LieREViTForImageClassification(
        LieREViTConfig(**OWN, **SIZES, **PIXELS, use_class_token=False, pooling="mean")
    )
    (rotation, _), grid = (
        model.liere.rotations(model.liere.grid_positions((4, 4), torch.device("cpu"))),
        (torch.arange(4) / 4) ** 2,
    )
    angles = 0.1 * (grid[:, None] + grid).flatten()
    state = torch.eye(8)[0].expand(1, 2, 16, 8)
    rotated, _ = rotation.rotate(state, state)
    torch.testing.assert_close(rotated[0, 0, :, 0], angles.cos(), rtol=0, atol=1e-6)
    torch.testing.assert_close(rotated[0, 0, :, 1].abs(), angles.sin(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "imports, package",
    [
        ("", True),
        *(pytest.param(*given, marks=pytest.mark.slow) for given in (("import own_rotations", True), ("", False))),
    ],
)
def test_a_checkpoint_loads_where_its_module_is_and_where_nothing_is(imports, package, tmp_path):
    """With the package the module must be imported, which the error says; without it the checkpoint has the code."""
    save(tmp_path / "saved")
    if imports:
        shutil.copy(own_rotations.__file__, tmp_path)
    # The tests' own copy must not be found.
    code = f"""
        import sys
        sys.path[:] = [place for place in sys.path if not place.endswith("support")]
        {imports or "import os"}
        import torch, transformers
        try:
            load = transformers.AutoModelForImageClassification.from_pretrained
            model = load("saved", trust_remote_code=True).eval()
            with torch.no_grad():
                logits = model(torch.ones(1, 3, 16, 16)).logits
            model.save_pretrained("again")
            print((logits - torch.load("saved/logits.pt")).abs().max().item() < 1e-5)
            print(type(model.liere.rotary_encoding).__module__)
        except ValueError as error:
            print(error)
    """
    lines = run_code(code, tmp_path, package)
    if package and not imports:
        assert "position_encoding='two_parameters'" in lines[-1] and "import own_rotations" in lines[-1]
        return
    assert lines[-2] == "True" and lines[-1].startswith("own_rotations" if package else "transformers_modules")
    assert "class TwoParameters" in (tmp_path / "again" / "modeling_liere.py").read_text()


def test_the_layer_and_patches_take_it(tmp_path):
    layer = hf_liere.LieRotaryEmbedding(2, 8, 2, position_encoding="two_parameters", block_size=4)
    query = torch.randn(1, 2, 5, 8)
    rotated, _ = layer(query, query, torch.rand(5, 2))
    torch.testing.assert_close(rotated.norm(dim=-1), query.norm(dim=-1))
    clip = CLIPVisionModel(CLIPVisionConfig(**SIZES, **PIXELS)).eval()
    pixels = torch.randn(1, 3, 16, 16)
    before = clip(pixels).last_hidden_state
    patched = hf_liere.patch(clip, RotaryPatchConfig(position_encoding="two_parameters", block_size=4))
    torch.testing.assert_close(patched(pixels).last_hidden_state, before, rtol=0, atol=1e-6)
    patched.save_pretrained(tmp_path)
    assert "class TwoParameters" in (tmp_path / "modeling_patched.py").read_text()


def test_what_nobody_else_could_import_is_refused(tmp_path):
    code = """
        import own_rotations
        @hf_liere.register_encoding
        class Mine(own_rotations.TwoParameters):
            name = "mine"
        try:
            hf_liere.LieREViTConfig(position_encoding="mine", block_size=4).save_pretrained("saved")
        except ValueError as error:
            print(error)
    """
    (line,) = run_code(code, tmp_path)
    assert line.startswith("Mine of __main__ cannot be saved") and "a file of its own" in line
    assert not (tmp_path / "saved" / "config.json").exists()


@pytest.mark.parametrize(
    "imported, named",
    [
        ("import numpy as np", "import numpy as np"),
        ("from hf_liere import patch as p", "import patch as p"),
        ("from __future__ import annotations", "import annotations"),
    ],
)
def test_files_with_other_imports_are_refused(imported, named, tmp_path, monkeypatch):
    (tmp_path / "with_imports.py").write_text(
        f"{imported}\n\n\ndef place(index, size, trained, width):\n    return index\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "with_imports", raising=False)
    import with_imports

    hf_liere.register_coordinates("with_imports", Convention("indices", with_imports.place))
    with pytest.raises(ValueError, match=named + ".*accepted: imports of torch"):
        LieREViTConfig(coordinates="with_imports").save_pretrained(tmp_path / "saved")


@pytest.mark.slow
def test_a_patch_of_the_default_size_loads_without_the_package(tmp_path):
    clip = CLIPVisionModel(CLIPVisionConfig(**SIZES, **PIXELS)).eval()
    patched = hf_liere.patch(clip, RotaryPatchConfig(position_encoding="two_parameters"))
    assert patched.config.rotary_patch["block_size"] is None
    with torch.no_grad():
        torch.save(patched(torch.ones(1, 3, 16, 16)).last_hidden_state, tmp_path / "states.pt")
    patched.save_pretrained(tmp_path / "saved")
    code = """
        import torch, transformers
        model = transformers.AutoModel.from_pretrained("saved", trust_remote_code=True).eval()
        with torch.no_grad():
            states = model(torch.ones(1, 3, 16, 16)).last_hidden_state
        print((states - torch.load("states.pt")).abs().max().item() < 1e-5)
    """
    assert run_code(code, tmp_path, package=False)[-1] == "True"


@pytest.mark.parametrize(
    "wrong, message",
    [
        (
            {"entries": lambda self, device: self.generators},
            r"entries of Wrong returned .*needed is the shape \(2, 1, 2, 2, 6\)",
        ),
        ({"entries": lambda self, device: None}, "entries of Wrong returned None"),
        ({"rotary_inits": ()}, "Wrong has parameters and no rotary_inits"),
    ],
)
def test_wrong_classes_are_refused_when_a_model_is_built(wrong, message):
    kind = hf_liere.register_encoding(type("Wrong", (own_rotations.TwoParameters,), {"name": "wrong", **wrong}))
    try:
        with pytest.raises(ValueError, match=message):
            hf_liere.LieRotaryEmbedding(2, 8, 2, position_encoding=kind.name)
    finally:
        del ENCODINGS["wrong"]


@pytest.mark.slow
def test_commands_and_scripts_import_files_by_name(tmp_path, capsys):
    save(tmp_path / "saved")
    shutil.copy(own_rotations.__file__, tmp_path / "own_rotations.py")
    command = ["--register", "own_rotations.py", "inspect", "saved", "--output", "report"]
    code = f"""
        import sys
        sys.path[:] = [place for place in sys.path if not place.endswith("support")]
        from hf_liere.tools.cli import main
        assert main({command[2:]}) == 1
        assert main({command}) == 0
        assert main(["--register", "absent.py", *{command[2:]}]) == 1
    """
    lines = run_code(code, tmp_path)
    assert "report" in lines[-1] and (tmp_path / "report" / "report.html").is_file()
    with pytest.raises(InputError, match="--register: absent.py is not a Python file"):
        parse_arguments(["--register", "absent.py", "--output_dir", str(tmp_path), "--do_eval"], (RunArguments,))
    with pytest.raises(ValueError, match="json.py has the name of"):
        (tmp_path / "json.py").write_text("")
        import_file(tmp_path / "json.py")


def test_names_are_identifiers_and_belong_to_one_thing():
    with pytest.raises(ValueError, match="position_encoding='liere' is LieRE of hf_liere.*another name"):
        hf_liere.register_encoding(type("Other", (own_rotations.TwoParameters,), {"name": "liere"}))
    with pytest.raises(ValueError, match="coordinates='index' is <lambda> of hf_liere.*another name"):
        hf_liere.register_coordinates("index", Convention("indices", own_rotations.place_squares))
    with pytest.raises(ValueError, match="an identifier, not 'two parameters'"):
        hf_liere.register_coordinates("two parameters", Convention("indices", own_rotations.place_squares))
    with pytest.raises(Exception, match="rotary_init='tenth': it is for .*liere, two_parameters, not for comrope_ld"):
        LieREViTConfig(position_encoding="comrope_ld", rotary_init="tenth")
