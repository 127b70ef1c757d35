"""
Gradient accumulation in the group: dL/dR of all micro-batches of an optimizer step is summed, and the backward pass of
the exponentials runs once, since it is linear and rotations of equal positions and generators are equal.

The sums are the part of the generators' gradient that is not computed yet. They therefore share its life: a later
backward pass adds them to what it passes to the generators, and `zero_grad` forgets them. Until then optimizers refuse
to step, and gradients to be read.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ..fast.differentiation import forbid_second_derivative
from ..fast.dispatch import values_are_unknown
from .grouped_rotation import Rotation


# Once this much is kept, rotations of further grids have their backward pass in every micro-batch.
KEPT_BYTES = 1 << 30
# What `zero_grad` and its like call; none of them returns a value of the gradient.
UNREAD = ("detach_", "requires_grad_", "zero_", "_foreach_zero_", "zeros_like", "size", "dim", "numel", "__repr__")
_in_use: "weakref.WeakSet[RotationAccumulation]" = weakref.WeakSet()


@contextlib.contextmanager
def accumulate_rotations(model: nn.Module, *, sync_gradients: bool) -> Iterator[None]:
    """
    Context for the forward and backward pass of one micro-batch of gradient accumulation. The exponentials of LieRE are
    computed once for each grid and optimizer step, and so is their backward pass. Gradients are complete, and equal to
    those without it up to rounding, after the backward pass of the last micro-batch.

    ```python
    import hf_liere
    import torch

    model = hf_liere.LieRETokensForSequenceClassification(hf_liere.LieRETokensConfig(num_hidden_layers=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = {"inputs_embeds": torch.randn(2, 9, 1), "positions": torch.rand(2, 9, 1), "labels": torch.tensor([0, 1])}
    batches = [batch, batch]
    for index, batch in enumerate(batches):
        with hf_liere.accumulate_rotations(model, sync_gradients=index == len(batches) - 1):
            (model(**batch).loss / len(batches)).backward()
    optimizer.step()
    optimizer.zero_grad()
    ```

    Between micro-batches the rotations of every grid stay in memory with what their backward pass needs, and the sums
    of their gradients. `zero_grad` between micro-batches forgets the sums, except under FSDP, where it has no gradients
    to zero. Whatever else reads or changes the generators' gradients between micro-batches raises an error: clip them,
    log them and move them after the last one. Encodings other than LieRE and RoPE-Mixed, positions that are not those
    of a grid (given or perturbed ones), compiled models and replicas of `DataParallel` accumulate as without it.

    Args:
        model: A model with rotary encodings, patched or wrapped ones included.
        sync_gradients: Whether the micro-batch is the last one before the optimizer's step, as
            `Accelerator.sync_gradients`.

    Raises:
        ValueError: for a DeepSpeed engine, which removes gradients between micro-batches.
        RuntimeError: from an optimizer of the generators that steps before the last micro-batch, from whatever computes
            with their gradients before, and from `torch.autograd.grad` of a loss by them.
    """
    parameters = list(model.parameters())
    if type(model).__module__.startswith("deepspeed.") or any(hasattr(parameter, "ds_id") for parameter in parameters):
        raise ValueError(
            f"{type(model).__name__} is managed by DeepSpeed, which removes gradients between micro-batches; accepted: "
            "plain models, DDP and FSDP."
        )
    with contextlib.ExitStack() as contexts:
        for module in model.modules():
            if hasattr(module, "rotation_accumulation"):
                module.rotation_accumulation = module.rotation_accumulation or RotationAccumulation()
                own = list(module.parameters())
                contexts.enter_context(module.rotation_accumulation.micro_batch(not sync_gradients, own))
        yield


class IncompleteGradient(torch.Tensor):
    """The gradient of generators while sums are held: it has a form, can be set to zero, and cannot be read."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function.__name__ == "__get__":
            return super().__torch_function__(function, types, args, kwargs)
        # Dispatch modes, such as profilers, call operators of the backward pass from Python.
        if function.__name__ not in UNREAD and not isinstance(function, torch._ops.OpOverload):
            raise RuntimeError(
                f"{function.__name__} of a gradient of learned rotations, which is complete after the last micro-batch "
                "of accumulate_rotations: with sync_gradients=True, and rotations that are not frozen. Clip, log, move "
                "or scale gradients after that, or accumulate without accumulate_rotations."
            )
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


class RotationAccumulation:
    """
    Rotations that the micro-batches of an optimizer step share, and the sums of their gradients. Copies start empty,
    and nothing is saved.

    Attributes:
        holding: Whether backward passes add to the sums; otherwise they pass them on to the generators.
    """

    def __init__(self):
        self.holding = False
        self._kept: list[_SharedRotations] = []
        self._hooks: dict[nn.Parameter, tuple[RemovableHandle, RemovableHandle]] = {}
        # The gradient of each parameter after the last backward pass, and its version.
        self._noted: dict[nn.Parameter, tuple[torch.Tensor, int]] = {}
        # Backward passes that used the sums, and those whose gradients are on their way to a parameter.
        self._users: set[int] = set()
        self._arriving: set[tuple[int, nn.Parameter]] = set()

    def __deepcopy__(self, memo) -> "RotationAccumulation":
        return RotationAccumulation()

    def __reduce__(self):
        return RotationAccumulation, ()

    @contextlib.contextmanager
    def micro_batch(self, holding: bool, parameters: list[nn.Parameter]) -> Iterator[None]:
        """
        Hold the sums, or not, inside this context.

        Args:
            parameters: Those of the encoding.

        Raises:
            RuntimeError: if none of them can take the sums in the last micro-batch.
        """
        self._forget_zeroed()
        if not holding and self._has_sums() and not any(parameter.requires_grad for parameter in parameters):
            raise RuntimeError(
                "Learned rotations were frozen (requires_grad=False) between the micro-batches of a step, so their "
                "gradients cannot be completed: freeze them after the optimizer's step, or call zero_grad() first."
            )
        before, self.holding = self.holding, holding
        if holding:
            self._follow(parameters)
        try:
            yield
        finally:
            self.holding = before
            if not before and not self._kept:
                self._unfollow()

    def rotations(
        self,
        key: Hashable | None,
        entries: torch.Tensor,
        compute: Callable[[torch.Tensor], Iterable[Rotation]],
    ) -> Iterable[Rotation]:
        """
        `compute(entries)`, or the rotations that an earlier micro-batch computed from the same key and equal entries.

        Args:
            key: All that the rotations depend on beside the entries; `None` if they will not return.
            entries: Free entries of the generators.
        """
        if values_are_unknown(entries) or not (entries.requires_grad and torch.is_grad_enabled()):
            return compute(entries)
        self._forget_zeroed()
        if not self.holding and not self._kept:
            return compute(entries)
        carried = _Carry.apply(entries, self)
        if key is not None:
            key = key, entries.dtype, entries.device
            for kept in self._kept:
                if kept.key == key and torch.equal(kept.entries, entries):
                    return kept.connect(carried, self)
            if self.holding and sum(kept.num_bytes() for kept in self._kept) < KEPT_BYTES:
                self._kept.append(_SharedRotations(key, entries, compute))
                return self._kept[-1].connect(carried, self)
        return compute(carried)

    def add(self, kept: "_SharedRotations", index: int, gradient: torch.Tensor) -> None:
        """Add to the sum of the gradients of one tensor."""
        self._forget_zeroed()
        self._users.add(torch._C._current_graph_task_id())
        if not any(kept is other for other in self._kept):
            self._kept.append(kept)
        kept.add(index, gradient)

    def release(self) -> torch.Tensor | None:
        """The gradient of the entries that belongs to all sums, which are then forgotten."""
        gradients = [kept.entries_gradient() for kept in self._kept if kept.has_gradient()]
        self._forget()
        self._users.add(torch._C._current_graph_task_id())
        return functools.reduce(torch.add, gradients) if gradients else None

    def _has_sums(self) -> bool:
        return any(kept.has_gradient() for kept in self._kept)

    def refuse_step(self, optimizer: torch.optim.Optimizer) -> None:
        """
        Raises:
            RuntimeError: if the optimizer has parameters whose gradients are not complete.
        """
        self._forget_zeroed()
        own = {id(parameter) for parameter in self._hooks}
        stepped = any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
        if stepped and self._has_sums():
            raise RuntimeError(
                "The optimizer steps before the gradients of learned rotations are complete. The last micro-batch of "
                "each step needs accumulate_rotations(model, sync_gradients=True), and zero_grad() leaves out a step."
            )

    def _follow(self, parameters: list[nn.Parameter]) -> None:
        """Notice what happens to the gradients of these parameters."""
        _refuse_early_steps()
        _in_use.add(self)
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._hooks:
                before = parameter.register_hook(functools.partial(self._expect, parameter))
                self._hooks[parameter] = before, parameter.register_post_accumulate_grad_hook(self._note)

    def _unfollow(self) -> None:
        _in_use.discard(self)
        for handles in self._hooks.values():
            for handle in handles:
                handle.remove()
        self._hooks = {}

    def _expect(self, parameter: nn.Parameter, _: torch.Tensor) -> None:
        """A backward pass that used the sums must add to the gradient of the parameter before it ends."""
        self._forget_zeroed()
        backward = torch._C._current_graph_task_id()
        if backward in self._users:
            self._arriving.add((backward, parameter))
            refuse = functools.partial(self._refuse_captured, backward, parameter)
            torch.autograd.Variable._execution_engine.queue_callback(refuse)

    def _refuse_captured(self, backward: int, parameter: nn.Parameter) -> None:
        """
        Raises:
            RuntimeError: if the gradient was returned instead.
        """
        self._users.discard(backward)
        if (backward, parameter) in self._arriving:
            self._forget()
            raise RuntimeError(
                "torch.autograd.grad returned gradients of learned rotations that belong to the sums of "
                "accumulate_rotations, which are lost: call zero_grad() and begin the step again. Inside of it, and "
                "until its last micro-batch is complete, only backward() is accepted for these parameters."
            )

    def _note(self, parameter: nn.Parameter) -> None:
        """
        Note the gradient after a backward pass. Its zeros become −0, which is neutral in sums and tells them from those
        of `zero_grad(set_to_none=False)`.
        """
        self._arriving.discard((torch._C._current_graph_task_id(), parameter))
        gradient = parameter.grad
        if self._kept and gradient is not None and not gradient.requires_grad:
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                gradient.masked_fill_(gradient == 0, -0.0)
            if type(gradient) is torch.Tensor:
                gradient = parameter.grad = gradient.as_subclass(IncompleteGradient)
            self._noted[parameter] = gradient, gradient._version

    def _forget_zeroed(self) -> None:
        """Forget the sums if gradients of earlier micro-batches were set to zero or `None`."""
        for parameter, (noted, version) in self._noted.items():
            gradient = parameter.grad
            if gradient is not None and gradient is noted and gradient._version == version:
                continue
            with torch._C.DisableTorchFunctionSubclass():
                is_zeroed = gradient is None or not ((gradient != 0) | gradient.signbit()).any()
            if is_zeroed:
                self._forget()
                return

    def _forget(self) -> None:
        for kept in self._kept:
            # A graph that is still to run backward may have it.
            kept.forget()
        for parameter in self._noted:
            if isinstance(parameter.grad, IncompleteGradient):
                with torch._C.DisableTorchFunctionSubclass():
                    parameter.grad = parameter.grad.as_subclass(torch.Tensor)
        self._kept, self._noted, self._users, self._arriving = [], {}, set(), set()


class _SharedRotations:
    """
    Rotations of one grid, the graph that leads to a copy of the entries, and the sums of their gradients.

    Attributes:
        entries: The copy.
    """

    def __init__(self, key: Hashable, entries: torch.Tensor, compute: Callable[[torch.Tensor], Iterable[Rotation]]):
        self.key = key
        self.entries = entries.detach().clone().requires_grad_()
        # Without the hooks of checkpointing, which drop what is saved: the graph belongs to several forward passes.
        # A result that is saved with its graph would never be freed.
        with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, _return_unchanged):
            self._rotations: list[Any] = list(compute(self.entries))
        # Layers may share a rotation.
        distinct = {id(rotation): rotation for rotation in self._rotations}.values()
        tensors = [tensor for rotation in distinct for tensor in rotation if tensor is not None]
        self._tensors = [tensor for tensor in tensors if tensor.requires_grad]
        self.forget()

    def forget(self) -> None:
        """Start new sums."""
        self._sums: list[torch.Tensor | None] = [None] * len(self._tensors)
        # Whether a sum may be changed in place: the first gradient may belong to others too.
        self._is_own = [False] * len(self._tensors)

    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    def has_gradient(self) -> bool:
        return any(total is not None for total in self._sums)

    def connect(self, carried: torch.Tensor, accumulation: RotationAccumulation) -> list[Rotation]:
        """The rotations, with gradients that go to the sums before `carried` gets them."""
        connected = {
            id(tensor): _Collect.apply(carried, tensor.detach(), self, index, accumulation)
            for index, tensor in enumerate(self._tensors)
        }
        return [type(one)(*(connected.get(id(tensor), tensor) for tensor in one)) for one in self._rotations]

    def add(self, index: int, gradient: torch.Tensor) -> None:
        total = self._sums[index]
        if total is None:
            self._sums[index] = gradient
        elif self._is_own[index]:
            total.add_(gradient)
        else:
            self._sums[index], self._is_own[index] = total + gradient, True

    def entries_gradient(self) -> torch.Tensor:
        """The gradient of the entries that belongs to the sums."""
        tensors, sums = zip(*((x, total) for x, total in zip(self._tensors, self._sums) if total is not None))
        # Another graph of this micro-batch may still need the rotations, such as that of a second view.
        return torch.autograd.grad(tensors, self.entries, sums, retain_graph=True)[0]


class _Carry(torch.autograd.Function):
    """Identity of the entries. Its gradient contains that of all sums, unless the accumulation holds them."""

    @staticmethod
    def forward(ctx, entries, accumulation):
        ctx.accumulation, ctx.entries = accumulation, (entries.shape, entries.dtype, entries.device)
        ctx.set_materialize_grads(False)
        return entries.view_as(entries)

    @staticmethod
    @forbid_second_derivative
    def backward(ctx, gradient):
        released = None if ctx.accumulation.holding else ctx.accumulation.release()
        if gradient is None and released is None:
            shape, dtype, device = ctx.entries
            gradient = torch.zeros(shape, dtype=dtype, device=device)
        elif released is not None:
            gradient = released if gradient is None else gradient + released
        return gradient, None


class _Collect(torch.autograd.Function):
    """A rotation whose gradient goes to the sums; `carried` only learns that there is one."""

    @staticmethod
    def forward(ctx, carried, rotation, kept, index, accumulation):
        ctx.place = kept, index, accumulation
        return rotation.detach()

    @staticmethod
    @forbid_second_derivative
    def backward(ctx, gradient):
        kept, index, accumulation = ctx.place
        accumulation.add(kept, index, gradient)
        return None, None, None, None, None


def _return_unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@functools.cache
def _refuse_early_steps() -> None:
    """Make every optimizer ask the accumulations in use before it steps."""

    def ask(optimizer, args, kwargs):
        for accumulation in list(_in_use):
            accumulation.refuse_step(optimizer)

    register_optimizer_step_pre_hook(ask)
