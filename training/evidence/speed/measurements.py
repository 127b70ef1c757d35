"""Cases to compare, and their measurements as json lines, from which an interrupted benchmark resumes."""

import dataclasses
import json
from pathlib import Path

from training.common.records import write_text
from training.evidence.speed.models import BenchmarkError, Row, Settings


BASELINE = "absolute"
PHASES = ("inference", "training")
# Measurements of additions, and the phase of `absolute` that each is compared with: inference with cached rotations,
# inference on the first image of a size, and training.
ADDITIONS = {"added_inference": "inference", "added_first": "inference", "added_training": "training"}
BLOCK_SIZES = (2, 4, 8, 16, 32, 64)
BATCH_SIZES = (1, 8, 32)


def phases_of(row: Row) -> tuple[str, ...]:
    """Models with folded rotations cannot be trained."""
    return PHASES if row.trains else ("inference",)


@dataclasses.dataclass(frozen=True)
class Case:
    """Models compared at one setting: a whole table, or one line of `--table growth`."""

    settings: Settings
    rows: tuple[Row, ...]
    axis: str | None = None
    value: str | None = None

    @property
    def key(self) -> list:
        return [self.axis, self.value, dataclasses.asdict(self.settings), [row.name for row in self.rows]]

    def additions(self, row: Row) -> dict[str, str]:
        """The [`ADDITIONS`] of a row that rotates. Compiled graphs cache no rotations."""
        missing = "added_first" if self.settings.compile else None
        return {name: phase for name, phase in ADDITIONS.items() if phase in phases_of(row) and name != missing}


def read_lines(path: Path) -> list[dict]:
    """
    The complete lines: the last one is cut if the machine stopped while writing it. Raises [`BenchmarkError`] if there
    is no such file.
    """
    if not path.is_file():
        raise BenchmarkError(f"{path} does not exist.")
    complete = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line[-1] == "\n"]
    return [json.loads(line) for line in complete]


class Records:
    """
    Measurements, each appended to `path` as a json line immediately.

    Args:
        path: Path of the file; its folder is created.
        header: Machine and versions, which all measurements share.
        resume: Whether to continue an existing file.

    Raises:
        BenchmarkError: if the file exists without `resume`, or was measured on another machine or version.
    """

    def __init__(self, path: Path, header: dict, resume: bool):
        self.lines = []
        if resume:
            self.lines = read_lines(path)
            write_text(path, "".join(json.dumps(line) + "\n" for line in self.lines))
            found = self.lines[0]["machine"] if self.lines else header
            for name in header:
                if found.get(name) != header[name]:
                    raise BenchmarkError(
                        f"--resume: {path} was measured with {name}={found.get(name)}, this is {header[name]}; "
                        "choose another --output."
                    )
        elif path.exists():
            raise BenchmarkError(f"{path} exists; continue it with --resume or choose another --output.")
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("a", encoding="utf-8")
        if not self.lines:
            self.add(machine=header)

    def add(self, **record) -> None:
        self.lines.append(record)
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()

    def find(self, case: Case, quantity: str, **fields) -> list[dict]:
        wanted = {"quantity": quantity, **fields, "case": case.key}
        return [line for line in self.lines if all(line.get(name) == value for name, value in wanted.items())]

    def value(self, case: Case, row: Row, quantity: str):
        """The last measured value, or `None`."""
        found = self.find(case, quantity, row=row.name)
        return found[-1]["value"] if found else None

    def steps(self, case: Case, row: Row, quantity: str) -> dict[int, dict]:
        """
        By round: seconds per step by clock, with those of a preceding step of `absolute` as `baseline`. The quantity is
        one of `PHASES`, for whole models, or of `ADDITIONS`.
        """
        return {line["round"]: line for line in self.find(case, quantity, row=row.name)}

    def ratios(self, case: Case, row: Row, quantity: str, clock: str) -> list[float]:
        """Time relative to `absolute`, per round."""
        lines = self.steps(case, row, quantity).values()
        return [line["value"][clock] / line["baseline"][clock] for line in lines if "baseline" in line]


def growth_cases(settings: Settings, rows: list[Row], axes: list[str]) -> list[Case]:
    """
    Cases with one, two and four times the resolution, half to twice the depth, and several block sizes, frames and
    batch sizes.
    """
    size, patch, layers = settings.image_size, settings.patch_size, settings.num_hidden_layers
    names = ["comrope_ld{}", "liere{}"]
    if any(row.kind == "folded" for row in rows):
        names += [f"folded_{name}" for name in names]
    grown = {
        "resolution": {f"{(side // patch) ** 2} tokens": {"image_size": side} for side in (size, 2 * size, 4 * size)},
        "depth": {f"{n} layers": {"num_hidden_layers": n} for n in (max(1, layers // 2), layers, 2 * layers)},
        "block_size": {f"b = {b}": {} for b in BLOCK_SIZES},
        "frames": {f"{frames} frames": {"num_frames": frames} for frames in (4, 8, 16)},
        "batch_size": {f"batch {batch}": {"batch_size": batch} for batch in BATCH_SIZES},
    }
    blocks = {f"b = {b}": [Row.parse(name.format(b)) for name in (BASELINE, *names)] for b in BLOCK_SIZES}
    return [
        Case(dataclasses.replace(settings, **changed), tuple(blocks.get(value, rows)), axis, value)
        for axis in axes
        for value, changed in grown[axis].items()
    ]
