"""
Official and pretrained checkpoints → ours, with the logits they have at home.

`load_checkpoint` reads a file, directory or Hub repository without executing anything in it, `convert_state_dict` makes
a [`Conversion`] of its tensors, and `convert_checkpoint` (the command `hf-liere convert`) writes a directory that
`from_pretrained` reads. Most of a source is re-expressed in weights, so that few configuration fields are needed:
a missing bias becomes zeros, an absent output projection the identity, another order of axes or of the planes a
permutation of query and key rows, LieRE's linear patch projection a convolution, ComRoPE's `scale_factor` part of the
generators, multipliers shared by heads are repeated, a table without a class token's row gets a row of zeros.

**What the shapes do not tell** is an option (or is read from the source's `config.json`):

- `liere`: `position_encoding` (without generators `absolute`, or `visionllama` if the table is all zeros), `pooling`
  (`cls`; `mean`), `num_channels` (3), `num_axes` (from the generators, else 2), `patch_size` and `image_size` (square
  ones from the shapes for images, to be given for volumes), `layer_generators` (`official`; `paper`).
- `comrope`: `position_encoding` (from the shapes; without generators `raw` if there is a table, else `none`;
  `vanilla-rope` has to be told), `num_axes` (from the shapes, else 2), `num_attention_heads` (from the generators, else
  heads of 64 channels), `image_size` (from the table, else 14 patches), `num_frames` (from the table, else 8),
  `theta_base` (the paper's 10000^(−2A/head_dim)), `scale_factor` (1), `axis_scale` (`True`), `cls_position` (½),
  `hidden_act` (`quick_gelu`), `layer_norm_eps` (1e-5).
- `timm` and `naver` (rope-vit), which differ in how a table is resized: `position_encoding` (`mixed` with frequencies,
  else `absolute` if the table has a row for the class token, else `axial`; `none`), `num_attention_heads` (from timm's
  frequencies, else heads of 64 channels), `axis_order` (`columns_first`; `rows_first` without a class token),
  `rope_theta` (100; 10000 for `rows_first`), `reference_grid` (none; 16 × 16 for `rows_first`), `image_size` (square
  from the table, else 224; 256 for `rows_first`), `pooling` (`mean` with `fc_norm`, else `cls`), `hidden_act` (`gelu`),
  `layer_norm_eps` (1e-6).
- `vit` (and DeiT), `clip`: `num_attention_heads` (heads of 64 channels), `hidden_act` (`gelu`; `quick_gelu`),
  `layer_norm_eps` (1e-12; 1e-5), `image_size` (square, from the table).

**LieRE's layer question.** The paper describes generators of their own for every layer, and the official checkpoints
hold one set per layer. The official forward pass nevertheless uses the set of the first layer in every layer; the
other sets receive no gradient and keep their random start. `layer_generators="official"` (the default) reproduces the
official logits: the first set, shared by all layers (`share_layers=True`). `layer_generators="paper"` keeps each set
for its own layer: the model that the paper describes, which is not the model whose accuracy the official code measures.

**Where official code is not followed.** rope-vit takes the positions and the table of the training grid for every input
with as many patches, whatever its shape; here they are always those of the input's grid. ComRoPE's code clamps random
displacements of half the paper's width and leaves frames in place; `position_perturbation` is the paper's eq. (11).
LieRE's code has one more dropout, inside the MLP; nothing of this touches the outputs in evaluation mode otherwise.
"""

import hashlib
import json
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file

from .auto import MODELS
from .cards import render
from .checked_facts import CONVERSION_FILE
from .configuration_liere import LieREConfig, LieREVideoConfig, LieREViTConfig
from .conversion_sources import (
    CONVERTERS,
    SOURCES,
    ConversionError,
    SourceTensors,
    detect_source,
    options_from_config,
    require_one_of,
    require_options,
)
from .facts import MODEL_FIELDS, Facts
from .hub import explained
from .loading import loading_options, local_path, reason, shards
from .modeling_liere import LieREPreTrainedModel, LieREViTForImageClassification, LieREViTModel
from .modeling_liere_video import LieREVideoForVideoClassification, LieREVideoModel
from .saved_weights import saved_weights_digest
from .targets import new_directory


OWN_MODEL_TYPES = tuple(config_class.model_type for config_class in MODELS)


@dataclass
class Conversion:
    """
    What a checkpoint becomes.

    Attributes:
        source: Kind of the source, one of [`SOURCES`].
        config: Configuration of the model.
        state_dict: All of the model's tensors; differentiable functions of the source's.
        model_class: A classifier where the source has one, else the bare model.
        ignored: Keys of the source that have no effect on the outputs kept here.
    """

    source: str
    config: LieREConfig
    state_dict: dict[str, torch.Tensor]
    model_class: type[LieREPreTrainedModel]
    ignored: list[str] = field(default_factory=list)

    def model(self) -> LieREPreTrainedModel:
        """The model with its weights, in evaluation mode."""
        model = self.model_class(self.config)
        model.load_state_dict(self.state_dict)
        return model.eval()


def convert_state_dict(
    tensors: Mapping[str, torch.Tensor],
    source: str | None = None,
    source_config: Mapping | None = None,
    **options,
) -> Conversion:
    """
    A configuration and tensors of ours from the tensors of a source.

    Args:
        tensors: The source's state dict, under its official names.
        source: One of [`SOURCES`]; `None` looks at the names.
        source_config: The `config.json` beside the checkpoint, if there is one.
        options: What the shapes do not tell, see the top of this file; they come before `source_config`.

    Raises:
        ConversionError: on unknown or missing tensors, shapes that contradict each other, values that are not finite,
            and options that are unknown or do not fit.
    """
    tensors = _plain(tensors)
    source = source or detect_source(tensors)
    require_one_of("source", source, SOURCES)
    from_config = options_from_config(source, source_config) if source_config else {}
    options = from_config | {name: value for name, value in options.items() if value is not None}
    require_options(source, options)
    table = SourceTensors(tensors)
    parts = CONVERTERS[source](table, **options)
    table.finish()

    axes = len(parts.patch)
    config_class = LieREViTConfig if axes == 2 else LieREVideoConfig
    fields = parts.fields
    if parts.head:
        labels = len(list(parts.head.values())[-1])
        fields["num_labels"] = labels
        names = (source_config or {}).get("id2label") or {}
        if not isinstance(names, Mapping) or not all(str(index).isdigit() for index in names):
            raise ConversionError(f"id2label={names!r} beside the checkpoint: accepted are names by their numbers.")
        if len(names) == labels:
            fields["id2label"] = {int(index): name for index, name in names.items()}
            fields["label2id"] = {name: index for index, name in fields["id2label"].items()}
    try:
        config = config_class(**fields)
    except (StrictDataclassError, ValueError) as error:
        raise ConversionError(f"No model has the checkpoint's properties: {error}") from error
    if not parts.head:
        return Conversion(
            source, config, parts.encoder, LieREViTModel if axes == 2 else LieREVideoModel, sorted(parts.ignored)
        )
    state_dict = {f"liere.{name}": tensor for name, tensor in parts.encoder.items()}
    state_dict |= {f"classifier.{name}": tensor for name, tensor in parts.head.items()}
    model_class = LieREViTForImageClassification if axes == 2 else LieREVideoForVideoClassification
    return Conversion(source, config, state_dict, model_class, sorted(parts.ignored))


def _plain(tensors: Mapping) -> dict[str, torch.Tensor]:
    """A state dict out of what training programs wrap around it: Lightning, DeiT, DistributedDataParallel, compile."""
    for wrapper in ("state_dict", "model"):
        if isinstance(tensors.get(wrapper), Mapping):
            tensors = tensors[wrapper]
    strange = {key: type(value).__name__ for key, value in tensors.items() if not isinstance(value, torch.Tensor)}
    if strange or not tensors:
        raise ConversionError(f"The checkpoint must map names to tensors, but holds {strange or 'nothing'}.")
    for prefix in ("model.", "module.", "_orig_mod.", "model."):
        if all(key.startswith(prefix) for key in tensors):
            tensors = {key.removeprefix(prefix): value for key, value in tensors.items()}
    return dict(tensors)


WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")


def load_checkpoint(
    checkpoint: str | os.PathLike, revision: str | None = None
) -> tuple[dict[str, torch.Tensor], dict | None]:
    """
    Tensors of a checkpoint, and the `config.json` beside them if there is one. Nothing in it is executed.

    Args:
        checkpoint: A file (safetensors, or a pickle of tensors), a directory with model.safetensors, its index of
            shards or pytorch_model.bin, or the name of a repository on the Hub.
        revision: Branch, tag or commit of the repository.

    Raises:
        ConversionError, CheckpointError: if there is no checkpoint, it is damaged, it is one of ours, or it is a pickle
            that needs code to be executed.
        HubError: if it is on the Hub, which does not answer or refuses.
    """
    path = _locate(checkpoint, revision)
    source_config = _json_beside(path, "config.json")
    if path.is_dir() and (source_config or {}).get("model_type") in OWN_MODEL_TYPES:
        raise ConversionError(f"{checkpoint} is a model of hf_liere already; from_pretrained reads it as it is.")
    tensors = {}
    for file in _weight_files(path):
        tensors.update(_read(file))
    return tensors, source_config


def _json_beside(path: Path, name: str) -> dict | None:
    """The content of a file beside the weights, if it is there."""
    file = (path if path.is_dir() else path.parent) / name
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConversionError(f"{name} beside the checkpoint is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConversionError(f"{name} beside the checkpoint holds a {type(content).__name__}; accepted is an object.")
    return content


def _locate(checkpoint: str | os.PathLike, revision: str | None) -> Path:
    """The file or directory itself, or the downloaded files of a repository."""
    path = local_path(checkpoint)
    if path is not None:
        return path
    options = loading_options(checkpoint, revision)
    patterns = ["*.json", *(f"*{suffix}" for suffix in WEIGHT_SUFFIXES)]
    with explained(HfApi(), str(checkpoint), revision):
        return Path(snapshot_download(str(checkpoint), allow_patterns=patterns, **options))


def _weight_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (path / name).is_file():
            return [path / name]
        index = path / f"{name}.index.json"
        if index.is_file():
            return shards(index)
    found = sorted(file for file in path.iterdir() if file.suffix in WEIGHT_SUFFIXES)
    if len(found) != 1:
        raise ConversionError(
            f"{path.name} holds {[file.name for file in found] or 'no checkpoint'}: please name one file."
        )
    return found


def _read(file: Path) -> Mapping:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    # Whatever a reader makes of bytes that are none of its own.
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError, LookupError, ValueError) as error:
        # Bytes of another kind make torch's reader stumble in as many ways.
        known = isinstance(error, (SafetensorError, pickle.UnpicklingError, OSError))
        text = reason(error) if known else f"it is truncated or no checkpoint at all ({type(error).__name__})."
        raise ConversionError(f"{file.name} cannot be read: {text}") from error
    if not isinstance(checkpoint, Mapping):
        raise ConversionError(f"{file.name} holds a {type(checkpoint).__name__}, not a mapping of names to tensors.")
    return checkpoint


def convert_checkpoint(
    checkpoint: str | os.PathLike,
    output: str | os.PathLike,
    source: str | None = None,
    revision: str | None = None,
    image_mean: list[float] | None = None,
    image_std: list[float] | None = None,
    **options,
) -> Conversion:
    """
    Write a checkpoint as a directory that `from_pretrained` reads: weights, configuration, code, processor and card.

    The directory appears under its name when it is complete, or not at all.

    Args:
        checkpoint: As for [`load_checkpoint`].
        output: The directory; it must not exist, or be empty.
        source: One of [`SOURCES`]; `None` looks at the names of the tensors.
        revision: Branch, tag or commit of a repository on the Hub.
        image_mean: Mean of the pixels of each channel in training; `None` takes that of the source's processor or
            configuration, else ½.
        image_std: Their standard deviation, likewise.
        options: As for [`convert_state_dict`].

    Raises:
        InputError: as [`load_checkpoint`] and [`convert_state_dict`], and if nothing can be written beside `output`.
        HubError: as [`load_checkpoint`].
        FileExistsError: if `output` is there and not an empty directory.
    """
    with new_directory(output) as partial:
        local = _locate(checkpoint, revision)
        tensors, source_config = load_checkpoint(local)
        conversion = convert_state_dict(tensors, source, source_config, **options)
        conversion.model().save_pretrained(partial)
        statistics = {"image_mean": image_mean, "image_std": image_std}
        _save_processor(partial, conversion.config, local, source_config, statistics)
        facts = _facts(checkpoint, revision, conversion, options, partial)
        render(facts).write(partial)
        record = {name: getattr(facts, name) for name in ("weights", "converted_from", "notes")}
        (partial / CONVERSION_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return conversion


def _save_processor(
    directory: Path,
    config: LieREConfig,
    local: Path,
    source_config: Mapping | None,
    statistics: Mapping[str, list[float] | None],
) -> None:
    """The processor file; its pixels' statistics are the given ones, the source's or ½."""
    known = {}
    trained = (source_config or {}).get("pretrained_cfg") or {}
    if "mean" in trained and "std" in trained:
        known = {"image_mean": list(trained["mean"]), "image_std": list(trained["std"])}
    processor = _json_beside(local, "preprocessor_config.json")
    if processor is not None:
        known |= {name: processor[name] for name in ("image_mean", "image_std", "resample") if name in processor}
    known |= {name: value for name, value in statistics.items() if value is not None}
    height, width = config.input_shape[-2:]
    fields = {
        "size": {"height": height, "width": width},
        "image_mean": [0.5] * config.num_channels,
        "image_std": [0.5] * config.num_channels,
        **known,
    }
    if config.num_axes == 3:
        # The class needs torchvision; the file does not.
        kind, name = {"video_processor_type": "LieREVideoProcessor"}, "video_preprocessor_config.json"
        fields |= {"do_center_crop": False}
    else:
        kind, name = {"image_processor_type": "ViTImageProcessor"}, "preprocessor_config.json"
        fields |= {"do_resize": True, "do_rescale": True, "do_normalize": True}
    (directory / name).write_text(json.dumps(kind | fields, indent=2) + "\n")


LAYER_NOTE = {
    "official": """
The official code uses the generators of the first layer in every layer, and so does this model (`share_layers=True`):
its logits are the official ones. The LieRE paper describes generators of their own for every layer.
""",
    "paper": """
Every layer uses the generators that the checkpoint holds for it, as the LieRE paper describes. The official code uses
those of the first layer in every layer: its logits, and the accuracy measured with it, are not this model's.
""",
}


def _facts(
    checkpoint: str | os.PathLike, revision: str | None, conversion: Conversion, options: Mapping, folder: Path
) -> Facts:
    """What the card of a converted checkpoint says."""
    path, config = Path(checkpoint), conversion.config
    if path.is_file():
        digest = hashlib.sha256()
        with path.open("rb") as file:
            for chunk in iter(lambda: file.read(1 << 20), b""):
                digest.update(chunk)
        name, origin = path.name, f"the file `{path.name}` (SHA-256 `{digest.hexdigest()}`)"
    elif path.is_dir():
        name, origin = path.resolve().name, f"the directory `{path.resolve().name}`"
    else:
        name = str(checkpoint)
        origin = f"[{checkpoint}](https://huggingface.co/{checkpoint})" + (f" at `{revision}`" if revision else "")
    notes = [f"Licence and terms are those of the source, a checkpoint of kind `{conversion.source}`."]
    if options:
        notes.append(f"Options: {', '.join(f'`{name}={value!r}`' for name, value in sorted(options.items()))}.")
    if conversion.ignored:
        shown = ", ".join(f"`{key}`" for key in conversion.ignored[:5])
        notes.append(f"Left out, without effect on these outputs: {len(conversion.ignored)} tensors, {shown}.")
    if conversion.source == "liere" and config.position_encoding in ("liere", "rope_mixed"):
        notes.append(LAYER_NOTE[options.get("layer_generators") or "official"].strip())
    notes.append("Check `image_mean` and `image_std` in the processor file against the training of the source.")
    return Facts(
        title=f"{conversion.model_class.__name__} from {name}",
        encoding=config.position_encoding,
        model={name: getattr(config, name) for name in MODEL_FIELDS if getattr(config, name, None) is not None},
        cost={"parameters": sum(tensor.numel() for tensor in conversion.state_dict.values())},
        architecture=conversion.model_class.__name__,
        notes="\n\n".join(notes),
        converted_from=origin,
        weights=saved_weights_digest(folder),
    )
