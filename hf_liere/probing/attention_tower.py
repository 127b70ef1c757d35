"""The attention layers of a module that a patch acts on."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn


@dataclass
class AttentionTower:
    """
    A module whose attention can be patched.

    Attributes:
        name: Its name in the model, empty for the model itself.
        attentions: (name in the model, module) of every attention layer.
    """

    name: str
    module: nn.Module
    attentions: list[tuple[str, nn.Module]]

    @property
    def label(self) -> str:
        kind = type(self.module).__name__
        return f"{self.name} ({kind})" if self.name else kind

    def choose_layers(self, layers: list[int] | None) -> list[int]:
        """
        The indices of the attention layers to patch; `None` means all. Raises `ValueError` if there are no such layers,
        or the tower has a `rotary_encoding` already.
        """
        available = list(range(len(self.attentions)))
        chosen = available if layers is None else layers
        if not chosen or set(chosen) - set(available):
            raise ValueError(
                f"layers={chosen} do not match: {self.label} has attention layers "
                f"{[f'{index}: {name}' for index, (name, _) in enumerate(self.attentions)]}."
            )
        if hasattr(self.module, "rotary_encoding"):
            raise ValueError(f"{self.label} already has a rotary_encoding; a patch would overwrite it.")
        return chosen

    def common_shape(self, layers: list[int], shape_of: Callable[[int], tuple[int, int]]) -> tuple[int, int]:
        """The (heads, head_dim) of attention layers. Raises `ValueError` if these differ."""
        shapes = {shape_of(layer) for layer in layers}
        if len(shapes) != 1:
            raise ValueError(
                f"The layers of {self.label} have different (heads, head_dim), {sorted(shapes)}: name equal ones in "
                "layers."
            )
        return shapes.pop()

    def attention_names(self, layers: list[int]) -> list[str]:
        """Names of attention layers inside the tower."""
        return [self.attentions[layer][0].removeprefix(f"{self.name}.") for layer in layers]
