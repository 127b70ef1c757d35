"""Learned rotations inside pretrained models: patch, unpatch, and models that reload with them."""

import copy
from collections.abc import Iterator
from dataclasses import replace

from torch import nn
from transformers import PreTrainedModel

from ..models.modeling_patched import rotary_class
from ..models.rotary_patch import RotaryPatchConfig, attach, detach, patched_towers, plan


# Fields of a configuration that depend on the class of the model.
CLASS_FIELDS = ("model_type", "architectures", "auto_map", "rotary_patch")


def patch(model: nn.Module, config: RotaryPatchConfig) -> nn.Module:
    """
    Rotate query and key in the vision towers of a pretrained model (ComRoPE §4.4), in place; or, with
    `rotary_init="pretrained"`, learn the rotations of a model that rotates by itself (RoPE), of language or images.

    With `rotary_init="zeros"` the model computes the same bits as before in float32, and gradients reach the
    generators; so does one with RoPE and `position_encoding="rope_mixed", rotary_init="pretrained"`. Its weights are
    not changed, moved or renamed; the generators are a new module `rotary_encoding` of each vision tower, or of each
    module around one that computes RoPE. Nothing is frozen: `rotary_parameters` lists the new parameters. Save the
    rotations with `save_rotary` or `complete_model`; the model's own `save_pretrained` writes generators that its class
    reports as unexpected and does not load.

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
            goes through transformers' attention interface, rotates queries and keys by itself while `rotary_init` is
            not `"pretrained"` or the reverse, has tokens that cannot be assigned to patches, or does not fit the
            configuration.
    """
    attach(plan(model, config))
    return model


def unpatch(model: nn.Module) -> nn.Module:
    """
    Remove the rotations: the model that `patch` was given, with its current weights.

    This is done in place, except for a complete model, whose class and configuration describe its rotations: it stays
    as it is, and a new model of the plain class gets copies of the weights. Use the model that is returned:
    `model = unpatch(model)`.

    Raises:
        ValueError: if the model is not patched, or contains a complete model or is a part of one.
    """
    towers = require_patched(model)
    plain = vars(type(model)).get("plain_class")
    if plain is not None:
        return _as_class(plain, model)
    # Otherwise the model would be saved as a patched one, and reload with new generators.
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

    peft freezes them, except with `LoraConfig(…, modules_to_save=["rotary_encoding"])`: then these are its trainable
    copies, and its `save_pretrained` writes them, see the example of [`patch`].
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
    towers = [tower for _, tower in require_patched(model)]
    for tower in towers:
        if tower.rotary_patch.config.keep_absolute != "fade":
            raise ValueError(
                f"The model is patched with keep_absolute={tower.rotary_patch.config.keep_absolute!r}, not 'fade'."
            )
    for tower in towers:
        config = tower.rotary_patch.config = replace(tower.rotary_patch.config, absolute_weight=weight)
        # The configuration of a complete model describes its rotary patch, too.
        if getattr(getattr(model, "config", None), "rotary_patch", None) is not None:
            model.config.rotary_patch = config.to_dict()


def complete_model(model: PreTrainedModel) -> PreTrainedModel:
    """
    A patched model of transformers as a class with its own `model_type`, such as `RotaryLlamaForCausalLM`, whose
    rotations `save_pretrained` saves and `from_pretrained` restores, also that of the Auto classes. The weights are
    copied. Use [`save_rotary`] for models that transformers does not export.

    Raises:
        ValueError: if the model is not patched, transformers does not export its class, or it holds parameters of
            adapters.
    """
    towers = require_patched(model)
    try:
        counterpart = rotary_class(type(model))
    except ValueError as error:
        raise ValueError(f"{error} save_rotary works for every model.") from error
    return _as_class(counterpart, model, rotary_patch=towers[0][1].rotary_patch.config.to_dict())


def _as_class(kind: type[PreTrainedModel], model: PreTrainedModel, **fields) -> PreTrainedModel:
    """A patched model as one of the class `kind`, with copies of the weights."""
    values = {name: value for name, value in model.config.to_dict().items() if name not in CLASS_FIELDS}
    config = kind.config_class.from_dict({**values, **fields})
    config._attn_implementation = model.config._attn_implementation
    reference = next(model.parameters())
    built = kind(config).to(device=reference.device, dtype=reference.dtype)
    for (_, tower), (_, source) in zip(patched_towers(built), patched_towers(model)):
        # Generators keep their own type in a model of another type.
        tower.rotary_encoding.to(dtype=source.rotary_encoding.rotation_dtype)
    # Buffers that are not saved, such as the frequencies of RoPE, keep the type that they have.
    own = dict(model.named_buffers())
    for name, module in built.named_modules():
        for buffer in module._buffers:
            if (path := f"{name}.{buffer}".lstrip(".")) in own:
                module._buffers[buffer] = own[path].clone()
    if model.can_generate():
        built.generation_config = copy.deepcopy(model.generation_config)
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


def require_patched(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of the patched vision towers. Raises `ValueError` if there are none."""
    towers = list(patched_towers(model))
    if not towers:
        raise ValueError(f"{type(model).__name__} is not patched; call patch(model, config) first.")
    return towers
