"""Adapters: the rotations of a patched model in small files, with a fingerprint of their base model."""

import json
import math
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn
from torch.distributed.tensor import DTensor

from ..probing.module_inspection import linear_layer
from ..storage.loading import locate, parse_json
from ..storage.saved_code import replace_file
from ..storage.saved_model import ADAPTER_CONFIG, ADAPTER_WEIGHTS, differing_files, file_digest, open_weights
from .apply import attach_plans, make_plans, require_patched
from .rotary_patch import RotaryPatchConfig
from .tower_patch import TowerPatch, patched_towers


SKETCH_SIZE = 32
# Twice the error of rounding to bfloat16, and less than the usual effect of training.
WEIGHTS_TOLERANCE = 0.005
# Twice the error of rounding to bfloat16.
FREQUENCY_TOLERANCE = 0.008
# Written with rotations that are saved as part of a model: digests of the files that belong together.
BESIDE = "beside"
PEFT_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
FINGERPRINT = ("model_type", "layers", "heads", "head_dim", "train_grid", "weights")


def save_rotary(model: nn.Module, directory: str | Path, overwrite: bool = False) -> None:
    """
    Write only the rotations, a few kilobytes for [`load_rotary`]: `rotary_config.json` and `rotary.safetensors`.

    ```python
    import hf_liere
    from transformers import CLIPModel

    model = CLIPModel.from_pretrained("openai/clip-vit-base-patch16")
    hf_liere.patch(model, hf_liere.RotaryPatchConfig(position_encoding="comrope_ld", block_size=8))
    hf_liere.save_rotary(model, "clip-rotations")
    ```

    Args:
        overwrite: Whether to replace the rotations that the directory contains.

    Raises:
        ValueError: if the model is not patched, its towers are patched differently, or the directory contains rotations
            and `overwrite` is not set.
    """
    found = [name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if (Path(directory) / name).exists()]
    if found and not overwrite:
        raise ValueError(
            f"{directory} already contains {' and '.join(found)}; accepted: another directory, or overwrite=True."
        )
    write_rotations(model, directory, is_alone=True)


def write_rotations(
    model: nn.Module,
    directory: str | Path,
    state_dict: dict | None = None,
    is_main_process: bool = True,
    adapter: str | None = None,
    is_alone: bool = False,
) -> None:
    """
    [`save_rotary`] as part of saving a whole model or its adapters.

    Args:
        state_dict: The gathered values of all parameters if processes have parts of them.
        is_main_process: Whether this process writes.
        adapter: As in [`stored_parameters`].
        is_alone: Whether the files belong to no model or adapter in the directory.
    """
    towers = [tower for _, tower in require_patched(model)]
    if any(tower.rotary_patch.config.folded_grids is not None for tower in towers):
        raise ValueError("Folded rotations are a part of the weights: save the model, or the rotations before folding.")
    configs = [tower.rotary_patch.config.to_dict() for tower in towers]
    if any(config != configs[0] for config in configs):
        raise ValueError(f"The vision towers are patched differently, which one adapter cannot store: {configs}.")
    names = {id(parameter): name.replace("_fsdp_wrapped_module.", "") for name, parameter in model.named_parameters()}
    tensors = {}
    for stored_name, parameter in stored_parameters(model, adapter).items():
        value = (state_dict or {}).get(names[id(parameter)], parameter).detach()
        # Gather parameters that FSDP2 has sharded.
        value = value.full_tensor() if isinstance(value, DTensor) else value
        tensors[stored_name] = value.cpu().contiguous()
    bases = [_fingerprint(tower, tower.rotary_patch) for tower in towers]
    if is_main_process:
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        replace_file(directory / ADAPTER_WEIGHTS, save(tensors, metadata={"format": "pt"}))
        content = {"rotary_patch": configs[0], "base": bases}
        if not is_alone:
            # peft also reads the first that exists.
            weights = [name for name in PEFT_WEIGHTS if (directory / name).is_file()][:1]
            content[BESIDE] = {name: file_digest(directory / name, "sha256") for name in (ADAPTER_WEIGHTS, *weights)}
        replace_file(directory / ADAPTER_CONFIG, (json.dumps(content, indent=2) + "\n").encode())


def remove_rotations(directory: str | Path) -> None:
    """
    Delete the rotations that an earlier model left in a directory, before one without is saved there. Files of other
    formats stay. Raises `ValueError` if they were not saved as part of a model: this may be their only copy.
    """
    path = Path(directory) / ADAPTER_CONFIG
    try:
        content = parse_json(path.read_bytes(), path)
        parse_adapter(content, path)
    except (OSError, ValueError):
        return
    if BESIDE not in content:
        raise ValueError(
            f"{directory} contains rotations ({ADAPTER_CONFIG}, {ADAPTER_WEIGHTS}) that would be loaded into this "
            "model, which has none: move them away, or save to another directory."
        )
    path.unlink()
    if not differing_files(path.parent, {ADAPTER_WEIGHTS: content[BESIDE].get(ADAPTER_WEIGHTS, "")}):
        (path.parent / ADAPTER_WEIGHTS).unlink()


def require_saved_together(path: Path) -> bool:
    """
    Whether the rotations of the `rotary_config.json` at `path` were saved as part of a model. Raises `ValueError` if a
    file beside them is not of that model.
    """
    content = parse_json(path.read_bytes(), path)
    if differing := differing_files(path.parent, content.get(BESIDE, {})):
        raise ValueError(
            f"{path} was not saved with {', '.join(differing)} as it is now: copy all files that were saved together, "
            f"or delete {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS} to load without rotations."
        )
    return BESIDE in content


def stored_parameters(model: nn.Module, adapter: str | None = None) -> dict[str, nn.Parameter]:
    """
    The parameters of all towers by their names in `rotary.safetensors`. If each peft adapter has its own copy
    (`modules_to_save`), those of `adapter`, or of the active one.
    """
    encodings = [tower.rotary_encoding for _, tower in require_patched(model)]
    for index, encoding in enumerate(encodings):
        if (copies := getattr(encoding, "modules_to_save", None)) is not None:
            name = adapter or next(iter(encoding.active_adapters), "")
            encodings[index] = copies[name] if name in copies else encoding.original_module
    return _name_parameters(encodings)


def _name_parameters(encodings: list[nn.Module]) -> dict[str, nn.Parameter]:
    """Without the names of the modules around, but for layers of another shape (`rotary_1`)."""
    found = {}
    for index, encoding in enumerate(encodings):
        for name, parameter in encoding.named_parameters():
            *around, last = name.split(".")
            found[".".join([str(index), *(part for part in around if part.startswith("rotary_")), last])] = parameter
    return found


def load_rotary(
    model: nn.Module, source: str | Path, revision: str | None = None, check_weights: bool = True
) -> nn.Module:
    """
    Patch a model in place with rotations that [`save_rotary`] wrote; a model with the same patch gets their values.

    ```python
    import hf_liere
    from transformers import CLIPModel

    model = CLIPModel.from_pretrained("openai/clip-vit-base-patch16")
    hf_liere.patch(model, hf_liere.RotaryPatchConfig(position_encoding="comrope_ld", block_size=8))
    hf_liere.save_rotary(model, "clip-rotations-of-today")

    fresh = CLIPModel.from_pretrained("openai/clip-vit-base-patch16")
    hf_liere.load_rotary(fresh, "clip-rotations-of-today")
    ```

    Args:
        source: Directory, or repository on the Hub.
        revision: Branch, tag or commit of the repository.
        check_weights: Whether to check that the rotations were trained with the model's query and key weights; pass
            `False` for a base that was trained further.

    Returns:
        The same model.

    Raises:
        ValueError: before anything is changed, if the files cannot be read, the rotations do not fit the model or its
            patch, tensors are missing, left over or not finite, or the weights differ.
    """
    config, bases, tensors = read_adapter(source, revision)
    require_same_patch(model, config, source)
    towers = [tower for _, tower in patched_towers(model)]
    plans = [] if towers else make_plans(model, config)
    found = [(tower, tower.rotary_patch) for tower in towers] or [(one.tower.module, one.patch) for one in plans]
    _check_bases(bases, [_fingerprint(*each) for each in found], source, check_weights)
    encodings = [planned.build_encoding() for planned in plans]
    current = stored_parameters(model) if towers else _name_parameters(encodings)
    _check_values(tensors, current, source)
    with torch.no_grad():
        for name, value in tensors.items():
            if towers:
                current[name].copy_(value)
            else:
                # Of the saved type.
                current[name].data = value
    return model if towers else attach_plans(model, plans, encodings)


def _check_values(tensors: dict[str, torch.Tensor], current: dict[str, nn.Parameter], source: str | Path) -> None:
    """Raise `ValueError` unless tensors are finite values of these parameters."""
    for name in sorted(current.keys() | tensors.keys()):
        there, here = (tuple(each[name].shape) if name in each else "none" for each in (tensors, current))
        if there != here:
            raise ValueError(f"{source} contains {name} of shape {there}; this model needs {here}.")
        if not (tensors[name].is_floating_point() and tensors[name].isfinite().all()):
            raise ValueError(f"{source} contains values of {name} that are not finite: nothing was loaded.")


def require_same_patch(model: nn.Module, config: RotaryPatchConfig, source: str | Path) -> None:
    """Raise `ValueError` if a model is patched with another configuration than `config`."""
    for _, tower in patched_towers(model):
        # The weight of a fading table changes during training.
        patch, saved = ({**each.to_dict(), "absolute_weight": None} for each in (tower.rotary_patch.config, config))
        if differing := {name: (patch[name], saved[name]) for name in patch if patch[name] != saved[name]}:
            shown = ", ".join(f"{name}={here!r} here, {there!r} there" for name, (here, there) in differing.items())
            raise ValueError(f"{model._get_name()} is patched differently from {source} ({shown}); unpatch it first.")


def read_adapter(
    source: str | Path, revision: str | None = None
) -> tuple[RotaryPatchConfig, list[dict], dict[str, torch.Tensor]]:
    """
    Read an adapter of [`save_rotary`]: the configuration, the fingerprint of each tower, and the tensors. Raises
    `ValueError` if a file is missing, cannot be read, or was not written by [`save_rotary`].
    """
    names = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
    path, weights = (locate(source, names, revision) / name for name in names)
    if missing := [file.name for file in (path, weights) if not file.is_file()]:
        raise ValueError(f"{source} contains no {missing[0]}: it was not written by save_rotary.")
    config, bases = parse_adapter(parse_json(path.read_bytes(), path), path)
    with open_weights(weights) as file:
        return config, bases, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def parse_adapter(content: dict[str, Any], path: Path) -> tuple[RotaryPatchConfig, list[dict]]:
    """As [`read_adapter`], without tensors, from the content of the file `rotary_config.json` at `path`."""
    for name, kind in (("rotary_patch", dict), ("base", list), (BESIDE, dict)):
        if not isinstance(content.get(name, {} if name == BESIDE else None), kind):
            raise ValueError(f"{path} has no {kind.__name__} {name!r}: it was not written by save_rotary.")
    for saved in content["base"]:
        if missing := [name for name in FINGERPRINT if not isinstance(saved, dict) or name not in saved]:
            raise ValueError(f"{path} does not identify its base model: base has no {', '.join(missing)}.")
    try:
        return RotaryPatchConfig.from_dict(content["rotary_patch"]), content["base"]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _fingerprint(tower: nn.Module, patch: TowerPatch) -> dict:
    attentions = patch.attentions(tower)
    return {
        "model_type": patch.model_type(tower),
        "layers": len(attentions),
        **patch.describe_base(tower),
        "weights": _sketch([module for attention in attentions for module in patch.weighted_modules(attention)]),
    }


def _sketch(modules: list[nn.Module]) -> list[list[float]] | None:
    """
    Count sketch of each query and key projection: signed sums of its weights over `SKETCH_SIZE` index classes; `None`
    if a weight is quantized, sharded or on the meta device.

    The relative distance of two sketches estimates that of the weights, whatever their dtype: rounding weights to
    bfloat16 gives 0.2%, where hashes would simply differ.
    """
    sketches = []
    for module in modules:
        weight = linear_layer(module).weight
        # Also covers values that are on another process.
        is_here = isinstance(weight, torch.Tensor) and not isinstance(weight, DTensor) and weight.numel()
        if not is_here or not weight.is_floating_point() or weight.is_meta:
            return None
        values = weight.detach().to("cpu", torch.float64).flatten()
        # A multiplicative hash (Knuth, vol. 3, §6.4) of the index determines the sign and the class.
        mixed = torch.arange(len(values)) * 2654435761 % 2**32
        signed = values * (1 - 2 * (mixed >> 31))
        sums = values.new_zeros(SKETCH_SIZE).index_add(0, (mixed >> 8) % SKETCH_SIZE, signed)
        sketches.append([float(f"{value:.5g}") for value in sums.tolist()])
    return sketches


def _distance(found: list[list[float]], saved: list[list[float]]) -> float:
    """Largest relative distance of two sketches of a projection; infinite if their shapes differ."""
    found = torch.tensor(found)
    try:
        saved = torch.tensor(saved)
    except (TypeError, ValueError):
        return math.inf
    if saved.shape != found.shape or not saved.isfinite().all():
        return math.inf
    return ((found - saved).norm(dim=1) / saved.norm(dim=1).clamp_min(1e-12)).max().item()


def _check_bases(bases: list[dict], fingerprints: list[dict], source: str | Path, check_weights: bool) -> None:
    if len(fingerprints) != len(bases):
        raise ValueError(
            f"{source} contains rotations for {len(bases)} vision towers; this model has {len(fingerprints)}."
        )
    for saved, found in zip(bases, fingerprints):
        if differing := [name for name in found if name != "weights" and not _agree(found[name], saved.get(name))]:
            shown = "; ".join(f"{name} {saved.get(name)} there, {found[name]} here" for name in differing)
            raise ValueError(f"{source} contains rotations for another model: {shown}.")
        if check_weights and None in (found["weights"], saved["weights"]):
            warnings.warn(
                f"Could not check whether {source} belongs to this model: its weights are quantized.", stacklevel=3
            )
        elif check_weights and (distance := _distance(found["weights"], saved["weights"])) > WEIGHTS_TOLERANCE:
            raise ValueError(
                f"{source} was trained on other weights: the query and key projections of this model differ by about "
                f"{distance:.1%}. Load its base, or pass check_weights=False for one that was trained further."
            )


def _agree(found: object, saved: object) -> bool:
    """Whether two facts agree, up to the rounding of a model's frequencies to half types."""
    if isinstance(found, list) and isinstance(saved, list):
        return len(found) == len(saved) and all(map(_agree, found, saved))
    if isinstance(found, float) and isinstance(saved, (int, float)):
        return math.isclose(found, saved, rel_tol=FREQUENCY_TOLERANCE)
    return found == saved
