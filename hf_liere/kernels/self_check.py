"""
Compares kernels with a plain float64 computation before their first use: once per process for every device, dtype,
block size and head width, because each has separate machine code. Kernels that differ or raise are not used in this
process. Out-of-bounds accesses cannot be caught; they leave the CUDA context unusable.
"""

import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from transformers.utils import logging

from .layout import is_planes


logger = logging.get_logger(__name__)

CAPTURING = "they must first be compared with plain operations, which needs a pass before a CUDA graph is captured"
WARNING = """\
{} are not used: {}. Plain operations compute the same, more slowly, and training goes on. Please report this with \
what `hf-liere env` prints."""
EPS = torch.finfo(torch.float32).eps


class Case(NamedTuple):
    """The parameters that kernels are compiled for; `block_dim` is the padded width of a head."""

    device: torch.device
    dtype: torch.dtype
    block_size: int
    block_dim: int

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} on {self.device}, block size {self.block_size}, heads of up to {self.block_dim} channels"


class Outcome(NamedTuple):
    """
    Attributes:
        failure: Why the kernels are not used; `None` if they are.
        error: The largest error of kernels that are used, as a fraction of its rounding bound.
        seconds: Duration of the comparison, mostly the compilation of the kernels.
    """

    failure: str | None
    error: float | None
    seconds: float


class SelfCheck:
    """
    Args:
        name: Name of the kernels in messages.
        apply_rotation, angle_gradients, outer_products: As the functions of `cuda`.

    Attributes:
        outcomes: Results of the comparisons so far, by [`Case`].
    """

    def __init__(self, name: str, apply_rotation: Callable, angle_gradients: Callable, outer_products: Callable):
        self.name, self._lock = name, threading.Lock()
        self.outcomes: dict[Case, Outcome] = {}
        self._apply_rotation, self._angle_gradients = apply_rotation, angle_gradients
        self._outer_products = outer_products

    def failure(self, device: torch.device, dtype: torch.dtype, block_size: int, head_dim: int) -> str | None:
        """Why not to use the kernels, or `None`; the first call for a [`Case`] compares them, and may warn."""
        case = Case(device, dtype, block_size, padded_width(head_dim))
        if case not in self.outcomes:
            # The comparison reads results on the CPU, which would abort the capture.
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return CAPTURING
            with self._lock:
                if case not in self.outcomes:
                    self.outcomes[case] = self._compare(case)
        return self.outcomes[case].failure

    def _compare(self, case: Case) -> Outcome:
        start, failure, error = time.monotonic(), None, 0.0
        try:
            with torch.no_grad(), torch.autocast(case.device.type, enabled=False):
                for function, found, expected, bound in self._comparisons(case):
                    # Count NaN as an infinite error.
                    difference = (found - expected).abs().nan_to_num(torch.inf, torch.inf)
                    worst = (difference / bound).argmax()
                    differs, explained = (tensor.flatten()[worst].item() for tensor in (difference, bound))
                    error = max(error, differs / explained)
                    if failure is None and differs > explained:
                        failure = f"{function} differs by {differs:.2g}, more than the rounding bound {explained:.2g}"
        except Exception as raised:
            failure = _describe_error(raised)
        if failure is not None:
            failure, error = f"{failure} ({case})", None
            logger.warning(WARNING.format(self.name, failure))
        return Outcome(failure, error, time.monotonic() - start)

    def _comparisons(self, case: Case) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yields a function's name, its result, the float64 result, and a bound of the rounding error."""
        if case.block_size == 2:
            # A program processes 1024 channels of several tokens: here one is full, and the last one has three tokens.
            planes = Example(case, batch=5, tokens=1024 // case.block_dim + 3)
            cos_sin = planes.rotation[..., 0].contiguous().to(case.device)
            yield from planes.compare_rotations(self._apply_rotation, cos_sin, samples=2)
            (found,) = _results(self._angle_gradients, *planes.to_device(), cos_sin.shape[:4], samples=2)
            yield "angle_gradients", found[0], *planes.angle_gradients()
        # One program needs several products for its samples; the other has fewer samples.
        blocks = Example(case, batch=70, tokens=3)
        rotation = blocks.rotation.to(case.device)
        yield from blocks.compare_rotations(self._apply_rotation, rotation, samples=66)
        arguments = *blocks.to_device(), rotation.shape[:4], case.block_size
        (found,) = _results(self._outer_products, *arguments, samples=66)
        yield "outer_products", found[0], *blocks.outer_products()


class Example:
    """
    Queries, keys and gradients of two heads whose width is not a power of two, with unrotated channels if the blocks
    leave any. As in attention, tokens come before heads in memory. Random state, default dtype and device do not
    change.
    """

    def __init__(self, case: Case, batch: int, tokens: int):
        heads, size = 2, case.block_size
        head_dim = max(case.block_dim * 3 // 4, size)
        blocks = max(1, (head_dim - 1) // size)
        self.case, self.batch, self.width = case, batch, blocks * size
        generator = torch.Generator("cpu").manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")

        # Both sides of the comparison start from the rounded inputs of the kernels.
        drawn = [normal(batch, tokens, heads, head_dim).transpose(1, 2).to(case.dtype) for _ in range(4)]
        self.states, self.gradients = drawn[:2], drawn[2:]
        rotation = torch.linalg.qr(normal(1, heads, tokens, blocks, size, size)).Q
        if size == 2:
            # An orthogonal matrix may be a reflection; its first column still is the cos and sin of a rotation.
            cos, sin = rotation[..., 0].unbind(-1)
            rotation = torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)
        self.rotation = rotation.to(torch.float32)

    def to_device(self) -> Iterator[list[torch.Tensor]]:
        """Gradients and states of query and key, on the device of the case."""
        return ([part.to(self.case.device) for part in pair] for pair in (self.gradients, self.states))

    def compare_rotations(self, apply_rotation: Callable, rotation: torch.Tensor, samples: int) -> Iterator[tuple]:
        """Compare both rotated states, in both directions."""
        _, given = self.to_device()
        kind = "planes" if is_planes(rotation) else "blocks"
        rounding, tiny = torch.finfo(self.case.dtype).eps, torch.finfo(self.case.dtype).tiny
        for inverse in (False, True):
            matrices = (self.rotation.transpose(-1, -2) if inverse else self.rotation)[0].double()
            found = _results(apply_rotation, given, rotation, inverse, samples=samples)
            for rotated, states in zip(found, self.states):
                # A float32 sum of n products has an error of at most n·ε times the sum of their absolute values. The
                # result and a matrix are each rounded to the dtype, by ε/2; subnormal numbers have larger errors.
                bound = (self.case.block_size * EPS + rounding) * self._rotate(matrices.abs(), states.abs()) + tiny
                name = f"apply_rotation of {kind}" + ", inverse," * inverse
                yield name, rotated, self._rotate(matrices, states), bound

    def _rotate(self, matrices: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        rotated = torch.einsum("hnkij,bhnkj->bhnki", matrices, self._blocks(states))
        return torch.cat([rotated.flatten(-2), states[..., self.width :]], dim=-1)

    def _blocks(self, states: torch.Tensor) -> torch.Tensor:
        """(…, D) → (…, blocks, b) in float64."""
        return states[..., : self.width].double().unflatten(-1, (-1, self.case.block_size))

    def angle_gradients(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(H, N, planes), and bounds of their rounding errors."""
        outer, bound = self.outer_products()
        return outer[..., 1, 0] - outer[..., 0, 1], 2 * (bound[..., 1, 0] + bound[..., 0, 1])

    def outer_products(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Σ g rᵀ over samples, query and key, (H, N, blocks, b, b), and bounds of their rounding errors."""
        pairs = [self._blocks(torch.cat(pair)) for pair in (self.gradients, self.states)]
        expected, absolute = (torch.einsum("bhnki,bhnkj->hnkij", *each) for each in (pairs, map(torch.abs, pairs)))
        return expected, 2 * self.batch * EPS * absolute


def padded_width(head_dim: int) -> int:
    """The width of a head in the kernels: a power of two, and at least the 16 channels of tensor cores."""
    return max(16, 1 << (head_dim - 1).bit_length())


def _results(function: Callable, *arguments: object, **options: object) -> list[torch.Tensor]:
    """The results on the CPU in float64; reading them also raises any error of the GPU. Errors name the kernel."""
    try:
        results = function(*arguments, **options)
        results = results if isinstance(results, tuple) else (results,)
        return [result.to("cpu", torch.float64) for result in results]
    except Exception as error:
        raise RuntimeError(f"{function.__name__} raised {_describe_error(error)}") from error


def _describe_error(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
