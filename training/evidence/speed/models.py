"""
Models of equal size for benchmark_speed.py: ours, naive ones after the papers' pseudo-code, those of timm and
transformers, and ours with rotations of other packages.
"""

import contextlib
import copy
import dataclasses
import functools
import importlib.util
import re
from collections.abc import Callable

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_liere import LieREVideoConfig, LieREVideoForVideoClassification, LieREViTConfig, LieREViTForImageClassification
from hf_liere.encoding.folding import build_rotary_encoding
from hf_liere.encoding.kinds import ENCODINGS
from hf_liere.plain import PLAIN_ENCODINGS
from hf_liere.plain import model as plain_model
from hf_liere.transformer.configuration_liere import LieREConfig
from training.evidence.speed.peers import PEERS
from training.evidence.speed.pseudo_code import NaiveRotation, PlainRotation


SIZES = {
    # Of training/recipes/arrows_mini.yaml.
    "arrows": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128},
    "tiny": {"hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 3, "intermediate_size": 768},
    "small": {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 1536},
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
}
UNROTATED = ("absolute", "none")
# Encodings of the papers with pseudo-code, LieRE and ComRoPE.
WITH_PSEUDO_CODE = ("axial_rope", "rope_mixed", "liere", "comrope_ap", "comrope_ld")
# Models with code of their own throughout. `axial_rope` of transformers is DINOv3.
OTHER_MODELS = {
    "timm": {"absolute": "vit_small_patch16_224", "rope_mixed": "vit_small_patch16_rope_mixed_224"},
    "transformers": {"absolute": "ViT", "axial_rope": "DINOv3ViT"},
}
NUM_LABELS = 1000
MOST_GRAPHS = 1 << 12
TUBELET_SIZE = 2


class BenchmarkError(ValueError):
    """A model or setting that cannot be measured. The message states what is accepted."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """One setting in which models are compared. `compile` is whether models are compiled, or the mode of it."""

    model_size: str
    num_hidden_layers: int
    batch_size: int
    image_size: int
    patch_size: int
    num_frames: int | None
    device: str
    dtype: str
    attn_implementation: str
    compile: bool | str

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def half(self) -> bool:
        return self.torch_dtype.itemsize == 2

    def autocast(self) -> contextlib.AbstractContextManager:
        """The context of the forward pass in a training step."""
        if not self.half:
            return contextlib.nullcontext()
        return torch.autocast(torch.device(self.device).type, self.torch_dtype)

    def pixels(self) -> torch.Tensor:
        shape = (3, self.image_size, self.image_size)
        frames = () if self.num_frames is None else (self.num_frames,)
        return torch.randn(self.batch_size, *frames, *shape, device=self.device)


@dataclasses.dataclass(frozen=True)
class Row:
    """
    A model by name: `liere8`, `comrope_ld16` (the number is the block size), `folded_liere8` (rotations folded for
    inference), `centred_liere8` (coordinates `centred_grid`), `naive_liere8` (papers' pseudo-code), `plain_liere8` (the
    plain model that checkpoints carry), `timm_rope_mixed` and `transformers_absolute` ([`OTHER_MODELS`]),
    `rope_mixed_by_timm` (our model with timm's rotations, see [`PEERS`]).
    """

    name: str
    kind: str
    encoding: str
    block_size: int | None

    @classmethod
    def parse(cls, name: str) -> "Row":
        if name in PEERS:
            return cls(name, "peer", "none", None)
        # Read now: a file of the user may have registered an encoding.
        one_size = tuple(encoding for encoding, traits in ENCODINGS.items() if not traits.block_sizes.varies)
        blockwise = tuple(encoding for encoding in ENCODINGS if encoding not in one_size)
        encodings = "|".join((*UNROTATED, *ENCODINGS))
        others = [f"{package}_{encoding}" for package, models in OTHER_MODELS.items() for encoding in models]
        match = re.fullmatch(rf"(?:(folded|centred|naive|plain|{'|'.join(OTHER_MODELS)})_)?({encodings})(\d+)?", name)
        if match is None:
            raise BenchmarkError(
                f"{name!r} is not a model; accepted are {', '.join(UNROTATED + one_size)}, {', '.join(blockwise)} with "
                f"or without a block size (liere64), rotating ones after folded_ or centred_, "
                f"{', '.join(WITH_PSEUDO_CODE)} after naive_, those of hf_liere.plain after plain_, and "
                f"{', '.join(others + list(PEERS))}."
            )
        kind, encoding, size = match[1] or "own", match[2], match[3]
        if size and encoding not in blockwise:
            raise BenchmarkError(f"{name!r}: {encoding} has no block size; accepted is {name.rstrip('0123456789')!r}.")
        taken = {"naive": WITH_PSEUDO_CODE, "plain": PLAIN_ENCODINGS, **OTHER_MODELS}.get(kind, ENCODINGS)
        if kind != "own" and encoding not in taken:
            raise BenchmarkError(f"{name!r}: accepted are {encoding!r} and, after {kind}_, {', '.join(taken)}.")
        block_size = int(size) if size else None
        if block_size is None and encoding in ENCODINGS:
            block_size = ENCODINGS[encoding].block_sizes.default
        return cls(name, kind, encoding, block_size)

    @property
    def trains(self) -> bool:
        return self.kind != "folded"

    @property
    def rotates(self) -> bool:
        """Whether it is one of our models and rotates queries and keys."""
        return self.kind == "peer" or self.kind in ("own", "folded", "centred") and self.encoding not in UNROTATED

    @property
    def learns(self) -> bool:
        return self.encoding not in UNROTATED and ENCODINGS[self.encoding].learned

    @property
    def package(self) -> str | None:
        """The other package that computes its rotations, if any."""
        return self.kind if self.kind in OTHER_MODELS else PEERS[self.name].package if self.kind == "peer" else None

    @property
    def is_installed(self) -> bool:
        return self.package is None or importlib.util.find_spec(self.package) is not None


def check_row(settings: Settings, row: Row) -> None:
    """Raises [`BenchmarkError`] if the model does not exist at this setting."""
    if row.package is not None:
        if settings.num_frames is not None:
            raise BenchmarkError(f"{row.name}: only images are compared with {row.package}; leave it out of --rows.")
        if not row.is_installed:
            raise BenchmarkError(
                f"{row.name}: {row.package} is not installed; `pip install {row.package.replace('_', '-')}` installs "
                "it, or leave it out of --rows."
            )
        return
    build_config(settings, row)


def build_config(settings: Settings, row: Row, **overrides) -> LieREConfig:
    fields = {
        **SIZES[settings.model_size],
        "num_hidden_layers": settings.num_hidden_layers,
        "image_size": settings.image_size,
        "patch_size": settings.patch_size,
        "num_labels": NUM_LABELS,
        "position_encoding": row.encoding,
        "block_size": row.block_size,
        "coordinates": "centred_grid" if row.kind == "centred" else None,
        **overrides,
    }
    try:
        if settings.num_frames is None:
            return LieREViTConfig(**fields)
        return LieREVideoConfig(**fields, num_frames=settings.num_frames, tubelet_size=TUBELET_SIZE)
    except StrictDataclassError as error:
        raise BenchmarkError(f"{row.name}: {error}") from error


def build_own(settings: Settings, row: Row, dtype: torch.dtype, attn_implementation: str, depth: int) -> nn.Module:
    """
    Our model, with other rotations for naive rows and peers. Weights have `dtype`, or float32 where from_pretrained
    keeps it.
    """
    config = build_config(settings, row, num_hidden_layers=depth)
    model_class = LieREViTForImageClassification if settings.num_frames is None else LieREVideoForVideoClassification
    if row.kind == "naive":
        plain = build_config(settings, Row.parse("none"), num_hidden_layers=depth)
        plain._attn_implementation = f"naive_{attn_implementation}"
        register_attention(plain._attn_implementation, functools.partial(naive_attention, inner=attn_implementation))
        model = model_class(plain)
        attach_naive_rotations(model, config)
    elif row.kind == "plain":
        values = config.to_dict() | {"attn_implementation": attn_implementation}
        plain_class = getattr(plain_model, model_class.__name__)
        model = plain_class(getattr(plain_model, type(config).__name__).from_dict(values))
    else:
        config._attn_implementation = attn_implementation
        model = model_class(config)
    kept = ("naive_rotation", *(model._keep_in_fp32_modules_strict or ()))
    for name, parameter in model.named_parameters():
        if not (dtype.itemsize == 2 and any(module in name for module in kept)):
            parameter.data = parameter.data.to(dtype)
    if row.kind == "peer":
        model.liere.rotary_encoding = PEERS[row.name](config).to(dtype)
    return model.to(settings.device)


def build_timm(settings: Settings, row: Row, dtype: torch.dtype) -> nn.Module:
    import timm

    size = SIZES[settings.model_size]
    model = timm.create_model(
        OTHER_MODELS["timm"][row.encoding],
        img_size=settings.image_size,
        patch_size=settings.patch_size,
        embed_dim=size["hidden_size"],
        depth=settings.num_hidden_layers,
        num_heads=size["num_attention_heads"],
        mlp_ratio=size["intermediate_size"] / size["hidden_size"],
        num_classes=NUM_LABELS,
        # Without layer scale, because no other model has it.
        init_values=None,
    )
    return model.to(settings.device, dtype)


class WithHead(nn.Module):
    """A backbone of transformers with a classifier of its pooled output, for models without a class for it."""

    def __init__(self, backbone: nn.Module):
        super().__init__()
        self.backbone, self.classifier = backbone, nn.Linear(backbone.config.hidden_size, NUM_LABELS)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.backbone(pixels).pooler_output)


def build_transformers(settings: Settings, row: Row, dtype: torch.dtype) -> nn.Module:
    name = OTHER_MODELS["transformers"][row.encoding]
    config = getattr(transformers, f"{name}Config")(
        **{**SIZES[settings.model_size], "num_hidden_layers": settings.num_hidden_layers},
        image_size=settings.image_size,
        patch_size=settings.patch_size,
        num_labels=NUM_LABELS,
        attn_implementation=settings.attn_implementation,
    )
    model_class = getattr(transformers, f"{name}ForImageClassification", None)
    model = WithHead(getattr(transformers, f"{name}Model")(config)) if model_class is None else model_class(config)
    return model.to(settings.device, dtype)


def build_model(settings: Settings, row: Row, training: bool) -> nn.Module:
    """
    A model as in practice: with weights in `dtype` for inference; for training with float32 weights if `dtype` is a
    half type (autocast, as Trainer does).
    """
    torch.manual_seed(0)
    dtype = torch.float32 if training and settings.half else settings.torch_dtype
    if row.kind in OTHER_MODELS:
        model = {"timm": build_timm, "transformers": build_transformers}[row.kind](settings, row, dtype)
    else:
        model = build_own(settings, row, dtype, settings.attn_implementation, settings.num_hidden_layers)
    if row.kind == "folded":
        model = model.eval().fold_rotations()
    return model.train(training)


def compile_function(settings: Settings, function: Callable) -> Callable:
    """
    Compiles a model or function for static shapes if `settings` require it.

    Raises:
        torch._dynamo.exc.FailOnRecompileLimitHit: from the function, instead of running it without compilation.
    """
    if not settings.compile:
        return function
    # All models share code. By default, the compiler stops after eight graphs of it and runs others uncompiled.
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = MOST_GRAPHS
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    mode = settings.compile if isinstance(settings.compile, str) else None
    return torch.compile(function, dynamic=False, mode=mode)


def logits(model: nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    outputs = model(pixels)
    return outputs if isinstance(outputs, torch.Tensor) else outputs.logits


def naive_attention(module: nn.Module, query, key, value, attention_mask, inner: str, **kwargs):
    query, key = module.naive_rotation.rotate(query, key)
    return ALL_ATTENTION_FUNCTIONS[inner](module, query, key, value, attention_mask, **kwargs)


def register_attention(name: str, function: Callable) -> None:
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)


def attach_naive_rotations(model: nn.Module, config) -> None:
    """Attaches the rotations of a new encoding to the layers of a model without rotations."""
    encoding = build_rotary_encoding(config, config.num_axes)
    encoding.reset_parameters()
    parameters = {name: parameter.detach() for name, parameter in encoding.named_parameters()}
    for index, layer in enumerate(model.liere.layers):
        layer.attention.naive_rotation = NaiveRotation(config, parameters, index)


@torch.no_grad()
def rotation_error(settings: Settings, row: Row) -> float | None:
    """
    Largest error of an entry of R(p)ᵀR(p′), which determines attention in any basis. The reference is the papers'
    pseudo-code or `hf_liere.plain`, in float64 with the same generators. Compares two layers, and every token p
    with one other token p′, for inference in the dtype of `settings`. `None` for models without rotations, those of
    other packages, and encodings of users, which have no reference.
    """
    if row.encoding not in PLAIN_ENCODINGS or row.kind in OTHER_MODELS:
        return None
    torch.manual_seed(0)
    queries, keys = [], []

    def record(module, query, key, value, attention_mask, **kwargs):
        queries.append(query)
        keys.append(key)
        return value.transpose(1, 2), None

    register_attention("probe", record)
    depth = min(2, settings.num_hidden_layers)
    model = build_own(settings, row, settings.torch_dtype, "probe", depth)
    config, layers = model.config, model.liere.layers
    parameters = {name.split(".")[-1]: parameter.cpu() for name, parameter in model.rotary_parameters()}
    if row.kind == "naive":
        references = [layer.attention.naive_rotation for layer in layers]
    else:
        rotation = NaiveRotation if row.encoding in WITH_PSEUDO_CODE else PlainRotation
        references = [rotation(config, parameters, index) for index in range(len(layers))]
    references = [copy.deepcopy(each).cpu().double().dense() for each in references]

    # With unit vectors as states and identical projections, query and key are columns of the rotations.
    for layer in layers:
        for projection in (layer.attention.q_proj, layer.attention.k_proj):
            nn.init.eye_(projection.weight)
            nn.init.zeros_(projection.bias)
        layer.mlp = nn.Identity()
    model.eval()
    if row.kind == "folded":
        model = model.fold_rotations()
    units = torch.eye(config.head_dim, device=settings.device, dtype=settings.torch_dtype)
    for layer in model.liere.layers:
        layer.layernorm_before.register_forward_hook(
            lambda module, inputs, output: units.repeat(1, config.num_attention_heads)[:, None].expand_as(output)
        )
    pixels = settings.pixels()[:1]
    model(pixels.to(settings.torch_dtype).expand(config.head_dim, *pixels.shape[1:]))

    error = 0.0
    for matrices, query, key in zip(references, queries, keys):
        other = torch.randperm(matrices.shape[0])
        expected = torch.einsum("nhdi,nhdj->hnij", matrices, matrices[other])
        found = torch.einsum("ihnd,jhnd->hnij", query.cpu().double(), key.cpu().double()[:, :, other])
        error = max(error, (found - expected).abs().max().item())
    return error
