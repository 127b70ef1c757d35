"""Diagnoses computed rotations: errors against float64, and the fault that explains them."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import torch

from .faults import FIXES, HALF_TYPES, Fault, find_faults
from .rotation import Rotation
from .spectrum import fit_bases


# An error of an angle that matters, in radians, where float32 does not round by more.
ALARM = 1e-3
# Angles in float32 have a relative error of 2⁻²³ from the power of the base, and of 2⁻²⁴ each from its reciprocal and
# from the product with the position.
FLOAT32_ANGLE = 2.0**-22
# The share of values that a fault has to explain to be named; with others left it is named as a part of the cause.
EXPLAINED = 0.98
TENSORS = ("cos", "sin", "rotated_query", "rotated_key")
# Combinations of faults, and the (errors, allowed errors) of some tensors.
Causes: TypeAlias = list[tuple[Fault, ...]]
Measured: TypeAlias = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Diagnosis:
    """
    Attributes:
        name: Of the rotation.
        compared: The tensors that were compared.
        error: The largest error, in radians.
        position: Of the token with that error, (A,) numbers.
        allowed: The error that is allowed there: [`ALARM`], and what float32 and the type of the output round.
        by_position: The largest error up to some positions, (position, error).
        causes: Every combination of faults that explains what was found; empty if it is right, or nothing explains it.
        explained: The share of the values that the causes explain, or without causes, of those that are right.
        is_right: Whether no error is larger than allowed.
        remarks: What could not be compared, or is not finite.
    """

    name: str
    compared: list[str] = field(default_factory=list)
    error: float = 0.0
    position: tuple[float, ...] = ()
    allowed: float = ALARM
    by_position: list[tuple[float, float]] = field(default_factory=list)
    causes: Causes = field(default_factory=list)
    explained: float = 1.0
    is_right: bool = True
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Vectors:
    """
    One rotation at known positions, and what an implementation computed there.

    Attributes:
        rotation: What computes the right results.
        positions: (N, A), as the model passes them; for modules that read pixels, coordinates of an image's patches.
        states: `query` and `key`, (N, head_dim), float64; empty if it is unknown which channels rotate.
        tensors: Some of [`TENSORS`], in the types of the implementation.
    """

    rotation: Rotation
    positions: torch.Tensor
    states: Mapping[str, torch.Tensor]
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def describe(self) -> dict[str, torch.Tensor]:
        """The tensors of the rotation in a file of test vectors, without its name: all that is given, and right."""
        given = {"positions": self.positions, "frequencies": self.rotation.frequencies, **self.states}
        return {**given, **self.rotation.compute(self.positions, self.states)}

    @cached_property
    def grids(self) -> dict[str, torch.dtype]:
        """By name of a tensor, the coarsest half type that contains all its values, or its own type."""
        return {
            name: next((t for t in HALF_TYPES if torch.equal(value.to(t).to(value.dtype), value)), value.dtype)
            for name, value in self.tensors.items()
        }

    def measure(self, rotation: Rotation, grids: Collection[torch.dtype] = ()) -> Measured | None:
        """
        (errors, allowed errors) in radians, (N, channels) or (N, planes), against what a rotation computes; `None` if
        the shapes differ. Tensors whose values all lie in the type of its output, or in one of `grids`, may be rounded
        to that type.
        """
        needed = {name: state for name, state in self.states.items() if f"rotated_{name}" in self.tensors}
        expected = rotation.compute(self.positions, needed)
        base = ALARM + rotation.compute_noise(self.positions, FLOAT32_ANGLE)  # (N, planes)
        accepted, count = {*grids, rotation.output_dtype}, rotation.planes.num_planes
        still = sorted(set(range(rotation.head_dim or 0)).difference(*rotation.planes.pairs or ()))
        found = []
        # Of cos and sin in two types, each has to be right by itself.
        for names in (("cos", "sin"), ("cos",), ("sin",), ("rotated_query",), ("rotated_key",)):
            names = [name for name in names if name in self.tensors]
            if not names:
                continue
            given = [self.tensors[name] for name in names]
            wanted, planes = [expected[name] for name in names if name in expected], list(rotation.channels)
            is_turn = names[0] in ("cos", "sin")
            if is_turn and given[0].shape[-1] == count:
                # One column for each plane.
                wanted, planes = [x[:, rotation.columns] for x in wanted], list(range(count))
            if [x.shape for x in given] != [x.shape for x in wanted]:
                return None
            types = [x.dtype for x in given]
            types += [self.grids[name] for name in names if self.grids[name] in accepted]
            # cos and sin are off by half of this, and by as much again if the factor rounds by itself.
            margin = max(0.0 if dtype == torch.float64 else torch.finfo(dtype).eps for dtype in types)
            difference = torch.stack([(x.double() - y).nan_to_num(math.inf) for x, y in zip(given, wanted)])
            error, allowed = difference.norm(dim=0), base[:, planes]
            if not is_turn:
                # Of a plane, relative to its length, and of channels that do not rotate.
                state = self.states[names[0].removeprefix("rotated_")].double()  # (N, head_dim)
                size, length = (torch.stack([*rotation.split(x)]).norm(dim=0) for x in (difference[0], state))
                error = torch.cat([size / length, (difference[0] / state)[:, still].abs()], 1)
                allowed = torch.cat([base, torch.full_like(state[:, still], ALARM)], 1)
                # cos and sin, two products and a sum round: (√2 + √2 + 1) / 2 at most.
                margin *= 2
            found.append((error / rotation.planes.factor, allowed + margin))
        return found


def diagnose(evidence: Vectors, others: Mapping[str, Rotation] | None = None) -> Diagnosis:
    """
    Compare what was computed with what is right, and name the fault, or the two faults, that explain a difference.
    `others` are the other rotations of the model, by name.
    """
    rotation = evidence.rotation
    diagnosis = Diagnosis(rotation.name, [name for name in TENSORS if name in evidence.tensors])
    if not evidence.tensors:
        diagnosis.remarks.append(f"nothing to compare; accepted are {', '.join(TENSORS)}")
        diagnosis.is_right = False
        return diagnosis
    measured = evidence.measure(rotation)
    if measured is None:
        shapes = {name: tuple(value.shape) for name, value in evidence.tensors.items()}
        wanted = {name: tuple(v.shape) for name, v in rotation.compute(evidence.positions, evidence.states).items()}
        diagnosis.remarks.append(f"the shapes are {shapes}; right are {wanted}")
        diagnosis.is_right, diagnosis.error = False, math.inf
    else:
        _describe_errors(diagnosis, evidence.positions, measured)
    if diagnosis.is_right:
        return diagnosis
    if _share(evidence.measure(rotation, HALF_TYPES)) == 1:
        # As results in a half type, whose rounding is allowed for.
        types = {HALF_TYPES[t] for t in evidence.grids.values() if t in HALF_TYPES}
        diagnosis.remarks.append(f"results rounded to {' and '.join(sorted(types))}: {FIXES['output type']}")
        diagnosis.is_right = True
        return diagnosis
    diagnosis.explained, diagnosis.causes = _explain(evidence, others or {}, _share(measured))
    if diagnosis.causes and measured is None:
        diagnosis.remarks = []
    return diagnosis


def _describe_errors(diagnosis: Diagnosis, positions: torch.Tensor, measured: Measured) -> None:
    error, allowed = (torch.cat(each, 1) for each in zip(*measured))  # (N, values) each
    errors = error.amax(1)  # (N,)
    worst = int(errors.argmax())
    diagnosis.is_right = bool((error <= allowed).all())
    diagnosis.error, diagnosis.position = float(errors[worst]), tuple(positions[worst].tolist())
    diagnosis.allowed = float(allowed[worst].max())
    furthest = positions.abs().amax(1)  # (N,)
    for bound in sorted({min(10.0**k, float(furthest.max())) for k in range(1, 8)}):
        diagnosis.by_position.append((bound, float(errors.where(furthest <= bound, 0).max())))


def _explain(evidence: Vectors, others: Mapping[str, Rotation], known: float) -> tuple[float, Causes]:
    """
    The faults that explain the evidence best, and the share of values that they explain: one, or two if no single one
    explains all; then the single one that explains most. A share `known` of the values needs no fault.
    """
    thetas = _propose_thetas(evidence.rotation, evidence)
    singles = list(find_faults(evidence.rotation, thetas, others))
    single = _choose([(fault,) for fault in singles], evidence, known)
    if single[0] == 1:
        return single
    twice: Causes = []
    for fault in singles:
        thetas = _propose_thetas(fault.rotation, evidence)
        # Each pair once; a base is looked for after the other fault, which may hide it.
        twice += [(fault, other) for other in find_faults(fault.rotation, thetas, {}) if _order(other) > _order(fault)]
    double = _choose(twice, evidence, known)
    return single if single[1] and double[0] < 1 else double


def _order(fault: Fault) -> tuple[bool, str]:
    return fault.kind == "base", fault.kind


def _share(measured: Measured | None) -> float:
    """The share of values whose errors are allowed, in the tensor where it is least."""
    return min((float((error <= allowed).double().mean()) for error, allowed in measured or ()), default=0.0)


def _choose(proposals: Causes, evidence: Vectors, known: float) -> tuple[float, Causes]:
    """
    Those proposals that explain most values that need a fault, and no worse than the best one, without those of the
    same names; and the share of all values that they explain.
    """
    scored: dict[tuple[str, ...], tuple[float, float, tuple[Fault, ...]]] = {}
    for faults in proposals:
        measured = evidence.measure(faults[-1].rotation)
        share = _share(measured)
        if measured is None or share < EXPLAINED or 1 - share > (1 - known) / 2:
            continue
        score = max(float(error.clamp(max=1).mean()) for error, _ in measured)
        names = tuple(sorted(fault.name for fault in faults))
        if names not in scored or score < scored[names][1]:
            scored[names] = share, score, faults
    most = max((share for share, _, _ in scored.values()), default=known)
    least = most if most == 1 else most - 1e-3
    best = min((score for share, score, _ in scored.values() if share >= least), default=0.0)
    chosen = [faults for share, score, faults in scored.values() if share >= least and score <= 1.5 * best + 1e-7]
    # A base is fitted to what was found: it explains what a particular fault does, and of several the first is round.
    fitted = [faults for faults in chosen if any(fault.kind == "base" for fault in faults)]
    return most, [faults for faults in chosen if faults not in fitted] or fitted[:1]


def _propose_thetas(rotation: Rotation, evidence: Vectors) -> list[float]:
    """Bases near that of the angles that were found, rounder numbers first."""
    observed = None if rotation.law is None else estimate_frequencies(rotation, evidence)
    if rotation.law is None or observed is None:
        return []
    index, wanted = torch.tensor(rotation.frequency_of_plane), rotation.frequencies
    # Slow planes hardly turn, and the first frequency of every base is 1.
    usable = (observed > 1e-2) & (wanted > 0) & (index > 0)
    plain = rotation.compute_law(rope_type="default")
    unscaled = usable & ((wanted - plain).abs() <= 1e-9 * plain)
    if unscaled.any():
        # Which frequencies are scaled depends on the base; the fastest ones are not.
        usable = unscaled & (index <= index[unscaled].median())
    if not usable.any():
        return []
    theta = rotation.law["rope_theta"]
    bases = fit_bases(index[usable] / rotation.law["count"], observed[usable] / wanted[usable], theta)
    return [base for base in bases if base > 1 and base != theta]


def estimate_frequencies(rotation: Rotation, evidence: Vectors) -> torch.Tensor | None:
    """
    (planes,) angles found for each position, in radians, from the token nearest to zero; `None` if the tensors have
    other shapes.
    """
    coordinates = (evidence.positions.double() + rotation.offset)[:, list(rotation.planes.axes)]  # (N, planes)
    size, token = coordinates.abs().where(coordinates != 0, math.inf).min(0)  # 2 × (planes,)
    place = token, torch.arange(rotation.planes.num_planes)
    if size.isinf().any():
        return None
    tensors, states = evidence.tensors, evidence.states
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    rotated = [name for name, state in states.items() if shapes.get(f"rotated_{name}") == state.shape]
    if {"cos", "sin"} <= shapes.keys() and shapes["cos"] == shapes["sin"]:
        cos, sin = tensors["cos"].double(), tensors["sin"].double()  # (N, D)
        if cos.shape[1] == len(rotation.channels):
            cos, sin = cos[:, rotation.columns], sin[:, rotation.columns]  # (N, planes)
    elif rotated and rotation.planes.pairs:
        (x, y), (u, v) = map(rotation.split, (states[rotated[0]], tensors[f"rotated_{rotated[0]}"]))  # (N, planes) each
        cos, sin = x * u + y * v, x * v - y * u
    else:
        return None
    return torch.atan2(sin, cos)[place] / coordinates[place] if cos.shape == coordinates.shape else None
