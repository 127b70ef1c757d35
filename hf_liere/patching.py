"""Learned rotations inside pretrained vision transformers: patch, unpatch, save and load as an adapter."""

import json
import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from huggingface_hub import hf_hub_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from .modeling_patched import COMPLETE_MODELS
from .rotary_patch import Plan, RotaryPatchConfig, attach, detach, patched_towers, plan
from .vision_towers import find_towers, head_shape, projections


CONFIG_NAME = "rotary_config.json"
WEIGHTS_NAME = "rotary.safetensors"
SKETCH_SIZE = 32
# Twice the rounding to bfloat16, and less than what training usually changes.
WEIGHTS_TOLERANCE = 0.005
FINGERPRINT = ("model_type", "layers", "heads", "head_dim", "train_grid", "weights")
# What a configuration says of the class that it belongs to.
CLASS_FIELDS = ("model_type", "architectures", "auto_map", "rotary_patch")


def patch(model: nn.Module, config: RotaryPatchConfig) -> nn.Module:
    """
    Rotate query and key in the vision towers of a pretrained model (ComRoPE §4.4), in place.

    With `rotary_init="zeros"` the model computes the same bits as before in float32, and gradients reach the
    generators. Its weights are not changed, moved or renamed; the generators are a new module `rotary_encoding` of
    each vision tower. Nothing is frozen: `rotary_parameters` gives what to train alone. `save_rotary` or
    `complete_model` keep the rotations; the model's own `save_pretrained` writes generators that its class reports as
    unexpected and does not load.

    With peft, generators are trained and saved beside its adapters as `modules_to_save`:

    ```python
    import torch
    from hf_liere import RotaryPatchConfig, patch, rotary_parameters
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import CLIPVisionConfig, CLIPVisionModel

    base = CLIPVisionModel(CLIPVisionConfig(image_size=64, num_hidden_layers=2))  # or from_pretrained(…)
    base.save_pretrained("base")
    config = RotaryPatchConfig(position_encoding="comrope_ld", block_size=8)
    lora = LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["rotary_encoding"])
    model = get_peft_model(patch(base, config), lora)
    rotations = dict(rotary_parameters(model))
    others = [value for name, value in model.named_parameters() if value.requires_grad and name not in rotations]
    groups = [{"params": others}, {"params": list(rotations.values()), "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    model(torch.randn(2, 3, 64, 64)).pooler_output.square().mean().backward()
    optimizer.step()
    model.save_pretrained("adapter")

    base = patch(CLIPVisionModel.from_pretrained("base"), config)  # before peft loads the generators into it
    restored = PeftModel.from_pretrained(base, "adapter")
    ```

    Returns:
        The same model.

    Raises:
        ValueError: before anything is changed, if the model is patched already, has no vision tower whose attention
            goes through transformers' attention interface, rotates queries and keys by itself (DINOv3, Qwen-VL …),
            has tokens whose patches cannot be told, or the configuration does not fit it.
    """
    attach(plan(model, config))
    return model


def unpatch(model: nn.Module) -> nn.Module:
    """
    Take the rotations out again: the model that `patch` was given, with the weights it has now.

    In place, except for a complete model: its class and configuration say that it is patched, so that a new model of
    the plain class is made, with copies of the weights, and the complete one stays as it is. Use what is returned:
    `model = unpatch(model)`.

    Raises:
        ValueError: if the model is not patched, or contains a complete model or is a part of one.
    """
    towers = _patched(model)
    plain = next((plain for plain, complete in COMPLETE_MODELS.items() if complete is type(model)), None)
    if plain is not None:
        return _as_class(plain, model)
    # In place, what is left would save as a patched model and reload with new generators.
    for name, part in model.named_modules():
        if getattr(getattr(part, "config", None), "rotary_patch", None) is not None:
            raise ValueError(
                f"{name or 'This'} ({type(part).__name__}) is a complete model or a part of one, whose configuration "
                "says that it is patched; call unpatch on the complete model itself and use what it returns."
            )
    for _, tower in towers:
        detach(tower)
    return model


def is_patched(model: nn.Module) -> bool:
    """Whether any vision tower of the model is patched."""
    return any(True for _ in patched_towers(model))


def rotary_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """
    (name, parameter) of generators and multipliers: train them without weight decay.

    peft freezes them unless it is told `LoraConfig(…, modules_to_save=["rotary_encoding"])`; then these are its
    trainable copies, and its `save_pretrained` writes them ([`patch`] shows it).
    """
    for tower_name, tower in patched_towers(model):
        for name, parameter in tower.rotary_encoding.named_parameters():
            if not name.startswith("original_module."):
                yield ".".join(filter(None, (tower_name, "rotary_encoding", name))), parameter


def set_absolute_weight(model: nn.Module, weight: float) -> None:
    """
    Weight of the position table in a model patched with `keep_absolute="fade"`: 1 as pretrained, 0 without it.

    Raises:
        ValueError: if the model is not patched so, or the weight is not in [0, 1].
    """
    towers = [tower for _, tower in _patched(model)]
    for tower in towers:
        if tower.rotary_patch.config.keep_absolute != "fade":
            raise ValueError(
                f"The model is patched with keep_absolute={tower.rotary_patch.config.keep_absolute!r}, not 'fade'."
            )
    for config, tower in [(replace(tower.rotary_patch.config, absolute_weight=weight), tower) for tower in towers]:
        tower.rotary_patch.config = config
        # A complete model says in its own configuration how it is patched.
        if getattr(getattr(model, "config", None), "rotary_patch", None) is not None:
            model.config.rotary_patch = config.to_dict()


def save_rotary(model: nn.Module, directory: str | Path) -> None:
    """
    Write only the rotations: `rotary_config.json` and `rotary.safetensors`, kilobytes, for [`load_rotary`].

    Raises:
        ValueError: if the model is not patched, or its towers are patched differently.
    """
    towers = _patched(model)
    configs = [tower.rotary_patch.config.to_dict() for _, tower in towers]
    if any(config != configs[0] for config in configs):
        raise ValueError(f"The vision towers are patched differently, one adapter cannot hold both: {configs}.")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{index}.{name.rpartition('.')[2]}": parameter.detach().cpu().contiguous()
        for index, (_, tower) in enumerate(towers)
        for name, parameter in rotary_parameters(tower)
    }
    save_file(tensors, directory / WEIGHTS_NAME, metadata={"format": "pt"})
    content = {"rotary_patch": configs[0], "base": [_fingerprint(tower) for _, tower in towers]}
    (directory / CONFIG_NAME).write_text(json.dumps(content, indent=2) + "\n")


def load_rotary(
    model: nn.Module, source: str | Path, revision: str | None = None, check_weights: bool = True
) -> nn.Module:
    """
    Patch an unpatched model with rotations that [`save_rotary`] wrote, in place.

    Args:
        source: Directory, or repository on the Hub.
        revision: Branch, tag or commit of the repository.
        check_weights: Whether the query and key weights must be those that the rotations were trained with; pass
            `False` for a base that was itself trained further.

    Returns:
        The same model.

    Raises:
        ValueError: before anything is changed, if the files cannot be read, the rotations do not fit the model, tensors
            are missing, left over or not finite, or the weights are others.
    """
    config, bases, tensors = _read_adapter(source, revision)
    plans = plan(model, config)
    if len(plans) != len(bases):
        raise ValueError(f"{source} holds rotations for {len(bases)} vision towers; there are {len(plans)}.")
    for planned, saved in zip(plans, bases):
        _check_base(planned, saved, source, check_weights)
    encodings = [_load_encoding(index, planned, tensors, source) for index, planned in enumerate(plans)]
    if tensors:
        raise ValueError(f"{source} holds tensors that this encoding does not have: {sorted(tensors)}.")
    attach(plans, encodings)
    return model


def complete_model(model: PreTrainedModel) -> PreTrainedModel:
    """
    A patched CLIP or ViT as a class with its own `model_type`, which `save_pretrained` and `from_pretrained` (also of
    the Auto classes) restore with its rotations. The weights are copied. Models of other families keep their rotations
    by [`save_rotary`].

    Raises:
        ValueError: if the model is not patched, its class has no such counterpart (only CLIP's and ViT's have), or it
            holds parameters of adapters.
    """
    towers = _patched(model)
    counterpart = COMPLETE_MODELS.get(type(model))
    if counterpart is None:
        raise ValueError(
            f"{type(model).__name__} has no class that reloads with rotations; accepted: "
            f"{', '.join(source.__name__ for source in COMPLETE_MODELS)}. save_rotary works for every model."
        )
    return _as_class(counterpart, model, rotary_patch=towers[0][1].rotary_patch.config.to_dict())


def _as_class(kind: type[PreTrainedModel], model: PreTrainedModel, **fields) -> PreTrainedModel:
    """A patched model as one of another class, with copies of the weights that this class has."""
    values = {name: value for name, value in model.config.to_dict().items() if name not in CLASS_FIELDS}
    config = kind.config_class.from_dict({**values, **fields})
    config._attn_implementation = model.config._attn_implementation
    reference = next(model.parameters())
    built = kind(config).to(device=reference.device, dtype=reference.dtype)
    for (_, tower), (_, source) in zip(patched_towers(built), patched_towers(model)):
        # Generators keep their precision in a model of another one.
        tower.rotary_encoding.to(dtype=source.rotary_encoding.rotation_dtype)
    weights = model.state_dict()
    if not is_patched(built):
        weights = {name: weight for name, weight in weights.items() if "rotary_encoding" not in name.split(".")}
    if differing := set(weights) ^ set(built.state_dict()):
        raise ValueError(
            f"{type(model).__name__} has not the parameters of {kind.__name__}: {', '.join(sorted(differing)[:4])} … "
            "Merge or unload adapters and undo quantization first."
        )
    built.load_state_dict(weights)
    return built.train(model.training)


def _patched(model: nn.Module) -> list[tuple[str, nn.Module]]:
    towers = list(patched_towers(model))
    if not towers:
        raise ValueError(f"{type(model).__name__} is not patched; call patch(model, config) first.")
    return towers


def _file(source: str | Path, name: str, revision: str | None) -> Path:
    if Path(source).is_dir():
        path = Path(source) / name
        if not path.is_file():
            raise ValueError(f"{source} holds no {name}: it was not written by save_rotary.")
        return path
    return Path(hf_hub_download(str(source), name, revision=revision))


def _read_adapter(source: str | Path, revision: str | None) -> tuple[RotaryPatchConfig, list[dict], dict]:
    """What `save_rotary` wrote, with one sentence about what is wrong with it."""
    path = _file(source, CONFIG_NAME, revision)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no json ({error}); save_rotary writes it.") from error
    for name, kind in (("rotary_patch", dict), ("base", list)):
        if not isinstance(content, dict) or not isinstance(content.get(name), kind):
            raise ValueError(f"{path} has no {kind.__name__} {name!r}: it was not written by save_rotary.")
    for saved in content["base"]:
        missing = [name for name in FINGERPRINT if not isinstance(saved, dict) or name not in saved]
        if missing:
            raise ValueError(f"{path} does not say which model it belongs to: base has no {', '.join(missing)}.")
    try:
        config = RotaryPatchConfig.from_dict(content["rotary_patch"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    path = _file(source, WEIGHTS_NAME, revision)
    try:
        return config, content["base"], load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read ({error}): it is damaged or was not copied to its end.") from error


def _fingerprint(tower: nn.Module) -> dict:
    patch = tower.rotary_patch
    attentions = [tower.get_submodule(name) for name in patch.attention_names]
    return _describe(attentions, patch.train_grid)


def _describe(attentions: list[nn.Module], train_grid: tuple[int, ...]) -> dict:
    model_type = attentions[0].config.model_type.removeprefix("rotary_")
    values = (model_type, len(attentions), *head_shape(attentions[0]), list(train_grid), _sketch(attentions))
    return dict(zip(FINGERPRINT, values, strict=True))


def _sketch(attentions: list[nn.Module]) -> list[list[float]] | None:
    """
    Count sketch of each query and key projection: signed sums of its weights over `SKETCH_SIZE` classes of indices, or
    `None` where they are quantized or have no memory.

    The relative distance of two sketches estimates that of the weights, whatever they are stored in: the same
    weights rounded to bfloat16 are 0.2% apart, where a hash would tell nothing but that they are not the same.
    """
    sketches = []
    for attention in attentions:
        for projection in projections(attention):
            # peft wraps a linear layer and keeps it.
            weight = getattr(projection, "base_layer", projection).weight
            if not isinstance(weight, torch.Tensor) or not weight.is_floating_point() or weight.is_meta:
                return None
            values = weight.detach().to("cpu", torch.float64).flatten()
            # A multiplicative hash (Knuth, vol. 3, §6.4) of the index gives the sign and the class.
            mixed = torch.arange(len(values)) * 2654435761 % 2**32
            signed = values * (1 - 2 * (mixed >> 31))
            sums = values.new_zeros(SKETCH_SIZE).index_add(0, (mixed >> 8) % SKETCH_SIZE, signed)
            sketches.append([float(f"{value:.5g}") for value in sums.tolist()])
    return sketches


def _distance(found: list[list[float]], saved: list[list[float]]) -> float:
    """Largest relative distance of two sketches of the same projection, infinite if they are none of the same."""
    found = torch.tensor(found)
    try:
        saved = torch.tensor(saved)
    except (TypeError, ValueError):
        return math.inf
    if saved.shape != found.shape or not saved.isfinite().all():
        return math.inf
    return ((found - saved).norm(dim=1) / saved.norm(dim=1).clamp_min(1e-12)).max().item()


def _check_base(planned: Plan, saved: dict, source: str | Path, check_weights: bool) -> None:
    found = _describe([attention for _, attention in planned.attentions], planned.tower.train_grid)
    differing = [name for name in found if name != "weights" and found[name] != saved[name]]
    if differing:
        raise ValueError(
            f"{source} holds rotations for another model: "
            + "; ".join(f"{name} {saved[name]} there, {found[name]} here" for name in differing)
            + "."
        )
    if not check_weights:
        return
    if found["weights"] is None or saved["weights"] is None:
        warnings.warn(
            f"Whether {source} belongs to this model was not checked: its weights are quantized.", stacklevel=3
        )
    elif (distance := _distance(found["weights"], saved["weights"])) > WEIGHTS_TOLERANCE:
        raise ValueError(
            f"{source} was trained on other weights: the query and key projections of this model differ by about "
            f"{distance:.1%}. Load the base it belongs to, or pass check_weights=False for one that was trained "
            "further."
        )


def _load_encoding(index: int, planned: Plan, tensors: dict, source: str | Path) -> nn.Module:
    encoding = planned.build_encoding()
    for name, parameter in encoding.named_parameters():
        saved = tensors.pop(f"{index}.{name}", None)
        if saved is not None and not (saved.is_floating_point() and saved.isfinite().all()):
            raise ValueError(f"{source} holds {name} with values that are not finite numbers: nothing was loaded.")
        if saved is None or saved.shape != parameter.shape:
            raise ValueError(
                f"{source} holds {name} of shape {None if saved is None else tuple(saved.shape)}; this model needs "
                f"{tuple(parameter.shape)}."
            )
        parameter.data = saved
    return encoding


__all__ = [
    "RotaryPatchConfig",
    "complete_model",
    "find_towers",
    "is_patched",
    "load_rotary",
    "patch",
    "rotary_parameters",
    "save_rotary",
    "set_absolute_weight",
    "unpatch",
]
