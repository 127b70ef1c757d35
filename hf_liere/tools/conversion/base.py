"""
The base class of each kind of source: it takes every tensor that it knows, checks its shape, and finds the
configuration and the weights of our model.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import ClassVar

import torch

from ...transformer.pretrained import LieREPreTrainedModel
from ...upgrades import ConversionError, sizes
from .options import OPTIONS


@dataclass
class Source:
    """
    A checkpoint of one kind.

    Attributes:
        kind: Its name in [`OPTIONS`].
        names: Official names of modules and tensors, by ours.
        tensors: The tensors of the checkpoint.
        options: The options of this kind, with defaults filled in.
        taken: Names of those that were used.
        patch: Extents of a patch, one for each axis.
        fields: Fields of the configuration.
        made: Tensors that our encoder has and the checkpoint does not, under our names.
        ignored: Names of official tensors that do not affect the outputs kept here.
    """

    kind: ClassVar[str]
    names: ClassVar[dict[str, str]]
    tensors: Mapping[str, torch.Tensor]
    options: SimpleNamespace
    taken: set[str] = field(init=False, default_factory=set)
    patch: tuple[int, ...] = field(init=False, default=())
    fields: dict = field(init=False, default_factory=dict)
    made: dict[str, torch.Tensor] = field(init=False, default_factory=dict)
    ignored: list[str] = field(init=False, default_factory=list)

    def read(self) -> None:
        """Fill `patch`, `fields` and `made`. Raises [`ConversionError`] for inconsistent tensors and options."""
        raise NotImplementedError

    def weights(self, model: LieREPreTrainedModel) -> dict[str, torch.Tensor]:
        """
        All tensors of a model, of which only names and shapes are read: those in `made`, else under official names.
        Raises [`ConversionError`] if one is missing or has another shape, or a tensor of the checkpoint is left over.
        """
        weights = {}
        for name, tensor in model.state_dict().items():
            ours = name.removeprefix(f"{model.base_model_prefix}.")
            weights[name] = self.made[ours] if ours in self.made else self.take(self.official(ours), *tensor.shape)
        if unknown := sorted(set(self.tensors) - self.taken):
            raise ConversionError(
                f"The checkpoint contains {len(unknown)} tensors unknown to this kind of model: "
                f"{', '.join(unknown[:5])} …"
            )
        return weights

    def official(self, ours: str) -> str:
        """The official name of a module or tensor of ours."""
        return re.sub(rf"\b({'|'.join(map(re.escape, self.names))})\b", lambda found: self.names[found[1]], ours)

    def has(self, ours: str) -> bool:
        """Whether there is a tensor that ours of this name is made of."""
        return self.official(ours) in self.tensors

    @property
    def head_dim(self) -> int:
        return self.fields["hidden_size"] // self.fields["num_attention_heads"]

    @classmethod
    def stated_options(cls, source_config: Mapping) -> dict:
        """The options in the `config.json` beside a checkpoint; by default their names are the same there."""
        return {name: source_config[name] for name in OPTIONS[cls.kind] if source_config.get(name) is not None}

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

    def set_transformer(self, kernel: torch.Tensor, heads: int, **fields: object) -> None:
        """Set the kernel of the patches, (hidden_size, channels, *patch), and what layers and classifier tell."""
        self.made["embeddings.patch_embeddings.projection.weight"] = kernel
        hidden_size, channels, *patch = kernel.shape
        self.patch = tuple(patch)
        self.fields |= {"hidden_size": hidden_size, "num_channels": channels, "num_attention_heads": heads, **fields}
        self.fields["num_hidden_layers"] = self._count(self.official("layers"))
        width = len(self.take(self.official("layers.0.mlp.fc1.weight"), None, hidden_size))
        self.fields["intermediate_size"] = width
        head, width = self.official("classifier"), hidden_size
        has_head = self.has("classifier.weight")
        if self.has("classifier.0.weight"):
            width = self.fields["classifier_hidden_size"] = len(self.take(f"{head}.0.weight", None, width))
            head, has_head = f"{head}.2", True
        if has_head:
            self.fields["num_labels"] = len(self.take(f"{head}.weight", None, width))

    def _count(self, layers: str) -> int:
        matches = (re.match(rf"{re.escape(layers)}\.(\d+)\.", key) for key in self.tensors)
        found = {int(match[1]) for match in matches if match}
        if not found:
            raise ConversionError(f"The checkpoint has no layers: no tensor's name begins with '{layers}.0.'.")
        if missing := sorted(set(range(max(found))) - found):
            raise ConversionError(f"The checkpoint has layers up to {max(found)}, but none of {missing}.")
        return len(found)

    def split_qkv(self, kind: str, *shape: int) -> None:
        """Make the queries, keys and values of every layer from its one tensor of the `kind` weight or bias."""
        for index in range(self.fields["num_hidden_layers"]):
            parts = self.take(self.official(f"layers.{index}.attention.qkv.{kind}"), *shape).chunk(3)
            self.made |= {f"layers.{index}.attention.{name}_proj.{kind}": part for name, part in zip("qkv", parts)}

    def require_planes(self) -> None:
        if self.head_dim % (2 * len(self.patch)):
            raise ConversionError(
                f"Heads of {self.head_dim} channels are not divisible into planes of {len(self.patch)} axes."
            )

    def ignore(self, *names: str) -> None:
        """Name tensors, if they are there, that do not affect the outputs kept here."""
        found = [name for name in names if name in self.tensors]
        self.taken.update(found)
        self.ignored += found

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
        self.made["rotary_encoding.generators"] = entries.view(axes, 1, 1, -1, 1).float()

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


def number_of_heads(given: int | None, found: int | None, width: int) -> int:
    """The number of heads in the checkpoint or the option; without either, that of heads of 64 channels."""
    heads = given_or_found("num_attention_heads", given, found) or max(1, width // 64)
    if width % heads:
        raise ConversionError(
            f"A width of {width} is not divisible into {heads} heads: please give num_attention_heads."
        )
    return heads


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
