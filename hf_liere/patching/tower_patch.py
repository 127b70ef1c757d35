"""
The patch of one tower, of any kind: the plan that is checked before the model is modified, and the state that the
forward pass reads. `vision_patch` makes those of vision towers, `pretrained_patch` those of models with RoPE.
"""

import inspect
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from typing import Any, Generic, TypeVar

from torch import nn

from ..probing.attention_tower import AttentionTower
from ..probing.module_inspection import device_of, forward_arguments, projections
from ..rotation.bases import shared_eigenbases


# Full graphs can neither set a `ContextVar` nor read class attributes of a subclass of `threading.local`.
_running = threading.local()
_running.passes, shared_eigenbases.known = (), None  # a graph that finds none would not serve a second pass
AnyPass = TypeVar("AnyPass", bound="Pass")


def _get_passes() -> tuple["Pass", ...]:
    """The passes that run in this thread, the innermost last."""
    return getattr(_running, "passes", ())


@dataclass(eq=False)
class Pass:
    """One forward pass of a module, from `begin` to `end`."""

    module: Any

    @classmethod
    def current(cls: type[AnyPass]) -> AnyPass | None:
        """The innermost pass of this class."""
        return next((each for each in reversed(_get_passes()) if isinstance(each, cls)), None)

    def begin(self) -> None:
        _running.passes = (*_get_passes(), self)

    @classmethod
    def end(cls: type[AnyPass], module: nn.Module | None = None) -> AnyPass | None:
        """End the current pass, if it is that of a given module, and return it."""
        current = cls.current()
        if current is None or module not in (None, current.module):
            return None
        _running.passes = tuple(each for each in _get_passes() if each is not current)
        return current

    @classmethod
    def finish(cls, module: nn.Module, args: tuple, output: Any) -> None:
        """The same as a forward hook, which is also called when the module fails; for others see [`run_tower`]."""
        cls.end(module)

    def resume(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Call a part of the module again, in the thread that runs backward."""
        outer = _get_passes()
        _running.passes = (*outer, self)
        try:
            return function(*args, **kwargs)
        finally:
            _running.passes = outer


@dataclass(eq=False)
class AttentionPass(Pass):
    """A pass through the attention module with the index `layer` in its tower."""

    layer: int

    @classmethod
    def find(cls: type[AnyPass], layer: int, inner: nn.Module) -> AnyPass:
        """The pass around a module inside attention. Raises `RuntimeError` if there is none."""
        current: Any = cls.current()
        if current is None or current.layer != layer:
            raise RuntimeError(
                f"{type(inner).__name__} of attention layer {layer} ran outside its attention module, so the "
                "positions of its tokens are unknown. Call the model around it, or unpatch the model."
            )
        return current


def change_by_name(change: Callable, names: tuple[str, ...], module: nn.Module, args, kwargs):
    """Forward pre-hook of a module with arguments of these names: `change` gets the module and all of them by name."""
    options = {**dict(zip(names, args)), **kwargs}
    change(module, options)
    return tuple(options.pop(name) for name in names[: len(args)]), options


class OutputHooks:
    """Hooks on the outputs of modules in places where adapters such as LoRA may put another module."""

    def __init__(self):
        self.current: dict[Any, tuple[nn.Module, Any]] = {}

    def follow(self, place: Any, module: nn.Module, hook: Callable) -> None:
        """Move the hook of a place to the module that is there now."""
        known, handle = self.current.get(place, (None, None))
        if known is module:
            return
        if handle is not None:
            handle.remove()
        self.current[place] = (module, module.register_forward_hook(hook))

    def remove(self) -> None:
        while self.current:
            _, (_, handle) = self.current.popitem()
            handle.remove()


Patchable = TypeVar("Patchable", bound=AttentionTower)


def choose_target(towers: list[Patchable], target: str | None, kind: str) -> list[Patchable]:
    """The tower with the name `target`; `None` means all. Raises `ValueError` if there is none."""
    if target is None:
        return towers
    chosen = [tower for tower in towers if tower.name == target]
    if not chosen:
        raise ValueError(f"target={target!r} matches no {kind}; there are {[tower.name for tower in towers]}.")
    return chosen


@dataclass
class TowerPatch(Generic[Patchable]):
    """
    The state of a patched tower, stored on it as `rotary_patch`.

    Attributes:
        config: A `RotaryPatchConfig`.
        attention_names: Names of the rotated attention modules inside the tower.
        handles: Those of the hooks, while the patch is attached.
        outputs: Hooks on the modules that make queries and keys.
    """

    config: Any
    attention_names: list[str]
    handles: list = field(default_factory=list, kw_only=True)
    outputs: OutputHooks = field(default_factory=OutputHooks, kw_only=True)

    def attentions(self, module: nn.Module) -> list[nn.Module]:
        """The rotated attention modules of the tower."""
        return [module.get_submodule(name) for name in self.attention_names]

    def model_type(self, module: nn.Module) -> str:
        """The kind of model by which adapters recognise their tower, patched or not."""
        config = getattr(self.attentions(module)[0], "config", None) or module.config
        return config.model_type.removeprefix("rotary_")

    def weighted_modules(self, attention: nn.Module) -> list[nn.Module]:
        """The modules of an attention module by whose weights adapters recognise their tower."""
        # Models with RoPE may use any names for their projections.
        return projections(attention) or [module for module in attention.modules() if hasattr(module, "out_features")]

    def describe_base(self, module: nn.Module) -> dict:
        """The facts by which adapters recognise their tower, patched or not."""
        raise NotImplementedError

    def reset_parameters(self, module: nn.Module) -> None:
        """Give parameters that no checkpoint contains their initial values."""
        module.rotary_encoding.reset_parameters()

    def add_hooks(self, tower: Patchable) -> None:
        """Make the tower rotate by `rotary_encoding`."""
        raise NotImplementedError

    def hook_arguments(self, module: nn.Module, change: Callable) -> None:
        """Let `change(module, options)` change the arguments of every call of a module, by name."""
        hook = partial(change_by_name, change, tuple(forward_arguments(module)))
        self.handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def run(self, module: nn.Module, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        """Call the forward of the tower."""
        return forward(*args, **kwargs)

    def remove_hooks(self, module: nn.Module) -> None:
        """Undo `add_hooks`."""
        while self.handles:
            self.handles.pop().remove()
        self.outputs.remove()


@dataclass
class TowerPlan(Generic[Patchable]):
    """A patch of one tower whose configuration has been checked, made before the model is modified."""

    tower: Patchable
    patch: TowerPatch[Patchable]
    build_encoding: Callable[[], nn.Module]

    def attach(self, encoding: nn.Module) -> None:
        module = self.tower.module
        device = device_of(self.patch.attentions(module)[0], module)
        can_train = self.patch.config.folded_grids is None
        module.rotary_encoding = encoding.to(device).train(module.training and can_train)
        module.rotary_patch = self.patch
        self.patch.add_hooks(self.tower)
        # Others, such as accelerate, may have put theirs around it.
        if not _runs_tower(inspect.unwrap(module.forward, stop=_runs_tower)):
            module.forward = update_wrapper(partial(run_tower, module, module.forward), module.forward)


def run_tower(module: nn.Module, forward: Callable, *args: Any, **kwargs: Any) -> Any:
    """
    The forward of a tower, patched or not any more. Whatever ends it ends the passes that began in it: PyTorch's hooks
    are called after errors, but not after a `KeyboardInterrupt`.
    """
    patch, outer = vars(module).get("rotary_patch"), _get_passes()
    if patch is None:
        return forward(*args, **kwargs)
    known, shared_eigenbases.known = getattr(shared_eigenbases, "known", None), {}
    try:
        return patch.run(module, forward, *args, **kwargs)
    finally:
        shared_eigenbases.known = known
        _running.passes = tuple(each for each in outer if each in _get_passes())


def _runs_tower(forward: Callable) -> bool:
    return getattr(forward, "func", None) is run_tower


def detach(module: nn.Module) -> None:
    """Undo [`TowerPlan.attach`]."""
    if _runs_tower(module.forward):
        forward = module.forward.args[1]
        del module.forward
        if module.forward != forward:
            module.forward = forward
    module.rotary_patch.remove_hooks(module)
    del module.rotary_encoding, module.rotary_patch


def patched_towers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of the towers that are patched."""
    for name, module in model.named_modules():
        if isinstance(vars(module).get("rotary_patch"), TowerPatch):
            yield name, module
