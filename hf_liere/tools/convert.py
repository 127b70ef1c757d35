"""
Writes complete model folders, from weights to card: `hf-liere convert` for the papers' checkpoints, and `hf-liere
upgrade` for models with a more general position encoding.

`conversion/` converts and `hub/` renders cards; this file combines them.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..auto import load_checkpoint
from ..storage.loading import locate
from ..storage.saved_model import SavedModel, file_digest
from ..storage.targets import new_directory
from ..transformer.configuration_liere import LieREVideoConfig, LieREViTConfig
from ..transformer.modeling_liere import LieREPreTrainedModel
from ..upgrades import ConversionError, resize_input, upgrade_encoding
from .conversion.checkpoints import Conversion, convert_state_dict, require_source
from .conversion.reading import FILES, json_beside, read_checkpoint
from .hub.cards import render_card
from .hub.checked_facts import CONVERSION_FILE, facts_of_run


def convert_checkpoint(
    checkpoint: str | os.PathLike,
    output: str | os.PathLike,
    source: str | None = None,
    revision: str | None = None,
    image_mean: list[float] | None = None,
    image_std: list[float] | None = None,
    **options: Any,
) -> Conversion:
    """
    Write a checkpoint as a directory that `from_pretrained` reads: weights, configuration, code, processor and card.

    The directory appears under its name only when it is complete.

    Args:
        checkpoint: A file (safetensors, or a pickle of tensors), a directory with model.safetensors, its index of
            shards or pytorch_model.bin, or the name of a repository on the Hub.
        output: The directory; it must not exist, or be empty.
        source: One of [`SOURCES`]; `None` detects it from the tensor names.
        revision: Branch, tag or commit of a repository on the Hub.
        image_mean: Mean of each channel in training; `None` means the source's processor or configuration, else ½.
        image_std: Standard deviation of each channel, likewise.
        options: As for [`convert_state_dict`].

    Raises:
        InputError: as [`read_checkpoint`] and [`convert_state_dict`], and if the folder of `output` is not writable.
        HubError: if the Hub does not answer or refuses the request.
        FileExistsError: if `output` is there and not an empty directory.
    """
    if source is not None:
        require_source(source)
    with new_directory(output) as partial:
        local = locate(checkpoint, FILES, revision)
        tensors, source_config = read_checkpoint(local)
        conversion = convert_state_dict(tensors, source, source_config, **options)
        statistics = _statistics(local, source_config, image_mean=image_mean, image_std=image_std)
        _write(partial, conversion.model(), statistics, _origin(checkpoint, revision), _notes(conversion, options))
    return conversion


def upgrade_checkpoint(
    checkpoint: str | os.PathLike,
    output: str | os.PathLike,
    position_encoding: str | None = None,
    image_size: int | list[int] | None = None,
    revision: str | None = None,
    **options: Any,
) -> LieREPreTrainedModel:
    """
    Give a model a more general position encoding ([`upgrade_encoding`], with its `options`), or another image size
    ([`resize_input`]), without changing the function that it computes, and write it as [`convert_checkpoint`] does.

    Raises [`ConversionError`] with the reason if nothing would change, or no such model computes the same function, and
    the errors of [`load_checkpoint`].
    """
    if position_encoding is None and image_size is None:
        raise ConversionError("Nothing to upgrade: accepted are position_encoding, image_size or both.")
    if position_encoding is None and any(value is not None for value in options.values()):
        raise ConversionError(f"{', '.join(options)} describe a position encoding: please give position_encoding too.")
    with new_directory(output) as partial:
        local = locate(checkpoint, FILES, revision)
        kind = (json_beside(local, "config.json") or {}).get("model_type")
        if not local.is_dir() or kind not in (LieREViTConfig.model_type, LieREVideoConfig.model_type):
            raise ConversionError(
                f"model_type={kind!r} of {checkpoint}: accepted are LieREViT… and LieREVideo…, which hf-liere convert "
                "makes of official checkpoints. In Python, hf_liere.upgrade_encoding accepts models of tokens, and "
                "hf_liere.patch gives Transformers and timm models learned rotations (docs/pretrained.md)."
            )
        model, _ = load_checkpoint(checkpoint, revision)
        if position_encoding is not None:
            model = upgrade_encoding(model, position_encoding=position_encoding, **options)
        if image_size is not None:
            model = resize_input(model, image_size)
        given = {"position_encoding": position_encoding, "image_size": image_size, **options}
        given = ", ".join(f"`{key}={value!r}`" for key, value in given.items() if value is not None)
        notes = f"It computes what the source computes, with {given}. Licence and terms are those of the source."
        _write(partial, model, _statistics(local, None), _origin(checkpoint, revision), notes)
    return model


def _write(
    directory: Path, model: LieREPreTrainedModel, statistics: Mapping[str, object], origin: tuple[str, str], notes: str
) -> None:
    """Write weights, configuration, code, processor and card; `statistics` override a mean and deviation of ½."""
    model.save_pretrained(directory)
    config, (name, source) = model.config, origin
    height, width = config.input_shape[-2:]
    fields = {
        "size": {"height": height, "width": width},
        "image_mean": [0.5] * config.num_channels,
        "image_std": [0.5] * config.num_channels,
        **statistics,
    }
    if config.num_axes == 3:
        # This processor's class needs torchvision; its file does not.
        kind, file = {"video_processor_type": "LieREVideoProcessor"}, "video_preprocessor_config.json"
        fields |= {"do_center_crop": False}
    else:
        kind, file = {"image_processor_type": "ViTImageProcessor"}, "preprocessor_config.json"
        fields |= {"do_resize": True, "do_rescale": True, "do_normalize": True}
    (directory / file).write_text(json.dumps(kind | fields, indent=2) + "\n")
    saved = SavedModel(directory)
    record = {"weights": saved.digest, "converted_from": source, "notes": notes}
    (directory / CONVERSION_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    render_card(facts_of_run(saved, title=f"{type(model).__name__} from {name}")).write(directory)


def _statistics(source: Path, source_config: Mapping | None, **given: list[float] | None) -> dict[str, object]:
    """Pixel statistics of the source's training: those given, of its processor, and of timm's configuration."""
    trained = (source_config or {}).get("pretrained_cfg") or {}
    processor = json_beside(source, "preprocessor_config.json") or {}
    known = {"image_mean": trained["mean"], "image_std": trained["std"]} if {"mean", "std"} <= set(trained) else {}
    known |= {name: processor[name] for name in ("image_mean", "image_std", "resample") if name in processor}
    return known | {name: value for name, value in given.items() if value is not None}


def _origin(checkpoint: str | os.PathLike, revision: str | None) -> tuple[str, str]:
    """The name of a checkpoint without its folder, and a text that identifies it."""
    path = Path(checkpoint)
    if path.is_file():
        return path.name, f"the file `{path.name}` (SHA-256 `{file_digest(path, 'sha256').removeprefix('sha256:')}`)"
    if path.is_dir():
        return path.resolve().name, f"the directory `{path.resolve().name}`"
    link = f"[{checkpoint}](https://huggingface.co/{checkpoint})"
    return str(checkpoint), f"{link} at `{revision}`" if revision else link


def _notes(conversion: Conversion, options: Mapping) -> str:
    """Paragraphs on the source and the effect of the options."""
    notes = [f"Licence and terms are those of the source, a checkpoint of kind `{conversion.source}`."]
    if options:
        notes.append(f"Options: {', '.join(f'`{name}={value!r}`' for name, value in sorted(options.items()))}.")
    if conversion.ignored:
        shown = ", ".join(f"`{key}`" for key in conversion.ignored[:5])
        notes.append(f"Left out because they do not affect these outputs: {len(conversion.ignored)} tensors, {shown}.")
    if conversion.source == "liere" and conversion.config.position_encoding in ("liere", "rope_mixed"):
        here = "while every layer of this model uses its own: logits and measured accuracy differ."
        if conversion.config.share_layers:
            here = "and so does this model (`share_layers=True`): its logits are the official ones."
        notes.append(
            "The LieRE paper describes separate generators for every layer. The official code uses those of the "
            f"first layer in every layer, {here}"
        )
    notes.append("Check `image_mean` and `image_std` in the processor file against the training of the source.")
    return "\n\n".join(notes)
