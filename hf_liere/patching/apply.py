"""Learned rotations in pretrained models: patch, unpatch, and functions of a patched model."""

import warnings
from collections.abc import Iterator
from dataclasses import replace

from torch import nn
from transformers import PreTrainedModel

from .guards import warn_unguarded
from .libraries import TOWERS
from .libraries.library_patch import plan_library
from .modeling_patched import RotaryModelMixin, is_restorable, patch_in_place, plan, unpatch_in_place
from .plain_rope import PlainRope
from .rotary_patch import RotaryPatchConfig
from .tower_patch import patched_towers


def patch(model: nn.Module, config: RotaryPatchConfig) -> nn.Module:
    """
    Rotate query and key in the vision towers of a pretrained model (ComRoPE §4.4), in place; or, with
    `rotary_init="pretrained"`, learn the rotations of a language or vision model with RoPE. A transformer of diffusers
    or a vision transformer of timm is patched in the same way; `save_rotary` saves its rotations.

    With `rotary_init="zeros"`, the model computes the same bits as before in float32, and gradients reach the
    generators; so does a model with RoPE and `position_encoding="rope_mixed", rotary_init="pretrained"`. Existing
    weights are not changed, moved or renamed. The generators are a new module `rotary_encoding` of each vision tower,
    or of each module around one that computes RoPE. Nothing is frozen: `rotary_parameters` lists the new parameters.

    A `LlamaForCausalLM` becomes a `RotaryLlamaForCausalLM`, a subclass, and its configuration a copy with
    `rotary_patch`. So `save_pretrained`, `push_to_hub` and the checkpoints of `Trainer` contain the rotations, and the
    Auto classes restore them. Use `save_rotary` to save the rotations alone.

    ```python
    from hf_liere import RotaryPatchConfig, patch
    from transformers import CLIPVisionConfig, CLIPVisionModel

    model = CLIPVisionModel(CLIPVisionConfig(image_size=64, num_hidden_layers=2))  # or from_pretrained(…)
    patch(model, RotaryPatchConfig(position_encoding="comrope_ld", block_size=8))
    ```

    With peft, train and save generators beside its adapters as `modules_to_save`; see the example of `load_peft`.

    Returns:
        The same model.

    Raises:
        ValueError: before anything is changed, if the model is already patched, has no vision tower whose attention
            uses transformers' attention interface, has RoPE while `rotary_init` is not `"pretrained"` or the reverse,
            has tokens that cannot be assigned to patches, or does not fit the configuration.

    Warns:
        UserWarning: if transformers does not export the class of the model, so that no Auto class restores it.
    """
    if not isinstance(config, RotaryPatchConfig):
        raise ValueError(
            f"{config!r} must be a RotaryPatchConfig, such as RotaryPatchConfig(position_encoding='liere')."
        )
    if config.folded_grids is not None:
        raise ValueError(f"folded_grids={config.folded_grids} is what fold_rotations sets; leave it out.")
    return attach_plans(model, make_plans(model, config))


def make_plans(model: nn.Module, config: RotaryPatchConfig) -> list:
    """The first half of [`patch`]: check a configuration against a model of any library."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"{type(model).__name__} is not a torch module; of a pipeline, pass pipeline.transformer.")
    tower_class = next((one for one in TOWERS if one.belongs(model)), None)
    return plan(model, config) if tower_class is None else plan_library(tower_class, model, config)


def attach_plans(model: nn.Module, plans: list, encodings: list[nn.Module] | None = None) -> nn.Module:
    """The second half of [`patch`]: attach new rotations or those of an adapter."""
    patch_in_place(model, plans, encodings)
    for planned in plans:
        planned.tower.module.rotary_encoding.register_state_dict_pre_hook(warn_unguarded)
    patched = next((module for module in model.modules() if isinstance(module, RotaryModelMixin)), None)
    # Warn before training if only the model's own class can restore its checkpoints.
    if patched is not None and not is_restorable(patched.plain_class):
        name = patched.plain_class.__name__
        warnings.warn(
            f"transformers does not export {name}, so no Auto class restores what its save_pretrained writes: load it "
            f"with rotary_class({name}).from_pretrained(folder) of {RotaryModelMixin.__module__}, or load the "
            "rotations beside it into its base with load_rotary.",
            stacklevel=3,
        )
    return model


def unpatch(model: nn.Module, keep_frequencies: bool = False) -> nn.Module:
    """
    Remove the rotations in place; this restores the class of the original model and keeps the current weights.

    ```python
    import hf_liere
    from transformers import CLIPModel

    model = CLIPModel.from_pretrained("openai/clip-vit-base-patch16")
    hf_liere.patch(model, hf_liere.RotaryPatchConfig(position_encoding="comrope_ld", block_size=8))
    hf_liere.unpatch(model)
    print(hf_liere.is_patched(model))
    ```

    ```text
    False
    ```

    Args:
        keep_frequencies: Write learned frequencies (`rope_mixed` with `rotary_init="pretrained"`) to `rope_parameters`
            of the configuration, as `longrope` with a factor for every frequency: a plain model, which computes the
            same up to rounding and needs this package no more. All layers of a kind must have the same frequencies, as
            with `share_layers=True`.

    Returns:
        The same model.

    Raises:
        ValueError: if the model is not patched, or `rope_parameters` cannot describe its frequencies, with the reason.
            Then nothing is changed.
    """
    towers = require_patched(model)
    plain = [PlainRope(name, tower) for name, tower in towers] if keep_frequencies else []
    unpatch_in_place(model)
    for rope in plain:
        rope.attach()
    return model


def is_patched(model: nn.Module) -> bool:
    """
    Whether any vision tower of the model is patched.

    ```python
    import hf_liere
    from transformers import CLIPModel

    model = CLIPModel.from_pretrained("openai/clip-vit-base-patch16")
    print(hf_liere.is_patched(model))
    ```

    ```text
    False
    ```
    """
    return any(True for _ in patched_towers(model))


def rotary_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """
    (name, parameter) of generators and multipliers: train them without weight decay.

    peft freezes them, except with `LoraConfig(…, modules_to_save=["rotary_encoding"])`: then these are peft's trainable
    copies, which its `save_pretrained` writes; see the example of `load_peft`.

    ```python
    import hf_liere
    import torch
    from transformers import CLIPModel

    model = CLIPModel.from_pretrained("openai/clip-vit-base-patch16")
    hf_liere.patch(model, hf_liere.RotaryPatchConfig(position_encoding="comrope_ld", block_size=8))
    model.requires_grad_(False)
    rotations = [parameter.requires_grad_() for _, parameter in hf_liere.rotary_parameters(model)]
    optimizer = torch.optim.AdamW(rotations, lr=3e-4, weight_decay=0.0)
    ```
    """
    for tower_name, tower in patched_towers(model):
        for name, parameter in tower.rotary_encoding.named_parameters():
            if not name.startswith("original_module."):
                yield ".".join(filter(None, (tower_name, "rotary_encoding", name))), parameter


def set_absolute_weight(model: nn.Module, weight: float) -> None:
    """
    Set the weight of the position table in a model patched with `keep_absolute="fade"`: 1 as pretrained, 0 without it.

    ```python
    import hf_liere
    from transformers import CLIPModel

    model = CLIPModel.from_pretrained("openai/clip-vit-base-patch16")
    hf_liere.patch(model, hf_liere.RotaryPatchConfig(position_encoding="liere", keep_absolute="fade"))
    hf_liere.set_absolute_weight(model, 0.5)  # call it again as training goes on, down to 0
    ```

    Raises:
        ValueError: if the model is not patched with that option, or the weight is not in [0, 1].
    """
    patches = [tower.rotary_patch for _, tower in require_patched(model)]
    for patched in patches:
        if patched.config.keep_absolute != "fade":
            raise ValueError(f"The model is patched with keep_absolute={patched.config.keep_absolute!r}, not 'fade'.")
    for patched in patches:
        patched.config = replace(patched.config, absolute_weight=weight)
    for module in model.modules():
        if (described := getattr(getattr(module, "config", None), "rotary_patch", None)) is not None:
            module.config.rotary_patch = {**described, "absolute_weight": weight}


def complete_model(model: PreTrainedModel) -> PreTrainedModel:
    """
    Require that the Auto classes can restore a saved model with its rotations; returns the model.

    ```python
    import hf_liere
    from transformers import CLIPModel

    model = CLIPModel.from_pretrained("openai/clip-vit-base-patch16")
    hf_liere.patch(model, hf_liere.RotaryPatchConfig(position_encoding="comrope_ld", block_size=8))
    hf_liere.complete_model(model).save_pretrained("clip-complete")
    ```

    Raises:
        ValueError: if the model is not patched, transformers does not export its class, or it contains adapters.
    """
    require_patched(model)
    if not isinstance(model, RotaryModelMixin) or not is_restorable(model.plain_class):
        raise ValueError(
            f"{model._get_name()} is not a class that transformers exports with its own model_type, so no Auto "
            "class restores it. save_rotary works for every model."
        )
    refuse_adapters(model)
    return model


def refuse_adapters(model: nn.Module) -> None:
    """Raise `ValueError` if a model contains adapters of peft, or a trained copy of rotations."""
    ends = ("base_layer", "rotary_encoding.modules_to_save")
    if adapted := [name for name, _ in model.named_modules() if name.endswith(ends)]:
        raise ValueError(
            f"{model._get_name()} contains adapters ({', '.join(adapted[:4])} …). Merge or unload them first, as "
            "merge_and_fold does; peft saves them beside the rotations."
        )


def require_patched(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of the patched vision towers. Raises `ValueError` if there are none."""
    towers = list(patched_towers(model))
    if not towers:
        raise ValueError(f"{type(model).__name__} is not patched; call patch(model, config) first.")
    return towers
