"""
Compares kernels with plain operations in float64 before their first use: once per process for every device, dtype,
block size and head width, because each has separate machine code. Kernels that differ or raise are not used in this
process. Out-of-bounds accesses cannot be caught; they leave the CUDA context unusable.
"""

import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from transformers.utils import logging

from ..fast.application import apply_rotation, multiply_blocks
from ..fast.dispatch import plain_operations
from ..fast.exponential_gradient import batched_rotations_backward
from ..fast.rotation_gradients import angle_gradients, outer_products
from ..fast.scaling_and_squaring import PORTABLE_SQUARINGS, portable_rotations


logger = logging.get_logger(__name__)

CAPTURING = "they must first be compared with plain operations, which needs a pass before a CUDA graph is captured"
WARNING = """\
{} are not used: {}. Plain operations compute the same, more slowly, and training goes on. Please report this with \
what `hf-liere env` prints."""
EPS = torch.finfo(torch.float32).eps


class Case(NamedTuple):
    """The parameters that kernels are compiled for; `block_dim` is the padded width of a head, 0 for exponentials."""

    device: torch.device
    dtype: torch.dtype
    block_size: int
    block_dim: int

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        kind = f"heads of up to {self.block_dim} channels" if self.block_dim else "exponentials"
        return f"{dtype} on {self.device}, block size {self.block_size}, {kind}"


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
        functions: Those of `cuda`, in its order, which are compared.

    Attributes:
        outcomes: Results of the comparisons so far, by [`Case`].
    """

    def __init__(self, name: str, *functions: Callable):
        self.name, self._functions, self._lock = name, functions, threading.Lock()
        self.outcomes: dict[Case, Outcome] = {}

    def failure(self, device: torch.device, dtype: torch.dtype, block_size: int, head_dim: int = 0) -> str | None:
        """Why not to use the kernels, or `None`; the first call for a [`Case`] compares them, and may warn."""
        case = Case(device, dtype, block_size, padded_width(head_dim) if head_dim else 0)
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
            with torch.no_grad(), plain_operations(), torch.autocast(case.device.type, enabled=False):
                comparisons = self._comparisons if case.block_dim else self._exponentials
                for function, found, expected, bound in comparisons(case):
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
        """Yields a function's name, its result, that of plain operations, and a bound of the rounding error."""
        size, type_info = case.block_size, torch.finfo(case.dtype)
        rotate, by_angles, by_blocks, *_ = self._functions
        # One program needs several products for its samples; the other has fewer samples.
        kinds = [("blocks", 70, 3, 66)]
        if size == 2:
            # A program processes 1024 channels of several tokens: here one is full, and the last one has three tokens.
            kinds.insert(0, ("planes", 5, 1024 // case.block_dim + 3, 2))
        for kind, batch, tokens, samples in kinds:
            *pairs, blocks = _draw(case, batch, tokens)
            rotation = blocks[..., 0].contiguous() if kind == "planes" else blocks
            gradients, states = (tuple(part.double() for part in pair) for pair in pairs)
            absolute_gradients, absolute_states = (tuple(map(torch.abs, pair)) for pair in (gradients, states))
            given_gradients, given = ([part.to(case.device) for part in pair] for pair in pairs)
            for inverse in (False, True):
                found = _results(rotate, given, rotation.to(case.device), inverse, samples=samples)
                expected = apply_rotation(states, rotation.double(), inverse)
                sizes = multiply_blocks(absolute_states, (blocks.transpose(-1, -2) if inverse else blocks).abs())
                for rotated, right, absolute in zip(found, expected, sizes):
                    # A float32 sum of n products has an error of at most n·ε times the sum of their absolute values.
                    # The result and a matrix are each rounded to the dtype, by ε/2; subnormal numbers err by more.
                    bound = (size * EPS + type_info.eps) * absolute + type_info.tiny
                    yield f"apply_rotation of {kind}" + ", inverse," * inverse, rotated, right, bound
            shape = rotation.shape[:4]
            # (1, H, N, blocks, b, b)
            bound = 2 * batch * EPS * outer_products(absolute_gradients, absolute_states, shape, size)
            if kind == "planes":
                (found,) = _results(by_angles, given_gradients, given, shape, samples=samples)
                right = angle_gradients(gradients, states, rotation.double())
                yield "angle_gradients", found, right, 2 * (bound[..., 1, 0] + bound[..., 0, 1])
            else:
                (found,) = _results(by_blocks, given_gradients, given, shape, size, samples=samples)
                yield "outer_products", found, outer_products(gradients, states, shape, size), bound

    def _exponentials(self, case: Case) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """As [`_comparisons`]."""
        *_, rotate, go_back, find_bases = self._functions
        axes, groups, blocks, tokens, size = 2, 2, 3, 17, case.block_size
        generator = torch.Generator("cpu").manual_seed(0)
        normal = functools.partial(torch.randn, generator=generator, dtype=torch.float64, device="cpu")
        # Norms up to a few hundred, and zero.
        positions, matrices = 10 * normal(tokens, axes), normal(axes, groups, blocks, size, size).float()
        positions[0], generators = 0.0, matrices - matrices.mT
        exact = torch.stack(portable_rotations(positions, generators.double(), torch.float64))  # (G, P, K, b, b)
        given = positions, generators, exact.float(), normal(exact.shape).float()
        tensors = [tensor.to(case.device) for tensor in given]
        (found,) = _results(rotate, *tensors[:2])
        yield "batched_rotations", found, exact, EPS * torch.ones_like(exact)
        # So few programs that one has several tiles of tokens.
        results = _results(go_back, *tensors, True, programs=groups * blocks + 1)
        p, a, r, g = (tensor.double() for tensor in given)
        expected = batched_rotations_backward(p, a, r, g, PORTABLE_SQUARINGS[torch.float64], needs_positions=True)
        # The polynomial of the derivative errs by 1e-7 of the norm of dL/dR.
        norms = g.flatten(-2).norm(dim=-1)  # (G, P, K)
        by_positions = torch.einsum("agk,gpk->pa", a.flatten(-2).norm(dim=-1), norms)
        by_generators = torch.einsum("pa,gpk->agk", positions.abs(), norms)[..., None, None].expand(generators.shape)
        for found, right, bound in zip(results, expected, (by_positions, by_generators)):
            yield "batched_backward", found, right, 2 * EPS * bound
        (basis,) = _results(find_bases, tensors[1].double())
        changed, bound = basis.mT @ a @ basis, torch.finfo(basis.dtype).eps ** 0.75 * torch.ones_like(basis)
        planes = torch.arange(size, device="cpu") // 2
        yield "eigenbases", basis.mT @ basis, torch.eye(size, device="cpu").expand_as(basis), bound
        yield "eigenbases", changed, changed.where(planes == planes.unsqueeze(-1), 0.0), bound


def _draw(case: Case, batch: int, tokens: int) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """
    Gradients and states of query and key, of two heads whose width is not a power of two, with unrotated channels if
    the blocks leave any, and (1, H, N, blocks, b, b) rotations. As in attention, tokens come before heads in memory.
    Random state, default dtype and device do not change.
    """
    heads, size = 2, case.block_size
    head_dim = max(case.block_dim * 3 // 4, size)
    blocks = max(1, (head_dim - 1) // size)
    generator = torch.Generator("cpu").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")

    # Both sides of the comparison start from the rounded inputs of the kernels.
    drawn = [normal(batch, tokens, heads, head_dim).transpose(1, 2).to(case.dtype) for _ in range(4)]
    rotation = torch.linalg.qr(normal(1, heads, tokens, blocks, size, size)).Q
    if size == 2:
        # An orthogonal matrix may be a reflection; its first column still is the cos and sin of a rotation.
        cos, sin = rotation[..., 0].unbind(-1)
        rotation = torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)
    return drawn[2:], drawn[:2], rotation.to(torch.float32)


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
