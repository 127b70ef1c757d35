"""The command `hf-liere rope`: what models rotate, test vectors of these rotations, and the check of other engines."""

import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from tqdm.auto import tqdm

from ...auto import build_without_weights, load_checkpoint, model_types
from ...errors import InputError, memory_shortage
from ...storage.loading import DiffusersCheckpointError
from ...storage.targets import new_directory
from .diagnosis import ALARM, Diagnosis, Vectors
from .faults import FIXES
from .measurement import Measurement, find_cache_faults, find_positions_of, measure
from .reading import FoundRotation, find_diffusion_rotations, find_rotations
from .rotation import STYLE_NAMES, Rotation, make_states
from .vectors import check_file, read_vectors, write_vectors


# A title and a text.
ROW = "  {:<12}{}"
BARS = "▁▂▃▄▅▆▇█"
WIDTH = 32


def _describe_model(name: str, with_weights: bool, **options: Any) -> str:
    """Describes what a model rotates and what is wrong with it on this machine."""
    try:
        if with_weights:
            model, _ = load_checkpoint(name, dtype="auto", **options)
        else:
            model = build_without_weights(name, **options)
    except DiffusersCheckpointError:
        lines = []
        for part in find_diffusion_rotations(name, with_weights, options.get("revision")):
            rows = [*_describe_rotation(part), *(("note", remark) for remark in part.remarks)]
            lines += [f"{name} ({type(part.rope).__name__} of diffusers)", part.rotation.name]
            lines += itertools.starmap(ROW.format, rows)
        return "\n".join(lines)
    found, refused = find_rotations(model)
    if not found and not refused:
        raise InputError(
            f"{name} ({type(model).__name__}) has no module with frequencies (inv_freq): accepted are models of "
            "transformers that rotate queries and keys."
        )
    others = {part.rotation.name: part.rotation for part in found}
    lines = [f"{name} ({type(model).__name__})"]
    lines += [line for part in found for line in _describe(part, measure(part, others))]
    lines += [f"not described: {reason}" for reason in refused]
    lines += [f"ALARM: {alarm}" for alarm in (find_cache_faults(model) if with_weights else ())]
    return "\n".join(lines)


def _describe(found: FoundRotation, measurement: Measurement) -> list[str]:
    """The lines on one rotation."""
    rows, loaded = _describe_rotation(found), measurement.loaded
    states = "float32" if loaded.allowed <= ALARM + 1e-6 else f"float32 rounds up to {loaded.allowed - ALARM:.1g}"
    rows.append(("error", f"{loaded.error:.1e} rad at {_show_position(loaded)} ({states})"))
    rows.append(("", ", ".join(f"{error:.0e} up to {bound:g}" for bound, error in loaded.by_position)))
    rows += [("note", remark) for remark in found.remarks]
    if found.differs:
        rows.append(("ALARM", "frequencies or attention factor are not those that the configuration asks for"))
    rows += [("ALARM", alarm) for alarm in (*_describe_causes(loaded), *measurement.alarms)]
    for name, diagnosis in measurement.conversions.items():
        if not diagnosis.is_right:
            rows.append(("hazard", f"{name}: {'; '.join(_describe_causes(diagnosis))}"))
    if measurement.is_right and not found.differs:
        rows.append(("right", "as it is, at two sizes and with a cache"))
    return [f"{found.rotation.name} ({type(found.rope).__name__})", *itertools.starmap(ROW.format, rows)]


def _describe_rotation(found: FoundRotation) -> list[tuple[str, str]]:
    """(title, text) of lines."""
    rotation, served = found.rotation, found.layers
    counts = {state: sum(value is state for value in served.values()) for state in (True, False, None)}
    layers = f"{counts[True]} rotate"
    if counts[False]:
        still = [name for name, rotates in served.items() if rotates is False]
        layers += f"; {counts[False]} do not: {', '.join(still[:4])}{', …' if len(still) > 4 else ''}"
    if counts[None]:
        layers += f"; {counts[None]} could not be called alone"
    described = [("layers", layers)]
    planes = rotation.planes
    if planes.pairs is not None:
        shown = ", ".join(map(str, planes.pairs[:2]))
        style = STYLE_NAMES.get(planes.style or "", "pairs")
        described.append(("channels", f"{2 * planes.num_planes} of {rotation.head_dim} rotate, {style} {shown}, …"))
    if planes.num_axes > 1:
        described.append(("axes", f"{planes.num_axes}, by plane {_describe_runs(planes.axes)}"))
    if rotation.law is not None:
        law = dict(rotation.law)
        fields = ", ".join(f"{key} {_show(law[key])}" for key in sorted(law) if key not in ("rope_type", "count"))
        described.append(("frequencies", f"{len(set(rotation.frequency_of_plane))}, {law['rope_type']}, {fields}"))
    if planes.factor != 1:
        described.append(("factor", f"cos and sin times {planes.factor:.6g}"))
    return described + [("" if row else "period", text) for row, text in enumerate(_draw_spectrum(rotation))]


def _show(value: object) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)


def _describe_runs(axes: Sequence[int]) -> str:
    """Runs of equal numbers, such as 16×0 24×1 24×2; the beginning where numbers alternate."""
    runs = [f"{len(list(run))}×{axis}" for axis, run in itertools.groupby(axes)]
    if len(runs) > 6:
        return " ".join(map(str, axes[:12])) + (" …" if len(axes) > 12 else "")
    return " ".join(runs)


def _draw_spectrum(rotation: Rotation) -> list[str]:
    """One line for each axis: by plane, how fast it turns, the highest bar for the fastest of the model."""
    rates = rotation.frequencies  # (planes,)
    turning = rates[rates > 0]
    if not len(turning):
        return ["no plane turns"]
    low, high = math.log(float(turning.min())), math.log(float(turning.max()))
    lines = []
    for axis in sorted(set(rotation.planes.axes)):
        own = [float(rate) for rate, other in zip(rates, rotation.planes.axes) if other == axis]
        step = max(1, math.ceil(len(own) / WIDTH))
        levels = [(math.log(rate) - low) / max(high - low, 1e-9) if rate > 0 else -1.0 for rate in own[::step]]
        bars = "".join(" " if level < 0 else BARS[round(level * (len(BARS) - 1))] for level in levels)
        if used := [rate for rate in own if rate > 0]:
            longest, shortest = 2 * math.pi / min(used), 2 * math.pi / max(used)
            label = f"axis {axis} " if rotation.planes.num_axes > 1 else ""
            lines.append(f"{label}{bars} {shortest:.3g} … {longest:.3g} positions")
    return lines


def _show_position(diagnosis: Diagnosis) -> str:
    numbers = [f"{number:g}" for number in diagnosis.position]
    return f"position {numbers[0] if len(numbers) == 1 else '(' + ', '.join(numbers) + ')'}"


def _describe_causes(diagnosis: Diagnosis, indent: str = "") -> list[str]:
    """One line for each possible cause and, indented, one for its fix; empty if nothing is wrong."""
    if diagnosis.is_right:
        return []
    size = f" ({diagnosis.error:.2g} rad at {_show_position(diagnosis)})" if diagnosis.position else ""
    share = f"{math.floor(1000 * diagnosis.explained) / 10:g}% of the values"
    part = f", which explains only {share}" if diagnosis.explained < 1 else ""
    lines = []
    for faults in diagnosis.causes:
        lines.append(" and ".join(fault.name for fault in faults) + size + part)
        if indent:
            lines += [f"{indent}{fix}" for fix in dict.fromkeys(FIXES[fault.kind] for fault in faults)]
    right = f", {share} are right" if diagnosis.explained else ""
    return lines or ["; ".join([*diagnosis.remarks, f"no fault that is known here explains it{size}{right}"])]


def make_vectors(model: nn.Module) -> tuple[list[Vectors], list[str]]:
    """The test vectors of a model, and why others cannot be written."""
    found, refused = find_rotations(model)
    placed = [(part.rotation, find_positions_of(part)) for part in found]
    return [Vectors(rotation, places, make_states(len(places), rotation)) for rotation, places in placed], refused


def write_models(models: Sequence[str], folder: str | os.PathLike, every: bool = False, **options: Any) -> str:
    """
    Write the test vectors of models, one file for each, or those of `every` type of transformers, in its default
    configuration. Raises `InputError` if a named model rotates nothing that can be described.
    """
    lines: list[str] = []
    with new_directory(folder) as partial:
        for name in tqdm(model_types() if every else models, desc="models", disable=not every):
            try:
                vectors, refused = make_vectors(build_without_weights(name, **options))
                if not vectors:
                    reason = "; ".join(refused) or "it has no module with frequencies (inv_freq)"
                    raise InputError(f"{name} has no rotation that can be written: {reason}")
            except Exception as error:
                # Many default configurations are incomplete, each in another way.
                if not every or memory_shortage(error):
                    raise
                continue
            own_name = Path(name).absolute().name if Path(name).exists() else name.replace("/", "--")
            file = partial / f"{own_name}.safetensors"
            write_vectors(file, name, vectors)
            lines.append(f"{Path(folder) / file.name}: {', '.join(part.rotation.name for part in vectors)}")
    return "\n".join(lines)


def check(path: str, model: str | None = None, **options: Any) -> tuple[str, bool]:
    """
    Lines on the results in an engine's file, and whether everything is right. `model` is a file of test vectors, or a
    model; `None` if the engine's file contains the metadata of the vectors.
    """
    if model is None or Path(model).suffix == ".safetensors":
        vectors = read_vectors(path if model is None else model)
    else:
        vectors, _ = make_vectors(build_without_weights(model, **options))
    lines, results = [], check_file(path, vectors)
    for result in results:
        lines.append(f"{result.name}: {'right' if result.is_right else 'WRONG'} ({', '.join(result.compared)})")
        if result.is_right:
            lines.append(f"  largest error {result.error:.1e} rad at {_show_position(result)}")
        lines += [f"  {text}" for text in _describe_causes(result, indent="  ")]
        lines += [f"  note: {remark}" for remark in result.remarks if result.is_right or result.causes]
    return "\n".join(lines), all(result.is_right for result in results)


def run(
    models: Sequence[str],
    check_path: str | None = None,
    vectors: str | None = None,
    every: bool = False,
    weights: bool = False,
    **options: Any,
) -> tuple[str, bool]:
    """
    One call of the command: the lines to print, and whether what was checked is right. Raises `InputError` if the
    arguments do not go together, or a model rotates nothing that can be described.
    """
    if check_path is not None:
        if len(models) > 1 or vectors or every:
            raise InputError("--check takes at most one model, and neither --vectors nor --all.")
        return check(check_path, models[0] if models else None, **options)
    if every and (models or not vectors):
        raise InputError("--all needs --vectors, and no model.")
    if not models and not every:
        raise InputError("accepted are models, --check FILE, or --all with --vectors FOLDER.")
    if vectors:
        return write_models(models, vectors, every, **options), True
    return "\n\n".join(_describe_model(name, weights, **options) for name in models), True
