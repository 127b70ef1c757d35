"""Drawn models of the package beside those of `hf_liere.plain`, with the same weights and inputs."""

import contextlib
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from encoding_cases import GRID_CONVENTIONS, OWN_PLAIN
from huggingface_hub.errors import StrictDataclassError
from plain_outputs import call, compare_outputs, relative, relative_norm, results
from torch import nn

import hf_liere
from hf_liere.encoding.kinds import ENCODINGS, needs_exponential
from hf_liere.fast.dispatch import as_on_accelerators, plain_operations
from hf_liere.plain import PLAIN_ENCODINGS
from hf_liere.plain import model as plain_models


# Kind → class of models, class of configurations, ways in which inputs are given.
PIXELS = ("grid", "sizes", "sizes", "spacing", "given", "mask")
KINDS = {
    "image": ("LieREViTForImageClassification", "LieREViTConfig", PIXELS),
    "video": ("LieREVideoForVideoClassification", "LieREVideoConfig", (*PIXELS, "times", "times")),
    "masked": ("LieREViTForMaskedImageModeling", "LieREViTConfig", ("grid", "given", "mask")),
    "backbone": ("LieREViTBackbone", "LieREViTConfig", ("grid", "given", "mask")),
    "tokens": ("LieRETokensForSequenceClassification", "LieRETokensConfig", ("given", "mask")),
    "labelled": ("LieRETokensForTokenClassification", "LieRETokensConfig", ("given", "mask")),
}
WEIGHTS = {"image": 4, "video": 4, "masked": 1, "backbone": 1, "tokens": 2, "labelled": 1}
SIZES = {"hidden_size": 48, "num_attention_heads": 2, "head_dim": 24, "intermediate_size": 32, "num_labels": 5}
# Height and width of inputs in pixels; patches have 8.
PICTURES = ((32, 32), (16, 40), (24, 32), (48, 24), (8, 24))
# Gradients of so many patches are computed in another way.
LARGE = (96, 120)
# Of the size of outputs, and of the norm of each gradient: a few roundings of the type. In float64, 16 squarings and
# tables, which are read in float32, round more. In bfloat16 queries are rounded in another basis.
TOLERANCES = {"float64": (1e-9, 2e-7), "float32": (1e-6, 1e-5), "bfloat16": (0.03, 0.1), "autocast": (0.03, 0.1)}


@dataclass
class Case:
    """What a number draws: a configuration, how inputs are given, the type, and the code that computes rotations."""

    number: int
    rng: random.Random = field(repr=False)
    kind: str
    given: str
    config: Any = field(repr=False)
    fields: dict[str, Any]
    precision: str
    path: str
    attention: str

    @property
    def dtype(self) -> torch.dtype:
        """That of weights and inputs."""
        return {"float64": torch.float64, "bfloat16": torch.bfloat16}.get(self.precision, torch.float32)

    @property
    def bounds(self) -> tuple[float, float]:
        return TOLERANCES[self.precision]

    @contextlib.contextmanager
    def conditions(self):
        """Rotations by the compiled kernels, by plain operations, or by those of accelerators; autocast where drawn."""
        paths = {"compiled": contextlib.nullcontext, "plain": plain_operations, "accelerator": as_on_accelerators}
        autocast = torch.autocast("cpu", torch.bfloat16, self.precision == "autocast", cache_enabled=False)
        with paths[self.path](), autocast:
            yield


def draw(number: int) -> Case:
    """The case of a number: the first draw that the package accepts."""
    rng = random.Random(number)
    while True:
        kind = rng.choices(list(WEIGHTS), WEIGHTS.values())[0]
        _, config_class, ways = KINDS[kind]
        given = rng.choice(ways)
        fields = draw_fields(rng, kind, given)
        with contextlib.suppress(StrictDataclassError, ValueError):
            config = getattr(hf_liere, config_class)(**fields)
            if given == "given" and not config.uses_positions or kind == "labelled" and config.final_norm == "pooled":
                continue
            # Half types round numbers across the kinks of the loss of masked modelling and of a hidden ReLU layer.
            has_kinks = kind == "masked" or config.classifier_hidden_size is not None
            precision = rng.choices(list(TOLERANCES), (1, 5, *((0, 0) if has_kinks else (2, 2))))[0]
            path = rng.choice(["compiled", "compiled", "plain", "accelerator"])
            return Case(
                number, rng, kind, given, config, fields, precision, path, rng.choice(["sdpa", "sdpa", "eager"])
            )


def draw_fields(rng, kind: str, given: str) -> dict[str, Any]:
    axes = {"tokens": rng.choice([1, 2, 3]), "labelled": 2, "video": 3}.get(kind, 2)
    fields = {**SIZES, "num_hidden_layers": rng.choice([2, 2, 3]), **draw_encoding(rng, axes), **draw_architecture(rng)}
    if kind in ("tokens", "labelled"):
        fields |= {"feature_size": 3, "num_axes": axes}
        if rng.random() < 0.5:
            fields |= {"position_origin": 0.3, "position_scale": rng.choice([2.0, [1.5, 0.5, 2.5][:axes]])}
    else:
        fields |= {"image_size": rng.choice([32, [16, 32]]), "patch_size": 8, **draw_places(rng, kind, given)}
    has_table = fields["position_encoding"] == "absolute" or rng.random() < 0.3
    if has_table:
        fields |= {"use_absolute_position_embeddings": True}
        if kind in ("tokens", "labelled") or rng.random() < 0.5:
            fields["position_table_size"] = rng.choice([[3] * axes, [4, 1, 2][:axes]])
        elif rng.random() < 0.3:
            fields["position_table_resize"] = "truncate"
    if rng.random() < 0.4:
        fields |= {"rotate_prefix": True, **rng.choice([{}, {}, {"prefix_coordinate": 0.2}])}
    return fields


def draw_encoding(rng, axes: int) -> dict[str, Any]:
    encoding = rng.choice(["none", "absolute", *OWN_PLAIN, *OWN_PLAIN, *["liere"] * 4])
    if encoding not in ENCODINGS:
        return {"position_encoding": encoding}
    fields: dict[str, Any] = {name: rng.random() < 0.3 for name in ("share_heads", "share_layers", "rotate_values")}
    start = rng.choice([None, *PLAIN_ENCODINGS[encoding].starts])
    accepted = ENCODINGS[encoding].block_sizes.accepted(SIZES["head_dim"], axes)
    fields["block_size"] = 3 if start == "so3" else rng.choice(accepted or [2])
    if start != "so3" and rng.random() < 0.3:
        fields["rotary_init_scale"] = rng.choice([0.3, 2.0])
    if "golden_gate" in (start, encoding[:11]) and rng.random() < 0.5:
        fields |= {"min_frequency": 0.2, "max_frequency": 3.0, "unrotated_share": 0.25}
    if "axial" in (start, encoding[:5]) and rng.random() < 0.5:
        fields |= {"axial_layout": "interleaved", "rope_theta": 30.0}
    if encoding == "shares":
        fields |= {"block_size": None, "shares": draw_shares(rng, axes)}
        fields.pop("rotary_init_scale", None)
    return {"position_encoding": encoding, "rotary_init": start, **fields}


def draw_shares(rng, axes: int) -> list:
    """Two or three encodings with channels of 24, some axes and a start that needs no others."""
    shares = []
    for share in rng.choice([(0.5, 0.5), (0.25, None), (0.3, 0.3, 0.3), (0.5, 0.25)]):
        own = sorted(rng.sample(range(axes), rng.randint(1, axes)))
        name = rng.choice([name for name in OWN_PLAIN if name != "shares"])
        start = rng.choice([start for start in (None, *PLAIN_ENCODINGS[name].starts) if start != "so3"])
        size = rng.choice([None, *ENCODINGS[name].block_sizes.accepted(6, len(own))])
        given = {} if share is None else {"share": share}
        shares.append([name, {**given, "axes": own, "rotary_init": start, "block_size": size}])
    return shares


def draw_architecture(rng) -> dict[str, Any]:
    has_class = rng.random() < 0.6
    fields = {
        "use_class_token": has_class,
        "num_register_tokens": rng.choice([0, 0, 2]),
        "pooling": rng.choice([*(["cls"] if has_class else []), "mean", "mean_all"]),
        "final_norm": rng.choice(["tokens", "pooled", "none"]),
        "use_pre_layernorm": rng.random() < 0.3,
        "layerscale_value": rng.choice([None, 0.5]),
        "classifier_hidden_size": rng.choice([None, 16]),
        "qkv_bias": rng.random() < 0.7,
        "hidden_act": rng.choice(["gelu", "silu"]),
        "token_initializer_range": rng.choice([None, 1.0]),
    }
    if rng.random() < 0.2:
        # Stochastic depth drops this branch in practice always: both draw other numbers.
        dropped = {"drop_path_rate": 1 - 1e-9, "num_hidden_layers": 2}
        return fields | rng.choice([{"hidden_dropout_prob": 0.2, "mlp_dropout_prob": 0.1}, dropped])
    return fields


def draw_places(rng, kind: str, given: str) -> dict[str, Any]:
    physical = given in ("spacing", "times") or given == "sizes" and rng.random() < 0.3
    if physical:
        unit = rng.choice([10.0, [2.0, 30.0, 20.0][-3 if kind == "video" else -2 :]])
        fields = {"coordinates": "physical", "physical_unit": unit}
    else:
        fields = {
            "coordinates": rng.choice([None, "centred_grid", *(name for name in GRID_CONVENTIONS if name != "squares")])
        }
    # Batches of sizes draw for each spacing apart.
    if rng.random() < 0.4 and not (physical and given == "sizes"):
        fields["position_perturbation"] = rng.choice([0.0, 0.7])
        augmented = {"position_shift": 0.2, "position_jitter": 1.3, "position_rescale": 1.5}
        fields |= {name: value for name, value in augmented.items() if rng.random() < 0.6}
    if kind in ("image", "video") and rng.random() < 0.2:
        fields["patch_dropout_prob"] = 0.4
    return fields


def draw_inputs(case: Case) -> dict[str, torch.Tensor]:
    if case.kind in ("tokens", "labelled"):
        return draw_tokens(case)
    config, rng = case.config, case.rng
    if case.given == "sizes":
        # Samples of one size are not neighbours, and their groups are in another order than the samples.
        shapes = [
            (*([rng.choice([4, 6])] if case.kind == "video" else []), 3, 8, 8 * n) for n in rng.sample(range(1, 5), 3)
        ]
        pixels = [torch.randn(shapes[index]) for index in (0, 1, 2, 0, 1)]
        inputs = hf_liere.batch_of_patches(pixels, config)
        padding = inputs["pixel_attention_mask"].unsqueeze(-1) == 0
        inputs["pixel_values"] = inputs["pixel_values"].masked_fill(padding, rng.choice([0.0, torch.nan]))
        if config.coordinates == "physical":
            # Some samples have one spacing.
            spacing = torch.rand(2, config.num_axes)[[0, 0, 1, 1, 0]] + 0.5
            inputs["spacing"] = rng.choice([spacing, spacing[0]])
        return inputs | {"labels": torch.tensor([1, 3, 0, 4, 2])}
    truncated = config.position_table_resize == "truncate"
    pictures = [size for size in PICTURES if not truncated or size[0] * size[1] <= 512 and size[1] <= 32]
    shape = (rng.choice([4, 8]),) if case.kind == "video" else ()
    height, width = rng.choice(pictures if truncated or case.kind == "video" else [*pictures, LARGE])
    inputs = {"pixel_values": torch.randn(2, *shape, 3, height, width)}
    num_patches = height // 8 * (width // 8) * (shape[0] // 2 if shape else 1)
    return inputs | draw_extras(case, num_patches, *shape)


def draw_extras(case: Case, num_patches: int, frames: int = 0) -> dict[str, torch.Tensor]:
    """Targets, and what the way of the case gives beside pixels."""
    inputs, axes, rng = {}, case.config.num_axes, case.rng
    if case.kind == "masked":
        inputs["bool_masked_pos"] = torch.rand(2, num_patches) < 0.5
    elif case.kind != "backbone":
        inputs["labels"] = torch.tensor([1, 3])
    if case.given == "spacing":
        inputs["spacing"] = torch.rand(*rng.choice([(axes,), (2, axes)])) + 0.5
    elif case.given == "times":
        inputs["spacing"] = torch.rand(*rng.choice([(2,), (2, 2)])) + 0.5
        inputs["frame_times"] = torch.rand(*rng.choice([(frames,), (2, frames)])).cumsum(-1)
    elif case.given == "given":
        inputs["positions"] = draw_positions(case, num_patches)
    elif case.given == "mask":
        inputs["attention_mask"] = draw_mask(case, case.config.num_prefix_tokens + num_patches)
    return inputs


def draw_positions(case: Case, num_tokens: int) -> torch.Tensor:
    """(…, N, A), some with class and register tokens, in any type."""
    rng = case.rng
    tokens = num_tokens + (case.config.num_prefix_tokens if case.config.places_prefix and rng.random() < 0.5 else 0)
    samples = rng.choice([(), (2,)])
    return torch.rand(*samples, tokens, case.config.num_axes, dtype=rng.choice([torch.float32, torch.float64]))


def draw_mask(case: Case, num_tokens: int) -> torch.Tensor:
    """Of tokens, or of pairs: Boolean or added."""
    hidden, form = min(3, num_tokens - case.config.num_prefix_tokens - 1), case.rng.random()
    seen = torch.arange(num_tokens) < torch.tensor([[num_tokens], [num_tokens - hidden]])
    if form < 0.5:
        return seen if form < 0.25 else seen.long()
    pairs = seen[:, None, None].expand(-1, 1, num_tokens, -1) | torch.eye(num_tokens, dtype=torch.bool)
    if form < 0.75:
        return pairs
    return torch.zeros(pairs.shape, dtype=case.dtype).masked_fill(~pairs, torch.finfo(case.dtype).min)


def draw_tokens(case: Case) -> dict[str, torch.Tensor]:
    rng, tokens = case.rng, case.rng.choice([5, 7, 100])
    inputs = {"inputs_embeds": torch.randn(2, tokens, 3)}
    inputs["labels"] = torch.randint(5, (2, tokens)) if case.kind == "labelled" else torch.tensor([1, 3])
    if case.config.uses_positions:
        inputs["positions"] = draw_positions(case, tokens)
    if case.given == "mask":
        seen = torch.arange(tokens) < torch.tensor([[tokens], [tokens - 2]])
        inputs["attention_mask"] = rng.choice([seen, seen.long()])
        inputs["inputs_embeds"] = inputs["inputs_embeds"].masked_fill(~seen.unsqueeze(-1), rng.choice([0.0, torch.nan]))
    return inputs


def build(case: Case):
    """The package's model and the plain one, each from the same seed."""
    name, config_name, _ = KINDS[case.kind]
    values = case.config.to_dict()
    values.pop("auto_map", None)
    config = getattr(plain_models, config_name).from_dict(values)
    built = []
    for models, each in ((hf_liere, case.config), (plain_models, config)):
        torch.manual_seed(case.number)
        model = getattr(models, name)(each)
        model.set_attn_implementation(case.attention)
        built.append(model)
    return built


def differences(case: Case):
    """(what, difference, bound) of everything that is compared."""
    ours, plain = build(case)
    yield from compare_starts(ours, plain)
    torch.manual_seed(case.number)
    move_parameters(ours)
    plain.load_state_dict(ours.state_dict())
    ours, plain = in_type(ours, case.dtype), in_type(plain, case.dtype)
    first, second = draw_inputs(case), draw_inputs(case)
    yield from compare_calls(case, ours, plain, first, second)
    yield from compare_training(case, ours, plain, first)
    yield from compare_folded(case, ours, plain, (first, second))


def in_type(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """As `from_pretrained` loads it: rotations have at least float32."""
    model = model.to(dtype)
    for name, parameter in model.named_parameters():
        if "rotary_encoding." in name and dtype == torch.bfloat16:
            parameter.data = parameter.data.float()
    return model


@torch.no_grad()
def move_parameters(model: nn.Module, names: str = "") -> None:
    for name, parameter in model.named_parameters():
        if names in name:
            parameter.add_(0.1 * torch.randn_like(parameter))


def compare_starts(ours, plain):
    expected = plain.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for name, values in ours.state_dict().items():
        yield f"start of {name}", relative(values, expected[name]), 1e-6


def compare_calls(case, ours, plain, first, second):
    """In inference: other inputs, the same again, and the same after training changed the rotations."""
    ours.eval(), plain.eval()
    bound = case.bounds[0]
    for name, inputs in (("first", first), ("second", second), ("first again", first)):
        yield from compare_outputs(f"{name} call", call(ours, inputs), call(plain, inputs), bound)
    torch.manual_seed(case.number)
    move_parameters(ours, "rotary_encoding.")
    plain.load_state_dict(ours.state_dict())
    yield from compare_outputs("call after a change", call(ours, first), call(plain, first), bound)


def compare_training(case, ours, plain, inputs):
    """Outputs and gradients of a step, and outputs of the next."""
    bounds = case.bounds
    for step in ("first", "second"):
        outputs, gradients = zip(*(train(case, model, inputs) for model in (ours, plain)))
        # Weights after a step differ as gradients do.
        yield from compare_outputs(f"{step} step", *outputs, bounds[step == "second"])
        assert gradients[0].keys() == gradients[1].keys()
        if step == "first":
            # Smaller ones are sums of large numbers, whose rounding is compared.
            everything = sum(gradient.norm().item() ** 2 for gradient in gradients[1].values()) ** 0.5
            smallest = everything * (0.01 if bounds[1] < 1e-3 else 0.1)
            for name, gradient in gradients[0].items():
                yield f"gradient of {name}", relative_norm(gradient, gradients[1][name], smallest), bounds[1]
    ours.eval(), plain.eval()
    yield from compare_outputs("call after training", call(ours, inputs), call(plain, inputs), bounds[1])


def train(case, model, inputs):
    """Outputs and gradients of one step of stochastic gradient descent."""
    model.train()
    # The gradients of positions are computed in another way, and those of generators beside them.
    fixed = ("spacing",) if case.number % 3 == 0 else ("spacing", "positions")
    inputs = {name: x.clone().requires_grad_(x.is_floating_point() and name not in fixed) for name, x in inputs.items()}
    torch.manual_seed(case.number)
    outputs = results(model(**inputs))
    loss = outputs.get("loss", sum(x.square().mean() for x in outputs.values()))
    named = {**dict(model.named_parameters()), **{name: x for name, x in inputs.items() if x.requires_grad}}
    found = torch.autograd.grad(loss, named.values(), allow_unused=True)
    gradients = {name: gradient for name, gradient in zip(named, found) if gradient is not None}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in gradients:
                parameter.sub_(0.1 * gradients[name])
    return {name: x.detach() for name, x in outputs.items()}, gradients


def compare_folded(case, ours, plain, calls):
    config = case.config
    has_grid = config.train_grid is not None and config.coordinates != "physical" and config.shares is None
    if config.position_encoding not in ENCODINGS or (needs_exponential(config) and not has_grid):
        return
    folded = ours.fold_rotations()
    plain.load_state_dict(ours.state_dict())
    for inputs in calls:
        yield from compare_outputs("folded", call(folded, inputs), call(plain, inputs), case.bounds[0])


def compare(number: int) -> list[str]:
    """What differs in the draw of a number."""
    case = draw(number)
    with case.conditions():
        found = list(differences(case))
    return [f"{what}: {value:.1e} above {bound}; {case}" for what, value, bound in found if not value <= bound]
