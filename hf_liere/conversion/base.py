"""
The base class of each kind of source: it takes every tensor that it knows, checks its shape, and collects the parts of
our model.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from huggingface_hub.errors import StrictDataclassError

from ..errors import InputError


class ConversionError(InputError):
    """The checkpoint cannot be converted, or an option is invalid; the message has the reason."""


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn the reason why a configuration or an encoding is impossible into [`ConversionError`]."""
    try:
        yield
    except (StrictDataclassError, ValueError) as reason:
        raise ConversionError(f"{what}: {str(reason).removesuffix('.')}.") from reason


@dataclass
class Source:
    """
    A checkpoint of one kind. The fields of a subclass are its options, annotated with the types that they accept.

    Attributes:
        tensors: The tensors of the checkpoint.
        taken: Names of those that were used.
        patch: Extents of a patch, one for each axis.
        fields: Fields of the configuration.
        encoder: Tensors of the encoder, under our names.
        head: Tensors of the classifier, likewise; empty without one.
        ignored: Names of official tensors that do not affect the outputs kept here.
    """

    tensors: Mapping[str, torch.Tensor]
    taken: set[str] = field(init=False, default_factory=set)
    patch: tuple[int, ...] = field(init=False, default=())
    fields: dict = field(init=False, default_factory=dict)
    encoder: dict[str, torch.Tensor] = field(init=False, default_factory=dict)
    head: dict[str, torch.Tensor] = field(init=False, default_factory=dict)
    ignored: list[str] = field(init=False, default_factory=list)

    @property
    def head_dim(self) -> int:
        return self.fields["hidden_size"] // self.fields["num_attention_heads"]

    def convert(self) -> None:
        """Fill all fields except `tensors`. Raises [`ConversionError`] for inconsistent tensors and options."""
        raise NotImplementedError

    @classmethod
    def options(cls) -> dict[str, object]:
        """Types of the options by name."""
        return dict(cls.__annotations__)

    @classmethod
    def stated_options(cls, source_config: Mapping) -> dict:
        """The options in the `config.json` beside a checkpoint; by default their names are the same there."""
        return {name: source_config[name] for name in cls.options() if source_config.get(name) is not None}

    def take(self, key: str, *shape: int | None) -> torch.Tensor:
        """The tensor under `key`; `None` in `shape` stands for any size."""
        if key not in self.tensors:
            raise ConversionError(f"The checkpoint has no tensor {key!r}.")
        tensor = self.tensors[key]
        if len(tensor.shape) != len(shape) or any(a not in (None, b) for a, b in zip(shape, tensor.shape)):
            expected = tuple("any" if size is None else size for size in shape)
            raise ConversionError(
                f"{key!r} has shape {tuple(tensor.shape)}, which contradicts the other tensors or the options: "
                f"expected {expected}."
            )
        if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
            raise ConversionError(f"{key!r} ({tensor.dtype}) must contain finite floating-point numbers.")
        self.taken.add(key)
        return tensor

    def count(self, layer: str) -> int:
        """Number of layers, whose names begin with `layer`, with the number in place of `{}`."""
        pattern = re.escape(f"{layer}.").replace(r"\{\}", r"(\d+)")
        matches = (re.match(pattern, key) for key in self.tensors)
        layers = {int(match[1]) for match in matches if match}
        if not layers:
            raise ConversionError(f"The checkpoint has no layers: no tensor's name begins as in {layer!r}.")
        if layers != set(range(len(layers))):
            missing = sorted(set(range(max(layers))) - layers)
            raise ConversionError(f"The checkpoint has layers up to {max(layers)}, but none of {missing}.")
        return len(layers)

    def require_all_taken(self) -> None:
        if unknown := sorted(set(self.tensors) - self.taken):
            raise ConversionError(
                f"The checkpoint contains {len(unknown)} tensors unknown to this kind of model: "
                f"{', '.join(unknown[:5])} …"
            )

    def require_planes(self) -> None:
        if self.head_dim % (2 * len(self.patch)):
            raise ConversionError(
                f"Heads of {self.head_dim} channels are not divisible into planes of {len(self.patch)} axes."
            )

    def take_module(self, official: str, *shape: int | None) -> dict[str, torch.Tensor]:
        """The weight of a norm (size) or of a linear map (rows, columns), and its bias (size or rows)."""
        weight = self.take(f"{official}.weight", *shape)
        return {"weight": weight, "bias": self.take(f"{official}.bias", len(weight))}

    def put(self, ours: str, **tensors: torch.Tensor) -> None:
        self.encoder |= {f"{ours}.{name}": tensor for name, tensor in tensors.items()}

    def copy(self, ours: str, official: str, *shape: int | None) -> None:
        """Copy a module of the encoder, see [`take_module`]."""
        self.put(ours, **self.take_module(official, *shape))

    def copy_layers(self, layer: str, names: Mapping[str, str]) -> None:
        """
        Args:
            layer: Official name of a layer, with `{}` in place of its number.
            names: Maps our names of a layer's modules to the official names.
        """
        size = self.fields["hidden_size"]
        width = len(self.take(f"{layer.format(0)}.{names['mlp.fc1']}.weight", None, size))
        self.fields["intermediate_size"] = width
        shapes: dict[str, tuple[int, ...]] = {"layernorm_before": (size,), "layernorm_after": (size,)}
        shapes |= {"mlp.fc1": (width, size), "mlp.fc2": (size, width)}
        for index in range(self.fields["num_hidden_layers"]):
            for ours, official in names.items():
                shape = shapes.get(ours, (size, size))
                self.copy(f"layers.{index}.{ours}", f"{layer.format(index)}.{official}", *shape)

    def copy_head(self, official: str) -> None:
        """Copy the linear classifier of this name, if there is one."""
        if f"{official}.weight" in self.tensors:
            self.head = self.take_module(official, None, self.fields["hidden_size"])

    def ignore(self, *names: str) -> None:
        """Name tensors, if they are there, that do not affect the outputs kept here."""
        found = [name for name in names if name in self.tensors]
        self.taken.update(found)
        self.ignored += found

    def set_transformer(self, kernel: torch.Tensor, layers: int, found_heads: int | None = None) -> None:
        """Set what follows from the patch projection's kernel (hidden_size, channels, *patch) and the options."""
        hidden_size, channels, *patch = kernel.shape
        self.patch, options = tuple(patch), vars(self)
        heads = given_or_found("num_attention_heads", options["num_attention_heads"], found_heads)
        heads = heads or max(1, hidden_size // 64)
        if hidden_size % heads:
            raise ConversionError(
                f"A width of {hidden_size} is not divisible into {heads} heads: please give num_attention_heads."
            )
        self.fields |= {
            "num_channels": channels,
            "hidden_size": hidden_size,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "hidden_act": options["hidden_act"],
            "layer_norm_eps": options["layer_norm_eps"],
        }

    def set_shape(self, image: tuple[int, ...]) -> None:
        """Set the fields for patches and inputs of these extents; three axes mean a video configuration."""

        def extent(sizes: Sequence[int]) -> int | list[int]:
            return sizes[0] if sizes[0] == sizes[1] else list(sizes)

        self.fields |= {"patch_size": extent(self.patch[-2:]), "image_size": extent(image[-2:])}
        if len(self.patch) == 3:
            self.fields |= {"tubelet_size": self.patch[0], "num_frames": image[0]}

    def set_frequencies(self, frequencies: torch.Tensor, theta: float | None, head_dim: int) -> None:
        """
        Set fixed frequencies, (planes,) for each axis in turn in a head: as `axial_rope` with base `theta` if its
        frequencies are the same, else as shared RoPE-Mixed generators.
        """
        axes = len(self.patch)
        if theta is not None and len(frequencies) == head_dim // (2 * axes):
            self.fields |= {"position_encoding": "axial_rope", "rope_theta": theta}
            return
        # (axes, axes · planes)
        entries = torch.block_diag(*[frequencies.unsqueeze(0)] * axes)
        entries = torch.nn.functional.pad(entries, (0, head_dim // 2 - entries.shape[1]))
        self.fields |= {"position_encoding": "rope_mixed", "share_heads": True, "share_layers": True}
        self.encoder["rotary_encoding.generators"] = entries.view(axes, 1, 1, -1, 1).float()

    def find_image(self, given: int | Iterable[int] | None, rows: int, is_square: bool = False) -> tuple[int, ...]:
        """
        Extents of a training input, whose table has a row for each patch: those of a square unless an option is given.
        With `is_square`, the table may also be that of a square as wide as the input.
        """
        if given is None:
            given = tuple(square_root("image_size", rows) * extent for extent in self.patch)
        image = sizes("image_size", given, len(self.patch))
        grid = tuple(size // extent for size, extent in zip(image, self.patch))
        if rows not in (math.prod(grid), grid[-1] ** 2 if is_square else None):
            raise ConversionError(f"image_size={image} has {math.prod(grid)} patches; the table has {rows}.")
        return image


def sizes(name: str, value: int | Iterable[int], axes: int) -> tuple[int, ...]:
    """One positive extent per axis, from a single number or one number per axis."""
    extents = (value,) * axes if isinstance(value, int) else tuple(value) if isinstance(value, Iterable) else ()
    if len(extents) != axes or any(not isinstance(size, int) or size < 1 for size in extents):
        raise ConversionError(f"{name}={value!r} must be one positive number, or one for each of {axes} axes.")
    return extents


def square_root(name: str, number: int) -> int:
    root = math.isqrt(number)
    if root * root != number:
        raise ConversionError(f"{number} is not a square, so {name} cannot be read off the shapes: please give it.")
    return root


def given_or_found(name: str, given: int | None, found: int | None) -> int | None:
    """The value of an option that a checkpoint may determine."""
    if None not in (given, found) and given != found:
        raise ConversionError(f"{name}={given} contradicts the checkpoint's {found}.")
    return found or given


def number_of_axes(given: int | None, found: int | None) -> int:
    """The number of axes in the checkpoint or the option; without either, that of images."""
    axes = given_or_found("num_axes", given, found) or 2
    if axes not in (2, 3):
        raise ConversionError(f"Inputs of {axes} axes: accepted are 2 (images) and 3 (volumes and videos).")
    return axes


def require_one_of(name: str, value: str | None, accepted: Iterable[str | None]) -> None:
    accepted = list(accepted)
    if value not in accepted:
        raise ConversionError(f"{name}={value!r} must be one of {', '.join(map(repr, accepted))} for this checkpoint.")
