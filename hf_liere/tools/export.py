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

Whatever is exported runs at other sizes than that of its example, and is compared with the model, before it is returned
or gets its name.
"""

import copy
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from ..auto import load_checkpoint
from ..encoding.kinds import encoding_of, needs_exponential
from ..encoding.positions import needs_spacing
from ..errors import InputError, memory_shortage, require_libraries, silence
from ..patching.tower_patch import patched_towers
from ..probing.module_inspection import cache_name, forward_arguments
from ..storage.saved_model import first_line
from ..storage.targets import new_file
from ..transformer.configuration_liere import LieREPixelConfig, pair


ONNX, TORCH_EXPORT = ".onnx", ".pt2"
# The first version with LayerNormalization; the installed onnx defines the newest.
OLDEST_OPSET = 17
EXPORTABLE_ATTENTION = ("sdpa", "eager")
# Accepted error of exported outputs, relative to the largest; reordered float32 sums cause 1% of it.
TOLERANCE = 1e-4
# In half types, in units of their rounding: that of the layers adds up.
ROUNDINGS = 8


class ExportError(InputError):
    """The export is not possible; the message says what is accepted."""


class _Tokens(nn.Module):
    """A language model whose cache of keys and values are inputs and outputs, without padding."""

    # (batch, tokens, earlier tokens) at which the graph is compared: a prompt, and one token after others.
    points = [(1, 7, 0), (3, 1, 9)]

    def __init__(self, model: PreTrainedModel, **sizes: object):
        super().__init__()
        if any(value is not None for value in sizes.values()):
            given = ", ".join(f"{name}={value}" for name, value in sizes.items())
            raise ExportError(
                f"{given}: the inputs of {type(model).__name__} are tokens, of any number; leave these out."
            )
        # Cached keys are in the basis of the folded model, so that outputs are compared with its own.
        self.model = model = model.fold_rotations() if _folds(model) else model
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

    def draw(self, batch: int, tokens: int, past: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        vocabulary = self.model.config.get_text_config().vocab_size
        ids = torch.randint(vocabulary, (batch, tokens), device=self.model.device)
        states = {name: x.new_ones(batch, x.shape[1], past, x.shape[3]) for name, x in self.empty.items()}
        return ids, {name: x.normal_() for name, x in states.items()}

    @torch.no_grad()
    def trace(self) -> tuple[torch.export.ExportedProgram, dict[str, dict]]:
        batch, tokens, past = torch.export.Dim("batch"), torch.export.Dim("tokens"), torch.export.Dim("past", min=0)
        shapes = {"input_ids": {0: batch, 1: tokens}, "past": dict.fromkeys(self.empty, {0: batch, 2: past})}
        # The graph must not ask whether there are earlier tokens.
        example = self.draw(2, 3, 5)
        program = _record(self, example, dynamic_shapes=shapes, prefer_deferred_runtime_asserts_over_guards=True)
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

    def draw(self, batch: int, grid: tuple[int, ...]) -> tuple[torch.Tensor]:
        *frames, height, width = (patches * extent for patches, extent in zip(grid, self.patch))
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
        # The graph is compared at other batch sizes than its example has, and on smaller and larger grids.
        self.points = [(1, grid), (3, grid)]
        if is_dynamic:
            for batch, odd in ((3, 1), (1, 0)):
                others = (2 if axis % 2 == odd else patches + 3 for axis, patches in enumerate(grid))
                self.points.append((batch, tuple(others)))
            # The exporter would infer constraints from equal sizes or sizes of one in the example.
            grid = tuple(patches + 1 + axis for axis, patches in enumerate(grid))
            sizes = {2: "height", 3: "width"} if len(grid) == 2 else {1: "frames", 3: "height", 4: "width"}
            names |= sizes
            dims |= {axis: extent * torch.export.Dim(f"patches_{axis}") for axis, extent in zip(sizes, self.patch)}
        # An already folded model has constants for its grids and computes the rotations of other grids.
        folds = encoding_of(own) is not None and own.folded_grids is None if own else _folds(self.model)
        # Exponentials of shares stay in the graph: they are no constants of a grid.
        shares = any(getattr(config, "shares", None) for config in encodings)
        folds = folds and not (has_exponential and (is_dynamic or shares))
        exported = _Pixels(self.model.fold_rotations(grids=[grid]) if folds else self.model)
        program = _record(
            exported,
            exported.draw(2, grid),
            dynamic_shapes={"pixel_values": dims},
            # Models of transformers ask whether an image has the trained size, where they need not resize tables.
            prefer_deferred_runtime_asserts_over_guards=is_dynamic and own is None,
        )
        for node in list(program.graph.nodes):
            if node.target is torch.ops.aten._assert_scalar.default and "expression Ne(" in node.args[1]:
                program.graph.erase_node(node)
        program.graph_module.recompile()
        return program, {"pixel_values": names}


def _record(module: nn.Module, example: tuple, **options: Any) -> torch.export.ExportedProgram:
    """`torch.export.export`; raises `ExportError` if there is no graph that holds for all inputs."""
    try:
        # It prints the graph that it began when it fails.
        with redirect_stderr(io.StringIO()):
            return torch.export.export(module, example, **options)
    except RuntimeError as error:
        if memory_shortage(error) is not None:
            raise
        raise ExportError(
            f"{type(module.model).__name__} cannot be exported: its operations depend on values that a graph does not "
            f"know, as frequencies of rope_type='dynamic' do on the length ({first_line(error)}). Accepted: models "
            "whose operations depend on sizes alone."
        ) from error


def _subject(model: PreTrainedModel, **sizes: Any) -> _Tokens | _Pixels:
    """
    What is exported of a model: `draw` makes inputs, and `trace` the graph, with names of the axes that vary: by
    argument, or by input of an argument that is several. `points` are arguments of `draw` at which the graph is
    compared with the model.
    """
    if any(tower.rotary_patch.config.num_axes for _, tower in patched_towers(model)):
        raise ExportError(
            f"{type(model).__name__} needs rotary_positions, which are no input of exported files; accepted: "
            "torch.export.export of the model, which takes them by name."
        )
    generates = getattr(model, "main_input_name", None) == "input_ids" and model.can_generate()
    is_text = generates and not (model.config.is_encoder_decoder or hasattr(model.config, "vision_config"))
    return _Tokens(model, **sizes) if is_text else _Pixels(model, **sizes)


def _folds(model: PreTrainedModel) -> bool:
    """Whether a patched model has rotations to fold."""
    configs = [tower.rotary_patch.config for _, tower in patched_towers(model)]
    stay = (not (config.folded_grids is not None or config.compose or config.content_positions) for config in configs)
    return bool(configs) and all(stay)


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
    perturbation. The file contains the configuration with its labels as the metadata `config.json`. ONNX files of
    bfloat16 models have the same weights in float32: ONNX Runtime computes bfloat16 on few devices.

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
        InputError: if the model or the options do not allow this export, a library is missing, or writing fails; if
            the file does not run at a second size, or its outputs differ by more than 1e-4 of the largest (in half
            types, by eight roundings).
        FileExistsError: if `output` exists.
    """
    output = Path(output)
    _require_format(output, opset)
    with new_file(output) as partial:
        _write(model, partial, opset, image_size=image_size, num_frames=num_frames, dynamic_size=dynamic_size)
    return output


def _write(model: PreTrainedModel, path: Path, opset: int | None, **sizes: Any) -> str:
    """Write a file, run it and describe it."""
    is_onnx = path.suffix == ONNX
    widens = is_onnx and any(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    if widens:
        model = copy.deepcopy(model).float()
    with _traced(model, **sizes) as (subject, program, axes):
        config = model.config.to_json_string(use_diff=False)
        if is_onnx:
            _save_onnx(program, axes, config, opset, path)
        else:
            # PyTorch's own writer ends the process where a disk is full.
            content = io.BytesIO()
            torch.export.save(program, content, extra_files={"config.json": config})
            path.write_bytes(content.getbuffer())
        described = _compare(subject, path)
    return f"{', in float32' if widens else ''}{described}"


def _require_format(output: Path, opset: int | None) -> None:
    if output.suffix not in (ONNX, TORCH_EXPORT):
        raise ExportError(f"{output}: accepted are names that end in {ONNX} or {TORCH_EXPORT}.")
    if output.suffix == TORCH_EXPORT:
        if opset is not None:
            raise ExportError(f"opset={opset} is for ONNX files; {output.name} has PyTorch's own operators.")
        return
    require_libraries("An ONNX file", "export", "onnx", "onnxruntime", "onnxscript")
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
    sizes = {"image_size": image_size, "num_frames": num_frames, "dynamic_size": dynamic_size}
    with _traced(model, **sizes) as (subject, program, _):
        _compare(subject, program)
    return program


@contextmanager
def _traced(
    model: PreTrainedModel, **sizes: Any
) -> Iterator[tuple[_Tokens | _Pixels, torch.export.ExportedProgram, dict[str, dict]]]:
    """What is exported of a model, which does not train meanwhile, with its graph and the names of axes."""
    was_training = model.training
    model.eval()
    try:
        subject = _subject(model, **sizes)
        if (attention := model.config._attn_implementation) not in EXPORTABLE_ATTENTION:
            raise ExportError(
                f"attn_implementation={attention!r} cannot be exported; accepted are "
                f"{', '.join(EXPORTABLE_ATTENTION)}, as in model.set_attn_implementation('sdpa')."
            )
        yield subject, *subject.trace()
    finally:
        model.train(was_training)


def run_exported(
    path: str | os.PathLike, states: torch.Tensor, past: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """
    Run a file of [`export_model`] with ONNX Runtime or PyTorch on the CPU; returns its outputs by name.

    Args:
        states: `pixel_values`, or `input_ids` of a language model. ONNX files take bfloat16 as float32.
        past: Keys and values of earlier tokens by name (`past.0.key` …), for language models.
    """
    with torch.no_grad():
        return _open(Path(path))(states, *([] if past is None else [past]))


def _open(exported: Path | torch.export.ExportedProgram) -> Callable[..., dict[str, torch.Tensor]]:
    """The function that a file or a program contains."""
    if not isinstance(exported, Path) or exported.suffix == TORCH_EXPORT:
        return (torch.export.load(exported) if isinstance(exported, Path) else exported).module()
    import onnxruntime

    session = onnxruntime.InferenceSession(exported, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run(states: torch.Tensor, past: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        inputs = {session.get_inputs()[0].name: states, **(past or {})}
        inputs = {name: value.float() if value.dtype == torch.bfloat16 else value for name, value in inputs.items()}
        arrays = session.run(names, {name: value.numpy(force=True) for name, value in inputs.items()})
        return {name: torch.from_numpy(array) for name, array in zip(names, arrays)}

    return run


def export_checkpoint(
    checkpoint: str | os.PathLike,
    output: str | os.PathLike,
    revision: str | None = None,
    opset: int | None = None,
    base: str | os.PathLike | None = None,
    **sizes: Any,
) -> str:
    """
    [`export_model`] of a saved model.

    Args:
        checkpoint: Directory or repository on the Hub.
        output: As in [`export_model`], like `opset` and `sizes`; without `image_size`, the images of a Transformers
            model have the size that the saved processor makes.
        revision, base: See [`load_checkpoint`].

    Returns:
        One line: the written file, and by how much its outputs differ.

    Raises:
        CheckpointError, HubError: if the checkpoint cannot be loaded, or a weight is missing, left over or not finite.
        ExportError: as [`export_model`].
    """
    output = Path(output)
    _require_format(output, opset)
    with new_file(output) as partial:
        model, processor = load_checkpoint(checkpoint, revision, dtype="auto", base=base)
        if sizes.get("image_size") is None and not isinstance(model.config, LieREPixelConfig):
            sizes["image_size"] = _processed_size(processor)
        description = _write(model, partial, opset, **sizes)
    return f"{output}: {type(model).__name__}{description}"


def _processed_size(processor: Any) -> tuple[int, int] | None:
    """Height and width of the images that a processor hands to a model; `None` if these vary."""
    size = getattr(processor, "crop_size" if getattr(processor, "do_center_crop", False) else "size", None)
    given = {} if size is None else dict(size)
    return (given["height"], given["width"]) if given.get("height") and given.get("width") else None


@torch.no_grad()
def _compare(subject: _Tokens | _Pixels, exported: Path | torch.export.ExportedProgram) -> str:
    """Run what was exported at the points of a subject, and describe it. Raises `ExportError` if outputs differ."""
    prefix = f"{exported.name} was not written" if isinstance(exported, Path) else "no program was made"
    errors, run = [], None
    for point in subject.points:
        inputs = subject.draw(*point)
        shape = tuple(inputs[0].shape)
        try:
            expected = subject(*inputs)
            run = run or _open(exported)
            found = run(*inputs)
        except Exception as error:
            # Those of the engines have no common class.
            if memory_shortage(error) is not None:
                raise
            raise ExportError(
                f"{prefix}: it does not run for inputs of {shape} ({first_line(error)}). Accepted are "
                "models that run there; try a fixed size (dynamic_size=False), or the model in float32."
            ) from error
        for output, tensor in expected.items():
            if output not in found or found[output].shape != tensor.shape:
                raise ExportError(f"{prefix}: it lacks the output {output} for inputs of {shape}.")
            tensor = tensor.double()
            difference = (found[output].to(tensor) - tensor).abs().max()
            errors.append(difference / tensor.abs().max().clamp(min=1e-3))
    largest = torch.stack(errors).max().item()
    halves = {torch.float16, torch.bfloat16} & {parameter.dtype for parameter in subject.model.parameters()}
    tolerance = max((ROUNDINGS * torch.finfo(dtype).eps for dtype in halves), default=TOLERANCE)
    if not largest <= tolerance:
        raise ExportError(f"{prefix}: its outputs differ by {largest:.1e} of the largest, more than {tolerance:.1e}.")
    outputs = [name for name in expected if not name.startswith("present.")]
    return f" with outputs {', '.join(outputs)}, within {largest:.1e} of the model's"


def _diagonal_scatter(
    states: torch.Tensor, source: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> torch.Tensor:
    """`diagonal_scatter` by `torch.where`: PyTorch's decomposition contains an operation that ONNX lacks."""
    first, second = torch.arange(states.shape[dim1]), torch.arange(states.shape[dim2])
    diagonal = torch.diag_embed(source, offset, dim1, dim2)
    return torch.where((second == first[:, None] + offset).to(states.device), diagonal, states)
