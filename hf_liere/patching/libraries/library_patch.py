"""Patches of models of other libraries: how all of them are planned, before a model is changed."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from torch import nn

from ...encoding.folding import build_encoding
from ...encoding.kinds import encoding_of
from ...probing.attention_tower import AttentionTower
from ...probing.planes import Planes
from ..rotary_patch import RotaryPatchConfig, require_unpatched
from ..tower_patch import Patchable, TowerPatch, TowerPlan, choose_target
from ..vision_patch import make_tower_config
from .rotations import LearnedFrequencies, StateRotations


@dataclass
class LibraryPatch(TowerPatch[Patchable]):
    """
    The patch of a model of another library, which transformers cannot save or load with its rotations.

    Attributes:
        kind: As in [`LibraryTower`].
        heads, head_dim: Heads with separate rotations in every attention module, and their channels.
        turns: Whether frequencies are learned, so that the model's own rotation is turned further and not replaced.
        planes: Those of models that rotate.
        train_grid, coordinates: Patches per axis in training and the convention of their coordinates, for models that
            do not rotate.
    """

    kind: str
    heads: int
    head_dim: int
    turns: bool
    planes: Planes | None = field(default=None, kw_only=True)
    train_grid: tuple[int, ...] = field(default=(), kw_only=True)
    coordinates: str = field(default="", kw_only=True)

    def describe_base(self, module: nn.Module) -> dict:
        base: dict[str, Any] = {"heads": self.heads, "head_dim": self.head_dim, "train_grid": list(self.train_grid)}
        if self.planes is not None and self.planes.axes:
            base["frequencies"] = [float(f"{value:.5g}") for value in self.planes.speeds]
        return base

    def model_type(self, module: nn.Module) -> str:
        return type(module).__name__


@dataclass
class LibraryTower(AttentionTower):
    """
    A model of another library, with the attention modules that rotate or can rotate.

    Attributes:
        kind: The name of its class among `kinds`, those that are known.
    """

    kind: str
    kinds: ClassVar[Mapping[str, Any]]
    # What such models are, for messages.
    noun: ClassVar[str]
    library: ClassVar[str]
    patch_class: ClassVar[type[LibraryPatch]]

    @classmethod
    def find_kind(cls, module: nn.Module) -> str | None:
        """The name of the class of a module, or of one that it inherits from, among `kinds`."""
        kinds = type(module).__mro__
        is_ours = any(kind.__module__.partition(".")[0] == cls.library for kind in kinds)
        return next((kind.__name__ for kind in kinds if is_ours and kind.__name__ in cls.kinds), None)

    @classmethod
    def belongs(cls, model: nn.Module) -> bool:
        """Whether a model is of this library, or is around one that is."""
        raise NotImplementedError

    @staticmethod
    def find_attentions(module: nn.Module, kind: str) -> Iterable[tuple[str, nn.Module]]:
        """(name, module) of the attention modules in a module of a kind. Raises `ValueError` if one is not known."""
        raise NotImplementedError

    @property
    def rotates(self) -> bool:
        """Whether the model rotates queries and keys."""
        raise NotImplementedError

    @property
    def composes(self) -> bool:
        """Whether learned rotations may stand behind those of the model."""
        return False

    @property
    def train_grid(self) -> tuple[int, ...]:
        """Patches per axis in training, of models that do not rotate. Raises `ValueError` if there are none."""
        raise NotImplementedError

    def check_tokens(self) -> None:
        """Raise `ValueError` if it cannot be known which token is where."""

    def head_shape(self, layer: int, turns: bool) -> tuple[int, int]:
        """(heads, head_dim) of an attention module, or of its keys unless its own rotation is turned further."""
        raise NotImplementedError

    def read_start(self) -> Planes:
        """
        The planes of a model that rotates, of all heads in a row where one cos and sin cover these. Raises `ValueError`
        if it computes other cos and sin for a few tokens.
        """
        raise NotImplementedError


def plan_library(tower_class: type[LibraryTower], model: nn.Module, config: RotaryPatchConfig) -> list[TowerPlan]:
    """
    Check a configuration against a model of another library, before the model is changed. Raises `ValueError` if the
    model is patched already, has nothing that can be patched, or the configuration does not fit.
    """
    require_unpatched(model)
    towers = []
    for name, module in model.named_modules():
        if (kind := tower_class.find_kind(module)) is not None:
            found = tower_class.find_attentions(module, kind)
            attentions = [(f"{name}.{inner}".lstrip("."), attention) for inner, attention in found]
            towers.append(tower_class(name, module, attentions, kind))
    if not towers:
        raise ValueError(
            f"{type(model).__name__} is not a {tower_class.noun} of {tower_class.library} whose rotations are known; "
            f"accepted: {', '.join(tower_class.kinds)}."
        )
    return [_plan_tower(tower, config) for tower in choose_target(towers, config.target, tower_class.noun)]


def _plan_tower(tower: LibraryTower, config: RotaryPatchConfig) -> TowerPlan:
    layers = tower.choose_layers(config.layers)
    _check_start(tower, config)
    tower.check_tokens()
    turns = tower.rotates and encoding_of(config).pretrained == "planes" and not config.compose
    heads, head_dim = tower.common_shape(layers, lambda layer: tower.head_shape(layer, turns))
    patch = tower.patch_class(config, tower.attention_names(layers), tower.kind, heads, head_dim, turns)
    if not tower.rotates:
        patch.train_grid = tower.train_grid
        rotary_config = make_tower_config(config, patch.train_grid, len(layers), heads, head_dim)
        patch.coordinates = str(rotary_config.coordinates)

        def build() -> nn.Module:
            return StateRotations(build_encoding(rotary_config, len(patch.train_grid)), config, heads, layers)

    else:
        patch.planes = planes = tower.read_start()
        if not turns:
            build = partial(StateRotations.from_planes, planes, config, heads, head_dim, layers, tower.label)
        elif planes.axes:
            build = partial(LearnedFrequencies, planes, layers, config)
        else:
            raise ValueError(
                f"{tower.label} learns the frequencies of every layer and head already: train rope.freqs, or pass "
                "position_encoding='liere', whose blocks start there."
            )
    build()
    return TowerPlan(tower, patch, build)


def _check_start(tower: LibraryTower, config: RotaryPatchConfig) -> None:
    if any(parameter.is_meta for parameter in tower.module.parameters()):
        raise ValueError(f"{tower.label} has parameters without values: patch it before they are offloaded.")
    if config.keep_absolute != "interpolate":
        raise ValueError(
            f"keep_absolute={config.keep_absolute!r} is for vision towers of transformers; {tower.label} accepts "
            "interpolate."
        )
    if config.compose and not tower.composes or config.content_positions is not None:
        given = f"compose={config.compose} and content_positions={config.content_positions!r}"
        raise ValueError(f"{given}: {tower.label} takes neither; accepted: models of transformers, compose on FLUX.")
    if tower.rotates != (config.compose or config.rotary_init == "pretrained"):
        fits = "already rotates query and key; accepted: pretrained"
        fits = fits if tower.rotates else "does not rotate, so there is nothing to start from; accepted: zeros"
        raise ValueError(f"rotary_init={config.rotary_init!r}: {tower.label} {fits}.")
