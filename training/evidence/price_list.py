"""Measures what each trick of `fast` and `kernels` saves of a step, by switching it off.

    python training/evidence/price_list.py --output outputs/price.jsonl       # everything: an hour and a half
    python training/evidence/price_list.py --output outputs/price.jsonl --tricks "huge pages" --recipes liere8_training

Every trick is measured last: everything else stays on. With `--alone` it is measured first: nothing else is on. A block
is a step without the trick, two with it, and one without it (A X X A), in processor time of one thread, in one process
and with one model. What the trick saves is 1 − X/A of a block; the table has the medians over the blocks with their 90%
intervals by order statistics, and the lines of code that would go. Lines of C++ are those of headers that serve the
trick alone.

A trick pays if the upper end of its interval reaches 1% in some recipe. Results are json lines; `--resume` goes on with
an interrupted list, and `--show` prints the table of an existing one:

    python training/evidence/price_list.py --output training/evidence/speed/records/price_list.jsonl --show
"""

import contextlib
import dataclasses
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from tqdm.auto import tqdm

from hf_liere.encoding import positions
from hf_liere.encoding import rotary_encoding as rotation_cache
from hf_liere.fast import exponential_gradient, exponentials, quaternions, scaling_and_squaring
from hf_liere.fast.dispatch import plain_operations
from hf_liere.kernels import cpu
from hf_liere.rotation import projections
from training.evidence.reporting.markdown import markdown
from training.evidence.speed.measurements import PHASES, Records, read_lines
from training.evidence.speed.models import Row, Settings
from training.evidence.speed.runner import Runner, machine
from training.evidence.speed.scripts import block_parser, block_ratio, run_script


KERNELS = Path(cpu.__file__).parent
MODEL = Settings("small", 4, 8, 224, 16, None, "cpu", "float32", "sdpa", False)
VIDEO = dataclasses.replace(MODEL, batch_size=1, num_frames=16, image_size=112)
HALF = dataclasses.replace(MODEL, dtype="bfloat16")


class Recipe(NamedTuple):
    """A model, and whether it trains."""

    row: str
    trains: bool
    settings: Settings


class Trick(NamedTuple):
    """
    Attributes:
        recipes: Beginnings of the names of recipes in which it does something.
        code: Python functions, classes and modules that only the trick needs.
        headers: C++ files that only the trick needs.
        off: A context without it.
    """

    recipes: tuple[str, ...]
    code: tuple[Any, ...]
    headers: tuple[str, ...]
    off: Callable[[], contextlib.AbstractContextManager]

    def lines(self) -> int:
        python = sum(len(inspect.getsource(part).splitlines()) for part in self.code)
        return python + sum(len((KERNELS / name).read_text().splitlines()) for name in self.headers)


def replaced(owner: Any, name: str, value: Any) -> Callable[[], contextlib.AbstractContextManager]:
    return lambda: mock.patch.object(owner, name, value)


def off_kernels(*names: str) -> Callable[[], contextlib.AbstractContextManager]:
    """Plain operations in place of kernels of these functions."""

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        kept = {name: vars(cpu)[name] for name in names}
        for name in names:
            delattr(cpu, name)
        try:
            yield
        finally:
            vars(cpu).update(kept)

    return context


def taylor_coefficients(norm: float, dtype: torch.dtype) -> tuple[float, ...]:
    """As `derivative_coefficients`, of the Taylor polynomial with the same error."""
    error, coefficients = {torch.float32: 1e-7, torch.float64: 1e-13}[dtype], [1.0]
    while (2 * norm) ** len(coefficients) / math.factorial(len(coefficients) + 1) > error:
        coefficients.append(1 / math.factorial(len(coefficients) + 1))
    return tuple(coefficients)


RECIPES = {
    f"{name}_{'training' if trains else 'inference'}": Recipe(row, trains, settings)
    for name, row, settings in (
        ("rope_mixed", "rope_mixed", MODEL),
        ("comrope_ld8", "comrope_ld8", MODEL),
        ("liere8", "liere8", MODEL),
        ("liere64", "liere64", MODEL),
        ("liere4", "liere4", MODEL),
        ("centred_liere8", "centred_liere8", MODEL),
        ("bfloat16_liere8", "liere8", HALF),
        ("bfloat16_liere64", "liere64", HALF),
        ("video_liere8", "liere8", VIDEO),
    )
    for trains in (True, False)
}
DENSE = ("liere8", "liere64", "centred_liere8", "video_liere8", "bfloat16")
PLANES = ("rope_mixed", "comrope_ld8")
TRICKS = {
    "closed forms of 3 and 4": Trick(
        ("liere4",), (quaternions,), ("quaternions.h",), lambda: mock.patch.object(exponentials, "CLOSED_FORMS", ())
    ),
    "rays of a grid": Trick(
        DENSE,
        (scaling_and_squaring._grid_rays, positions.GridFacts.rays),
        (),
        replaced(positions.GridFacts, "rays", lambda self: None),
    ),
    "gradient by moments": Trick(
        DENSE,
        (
            exponential_gradient.gradient_by_moments,
            exponential_gradient._apply_polynomials,
            exponential_gradient.product_indices,
            exponential_gradient._take,
            exponential_gradient._powers,
            cpu.moments_gradient,
        ),
        (),
        replaced(exponential_gradient, "MOST_MOMENT_AXES", 0),
    ),
    "shorter polynomial of the derivative": Trick(
        DENSE,
        (exponential_gradient.derivative_coefficients,),
        (),
        replaced(exponential_gradient, "derivative_coefficients", taylor_coefficients),
    ),
    "float32 products for half types": Trick(
        ("bfloat16",),
        (scaling_and_squaring.exponential_dtype,),
        (),
        replaced(scaling_and_squaring, "FLOAT32_SQUARINGS", {}),
    ),
    "cache of rotations": Trick(
        ("",),
        (rotation_cache,),
        (),
        replaced(
            rotation_cache.RotationCache, "rotations", lambda self, encoding, *given: encoding.layer_rotations(*given)
        ),
    ),
    "basis in the weights": Trick(
        ("comrope_ld8",), (projections._LinearInBasis,), (), replaced(projections, "_obstacle", lambda layer: "off")
    ),
    "huge pages": Trick(
        ("",), (cpu._prefer_huge_pages,), (), replaced(cpu, "_prefer_huge_pages", lambda tensor: tensor)
    ),
    "kernel of rotated states": Trick(("",), (cpu.apply_rotation,), (), off_kernels("apply_rotation")),
    "kernel of exponentials": Trick(DENSE, (cpu.block_rotations,), (), off_kernels("block_rotations")),
    "kernel of tangents": Trick(DENSE, (cpu.block_tangents,), (), off_kernels("block_tangents")),
    "kernel of moments": Trick(DENSE, (cpu.moments_gradient,), (), off_kernels("moments_gradient")),
    "kernel of outer products": Trick(DENSE, (cpu.outer_products,), (), off_kernels("outer_products")),
    "kernel of angles": Trick(("rope_mixed",), (cpu.angle_gradients,), (), off_kernels("angle_gradients")),
    "kernel of commuting generators, backward": Trick(
        ("comrope_ld8",), (cpu.commuting_backward,), ("commuting.h",), off_kernels("commuting_backward")
    ),
    "kernels of quaternions": Trick(
        ("liere4",),
        (cpu.quaternion_rotations, cpu.quaternion_gradients, cpu._quaternions),
        ("quaternions.h",),
        off_kernels("quaternion_rotations", "quaternion_gradients"),
    ),
    "all kernels": Trick(("",), (cpu,), (), plain_operations),
}
ALL_KERNELS = "all kernels"


def measure(recipe: str, trick: str, alone: bool, blocks: int) -> list[list[float]]:
    """The seconds of all steps, in blocks A X X A: A without the trick, X with it."""
    row, trains, settings = RECIPES[recipe]
    runner = Runner(settings, Row.parse(row), PHASES[trains])
    others = [name for name in TRICKS if name not in (trick, ALL_KERNELS)] if alone else []

    def seconds(off: list[str]) -> float:
        with contextlib.ExitStack() as stack:
            for name in off:
                stack.enter_context(TRICKS[name].off())
            return runner.seconds(1)["cpu"]

    off = {"A": [*others, trick], "X": others}
    for name in "AXAX":
        seconds(off[name])
    return [[seconds(off[name]) for name in "AXXA"] for _ in range(blocks)]


def table(results: list[dict[str, Any]]) -> str:
    """One row for each trick: its lines, and the recipes in which it saves most and least, by the medians."""
    rows = []
    for name, alone in dict.fromkeys((result["trick"], result["alone"]) for result in results):
        found = [result for result in results if (result["trick"], result["alone"]) == (name, alone)]
        ratios = sorted((block_ratio(result["seconds"]), result["recipe"]) for result in found)
        cells = [
            f"{recipe.replace('_', ' ')} {1 - ratio.median:.1%} ({100 - 100 * ratio.high:.1f} – {1 - ratio.low:.1%})"
            for ratio, recipe in (ratios[0], ratios[-1])
        ]
        most, least = cells if len(ratios) > 1 else (cells[0], "–")
        measured = "alone" if alone else "last"
        rows.append([name, str(found[0]["lines"]), measured, str(len(ratios)), most, least])
    return markdown(["trick", "lines", "measured", "recipes", "saves most", "saves least"], rows)


def main(arguments: list[str] | None = None) -> int:
    parser = block_parser(__doc__)
    parser.add_argument("--tricks", nargs="+", choices=TRICKS, default=list(TRICKS), metavar="TRICK")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), metavar="RECIPE")
    parser.add_argument("--alone", action="store_true", help="with nothing else on")
    given = parser.parse_args(arguments)
    if given.show:
        print(table([line for line in read_lines(given.output) if "trick" in line]))
        return 0
    torch.set_num_threads(1)
    records = Records(given.output, machine("cpu"), given.resume)
    known = {(line["recipe"], line["trick"], line["alone"]) for line in records.lines if "trick" in line}
    pairs = [
        (recipe, trick)
        for trick in given.tricks
        for recipe in given.recipes
        if recipe.startswith(TRICKS[trick].recipes) and (recipe, trick, given.alone) not in known
    ]
    for recipe, trick in tqdm(pairs, unit="pair"):
        seconds = measure(recipe, trick, given.alone, given.blocks)
        lines = TRICKS[trick].lines()
        records.add(recipe=recipe, trick=trick, alone=given.alone, lines=lines, seconds=seconds)
    print(table([line for line in records.lines if "trick" in line]))
    return 0


if __name__ == "__main__":
    run_script(main)
