"""
Export of image and video models to ONNX files and `torch.export` archives, with a dynamic batch size.

    export_model(model, "model.onnx")                      # or "model.pt2"
    export_model(model, "model.onnx", image_size=384)      # LieRE at another size than the one of its configuration

| `position_encoding` | content of the exported graph | input size |
|---|---|---|
| all others except `absolute` | cos and sin of the positions | dynamic |
| `liere` | rotations of one grid as constants | fixed |
| `liere` with `dynamic_size=True` | the matrix exponential, as float64 products | dynamic |
| `absolute`, and any encoding beside a learned table | the table, resized to one grid | fixed |

An ONNX file returns a list of outputs, with their names in the file. The program in a `.pt2` archive returns a
dictionary of tensors: `torch.export.load("model.pt2").module()(pixel_values)["logits"]`.
"""

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..auto import load_checkpoint
from ..errors import InputError, require_libraries, silence
from ..models.encoding.kinds import encoding_of, needs_exponential, needs_spacing
from ..models.transformer.configuration_liere import LieREPixelConfig, pair
from ..models.transformer.modeling_liere import LieREPreTrainedModel
from ..storage.targets import new_file


ONNX, TORCH_EXPORT = ".onnx", ".pt2"
# Protocol buffers are limited to this size; larger models store their weights in a second file.
PROTOBUF_LIMIT = 2**31 - 2**24
# The first version with LayerNormalization; the installed onnx defines the newest.
OLDEST_OPSET = 17
EXPORTABLE_ATTENTION = ("sdpa", "eager")
# Accepted error of exported outputs, relative to the largest; reordered float32 sums cause 1% of it.
TOLERANCE = 1e-4


class ExportError(InputError):
    """The export is not possible; the message says what is accepted."""


class _TensorOutputs(nn.Module):
    """A model whose only input is pixels and whose output is a dictionary of tensors."""

    def __init__(self, model: LieREPreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        tensors = {}
        for name, value in self.model(pixel_values).items():
            if isinstance(value, torch.Tensor):
                tensors[name] = value
            elif isinstance(value, tuple):
                tensors |= {f"{name}_{index}": tensor for index, tensor in enumerate(value)}
        return tensors


def export_model(
    model: LieREPreTrainedModel,
    output: str | os.PathLike,
    image_size: int | tuple[int, int] | None = None,
    num_frames: int | None = None,
    dynamic_size: bool | None = None,
    opset: int | None = None,
) -> Path:
    """
    Write a model for inference. Its input is `pixel_values` of any batch size; its outputs keep their names in PyTorch
    (`logits`; `last_hidden_state`, `pooler_output`; `reconstruction`; `feature_maps_0` …).

    Commuting rotations are folded into the query and key weights. Positions are those of the grid, without
    perturbation. The file contains the configuration with its labels as the metadata `config.json`.

    Args:
        model: Any model of this package; it is left as it is.
        output: A new file ending in `.onnx` or `.pt2`. Above 2 GB, an ONNX model stores its weights in a second file
            beside it, with `.data` added to the name.
        image_size: Height and width of inputs of a fixed size; `None` means those of the configuration.
        num_frames: Number of frames of inputs of a fixed size; `None` means that of the configuration.
        dynamic_size: Whether height and width (and frames) may vary by whole patches, at least two on every axis.
            `None` means wherever it is free, see the table above, and the configured inputs have two; with LieRE,
            `True` puts the exponential into the graph.
        opset: Version of ONNX's operators, from 17; `None` means the version that PyTorch's exporter recommends.

    Returns:
        The path of the file.

    Raises:
        InputError: if the model or the options do not allow this export, a library is missing, or writing fails.
        FileExistsError: if `output` exists.
    """
    output = Path(output)
    _require_format(output, opset)
    with new_file(output) as partial:
        program = export_program(model, image_size, num_frames, dynamic_size)
        config = model.config.to_json_string(use_diff=False)
        if output.suffix == TORCH_EXPORT:
            torch.export.save(program, partial, extra_files={"config.json": config})
        else:
            _save_onnx(program, model.config, config, opset, partial)
    return output


def _require_format(output: Path, opset: int | None) -> None:
    if output.suffix not in (ONNX, TORCH_EXPORT):
        raise ExportError(f"{output}: accepted are names that end in {ONNX} or {TORCH_EXPORT}.")
    if output.suffix == TORCH_EXPORT:
        if opset is not None:
            raise ExportError(f"opset={opset} is for ONNX files; {output.name} has PyTorch's own operators.")
        return
    require_libraries("An ONNX file", "export", "onnx", "onnxscript")
    if opset is not None:
        from onnx.defs import onnx_opset_version

        newest = onnx_opset_version()
        if not OLDEST_OPSET <= opset <= newest:
            raise ExportError(f"opset={opset}: accepted are {OLDEST_OPSET} to {newest}.")


def _save_onnx(
    program: torch.export.ExportedProgram, config: LieREPixelConfig, metadata: str, opset: int | None, path: Path
) -> None:
    program = program.run_decompositions({torch.ops.aten.diagonal_scatter.default: _diagonal_scatter})
    (pixels,) = (node.meta["val"] for node in program.graph.nodes if node.name == "pixel_values")
    names = {0: "batch", **_size_axes(config)}
    names = {axis: name for axis, name in names.items() if not isinstance(pixels.shape[axis], int)}
    # If the exporter cannot convert to a version, it only logs that and writes another one.
    with silence("torch.onnx", "onnxscript"):
        onnx_program = torch.onnx.export(
            program,
            dynamo=True,
            input_names=["pixel_values"],
            output_names=list(program.call_spec.out_spec.context),
            dynamic_shapes={"pixel_values": names},
            opset_version=opset,
            verbose=False,
        )
    written = onnx_program.model.opset_imports[""]
    if opset not in (None, written):
        raise ExportError(f"opset={opset}: PyTorch's exporter writes this model with {written} only; leave opset out.")
    onnx_program.model.metadata_props["config.json"] = metadata
    size = sum(tensor.nbytes for tensor in program.state_dict.values())
    onnx_program.save(path, external_data=size > PROTOBUF_LIMIT)


def export_program(
    model: LieREPreTrainedModel,
    image_size: int | tuple[int, int] | None = None,
    num_frames: int | None = None,
    dynamic_size: bool | None = None,
) -> torch.export.ExportedProgram:
    """The graph that [`export_model`] writes; `program.module()(pixel_values)` returns the outputs by name."""
    if not isinstance(model, LieREPreTrainedModel) or not isinstance(model.config, LieREPixelConfig):
        raise ExportError(f"{type(model).__name__}: accepted are the image and video models of hf_liere.")
    config = model.config
    if config._attn_implementation not in EXPORTABLE_ATTENTION:
        raise ExportError(
            f"attn_implementation={config._attn_implementation!r} cannot be exported; accepted are "
            f"{', '.join(EXPORTABLE_ATTENTION)}, as in model.set_attn_implementation('sdpa')."
        )
    if needs_spacing(config):
        raise ExportError(
            f"coordinates={config.coordinates!r} need the spacing of every input, but pixel_values are the only input "
            "of an exported file; torch.export.export takes spacing as well."
        )
    grid = _grid(config, image_size, num_frames)
    obstacles = {
        "the learned table of positions is resized for one image_size": config.use_absolute_position_embeddings,
        f"image_size={image_size} and num_frames={num_frames} are a fixed size": {image_size, num_frames} != {None},
        f"sizes that vary have at least two patches on every axis, and the inputs of this model have {grid}": 1 in grid,
    }
    found, has_exponential = [obstacle for obstacle, holds in obstacles.items() if holds], needs_exponential(config)
    if dynamic_size and found:
        raise ExportError(f"dynamic_size=True: {found[0]}; leave dynamic_size out.")
    if dynamic_size is None:
        dynamic_size = not (found or has_exponential)
    if dynamic_size:
        # The exporter would infer constraints from equal sizes or sizes of one in the example.
        grid = tuple(patches + 1 + axis for axis, patches in enumerate(grid))
    pixels = _pixels(config, grid, batch_size=2)
    dynamic = {0: torch.export.Dim("batch")}
    if dynamic_size:
        for axis, extent in zip(_size_axes(config), config.patch_shape):
            dynamic[axis] = extent * torch.export.Dim(f"patches_{axis}")

    was_training = model.training
    model.eval()
    try:
        # An already folded model has constants for its grids and computes the rotations of other grids.
        folds = encoding_of(config) is not None and config.folded_grids is None
        folds = folds and not (dynamic_size and has_exponential)
        exported = model.fold_rotations(grids=[grid]) if folds else model
        with torch.no_grad():
            return torch.export.export(
                _TensorOutputs(exported),
                (pixels.to(device=model.device, dtype=model.dtype),),
                dynamic_shapes={"pixel_values": dynamic},
            )
    finally:
        model.train(was_training)


def run_exported(path: str | os.PathLike, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Run a file of [`export_model`] with ONNX Runtime or PyTorch on the CPU; returns its outputs by name."""
    path = Path(path)
    if path.suffix == TORCH_EXPORT:
        with torch.no_grad():
            return torch.export.load(path).module()(pixel_values)
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    arrays = session.run(names, {"pixel_values": pixel_values.numpy()})
    return {name: torch.from_numpy(array) for name, array in zip(names, arrays)}


def export_checkpoint(
    checkpoint: str | os.PathLike, output: str | os.PathLike, revision: str | None = None, **options: Any
) -> str:
    """
    [`export_model`] of a saved model; compares the outputs of the written file with the model's.

    Args:
        checkpoint: Directory or repository on the Hub.
        output: As in [`export_model`], like the `options`.
        revision: Branch, tag or commit of the repository.

    Returns:
        One line: the written file, and by how much its outputs differ.

    Raises:
        CheckpointError, HubError: if the checkpoint cannot be loaded, or a weight is missing, left over or not finite.
        ExportError: as [`export_model`], and (before writing) if the outputs differ by more than 1e-4 of the largest.
    """
    output = Path(output)
    _require_format(output, options.get("opset"))
    with new_file(output) as partial:
        model, _ = load_checkpoint(checkpoint, revision, dtype="auto")
        export_model(model, partial, **options)
        comparison = _comparison(model, partial, options)
    return f"{output}: {type(model).__name__}{comparison}"


def _comparison(model: LieREPreTrainedModel, path: Path, options: Mapping) -> str:
    """A description of the exported file and its error. Raises `ExportError` if the outputs differ from the model's."""
    if path.suffix == ONNX and importlib.util.find_spec("onnxruntime") is None:
        return "; not compared, for onnxruntime is not installed"
    grid = _grid(model.config, options.get("image_size"), options.get("num_frames"))
    pixels = _pixels(model.config, grid, batch_size=3).normal_()
    with torch.no_grad():
        expected = _TensorOutputs(model.eval())(pixels)
    found = run_exported(path, pixels)
    difference = max(
        ((found[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-3)).item()
        for name, tensor in expected.items()
    )
    if not difference <= TOLERANCE:
        raise ExportError(
            f"{path.name} was not written: its outputs differ by {difference:.1e} of the largest, more than "
            f"{TOLERANCE}."
        )
    return f" with outputs {', '.join(found)}, within {difference:.1e} of the model's"


def _diagonal_scatter(
    states: torch.Tensor, source: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> torch.Tensor:
    """`diagonal_scatter` by `torch.where`: PyTorch's decomposition contains an operation that ONNX lacks."""
    first, second = torch.arange(states.shape[dim1]), torch.arange(states.shape[dim2])
    diagonal = torch.diag_embed(source, offset, dim1, dim2)
    return torch.where((second == first[:, None] + offset).to(states.device), diagonal, states)


def _grid(
    config: LieREPixelConfig, image_size: int | tuple[int, int] | None, num_frames: int | None
) -> tuple[int, ...]:
    """Patches per axis of inputs of this size; `None` means the configuration's."""
    shape = config.input_shape
    if image_size is not None:
        shape = (*shape[:-2], *pair("image_size", image_size))
    if num_frames is not None:
        if config.num_axes == 2:
            raise ExportError(f"num_frames={num_frames}: inputs of this model are images.")
        shape = (num_frames, *shape[1:])
    if any(size < extent or size % extent for size, extent in zip(shape, config.patch_shape)):
        raise ExportError(f"An input of {tuple(shape)} is not divisible into patches of {config.patch_shape}.")
    return tuple(size // extent for size, extent in zip(shape, config.patch_shape))


def _pixels(config: LieREPixelConfig, grid: tuple[int, ...], batch_size: int) -> torch.Tensor:
    """Black images or clips."""
    *frames, height, width = (patches * extent for patches, extent in zip(grid, config.patch_shape))
    return torch.zeros(batch_size, *frames, config.num_channels, height, width)


def _size_axes(config: LieREPixelConfig) -> dict[int, str]:
    """Axes of `pixel_values` that may vary in size, in the order of a grid."""
    return {2: "height", 3: "width"} if config.num_axes == 2 else {1: "frames", 3: "height", 4: "width"}
