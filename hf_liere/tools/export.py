"""
Export of image and video models, and of patched Transformers models, to ONNX files and `torch.export` archives,
with a dynamic batch size.

    export_model(model, "model.onnx")                      # or "model.pt2"
    export_model(model, "model.onnx", image_size=384)      # LieRE at another size than the one of its configuration

| `position_encoding` | content of the exported graph | input size |
|---|---|---|
| all others except `absolute` | cos and sin of the positions | dynamic |
| `liere` | rotations of one grid as constants | fixed |
| `liere` with `dynamic_size=True` | the matrix exponential, as float64 products | dynamic |
| `absolute`, and any encoding beside a learned table | the table, resized to one grid | fixed |

A patched model of transformers is folded in the same way. It has a fixed size unless `dynamic_size=True`. A language
model takes any number of tokens, and the keys and values of earlier ones.

An ONNX file returns a list of outputs, with their names in the file. The program in a `.pt2` archive returns a
dictionary of tensors: `torch.export.load("model.pt2").module()(pixel_values)["logits"]`.
"""

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from ..auto import load_checkpoint
from ..errors import InputError, require_libraries, silence
from ..models.encoding.kinds import encoding_of, needs_exponential, needs_spacing
from ..models.patched.tower_patch import patched_towers
from ..models.probing.module_inspection import cache_name, forward_arguments
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


class _WithCache(nn.Module):
    """A language model whose cache of keys and values are inputs and outputs, without padding."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model
        with torch.no_grad():
            output = model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=True)
        cache = output[cache_name(output) or ""]
        kinds = sorted({type(layer).__name__ for layer in cache.layers})
        if kinds != ["DynamicLayer"]:
            raise ExportError(
                f"{type(model).__name__} keeps {', '.join(kinds)} in its cache; accepted: models whose layers all "
                "attend to all earlier tokens."
            )
        # By name, (1, key heads, 0, head_dim).
        self.empty = {
            f"past.{layer}.{kind}": getattr(each, f"{kind}s")[:, :, :0]
            for layer, each in enumerate(cache.layers)
            for kind in ("key", "value")
        }

    def forward(self, input_ids: torch.Tensor, past: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """(B, N) tokens and (B, key heads, P, head_dim) states of earlier ones → logits, and states with the new."""
        cache = DynamicCache()
        for layer in range(len(self.empty) // 2):
            states = DynamicLayer()
            keys, values = past[f"past.{layer}.key"], past[f"past.{layer}.value"]
            states.lazy_initialization(keys, values)
            states.keys, states.values = keys, values
            cache.layers.append(states)
        name = cache_name(forward_arguments(self.model)) or ""
        found = {"logits": self.model(input_ids=input_ids, use_cache=True, **{name: cache}).logits}
        for layer, states in enumerate(cache.layers):
            found |= {f"present.{layer}.key": states.keys, f"present.{layer}.value": states.values}
        return found

    def draw(self, batch: int, tokens: int, earlier: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Inputs of these sizes."""
        vocabulary = self.model.config.get_text_config().vocab_size
        ids = torch.randint(vocabulary, (batch, tokens), device=self.model.device)
        states = {name: x.new_ones(batch, x.shape[1], earlier, x.shape[3]) for name, x in self.empty.items()}
        return ids, {name: x.normal_() for name, x in states.items()}


class _TensorOutputs(nn.Module):
    """A model whose only input is pixels and whose output is a dictionary of tensors."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        tensors = {}
        for name, value in self.model(pixel_values=pixel_values).items():
            if isinstance(value, torch.Tensor):
                tensors[name] = value
            elif isinstance(value, tuple):
                tensors |= {f"{name}_{index}": tensor for index, tensor in enumerate(value)}
        return tensors


class _ImageInput(NamedTuple):
    """The images that a Transformers model takes, in the words of a [`LieREPixelConfig`]."""

    input_shape: tuple[int, ...]
    patch_shape: tuple[int, ...]
    num_channels: int
    num_axes: int = 2


def _input_of(model: PreTrainedModel) -> LieREPixelConfig | _ImageInput:
    """Raises `ExportError` unless a model takes images, or clips, and nothing else."""
    config = getattr(model, "config", None)
    if isinstance(model, LieREPreTrainedModel) and isinstance(config, LieREPixelConfig):
        return config
    vision: Any = getattr(config, "vision_config", config)
    sizes: list[Any] = [getattr(vision, name, None) for name in ("image_size", "patch_size", "num_channels")]
    if getattr(model, "main_input_name", None) != "pixel_values" or None in sizes or hasattr(vision, "num_frames"):
        raise ExportError(
            f"{type(model).__name__}: accepted are the image and video models of hf_liere, and Transformers models "
            "that take images of one configured size alone; of a model with text, its part, such as model.vision_model."
        )
    return _ImageInput(pair("image_size", sizes[0]), pair("patch_size", sizes[1]), sizes[2])


def export_model(
    model: PreTrainedModel,
    output: str | os.PathLike,
    image_size: int | tuple[int, int] | None = None,
    num_frames: int | None = None,
    dynamic_size: bool | None = None,
    opset: int | None = None,
) -> Path:
    """
    Write a model for inference. Its input is `pixel_values` of any batch size; its outputs keep their names in PyTorch
    (`logits`; `last_hidden_state`, `pooler_output`; `reconstruction`; `feature_maps_0` …). A language model takes
    `input_ids`, and keys and values of earlier tokens, `past.0.key`, `past.0.value` … of (batch, key heads, past,
    head_dim), where past may be 0; it returns `logits`, and these with the new tokens as `present.0.key` ….

    Commuting rotations are folded into the query and key weights. Positions are those of the grid, without
    perturbation. The file contains the configuration with its labels as the metadata `config.json`.

    Args:
        model: Any model of this package, or a patched or plain model of transformers whose only input is images or
            tokens; it is left as it is.
        output: A new file ending in `.onnx` or `.pt2`. Above 2 GB, an ONNX model stores its weights in a second file
            beside it, with `.data` added to the name.
        image_size: Height and width of inputs of a fixed size; `None` means those of the configuration.
        num_frames: Number of frames of inputs of a fixed size; `None` means that of the configuration.
        dynamic_size: Whether height and width (and frames) may vary by whole patches, at least two on every axis.
            `None` means wherever it is free, see the table above, and the configured inputs have two, but a fixed size
            for Transformers models; with LieRE, `True` puts the exponential into the graph.
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
            _save_onnx(program, model, config, opset, partial)
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


def _name_axes(program: torch.export.ExportedProgram, model: PreTrainedModel) -> dict[str, dict]:
    """By argument, the names of the axes that vary, or these by input of an argument that is several."""
    if _writes_text(model):
        _, past = program.example_inputs[0]
        return {"input_ids": {0: "batch", 1: "tokens"}, "past": dict.fromkeys(past, {0: "batch", 2: "past"})}
    (pixels,) = (node.meta["val"] for node in program.graph.nodes if node.name == "pixel_values")
    names = {0: "batch", **_size_axes(_input_of(model))}
    return {"pixel_values": {axis: name for axis, name in names.items() if not isinstance(pixels.shape[axis], int)}}


def _save_onnx(
    program: torch.export.ExportedProgram, model: PreTrainedModel, metadata: str, opset: int | None, path: Path
) -> None:
    program = program.run_decompositions({torch.ops.aten.diagonal_scatter.default: _diagonal_scatter})
    axes = _name_axes(program, model)
    # If the exporter cannot convert to a version, it only logs that and writes another one.
    with silence("torch.onnx", "onnxscript"):
        onnx_program = torch.onnx.export(
            program,
            dynamo=True,
            input_names=[name for given, each in axes.items() for name in (each if given == "past" else [given])],
            output_names=list(program.call_spec.out_spec.context),
            dynamic_shapes=axes,
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
    model: PreTrainedModel,
    image_size: int | tuple[int, int] | None = None,
    num_frames: int | None = None,
    dynamic_size: bool | None = None,
) -> torch.export.ExportedProgram:
    """
    The graph that [`export_model`] writes; `program.module()` returns the outputs by name, of `pixel_values`, or of
    `input_ids` and states of earlier tokens by name.
    """
    if not _writes_text(model):
        _input_of(model)
    options, attention = (image_size, num_frames, dynamic_size), model.config._attn_implementation
    if attention not in EXPORTABLE_ATTENTION:
        raise ExportError(
            f"attn_implementation={attention!r} cannot be exported; accepted are {', '.join(EXPORTABLE_ATTENTION)}, as "
            "in model.set_attn_implementation('sdpa')."
        )
    if _writes_text(model) and {*options} != {None}:
        raise ExportError(
            f"image_size={image_size}, num_frames={num_frames}, dynamic_size={dynamic_size}: the inputs of "
            f"{type(model).__name__} are tokens, of any number; leave these out."
        )
    was_training = model.training
    model.eval()
    try:
        return _trace_text(model) if _writes_text(model) else _trace_pixels(model, *options)
    finally:
        model.train(was_training)


def _writes_text(model: PreTrainedModel) -> bool:
    """Whether a model takes tokens alone and keeps keys and values of earlier ones."""
    takes_tokens = isinstance(model, PreTrainedModel) and model.main_input_name == "input_ids" and model.can_generate()
    return takes_tokens and not (model.config.is_encoder_decoder or hasattr(model.config, "vision_config"))


def _folds(model: PreTrainedModel) -> bool:
    """Whether a patched model has rotations to fold."""
    configs = [tower.rotary_patch.config for _, tower in patched_towers(model)]
    return bool(configs) and all(config.folded_grids is None for config in configs)


@torch.no_grad()
def _trace_text(model: PreTrainedModel) -> torch.export.ExportedProgram:
    module = _WithCache(model.fold_rotations() if _folds(model) else model)
    batch, tokens, past = torch.export.Dim("batch"), torch.export.Dim("tokens"), torch.export.Dim("past", min=0)
    shapes = {"input_ids": {0: batch, 1: tokens}, "past": dict.fromkeys(module.empty, {0: batch, 2: past})}
    # The graph must not ask whether there are earlier tokens.
    return torch.export.export(
        module, module.draw(2, 3, 5), dynamic_shapes=shapes, prefer_deferred_runtime_asserts_over_guards=True
    )


def _trace_pixels(
    model: PreTrainedModel,
    image_size: int | tuple[int, int] | None,
    num_frames: int | None,
    dynamic_size: bool | None,
) -> torch.export.ExportedProgram:
    config = _input_of(model)
    own = config if isinstance(config, LieREPixelConfig) else None
    if own is not None and needs_spacing(own):
        raise ExportError(
            f"coordinates={own.coordinates!r} need the spacing of every input, but pixel_values are the only input "
            "of an exported file; torch.export.export takes spacing as well."
        )
    grid = _grid(config, image_size, num_frames)
    encodings: list[Any] = [own] if own else [tower.rotary_encoding.config for _, tower in patched_towers(model)]
    has_exponential = any(map(needs_exponential, encodings))
    is_rope = any(encoding.rotary_init == "pretrained" for encoding in encodings)
    obstacles = {
        "the rotations of liere in a model with RoPE are constants of one size": has_exponential and is_rope,
        "the learned table of positions is resized for one image_size": own and own.use_absolute_position_embeddings,
        f"image_size={image_size} and num_frames={num_frames} are a fixed size": {image_size, num_frames} != {None},
        f"sizes that vary have at least two patches on every axis, and the inputs of this model have {grid}": 1 in grid,
    }
    found = [obstacle for obstacle, holds in obstacles.items() if holds]
    if dynamic_size and found:
        raise ExportError(f"dynamic_size=True: {found[0]}; leave dynamic_size out.")
    if dynamic_size is None:
        dynamic_size = own is not None and not (found or has_exponential)
    if dynamic_size:
        # The exporter would infer constraints from equal sizes or sizes of one in the example.
        grid = tuple(patches + 1 + axis for axis, patches in enumerate(grid))
    pixels = _pixels(config, grid, batch_size=2)
    dynamic = {0: torch.export.Dim("batch")}
    if dynamic_size:
        for axis, extent in zip(_size_axes(config), config.patch_shape):
            dynamic[axis] = extent * torch.export.Dim(f"patches_{axis}")
    # An already folded model has constants for its grids and computes the rotations of other grids.
    folds = encoding_of(own) is not None and own.folded_grids is None if own else _folds(model)
    exported = model.fold_rotations(grids=[grid]) if folds and not (dynamic_size and has_exponential) else model
    with torch.no_grad():
        program = torch.export.export(
            _TensorOutputs(exported),
            (pixels.to(device=model.device, dtype=model.dtype),),
            dynamic_shapes={"pixel_values": dynamic},
            # Models of transformers ask whether an image has the trained size, where they need not resize tables.
            prefer_deferred_runtime_asserts_over_guards=dynamic_size and own is None,
        )
    for node in list(program.graph.nodes):
        if node.target is torch.ops.aten._assert_scalar.default and "expression Ne(" in node.args[1]:
            program.graph.erase_node(node)
    program.graph_module.recompile()
    return program


def run_exported(
    path: str | os.PathLike, states: torch.Tensor, past: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """
    Run a file of [`export_model`] with ONNX Runtime or PyTorch on the CPU; returns its outputs by name.

    Args:
        states: `pixel_values`, or `input_ids` of a language model.
        past: Keys and values of earlier tokens by name (`past.0.key` …), for language models.
    """
    path = Path(path)
    if path.suffix == TORCH_EXPORT:
        with torch.no_grad():
            return torch.export.load(path).module()(states, *([] if past is None else [past]))
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    inputs = {"pixel_values": states} if past is None else {"input_ids": states, **past}
    arrays = session.run(names, {name: value.numpy() for name, value in inputs.items()})
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


def _comparison(model: PreTrainedModel, path: Path, options: Mapping) -> str:
    """A description of the exported file and its error. Raises `ExportError` if the outputs differ from the model's."""
    if path.suffix == ONNX and importlib.util.find_spec("onnxruntime") is None:
        return "; not compared, for onnxruntime is not installed"
    module: nn.Module
    if _writes_text(model):
        module = _WithCache(model.eval())
        inputs = module.draw(3, 4, 6)
    else:
        config, module = _input_of(model), _TensorOutputs(model.eval())
        grid = _grid(config, options.get("image_size"), options.get("num_frames"))
        inputs = (_pixels(config, grid, batch_size=3).normal_(),)
    with torch.no_grad():
        expected = module(*inputs)
    found = run_exported(path, *inputs)
    difference = max(
        ((found[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-3)).item()
        for name, tensor in expected.items()
    )
    if not difference <= TOLERANCE:
        raise ExportError(
            f"{path.name} was not written: its outputs differ by {difference:.1e} of the largest, more than "
            f"{TOLERANCE}."
        )
    outputs = [name for name in found if not name.startswith("present.")]
    return f" with outputs {', '.join(outputs)}, within {difference:.1e} of the model's"


def _diagonal_scatter(
    states: torch.Tensor, source: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> torch.Tensor:
    """`diagonal_scatter` by `torch.where`: PyTorch's decomposition contains an operation that ONNX lacks."""
    first, second = torch.arange(states.shape[dim1]), torch.arange(states.shape[dim2])
    diagonal = torch.diag_embed(source, offset, dim1, dim2)
    return torch.where((second == first[:, None] + offset).to(states.device), diagonal, states)


def _grid(
    config: LieREPixelConfig | _ImageInput, image_size: int | tuple[int, int] | None, num_frames: int | None
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


def _pixels(config: LieREPixelConfig | _ImageInput, grid: tuple[int, ...], batch_size: int) -> torch.Tensor:
    """Black images or clips."""
    *frames, height, width = (patches * extent for patches, extent in zip(grid, config.patch_shape))
    return torch.zeros(batch_size, *frames, config.num_channels, height, width)


def _size_axes(config: LieREPixelConfig | _ImageInput) -> dict[int, str]:
    """Axes of `pixel_values` that may vary in size, in the order of a grid."""
    return {2: "height", 3: "width"} if config.num_axes == 2 else {1: "frames", 3: "height", 4: "width"}
