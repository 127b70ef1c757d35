"""
The record of gpu_check.py, beside its report: json lines, the first about the machine and the code, and one for every
model that was measured, written as it is measured. The tables of the report and of speed_tables.md are made from it.
"""

import hashlib
import statistics
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from hf_liere.errors import InputError
from training.evidence.gpu.models import Settings
from training.evidence.reporting.markdown import markdown
from training.evidence.speed.measurements import Records
from training.evidence.speed.models import BenchmarkError
from training.evidence.speed.runner import machine
from training.evidence.speed.scripts import block_ratio


ROOT = Path(__file__).resolve().parents[3]
LIBRARIES = ("triton", "timm", "peft")
SIZE_NAMES = {"small": "ViT-S", "base": "ViT-B", "arrows": "two layers", "tiny": "ViT-Ti"}
Lines = list[dict[str, Any]]


class Goal(NamedTuple):
    """
    What a step of training in the way of accelerators may take, as a multiple of that of transformers' ViT.

    Attributes:
        row: The model.
        case: What tells its comparison from others, of the fields of a benchmark's settings.
        limit: The largest accepted multiple: itself, above that of the model `above`, or over that of the model `over`.
    """

    text: str
    row: str
    case: dict[str, Any]
    limit: float
    above: str | None = None
    over: str | None = None

    def found(self, lines: Lines) -> float | None:
        """The multiple, or `None` if it was not measured."""
        wanted = {"device": "cuda", "compile": False, "image_size": 224, **self.case}
        ratios = {
            line["row"]: block_ratio(line["seconds"]).median
            for line in lines
            if "seconds" in line and line["phase"] == "training" and wanted.items() <= line["case"].items()
        }
        if not {self.row, self.above, self.over} - {None} <= ratios.keys():
            return None
        return round((ratios[self.row] - ratios.get(self.above, 0.0)) / ratios.get(self.over, 1.0), 3)


SMALL = {"model_size": "small", "batch_size": 64, "dtype": "bfloat16"}
LARGE_BATCH = {**SMALL, "batch_size": 256}
TWO_LAYERS = {"model_size": "arrows", "image_size": 168, "dtype": "float32"}
FIXED_ROPE = "transformers_axial_rope"
GOALS = (
    Goal("RoPE-Mixed, above DINOv3's fixed RoPE", "rope_mixed", SMALL, 0.03, above=FIXED_ROPE),
    Goal("ComRoPE-LD8, above DINOv3's fixed RoPE", "comrope_ld8", SMALL, 0.03, above=FIXED_ROPE),
    Goal("LieRE8, batched", "liere8", SMALL, 1.4),
    Goal("LieRE8, with the kernel", "liere8_with_kernel", SMALL, 1.08),
    Goal("LieRE64, batch 256", "liere64", LARGE_BATCH, 2.0),
    Goal("LieRE8, two layers at 168 px, over the table", "liere8", TWO_LAYERS, 1.15, over="absolute"),
)


def goals_table(lines: Lines) -> str:
    rows = []
    for goal in GOALS:
        found = goal.found(lines)
        reached = "not measured" if found is None else "yes" if found <= goal.limit else "no"
        rows.append([goal.text, f"≤ {goal.limit:g}", "–" if found is None else f"{found:.3f}", reached])
    return markdown(["times a training step of transformers' ViT", "goal", "found", "reached"], rows)


def title(case: dict[str, Any]) -> str:
    if "title" in case:
        return case["title"]
    compiled = {False: "eager", True: "compiled"}.get(case["compile"], f"compiled, {case['compile']}")
    model = f"{SIZE_NAMES[case['model_size']]}/{case['patch_size']} at {case['image_size']} px"
    return f"{model}, batch {case['batch_size']}, {case['dtype']}, {compiled}"


def comparisons(lines: Lines) -> dict[tuple[str, str], Lines]:
    """The lines of models by title and phase of what they are compared in."""
    found: dict[tuple[str, str], Lines] = {}
    for line in lines:
        if "case" in line:
            found.setdefault((title(line["case"]), line["phase"]), []).append(line)
    return found


def comparison_tables(lines: Lines) -> str:
    """For every comparison, time, its ratio to the first model with a 90% interval, and peak memory."""
    parts = []
    for (name, phase), group in comparisons(lines).items():
        first = group[0]
        rows = []
        for line in group:
            if "seconds" not in line:
                rows.append([line["row"], line.get("failed") or line["skipped"], *["–"] * 4])
                continue
            ratio, seconds = block_ratio(line["seconds"]), median_step(line)
            cells = [line["row"], f"{1000 * seconds:.2f}", f"{line['case']['batch_size'] / seconds:.0f}"]
            cells.append(f"{ratio.median:.3f} ({ratio.low:.3f} – {ratio.high:.3f})")
            memory, base = line.get("memory"), first.get("memory")
            cells.append("–" if memory is None else f"{memory / 1e6:,.0f}")
            rows.append([*cells, f"{memory / base:.2f}" if memory and base else "–"])
        header = ["model", "ms a step", "samples/s", f"times {first['row']}", "peak memory, MB", "times"]
        parts.append(f"{name[:1].upper()}{name[1:]}, {phase}:\n\n{markdown(header, rows)}")
    return "\n\n".join(parts)


def overview(lines: Lines) -> str:
    """Models in rows, and the first comparisons in columns: multiples of the baseline, and milliseconds."""
    groups = [group for group in comparisons(lines).items() if "title" not in group[1][0]["case"]][:4]
    names = dict.fromkeys(line["row"] for _, group in groups for line in group)
    rows = []
    for name in names:
        cells = [f"`{name}`"]
        for _, group in groups:
            found = [line for line in group if line["row"] == name and "seconds" in line]
            ratios = [(block_ratio(line["seconds"]).median, 1000 * median_step(line)) for line in found]
            cells += [f"{ratio:.3f} ({milliseconds:.1f} ms)" for ratio, milliseconds in ratios] or ["–"]
        rows.append(cells)
    return markdown(["model", *(f"{name}, {phase}" for (name, phase), _ in groups)], rows)


def median_step(line: dict[str, Any]) -> float:
    """Median seconds of a step of the model, beside which the baseline ran."""
    return statistics.median(seconds for _, *own, _ in line["seconds"] for seconds in own)


def describe(lines: Lines) -> str:
    """Device, versions and code of a record, in one line."""
    known = lines[0]["machine"]
    return ", ".join([known.get("gpu", known["cpu"]), *(f"{k} {known[k]}" for k in ("torch", "transformers", "code"))])


def header(settings: Settings) -> dict[str, Any]:
    """Machine, versions and code of a record."""
    found = {**machine(settings.device), "quick": settings.quick, "code": code()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def code() -> str:
    """The commit of this checkout, or without git a digest of the package."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        files = sorted((ROOT / "hf_liere").rglob("*.py"))
        return "sources " + hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def open_record(settings: Settings, go_on: bool) -> Lines:
    """
    Begins a record, or goes on with one, without the last line if it was cut; the lines.

    Raises:
        InputError: if it exists without `go_on`, or is of another machine, other versions or other code.
    """
    assert settings.record is not None
    try:
        records = Records(settings.record, header(settings), go_on and settings.record.exists())
    except BenchmarkError as error:
        raise InputError(str(error)) from error
    records.file.close()
    return records.lines
