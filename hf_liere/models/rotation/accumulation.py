"""
Gradient accumulation in the group: dL/dR of all micro-batches of an optimizer step is summed, and the backward pass of
the exponentials runs once, since it is linear and rotations of equal positions and generators are equal.
"""

from collections.abc import Callable, Hashable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ..fast.differentiation import forbid_second_derivative
from ..fast.dispatch import values_are_unknown
from .grouped_rotation import Rotation


# Once this much is kept, rotations of further grids have their backward pass in every micro-batch.
KEPT_BYTES = 1 << 30


class accumulate_rotations:
    """
    Context of the micro-batches of one optimizer step. The exponentials of LieRE are computed once for each grid, and
    so is their backward pass. Gradients are complete, and equal to those without it up to rounding, after the backward
    pass of the last micro-batch.

    ```python
    import hf_liere
    import torch

    model = hf_liere.LieRETokensForSequenceClassification(hf_liere.LieRETokensConfig(num_hidden_layers=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = {"inputs_embeds": torch.randn(2, 9, 1), "positions": torch.rand(2, 9, 1), "labels": torch.tensor([0, 1])}
    with hf_liere.accumulate_rotations(model) as window:
        model(**batch).loss.backward()
        window.last()
        model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    ```

    Until the last micro-batch the rotations of every grid stay in memory with what their backward pass needs, and the
    sums of their gradients; the generators' own gradients lack these sums. Clip, log, move and zero gradients after the
    context. Encodings other than LieRE and RoPE-Mixed, positions that are not those of a grid (given or perturbed
    ones), compiled models and replicas of `DataParallel` accumulate as without it.

    Args:
        model: A model with rotary encodings, patched or wrapped ones included.

    Raises:
        ValueError: for a DeepSpeed engine, which removes gradients between micro-batches.
        RuntimeError: from the next forward pass or the end of the context, if the generators' gradients were changed
            between micro-batches, the generators were frozen, `torch.autograd.grad` took their gradients, or the last
            micro-batch was not announced.
    """

    def __init__(self, model: nn.Module):
        deepspeed = any(hasattr(parameter, "ds_id") for parameter in model.parameters())
        if deepspeed or type(model).__module__.startswith("deepspeed."):
            raise ValueError(
                f"{type(model).__name__} is managed by DeepSpeed, which removes gradients between micro-batches; "
                "accepted: plain models, DDP and FSDP."
            )
        encodings = (module for module in model.modules() if hasattr(module, "rotation_sums"))
        self._encodings = [encoding for encoding in encodings if encoding.generators.requires_grad]

    def __enter__(self) -> "accumulate_rotations":
        for encoding in self._encodings:
            encoding.rotation_sums = RotationSums(encoding.generators)
        self._sums = [encoding.rotation_sums for encoding in self._encodings]
        return self

    def last(self) -> None:
        """Announce the last micro-batch of the step, before its forward pass."""
        for sums in self._sums:
            sums.are_held = False

    def __exit__(self, kind, error, traceback) -> None:
        self.last()
        with ExitStack() as ends:
            for encoding, sums in zip(self._encodings, self._sums):
                encoding.rotation_sums = None
                ends.callback(sums.end, is_complete=kind is None)


class RotationSums:
    """
    Rotations of an encoding that micro-batches share, and the sums of their gradients. Copies of a model take no part.

    Attributes:
        are_held: Whether backward passes only add to the sums; otherwise they pass them on to the generators.
    """

    def __init__(self, generators: nn.Parameter):
        self.are_held = True
        self._generators = generators
        self._kept: list[_SharedRotations] = []
        # Whether a backward pass used the sums, and whether its gradient is on its way to the generators.
        self._is_used = self._is_arriving = False
        # Theirs after the last backward pass, and its version.
        self._noted: tuple[torch.Tensor, int] | None = None
        # Parameters that FSDP shards get no gradients from autograd: neither is called.
        self._hooks = [generators.register_hook(self._expect)]
        self._hooks.append(generators.register_post_accumulate_grad_hook(self._note))

    def __reduce__(self):
        return type(None), ()

    def rotations(
        self, key: Hashable | None, entries: torch.Tensor, compute: Callable[[torch.Tensor], Iterable[Rotation]]
    ) -> Iterable[Rotation]:
        """
        `compute(entries)`, or the rotations that an earlier micro-batch computed from the same key and equal entries.

        Args:
            key: All that the rotations depend on beside the entries; `None` if they will not return.
            entries: Free entries of the generators.
        """
        if values_are_unknown(entries) or not torch.is_grad_enabled() or not entries.requires_grad:
            return compute(entries)
        self._check()
        carried = entries.view_as(entries)
        carried.register_hook(self._pass_on)
        if key is None:
            return compute(carried)
        key = key, entries.dtype, entries.device
        shared = next((each for each in self._kept if each.key == key and torch.equal(each.entries, entries)), None)
        num_bytes = sum(tensor.nbytes for each in self._kept for tensor in each.tensors.values())
        if shared is None and self.are_held and num_bytes < KEPT_BYTES:
            shared = _SharedRotations(key, entries, compute)
            self._kept.append(shared)
        return compute(carried) if shared is None else shared.connect(carried, self._kept)

    def _pass_on(self, gradient: torch.Tensor) -> torch.Tensor:
        """Hook of the entries, whose backward pass runs after those of the rotations that were made from them."""
        self._is_used = True
        if not self.are_held:
            gradient = sum((shared.release() for shared in self._kept if shared.sums), gradient)
            self._kept.clear()
        return gradient

    def _expect(self, gradient: torch.Tensor) -> None:
        """A backward pass that used the sums must add to the gradient of the generators before the next one."""
        self._is_arriving = self._is_arriving or self._is_used

    def _note(self, generators: nn.Parameter) -> None:
        self._is_arriving = self._is_used = False
        self._noted = None if generators.grad is None else (generators.grad, generators.grad._version)

    def _check(self, is_end: bool = False) -> None:
        gradient = self._generators.grad
        if self._is_arriving:
            reason = "were taken by torch.autograd.grad"
        elif not any(shared.sums for shared in self._kept):
            return
        elif not self._generators.requires_grad:
            reason = "lost their parameter, which was frozen (requires_grad=False)"
        elif self._noted is not None and (gradient is not self._noted[0] or gradient._version != self._noted[1]):
            reason = "were changed (clipped, scaled, set to zero, moved, or reduced by DDP without no_sync)"
        elif is_end:
            reason = "were left by the context"
        else:
            return
        raise RuntimeError(
            f"The gradients of learned rotations {reason} before they were complete. Inside accumulate_rotations only "
            "backward() is accepted for them: call last() before the forward pass of the last micro-batch, do the rest "
            "after the context, and leave a step out by an exception."
        )

    def end(self, is_complete: bool) -> None:
        for hook in self._hooks:
            hook.remove()
        if is_complete:
            self._check(is_end=True)
        self._kept.clear()


class _SharedRotations:
    """
    Rotations of one grid, and the graph that leads to a copy of the entries.

    Attributes:
        entries: The copy.
        tensors: Those of all rotations by their ids: layers may share some.
        sums: Those of their gradients, if there are any.
    """

    def __init__(self, key: Hashable, entries: torch.Tensor, compute: Callable[[torch.Tensor], Iterable[Rotation]]):
        self.key, self.entries = key, entries.detach().clone().requires_grad_()
        # Without the hooks of checkpointing, which drop what is saved: the graph belongs to several forward passes.
        # A result that is saved with its graph would never be freed.
        with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor):
            self._rotations: list[Any] = list(compute(self.entries))
        found = (tensor for rotation in self._rotations for tensor in rotation if tensor is not None)
        self.tensors = {id(tensor): tensor for tensor in found if tensor.requires_grad}
        self.sums: dict[int, torch.Tensor] = {}

    def connect(self, carried: torch.Tensor, kept: list["_SharedRotations"]) -> list[Rotation]:
        """The rotations, with gradients that go to the sums before `carried` learns that there are some."""
        connected = {key: _Collect.apply(carried, key, self, kept) for key in self.tensors}
        return [type(one)(*(connected.get(id(tensor), tensor) for tensor in one)) for one in self._rotations]

    def release(self) -> torch.Tensor:
        """The gradient of the entries that belongs to the sums, which then begin anew."""
        tensors, sums, self.sums = [self.tensors[key] for key in self.sums], [*self.sums.values()], {}
        # Another graph of this micro-batch may still need the rotations, such as that of a second view.
        return torch.autograd.grad(tensors, self.entries, sums, retain_graph=True)[0]


class _Collect(torch.autograd.Function):
    """A rotation whose gradient goes to the sums; `carried` gets zeros."""

    @staticmethod
    def forward(ctx, carried, key, shared, kept):
        ctx.place, ctx.zeros = (key, shared, kept), carried.new_zeros(()).expand(carried.shape)
        return shared.tensors[key].detach()

    @staticmethod
    @forbid_second_derivative
    def backward(ctx, gradient):
        key, shared, kept = ctx.place
        if shared not in kept:
            kept.append(shared)
        total = shared.sums.get(key)
        # A copy, because the gradient may belong to others too.
        shared.sums[key] = gradient.clone() if total is None else total.add_(gradient)
        return ctx.zeros, None, None, None
