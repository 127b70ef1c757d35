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
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from ..auto import load_checkpoint
from ..errors import InputError, require_libraries, silence
from ..models.encoding.kinds import encoding_of, needs_exponential, needs_spacing
from ..models.patched.tower_patch import patched_towers
from ..models.probing.module_inspection import cache_name, forward_arguments
from ..models.transformer.configuration_liere import LieREPixelConfig, pair
from ..storage.targets import new_file


ONNX, TORCH_EXPORT = ".onnx", ".pt2"
# The first version with LayerNormalization; the installed onnx defines the newest.
OLDEST_OPSET = 17
EXPORTABLE_ATTENTION = ("sdpa", "eager")
# Accepted error of exported outputs, relative to the largest; reordered float32 sums cause 1% of it.
TOLERANCE = 1e-4


class ExportError(InputError):
    """The export is not possible; the message says what is accepted."""


class _Tokens(nn.Module):
    """A language model whose cache of keys and values are inputs and outputs, without padding."""

    def __init__(self, model: PreTrainedModel, **sizes: object):
        super().__init__()
        if any(value is not None for value in sizes.values()):
            given = ", ".join(f"{name}={value}" for name, value in sizes.items())
            raise ExportError(
                f"{given}: the inputs of {type(model).__name__} are tokens, of any number; leave these out."
            )
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
        layers = range(len(self.empty) // 2)
        cache = DynamicCache([(past[f"past.{layer}.key"], past[f"past.{layer}.value"]) for layer in layers])
        name = cache_name(forward_arguments(self.model)) or ""
        found = {"logits": self.model(input_ids=input_ids, use_cache=True, **{name: cache}).logits}
        for layer, states in enumerate(cache.layers):
            found |= {f"present.{layer}.key": states.keys, f"present.{layer}.value": states.values}
        return found

    def draw(self, batch: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        vocabulary = self.model.config.get_text_config().vocab_size
        ids = torch.randint(vocabulary, (batch, batch + 1), device=self.model.device)
        states = {name: x.new_ones(batch, x.shape[1], batch + 3, x.shape[3]) for name, x in self.empty.items()}
        return ids, {name: x.normal_() for name, x in states.items()}

    @torch.no_grad()
    def trace(self) -> tuple[torch.export.ExportedProgram, dict[str, dict]]:
        module = _Tokens(self.model.fold_rotations()) if _folds(self.model) else self
        batch, tokens, past = torch.export.Dim("batch"), torch.export.Dim("tokens"), torch.export.Dim("past", min=0)
        shapes = {"input_ids": {0: batch, 1: tokens}, "past": dict.fromkeys(self.empty, {0: batch, 2: past})}
        # The graph must not ask whether there are earlier tokens.
        program = torch.export.export(
            module, module.draw(2), dynamic_shapes=shapes, prefer_deferred_runtime_asserts_over_guards=True
        )
        names = {0: "batch", 2: "past"}
        return program, {"input_ids": {0: "batch", 1: "tokens"}, "past": dict.fromkeys(self.empty, names)}


class _Pixels(nn.Module):
    """A model whose only input is images or clips, and whose output is a dictionary of tensors."""

    def __init__(
        self,
        model: PreTrainedModel,
        image_size: int | tuple[int, int] | None = None,
        num_frames: int | None = None,
        dynamic_size: bool | None = None,
    ):
        super().__init__()
        config = getattr(model, "config", None)
        self.own = config if isinstance(config, LieREPixelConfig) else None
        vision: Any = getattr(config, "vision_config", config)
        sizes: list[Any] = [getattr(vision, name, None) for name in ("image_size", "patch_size", "num_channels")]
        is_known = getattr(model, "main_input_name", None) == "pixel_values" and None not in sizes
        if self.own is None and (not is_known or hasattr(vision, "num_frames")):
            raise ExportError(
                f"{type(model).__name__}: accepted are the image and video models of hf_liere, and Transformers models "
                "that take images of one configured size alone; of a model with text, its part, such as "
                "model.vision_model."
            )
        shape = self.own.input_shape if self.own else pair("image_size", sizes[0])
        patch = self.own.patch_shape if self.own else pair("patch_size", sizes[1])
        if image_size is not None:
            shape = (*shape[:-2], *pair("image_size", image_size))
        if num_frames is not None:
            if len(shape) == 2:
                raise ExportError(f"num_frames={num_frames}: inputs of this model are images.")
            shape = (num_frames, *shape[1:])
        if any(size < extent or size % extent for size, extent in zip(shape, patch)):
            raise ExportError(f"An input of {tuple(shape)} is not divisible into patches of {patch}.")
        self.model, self.patch, self.channels = model, patch, sizes[2]
        self.grid = tuple(size // extent for size, extent in zip(shape, patch))
        self.dynamic_size, self.fixed_size = dynamic_size, (image_size, num_frames)

    def forward(self, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        tensors = {}
        for name, value in self.model(pixel_values=pixel_values).items():
            if isinstance(value, torch.Tensor):
                tensors[name] = value
            elif isinstance(value, tuple):
                tensors |= {f"{name}_{index}": tensor for index, tensor in enumerate(value)}
        return tensors

    def draw(self, batch: int) -> tuple[torch.Tensor]:
        *frames, height, width = (patches * extent for patches, extent in zip(self.grid, self.patch))
        shape = (batch, *frames, self.channels, height, width)
        return (torch.randn(shape, device=self.model.device, dtype=self.model.dtype),)

    def varies(self, has_exponential: bool) -> bool:
        """Whether inputs may have any size. Raises `ExportError` if they are asked to and cannot."""
        is_rope = any(
            tower.rotary_encoding.config.rotary_init == "pretrained" for _, tower in patched_towers(self.model)
        )
        obstacle = None
        if has_exponential and is_rope:
            obstacle = "the rotations of liere in a model with RoPE are constants of one size"
        elif self.own is not None and self.own.use_absolute_position_embeddings:
            obstacle = "the learned table of positions is resized for one image_size"
        elif self.fixed_size != (None, None):
            obstacle = "image_size={} and num_frames={} are a fixed size".format(*self.fixed_size)
        elif 1 in self.grid:
            obstacle = f"sizes that vary have at least two patches on every axis, and these inputs have {self.grid}"
        if self.dynamic_size and obstacle:
            raise ExportError(f"dynamic_size=True: {obstacle}; leave dynamic_size out.")
        if self.dynamic_size is None:
            return self.own is not None and not (obstacle or has_exponential)
        return self.dynamic_size

    @torch.no_grad()
    def trace(self) -> tuple[torch.export.ExportedProgram, dict[str, dict]]:
        own, grid = self.own, self.grid
        if own is not None and needs_spacing(own):
            raise ExportError(
                f"coordinates={own.coordinates!r} need the spacing of every input, but pixel_values are the only input "
                "of an exported file; torch.export.export takes spacing as well."
            )
        encodings = [own] if own else [tower.rotary_encoding.config for _, tower in patched_towers(self.model)]
        has_exponential = any(map(needs_exponential, encodings))
        is_dynamic = self.varies(has_exponential)
        dims, names = {0: torch.export.Dim("batch")}, {0: "batch"}
        if is_dynamic:
            # The exporter would infer constraints from equal sizes or sizes of one in the example.
            grid = tuple(patches + 1 + axis for axis, patches in enumerate(grid))
            sizes = {2: "height", 3: "width"} if len(grid) == 2 else {1: "frames", 3: "height", 4: "width"}
            names |= sizes
            dims |= {axis: extent * torch.export.Dim(f"patches_{axis}") for axis, extent in zip(sizes, self.patch)}
        # An already folded model has constants for its grids and computes the rotations of other grids.
        folds = encoding_of(own) is not None and own.folded_grids is None if own else _folds(self.model)
        folds = folds and not (is_dynamic and has_exponential)
        exported = _Pixels(self.model.fold_rotations(grids=[grid]) if folds else self.model)
        exported.grid = grid
        program = torch.export.export(
            exported,
            exported.draw(2),
            dynamic_shapes={"pixel_values": dims},
            # Models of transformers ask whether an image has the trained size, where they need not resize tables.
            prefer_deferred_runtime_asserts_over_guards=is_dynamic and own is None,
        )
        for node in list(program.graph.nodes):
            if node.target is torch.ops.aten._assert_scalar.default and "expression Ne(" in node.args[1]:
                program.graph.erase_node(node)
        program.graph_module.recompile()
        return program, {"pixel_values": names}


def _subject(model: PreTrainedModel, **sizes: Any) -> _Tokens | _Pixels:
    """
    What is exported of a model: `draw` makes inputs, and `trace` the graph, with names of the axes that vary: by
    argument, or by input of an argument that is several.
    """
    generates = getattr(model, "main_input_name", None) == "input_ids" and model.can_generate()
    is_text = generates and not (model.config.is_encoder_decoder or hasattr(model.config, "vision_config"))
    return _Tokens(model, **sizes) if is_text else _Pixels(model, **sizes)


def _folds(model: PreTrainedModel) -> bool:
    """Whether a patched model has rotations to fold."""
    configs = [tower.rotary_patch.config for _, tower in patched_towers(model)]
    return bool(configs) and all(config.folded_grids is None for config in configs)


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
        output: A new file ending in `.onnx` or `.pt2`. Above 1.5 GB, an ONNX model stores its weights in a second
            file beside it, with `.data` added to the name.
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
        program, axes = _trace(model, image_size=image_size, num_frames=num_frames, dynamic_size=dynamic_size)
        config = model.config.to_json_string(use_diff=False)
        if output.suffix == TORCH_EXPORT:
            torch.export.save(program, partial, extra_files={"config.json": config})
        else:
            _save_onnx(program, axes, config, opset, partial)
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
    program: torch.export.ExportedProgram, axes: dict[str, dict], metadata: str, opset: int | None, path: Path
) -> None:
    program = program.run_decompositions({torch.ops.aten.diagonal_scatter.default: _diagonal_scatter})
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
    onnx_program.save(path)


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
    return _trace(model, image_size=image_size, num_frames=num_frames, dynamic_size=dynamic_size)[0]


def _trace(model: PreTrainedModel, **sizes: Any) -> tuple[torch.export.ExportedProgram, dict[str, dict]]:
    was_training = model.training
    model.eval()
    try:
        subject = _subject(model, **sizes)
        if (attention := model.config._attn_implementation) not in EXPORTABLE_ATTENTION:
            raise ExportError(
                f"attn_implementation={attention!r} cannot be exported; accepted are "
                f"{', '.join(EXPORTABLE_ATTENTION)}, as in model.set_attn_implementation('sdpa')."
            )
        return subject.trace()
    finally:
        model.train(was_training)


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
    inputs = {session.get_inputs()[0].name: states, **(past or {})}
    arrays = session.run(None, {name: value.numpy() for name, value in inputs.items()})
    return {output.name: torch.from_numpy(array) for output, array in zip(session.get_outputs(), arrays)}


def export_checkpoint(
    checkpoint: str | os.PathLike,
    output: str | os.PathLike,
    revision: str | None = None,
    opset: int | None = None,
    **sizes: Any,
) -> str:
    """
    [`export_model`] of a saved model; compares the outputs of the written file with the model's.

    Args:
        checkpoint: Directory or repository on the Hub.
        output: As in [`export_model`], like `opset` and `sizes`.
        revision: Branch, tag or commit of the repository.

    Returns:
        One line: the written file, and by how much its outputs differ.

    Raises:
        CheckpointError, HubError: if the checkpoint cannot be loaded, or a weight is missing, left over or not finite.
        ExportError: as [`export_model`], and (before writing) if the outputs differ by more than 1e-4 of the largest.
    """
    output = Path(output)
    _require_format(output, opset)
    with new_file(output) as partial:
        model, _ = load_checkpoint(checkpoint, revision, dtype="auto")
        export_model(model, partial, opset=opset, **sizes)
        comparison = _compare(_subject(model, **sizes), partial)
    return f"{output}: {type(model).__name__}{comparison}"


@torch.no_grad()
def _compare(subject: _Tokens | _Pixels, path: Path) -> str:
    """A description of the exported file and its error. Raises `ExportError` if the outputs differ from the model's."""
    if path.suffix == ONNX and importlib.util.find_spec("onnxruntime") is None:
        return "; not compared, for onnxruntime is not installed"
    inputs = subject.draw(3)
    found = run_exported(path, *inputs)
    difference = max(
        ((found[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-3)).item()
        for name, tensor in subject(*inputs).items()
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
