"""
Gradient accumulation in the group: dL/dR of all micro-batches of an optimizer step is summed, and the backward pass of
the exponentials runs once, since it is linear and rotations of equal positions and generators are equal.
"""

import functools
from collections.abc import Callable, Hashable, Iterable
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
        self._encodings = [module for module in model.modules() if hasattr(module, "rotation_sums")]

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
        for encoding, sums in zip(self._encodings, self._sums):
            encoding.rotation_sums = None
            sums.end(is_complete=kind is None)


class RotationSums:
    """
    Rotations that micro-batches share, and the sums of their gradients. Copies of a model take no part.

    Attributes:
        are_held: Whether backward passes add to the sums; otherwise they pass them on to the generators.
    """

    def __init__(self, generators: nn.Parameter):
        self.are_held = True
        self._generators = generators
        self._kept: list[_SharedRotations] = []
        # The generators' gradient after the last backward pass, and its version.
        self._noted: tuple[torch.Tensor, int] | None = None
        # Whether a backward pass used the sums, and whether its gradient is on its way to the generators.
        self._used = self._arriving = False
        self._hooks = []
        if generators.requires_grad:
            # Parameters that FSDP shards get no gradients from autograd: neither is called.
            self._hooks.append(generators.register_hook(self._expect))
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
        if values_are_unknown(entries) or not torch.is_grad_enabled():
            return compute(entries)
        self._check()
        if not entries.requires_grad or not (self.are_held or self._kept):
            return compute(entries)
        carried = _Carry.apply(entries, self)
        if key is not None:
            key = key, entries.dtype, entries.device
            for kept in self._kept:
                if kept.key == key and torch.equal(kept.entries, entries):
                    return kept.connect(carried, self)
            if self.are_held and sum(kept.num_bytes() for kept in self._kept) < KEPT_BYTES:
                self._kept.append(_SharedRotations(key, entries, compute))
                return self._kept[-1].connect(carried, self)
        return compute(carried)

    def add(self, kept: "_SharedRotations", index: int, gradient: torch.Tensor) -> None:
        """Add to the sum of the gradients of one tensor."""
        self._used = True
        if not any(kept is other for other in self._kept):
            self._kept.append(kept)
        total = kept.sums[index]
        # A copy, because the gradient may belong to others too.
        kept.sums[index] = gradient.clone() if total is None else total.add_(gradient)

    def release(self) -> torch.Tensor | None:
        """The gradient of the entries that belongs to all sums, which then begin anew."""
        self._used = True
        gradients = [kept.release() for kept in self._kept if kept.has_gradient()]
        self._kept, self._noted = [], None
        return functools.reduce(torch.add, gradients) if gradients else None

    def end(self, is_complete: bool) -> None:
        for hook in self._hooks:
            hook.remove()
        if is_complete:
            self._check()
            if self._is_incomplete():
                raise RuntimeError(
                    "The gradients of learned rotations are not complete at the end of accumulate_rotations: call "
                    "last() before the forward pass of the last micro-batch, and leave a step out by an exception."
                )
        self._kept = []

    def _is_incomplete(self) -> bool:
        return any(kept.has_gradient() for kept in self._kept)

    def _expect(self, gradient: torch.Tensor) -> None:
        """A backward pass that used the sums must add to the gradient of the generators before the next one."""
        self._arriving = self._arriving or self._used

    def _note(self, generators: nn.Parameter) -> None:
        self._arriving = self._used = False
        gradient = generators.grad
        self._noted = None if gradient is None else (gradient, gradient._version)

    def _check(self) -> None:
        gradient = self._generators.grad
        if self._arriving:
            reason = "were taken by torch.autograd.grad"
        elif not self._is_incomplete():
            return
        elif not self._generators.requires_grad:
            reason = "lost their parameter, which was frozen (requires_grad=False)"
        elif self._noted is not None and (gradient is not self._noted[0] or gradient._version != self._noted[1]):
            reason = "were changed (clipped, scaled, set to zero, moved, or reduced by DDP without no_sync)"
        else:
            return
        raise RuntimeError(
            f"The gradients of learned rotations {reason} before they were complete. Inside accumulate_rotations only "
            "backward() is accepted for them; the rest belongs after the context."
        )


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
        with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor):
            self._rotations: list[Any] = list(compute(self.entries))
        # Layers may share a rotation.
        distinct = {id(tensor): tensor for rotation in self._rotations for tensor in rotation if tensor is not None}
        self._tensors = [tensor for tensor in distinct.values() if tensor.requires_grad]
        self.sums: list[torch.Tensor | None] = [None] * len(self._tensors)

    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    def has_gradient(self) -> bool:
        return any(total is not None for total in self.sums)

    def connect(self, carried: torch.Tensor, sums: RotationSums) -> list[Rotation]:
        """The rotations, with gradients that go to the sums before `carried` gets them."""
        connected = {
            id(tensor): _Collect.apply(carried, tensor.detach(), self, index, sums)
            for index, tensor in enumerate(self._tensors)
        }
        return [type(one)(*(connected.get(id(tensor), tensor) for tensor in one)) for one in self._rotations]

    def release(self) -> torch.Tensor:
        """The gradient of the entries that belongs to the sums, which then begin anew."""
        tensors, sums = zip(*((x, total) for x, total in zip(self._tensors, self.sums) if total is not None))
        self.sums = [None] * len(self.sums)
        # Another graph of this micro-batch may still need the rotations, such as that of a second view.
        return torch.autograd.grad(tensors, self.entries, sums, retain_graph=True)[0]


class _Carry(torch.autograd.Function):
    """Identity of the entries. Its gradient contains that of all sums, unless these are held."""

    @staticmethod
    def forward(ctx, entries, sums):
        ctx.sums, ctx.entries = sums, (entries.shape, entries.dtype, entries.device)
        ctx.set_materialize_grads(False)
        return entries.view_as(entries)

    @staticmethod
    @forbid_second_derivative
    def backward(ctx, gradient):
        released = None if ctx.sums.are_held else ctx.sums.release()
        if gradient is None and released is None:
            shape, dtype, device = ctx.entries
            gradient = torch.zeros(shape, dtype=dtype, device=device)
        elif released is not None:
            gradient = released if gradient is None else gradient + released
        return gradient, None


class _Collect(torch.autograd.Function):
    """A rotation whose gradient goes to the sums; `carried` only learns that there is one."""

    @staticmethod
    def forward(ctx, carried, rotation, kept, index, sums):
        ctx.place = kept, index, sums
        return rotation.detach()

    @staticmethod
    @forbid_second_derivative
    def backward(ctx, gradient):
        kept, index, sums = ctx.place
        sums.add(kept, index, gradient)
        return None, None, None, None, None
