"""
Learned frequencies written back as the RoPE of a plain model, so that it runs without this package.

transformers computes frequencies from `rope_parameters` of the configuration when a model is loaded. Its type
`longrope` (LongRoPE, Ding et al. 2024) has a factor λ_i for every plane, 1/(λ_i θ^(2i/D)): with the same factors for
short and long inputs, any positive frequencies.
"""

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from ..probing.rope_layout import RopeLayout
from .libraries.library_patch import LibraryPatch
from .pretrained_patch import RopePatch
from .pretrained_rope import PretrainedPlanes


# The frequencies of layers may differ by the rounding of float32.
AGREEMENT = 1e-6


class PlainRope:
    """
    The rotary module of a tower with its learned frequencies, for a configuration of transformers that has these.

    Attributes:
        module: A new rotary module.
        parameters: The `rope_parameters` of its configuration.

    Raises:
        ValueError: if no such configuration exists, with the reason.
    """

    def __init__(self, name: str, tower: nn.Module):
        patch, encoding, self.tower = tower.rotary_patch, tower.rotary_encoding, tower
        self.label = f"{name} ({type(tower).__name__})" if name else type(tower).__name__
        if isinstance(patch, LibraryPatch):
            raise self._make_error("no configuration of diffusers or timm has a factor for every frequency")
        if not isinstance(patch, RopePatch) or not isinstance(encoding, PretrainedPlanes) or encoding.content:
            raise self._make_error(
                f"position_encoding={patch.config.position_encoding!r} with rotary_init={patch.config.rotary_init!r} "
                "is more than one frequency for every plane; accepted: rope_mixed with rotary_init='pretrained' alone"
            )
        if len(encoding.rope_names) > 1:
            raise self._make_error(f"it has {len(encoding.rope_names)} rotary modules, and one is accepted")
        (self.name,) = encoding.rope_names
        self.old = tower.get_submodule(self.name)
        config: Any = getattr(self.old, "config", None)
        if not isinstance(getattr(config, "rope_parameters", None), dict):
            raise self._make_error("its configuration has no rope_parameters")
        self.config = config
        wanted = {planes.layout: self._read_frequencies(encoding, i) for i, planes in enumerate(encoding.layouts)}
        self.parameters, self.module = self._find_factors(wanted)

    def _make_error(self, reason: str) -> ValueError:
        return ValueError(
            f"The frequencies of {self.label} cannot be written back as plain RoPE: {reason}. Keep the patch, whose "
            "checkpoint contains its code, or drop the frequencies with unpatch(model)."
        )

    @torch.no_grad()
    def _read_frequencies(self, encoding: PretrainedPlanes, index: int) -> torch.Tensor:
        """(frequencies,) learned ones of a layout of the encoding, in the order of the rotary module's."""
        planes: Any = encoding.layouts[index]
        if planes.layout.num_axes > 1:
            raise self._make_error("engines read factors of frequencies for positions on one axis alone")
        pretrained = planes.read_frequencies(self.old).float().cpu()  # (planes,)
        learned = {}
        for layer, kind in enumerate(encoding.layout_of_layer):
            if kind == index and layer in encoding.place:
                learned[layer] = (pretrained * encoding.factors(layer).cpu()).float()
            elif kind == index and encoding.config.layers is not None:
                # Without names, all layers that rotate learn.
                learned[layer] = pretrained
        layers, frequencies = list(learned), torch.stack(list(learned.values()) or [pretrained])  # (layers, planes)
        if not (frequencies > 0).all() or not frequencies.isfinite().all():
            raise self._make_error("some planes do not rotate, and factors only scale frequencies")
        spread = (frequencies / frequencies[0] - 1).abs().amax(1)  # (layers,)
        if spread.max() > AGREEMENT:
            layer = int(spread.argmax())
            raise self._make_error(
                f"attention layers {layers[0]} and {layers[layer]} differ by up to {spread[layer]:.1%}, and plain "
                "models have one set of frequencies; accepted: all layers learned together, with share_layers=True"
            )
        order = planes.frequencies.cpu()  # (planes,)
        return torch.zeros(len(order)).index_copy(0, order, frequencies[0])

    def _find_factors(self, wanted: dict[RopeLayout, torch.Tensor]) -> tuple[dict, nn.Module]:
        """The `rope_parameters` whose rotary module has the frequencies, up to rounding."""
        _, module = self._build({layout: torch.ones_like(frequencies) for layout, frequencies in wanted.items()})
        factors = {layout: _read(module, layout) / frequencies for layout, frequencies in wanted.items()}
        parameters, module = self._build(factors)
        for layout, frequencies in wanted.items():
            scales_alike = _read_scaling(module, layout) == _read_scaling(self.old, layout)
            if (_read(module, layout) / frequencies - 1).abs().max() > AGREEMENT or not scales_alike:
                raise self._make_error(f"{type(module).__name__} ignores factors of rope_parameters")
        return parameters, module

    def _build(self, factors: dict[RopeLayout, torch.Tensor]) -> tuple[dict, nn.Module]:
        config, written = copy.deepcopy(self.config), copy.deepcopy(self.config.rope_parameters)
        for layout, values in factors.items():
            old = written if layout.layer_type is None else written[layout.layer_type]
            if old.get("rope_type") == "dynamic" or old.get("short_factor") != old.get("long_factor"):
                raise self._make_error("its frequencies depend on the length of the input")
            kept = {name: old[name] for name in ("rope_theta", "partial_rotary_factor") if name in old}
            old.clear()
            old.update(kept | {"rope_type": "longrope", "factor": 1.0})
            old["attention_factor"] = _read_scaling(self.old, layout)
            old["short_factor"], old["long_factor"] = values.tolist(), values.tolist()
            old["original_max_position_embeddings"] = config.max_position_embeddings
        _write(config, written)
        try:
            with torch.device("cpu"):
                return written, type(self.old)(config)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise self._make_error(f"{type(self.old).__name__} does not take rope_type='longrope', {error}") from error

    def attach(self) -> None:
        """Replace the rotary module of the tower, which is unpatched, and the parameters of its configuration."""
        device = next((buffer.device for buffer in self.old.buffers()), torch.device("cpu"))
        config = self.tower.get_submodule(self.name).config
        _write(config, self.parameters)
        self.module.config = config
        self.tower.set_submodule(self.name, self.module.to(device).train(self.tower.training))


def _write(config: PreTrainedConfig, parameters: dict) -> None:
    config.rope_parameters = parameters
    if hasattr(config, "original_max_position_embeddings"):
        # It takes precedence over the one in `rope_parameters`; engines scale attention by the ratio of the two.
        config.original_max_position_embeddings = config.max_position_embeddings


def _read(module: nn.Module, layout: RopeLayout) -> torch.Tensor:
    """(frequencies,) of a rotary module."""
    return module.get_buffer(layout.buffer).float().cpu().flatten()


def _read_scaling(module: nn.Module, layout: RopeLayout) -> float:
    """By which a rotary module multiplies cos and sin."""
    prefix = f"{layout.layer_type}_" if layout.layer_type else ""
    return float(getattr(module, f"{prefix}attention_scaling", 1.0))
