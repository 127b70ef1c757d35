"""An encoding, a start and coordinates of a user, in a file of her own."""

import importlib
import re
import shutil
import sys
import textwrap

import own_rotations
import pytest
import torch
from fresh_process import run_code
from transformers import CLIPVisionConfig, CLIPVisionModel

import hf_liere
from hf_liere import LieREViTConfig, LieREViTForImageClassification, RotaryEncoding, RotaryPatchConfig
from hf_liere.encoding.commuting_encodings import ComRoPEAxialPartition
from hf_liere.encoding.kinds import DIVISORS, ENCODINGS, PLANES
from hf_liere.encoding.positions import CONVENTIONS, Convention, TokenPositions
from hf_liere.encoding.registration import check_claims, check_convention, import_file
from hf_liere.encoding.rotary_encoding import LieRE
from hf_liere.errors import InputError
from training.common.arguments import RunArguments
from training.common.command_line import parse_arguments


OWN_ENCODINGS = tuple(name for name, kind in ENCODINGS.items() if kind.__module__.startswith("hf_liere."))
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


def test_everything_of_a_user_is_used():
    """R(p) of a plane turns by Σ_a p_a f_a: with the start, by a tenth of the sum of the coordinates."""
    config = LieREViTConfig(**OWN, **SIZES, **PIXELS, use_class_token=False, pooling="mean")
    model = hf_liere.LieREViTModel(config)
    rotation, _ = model.rotations(model.grid_positions((4, 4), torch.device("cpu")))
    places = (torch.arange(4) / 4) ** 2
    angles = 0.1 * (places[:, None] + places).flatten()
    state = torch.eye(8)[0].expand(1, 2, 16, 8)
    rotated, _ = rotation.rotate(state, state)
    found = torch.stack([rotated[0, 0, :, 0], rotated[0, 0, :, 1].abs()])
    torch.testing.assert_close(found, torch.stack([angles.cos(), angles.sin()]), rtol=0, atol=1e-6)


LOAD = """
    import transformers, torch
    try:
        model = transformers.AutoModelForImageClassification.from_pretrained("saved", trust_remote_code=True).eval()
        with torch.no_grad():
            logits = model(torch.ones(1, 3, 16, 16)).logits
        model.save_pretrained("again")
        print((logits - torch.load("saved/logits.pt")).abs().max().item() < 1e-5)
        print(type(model.liere.rotary_encoding).__module__)
    except (ImportError, ValueError) as error:
        print(error)
"""
WITHOUT_OWN = """
    import sys
    sys.path[:] = [place for place in sys.path if not place.endswith("support")]
"""


@pytest.mark.parametrize(
    "imported, package, module",
    [
        ("", None, "transformers_modules"),
        ("import hf_liere", None, "position_encoding='two_parameters'.*import own_rotations"),
        ("", False, "needs the package hf_liere: run `pip install .`"),
        *(pytest.param(*given, marks=pytest.mark.slow) for given in [("import own_rotations", None, "own_rotations")]),
    ],
)
def test_a_checkpoint_loads_where_the_package_is(imported, package, module, tmp_path):
    """By the file beside it, if nobody imported the package; then by what was imported."""
    save(tmp_path / "saved")
    if "own" in imported:
        shutil.copy(own_rotations.__file__, tmp_path)
    lines = run_code(f"{WITHOUT_OWN}    {imported}{LOAD}", tmp_path, package)
    assert re.search(module, lines[-1])
    if " " not in module:
        assert lines[-2] == "True"
        for name in ("modeling_liere.py", "own_rotations.py"):
            assert (tmp_path / "again" / name).read_text() == (tmp_path / "saved" / name).read_text()


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


CONVENTION = """
import hf_liere
def place(index, size, trained, width):
    return index * TWO
hf_liere.register_coordinates("{name}", hf_liere.Convention("doubled", place))
"""


def import_convention(folder, name, first):
    """A file of a user's package that registers coordinates; the configuration of a model with them."""
    folder.mkdir(exist_ok=True)
    (folder / "__init__.py").touch()
    (folder / "helpers.py").write_text("TWO = 2\n")
    (folder / f"{name}.py").write_text(first + CONVENTION.format(name=name))
    importlib.import_module(f"package_of_user.{name}")
    return LieREViTConfig(coordinates=name)


@pytest.fixture
def package_of_user(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for module in [module for module in sys.modules if module.startswith("package_of_user")]:
        monkeypatch.delitem(sys.modules, module)
    return tmp_path / "package_of_user"


@pytest.mark.parametrize(
    "name, first, message",
    [
        ("relative", "from .helpers import TWO", "attempted relative import|No module named"),
        pytest.param(
            "absolute",
            "from package_of_user.helpers import TWO",
            "No module named 'package_of_user'",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_files_that_need_others_are_refused(name, first, message, package_of_user, tmp_path):
    """When the model is saved, not when somebody else loads it."""
    config = import_convention(package_of_user, name, first)
    with pytest.raises(ValueError, match=f"{name}.py cannot be saved with a model.*({message})"):
        config.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def patch_and_save(folder, **fields):
    """A model that was patched with the user's encoding in its default size, and is saved."""
    clip = CLIPVisionModel(CLIPVisionConfig(**SIZES, **PIXELS)).eval()
    model = hf_liere.patch(clip, RotaryPatchConfig(position_encoding="two_parameters", **fields))
    model.save_pretrained(folder)
    return model


def test_a_patch_is_saved_with_the_text_that_ran(package_of_user, tmp_path):
    """Not that of the next experiment, which is edited while this one trains."""
    import_convention(package_of_user, "edited", "import numpy; TWO = 2\n# part one\x0c part two")
    (package_of_user / "edited.py").write_text("TWO = 3" + CONVENTION.format(name="edited"))
    patched = patch_and_save(tmp_path / "saved", coordinates="edited")
    assert patched.config.rotary_patch["block_size"] is None
    assert "class TwoParameters" in (tmp_path / "saved" / "own_rotations.py").read_text()
    assert "TWO = 2" in (tmp_path / "saved" / "edited.py").read_text()


@pytest.mark.slow
def test_a_patch_loads_by_its_file(tmp_path):
    patched = patch_and_save(tmp_path / "saved")
    with torch.no_grad():
        torch.save(patched(torch.ones(1, 3, 16, 16)).last_hidden_state, tmp_path / "states.pt")
    code = """
        import torch, transformers
        model = transformers.AutoModel.from_pretrained("saved", trust_remote_code=True).eval()
        with torch.no_grad():
            states = model(torch.ones(1, 3, 16, 16)).last_hidden_state
        print((states - torch.load("states.pt")).abs().max().item() < 1e-5)
    """
    assert run_code(textwrap.dedent(WITHOUT_OWN) + textwrap.dedent(code), tmp_path, package=None)[-1] == "True"


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


class Free(RotaryEncoding):
    """Generators of any kind, none of them large; it states nothing of them."""

    name, description, rotary_inits, block_sizes = "free", "Free", ("normal",), DIVISORS

    def __init__(self, config, num_axes):
        super().__init__(config, num_axes)
        self.generators = self.new_parameter(num_axes, self.layers, self.heads, self.num_blocks, self.num_entries)

    def entries(self, device):
        return self.generators.tanh()


class Multiples(Free):
    """Generators of the axes are multiples of one matrix."""

    def entries(self, device):
        return torch.stack([self.generators[0] * (axis + 1) for axis in range(self.num_axes)])


def register(kind, **claims):
    try:
        return hf_liere.register_encoding(type("Claiming", (kind,), {"name": "claiming", **claims}))
    finally:
        ENCODINGS.pop("claiming", None)


def on_all_axes(self, device):
    return self.generators.expand(self.num_axes, -1, -1, -1, -1)


def turned_further(self, positions, *rest):
    return Free.layer_rotations(self, TokenPositions(positions.coordinates * 2), *rest)


@pytest.mark.parametrize(
    "kind, claims, wrong",
    [
        (Free, {"commutes": True}, "commutes = True, .* accepted: commutes = False"),
        (Multiples, {"commutes": False}, "commutes = False, .* accepted: commutes = True"),
        (Free, {"proportional": True}, "proportional = True, .* accepted: proportional = False"),
        (Multiples, {"serves_one_axis": True}, "serves_one_axis = True, .* accepted: serves_one_axis = False"),
        (Free, {"product": True}, "product = True, .* accepted: product = False"),
        (Free, {"layer_rotations": turned_further}, "product = False, .* or other entries"),
        # Of its base class, which is one of the package.
        (ComRoPEAxialPartition, {"entries": on_all_axes}, "has serves_one_axis = True"),
    ],
)
def test_a_wrong_claim_of_an_encoding_is_refused(kind, claims, wrong):
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=f"Claiming .*{wrong}"):
        register(kind, **claims)
    assert "claiming" not in ENCODINGS and torch.equal(torch.get_rng_state(), state)


def test_whether_an_encoding_commutes_is_measured_if_it_does_not_say(monkeypatch):
    assert not register(Free).commutes and register(Free, block_sizes=PLANES).commutes
    assert register(Multiples, proportional=True).commutes and not register(Free, commutes=False).commutes
    assert register(LieRE, block_sizes=PLANES).commutes and not register(LieRE).commutes
    monkeypatch.setitem(ENCODINGS, "claiming", register(Free))
    config = LieREViTConfig(position_encoding="claiming", block_size=4, **SIZES, **PIXELS)
    model = hf_liere.LieREViTModel(config).eval()
    folded = model.fold_rotations()
    assert folded.config.folded_grids == [[4, 4]]
    for size in ((16, 16), (8, 16)):
        pixels = torch.randn(1, 3, *size)
        with torch.no_grad():
            found, wanted = (each(pixels).last_hidden_state for each in (folded, model))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", OWN_ENCODINGS)
def test_the_encodings_of_the_package_are_as_they_say(name):
    said = ENCODINGS[name].commutes
    check_claims(name, ENCODINGS[name])
    assert ENCODINGS[name].commutes == said


def place_halves(i, n, n0, w):
    return (i + 0.5) / n


@pytest.mark.parametrize(
    "wrong, claim",
    [
        (Convention("", place_halves, True, 0.5), "is_proportional=True"),
        (Convention("", place_halves, centre=0.0), "centre=0.0"),
        (Convention("", lambda i, n, n0, w: i + 1, True), "is_proportional=True"),
        (Convention("", lambda i, n, n0, w: i * i, True), "is_proportional=True"),
        (Convention("", lambda i, n, n0, w: i - (n - 1) / 2, True), "is_proportional=True"),
        (Convention("", lambda i, n, n0, w: i - (w - 1) / 2, True, 0.0), "is_proportional=True"),
        (Convention("", lambda i, n, n0, w: i / n, centre=0.5), "centre=0.5"),
        (Convention("", lambda i, n, n0, w: i / (n - 1) if n > 1 else i + 0.5, True), "is_proportional=True"),
        (Convention("", lambda i, n, n0, w: i * (2 if isinstance(n, int) else 1)), "place of tensors"),
        (Convention("", lambda i, n, n0, w: i / n0, extents=lambda *_: None), "extents"),
    ],
)
def test_coordinates_are_where_a_convention_says(wrong, claim):
    with pytest.raises(ValueError, match=f"coordinates='halves': .*patches are at .*with {claim} they would be at"):
        hf_liere.register_coordinates("halves", wrong)
    assert "halves" not in CONVENTIONS


def test_right_claims_of_conventions_are_accepted(monkeypatch):
    for name in [name for name in CONVENTIONS if name != "squares"]:
        check_convention(name, CONVENTIONS[name])
    # The second has no place for a single patch.
    for place, *claims in (
        (lambda i, n, n0, w: i - (n - 1) / 2, True, 0.0),
        (lambda i, n, n0, w: 2 / (n - 1) * i - 1, True, 0.0),
        (lambda i, n, n0, w: i / 3, True),
        (place_halves, False, 0.5),
    ):
        check_convention("right", Convention("", place, *claims))


def register_steps(step):
    hf_liere.register_coordinates("steps", Convention("", lambda i, n, n0, w: i / step, True))


@torch.no_grad()
def test_a_convention_that_is_registered_again_ends_what_was_kept(monkeypatch):
    """Rotations of grids that a model keeps, constants of a folded one; a grid that was made before stays as it was."""
    register_steps(1)
    config = LieREViTConfig(block_size=4, coordinates="steps", **SIZES, **PIXELS)
    model, pixels = hf_liere.LieREViTModel(config).eval(), torch.randn(1, 3, 16, 16)
    folded, grid = model.fold_rotations(), hf_liere.grid_positions((4, 4), "steps")
    before = [each(pixels).last_hidden_state for each in (model, folded)]
    register_steps(3)
    fresh = hf_liere.LieREViTModel(config).eval()
    fresh.load_state_dict(model.state_dict())
    wanted = fresh(pixels).last_hidden_state
    assert (wanted - before[0]).abs().max() > 1e-3
    for each in (model, folded):
        torch.testing.assert_close(each(pixels).last_hidden_state, wanted, rtol=0, atol=1e-5)
    del CONVENTIONS["steps"]
    assert grid.coordinates.max() == 3


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
