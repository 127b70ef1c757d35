"""What an encoding costs: speed, memory and exactness of every encoding beside learned absolute embeddings.

    python training/benchmark_speed.py --output outputs/speed.jsonl            # ViT-S/16, 224 px, batch 8
    python training/benchmark_speed.py --model_size base --batch_size 256 --dtype bfloat16 --compile --folded
    python training/benchmark_speed.py --table growth --batch_size 1 --rounds 5

All models are measured in turn, round after round, each right after `absolute`; a ratio is the median over the rounds
of the time of the one divided by that of the other, with quartiles in brackets, so that a machine that slows down slows
both, and the row of `absolute` shows the noise. On a machine with other work `--clock cpu` compares processor time
instead. Inference is a forward pass without gradients in evaluation mode; a training step is forward, loss and
backward. The optimizer's step is left out: it costs every model the same and would draw the ratios towards 1. Memory is
what PyTorch's allocator holds at the peak of a training step: the model and all that the step allocates.

Every measurement is a line of the output file as soon as it is made. Ctrl-C prints the tables of what there is, and
`--resume` with the same output goes on. Naive models are the papers' pseudo-code; timm's have its own code throughout.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import platform
import signal
import statistics
import sys
import time
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from torch import nn
from tqdm.auto import tqdm

import hf_liere
from hf_liere.kernels import cpu as cpu_kernels
from training.speed.models import (
    SIZES,
    BenchmarkError,
    Row,
    Settings,
    build_model,
    check_row,
    logits,
    rotation_error,
    timm_installed,
)


BASELINE = "absolute"
PHASES = ("inference", "training")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
ENCODING_ROWS = "absolute none axial_rope rope_mixed comrope_ap8 comrope_ld8 liere8 liere64".split()
# naive_liere64 takes minutes a step: by name only.
REFERENCE_ROWS = "naive_liere8 naive_comrope_ld8".split()
TIMM_ROWS = "timm_absolute timm_rope_mixed".split()
GROWTH_ROWS = "absolute rope_mixed comrope_ld8 liere8 liere64".split()
GROWTH_AXES = ("resolution", "depth", "block_size", "frames")
BLOCK_SIZES = (2, 4, 8, 16, 32, 64)


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows that are compared at one setting: the whole first table, or one line of the second."""

    settings: Settings
    rows: tuple[Row, ...]
    axis: str | None = None
    value: str | None = None

    @property
    def key(self) -> list:
        return [self.axis, self.value, dataclasses.asdict(self.settings), [row.name for row in self.rows]]


class Records:
    """
    Measurements, each a json line of `path` as soon as it is made.

    Args:
        path: Of the file; its folder is made.
        header: What the measurements hold for: machine, versions.
        resume: Whether a file that exists is continued.

    Raises:
        BenchmarkError: if the file exists and is not to be resumed, or was measured on another machine or version.
    """

    def __init__(self, path: Path, header: dict, resume: bool):
        self.lines = []
        if resume:
            if not path.is_file():
                raise BenchmarkError(f"--resume: {path} does not exist.")
            # The last line is cut short where a machine stopped while writing it.
            complete = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line[-1] == "\n"]
            self.lines = [json.loads(line) for line in complete]
            path.write_text("".join(complete), encoding="utf-8")
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
        wanted = {"case": case.key, "quantity": quantity, **fields}
        return [line for line in self.lines if all(line.get(name) == value for name, value in wanted.items())]

    def value(self, case: Case, row: Row, quantity: str):
        """The measured value, `None` where there is none."""
        found = self.find(case, quantity, row=row.name)
        return found[-1]["value"] if found else None

    def steps(self, case: Case, row: Row, phase: str) -> dict[int, dict]:
        """By round: what [`Runner.seconds`] says of a step, and as `baseline` of one of `absolute` right before."""
        return {line["round"]: line for line in self.find(case, phase, row=row.name)}


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


class Runner:
    """One model ready to be timed in one phase."""

    def __init__(self, settings: Settings, row: Row, phase: str):
        self.settings, self.training = settings, phase == "training"
        self.model = build_model(settings, row, self.training)
        self.call = torch.compile(self.model) if settings.compile else self.model
        torch.manual_seed(0)
        self.pixels, self.labels = settings.pixels(), torch.arange(settings.batch_size, device=settings.device)
        if not (self.training and settings.half):
            self.pixels = self.pixels.to(settings.torch_dtype)

    def step(self) -> None:
        if not self.training:
            with torch.no_grad():
                logits(self.call, self.pixels)
            return
        self.model.zero_grad(set_to_none=True)
        device = torch.device(self.settings.device).type
        cast = torch.autocast(device, self.settings.torch_dtype) if self.settings.half else contextlib.nullcontext()
        with cast:
            loss = nn.functional.cross_entropy(logits(self.call, self.pixels), self.labels)
        loss.backward()

    def seconds(self, steps: int) -> dict[str, float]:
        """Mean seconds of a step by every clock."""
        synchronize(self.settings.device)
        start = {name: clock() for name, clock in CLOCKS.items()}
        for _ in range(steps):
            self.step()
        synchronize(self.settings.device)
        seconds = {name: (clock() - start[name]) / steps for name, clock in CLOCKS.items()}
        self.model.zero_grad(set_to_none=True)
        return seconds

    def peak_memory(self) -> int | None:
        """Bytes of model and input and of what a step allocates at its peak; `None` where PyTorch does not tell."""
        self.model.zero_grad(set_to_none=True)
        device = torch.device(self.settings.device)
        tensors = [*self.model.parameters(), *self.model.buffers(), self.pixels]
        held = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        if device.type == "cpu":
            return held + peak_cpu_allocation(self.step)
        if device.type != "cuda":
            return None
        synchronize(self.settings.device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        self.step()
        synchronize(self.settings.device)
        return held + torch.cuda.max_memory_allocated(device) - before


@contextlib.contextmanager
def profiler_silenced():
    """PyTorch's profiler announces itself on the descriptor of stderr, in the middle of the progress bar."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def peak_cpu_allocation(run) -> int:
    """
    Bytes that PyTorch's allocator holds at most at once during `run()`, above what it held before. Unlike the size of
    the process, it does not depend on what ran before; scratch memory of the mathematics libraries is not in it.
    """
    with profiler_silenced(), torch.autograd.profiler.profile(profile_memory=True) as profile:
        run()
    held = peak = 0
    for event in profile.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def measure(case: Case, records: Records, rounds: int, warmup: int, steps: int, with_error: bool) -> None:
    """Everything about a case that the records do not hold yet."""
    done = set(range(rounds))
    for row in case.rows:
        for phase in PHASES:
            if (row.trains or phase == "inference") and records.value(case, row, "failed") is None:
                done &= set(records.steps(case, row, phase))
    title = "encodings" if case.axis is None else f"{case.axis} {case.value}"
    runners = {}
    for row in tqdm(case.rows, desc=f"{title}: memory, errors", leave=False):
        if records.value(case, row, "failed") is not None:
            continue
        try:
            if with_error and not records.find(case, "error", row=row.name):
                error = rotation_error(case.settings, row)
                records.add(case=case.key, quantity="error", row=row.name, value=error)
            if len(done) == rounds and (not row.trains or records.find(case, "memory", row=row.name)):
                continue
            for phase in PHASES:
                if phase == "training" and not row.trains:
                    continue
                runner = runners[row, phase] = Runner(case.settings, row, phase)
                for _ in range(warmup):
                    runner.step()
                if phase == "training" and not records.find(case, "memory", row=row.name):
                    records.add(case=case.key, quantity="memory", row=row.name, value=runner.peak_memory())
                runner.model.zero_grad(set_to_none=True)
        except (RuntimeError, TypeError) as error:
            # Out of memory, or an operation that the device lacks: the other rows are still of use.
            records.add(case=case.key, quantity="failed", row=row.name, value=f"{type(error).__name__}: {error}")
            for phase in PHASES:
                runners.pop((row, phase), None)
            gc.collect()

    waiting = [number for number in range(rounds) if number not in done]
    with tqdm(total=len(waiting) * len(runners), desc=f"{title}: {len(waiting)} rounds", leave=False) as progress:
        for number in waiting:
            for phase in PHASES:
                order = [key for key in runners if key[1] == phase]
                shift = number % max(len(order), 1)
                # No model always runs after the same other one.
                for key in order[shift:] + order[:shift]:
                    baseline = runners.get((Row.parse(BASELINE), phase))
                    fields = {} if baseline is None else {"baseline": baseline.seconds(steps)}
                    fields |= {"row": key[0].name, "round": number, "value": runners[key].seconds(steps)}
                    records.add(case=case.key, quantity=phase, **fields)
                    progress.update()


def ratios(records: Records, case: Case, row: Row, phase: str, clock: str) -> list[float]:
    """Time over that of `absolute`, of every round."""
    lines = records.steps(case, row, phase).values()
    return [line["value"][clock] / line["baseline"][clock] for line in lines if "baseline" in line]


def format_ratio(values: list[float], spread: bool = True) -> str:
    if not values:
        return "not measured"
    median = f"{statistics.median(values):.3f}"
    if not spread or len(values) < 2:
        return median
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{median} ({low:.3f} – {high:.3f})"


def format_rate(records: Records, case: Case, row: Row, phase: str) -> str:
    seconds = [line["value"]["wall"] for line in records.steps(case, row, phase).values()]
    return f"{case.settings.batch_size / statistics.median(seconds):.4g}" if seconds else "not measured"


def memory_over_baseline(records: Records, case: Case, row: Row) -> str:
    own, base = records.value(case, row, "memory"), records.value(case, Row.parse(BASELINE), "memory")
    return "not measured" if own is None or base is None else f"{100 * (own / base - 1):+.1f}%"


def encodings_table(records: Records, case: Case, clock: str) -> str:
    header = ["model", "inference, images/s", "ratio", "training, images/s", "ratio"]
    header += ["peak memory, MB", "over absolute", "error of rotations"]
    rows = []
    for row in case.rows:
        cells = [row.name]
        for phase in PHASES:
            if phase == "training" and not row.trains:
                cells += ["–"] * 2
                continue
            cells += [format_rate(records, case, row, phase), format_ratio(ratios(records, case, row, phase, clock))]
        memory, error = records.value(case, row, "memory"), records.value(case, row, "error")
        cells.append("–" if not row.trains else "not measured" if memory is None else f"{memory / 1e6:,.0f}")
        cells.append("–" if not row.trains else memory_over_baseline(records, case, row))
        cells.append("–" if error is None else f"{error:.0e}")
        rows.append(cells)
    return markdown(header, rows)


def growth_table(records: Records, cases: list[Case], clock: str) -> str:
    """One line per case; in each cell the ratios of inference and of training, and the memory over absolute."""
    names = list(dict.fromkeys(column(case, row) for case in cases for row in case.rows))
    header, rows = ["growing", "value", "absolute: inference, training, images/s", *names[1:]], []
    for case in cases:
        cells = {}
        for row in case.rows:
            parts = [format_ratio(ratios(records, case, row, "inference", clock), spread=False)]
            if row.trains:
                parts.append(format_ratio(ratios(records, case, row, "training", clock), spread=False))
                parts.append(memory_over_baseline(records, case, row))
            cells[column(case, row)] = " / ".join(parts)
        rates = (format_rate(records, case, case.rows[0], phase) for phase in PHASES)
        rows.append([case.axis, case.value, ", ".join(rates), *(cells.get(name, "–") for name in names[1:])])
    return markdown(header, rows)


def column(case: Case, row: Row) -> str:
    return row.name.rstrip("0123456789") if case.axis == "block_size" else row.name


def markdown(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, ["---"] * len(header), *rows])


def failures(records: Records) -> str:
    lines = [line for line in records.lines if line.get("quantity") == "failed"]
    return "\n".join(f"{line['row']} failed ({line['case'][:2]}): {line['value']}" for line in lines)


def growth_cases(settings: Settings, rows: list[Row], axes: list[str]) -> list[Case]:
    """Resolution once, twice and four times the given one, half to twice the depth, block sizes, and frames."""
    cases = []
    for axis in axes:
        if axis == "resolution":
            for factor in (1, 2, 4):
                size = factor * settings.image_size
                tokens = (size // settings.patch_size) ** 2
                cases.append(
                    Case(dataclasses.replace(settings, image_size=size), tuple(rows), axis, f"{tokens} tokens")
                )
        elif axis == "depth":
            layers = settings.num_hidden_layers
            for depth in (max(1, layers // 2), layers, 2 * layers):
                deeper = dataclasses.replace(settings, num_hidden_layers=depth)
                cases.append(Case(deeper, tuple(rows), axis, f"{depth} layers"))
        elif axis == "block_size":
            for size in BLOCK_SIZES:
                names = [BASELINE, f"comrope_ld{size}", f"liere{size}"]
                if any(row.kind == "folded" for row in rows):
                    names += [f"folded_{name}" for name in names[1:]]
                cases.append(Case(settings, tuple(map(Row.parse, names)), axis, f"b = {size}"))
        else:
            for frames in (4, 8, 16):
                video = dataclasses.replace(settings, num_frames=frames)
                cases.append(Case(video, tuple(rows), axis, f"{frames} frames"))
    return cases


def machine(device: str) -> dict:
    """What the measurements were made on and with."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {"transformers": transformers.__version__, "hf_liere": hf_liere.__version__}
    found = {"cpu": name, "cores": os.cpu_count(), "threads": torch.get_num_threads(), **versions}
    if device.startswith("cuda"):
        found["gpu"] = torch.cuda.get_device_name(device)
    elif device == "cpu":
        found["kernels"] = "C++" if cpu_kernels.is_available(torch.zeros(1), torch.float32, 2) else "none"
    return found


def parse_arguments(arguments: list[str] | None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", choices=("encodings", "growth"), default="encodings")
    parser.add_argument("--rows", nargs="+", metavar="MODEL", help="models, such as liere64 naive_liere8 (all)")
    parser.add_argument("--axes", nargs="+", choices=GROWTH_AXES, default=GROWTH_AXES, help="what grows (everything)")
    parser.add_argument("--folded", action="store_true", help="also models with folded rotations, at inference")
    parser.add_argument("--model_size", choices=SIZES, default="small")
    parser.add_argument("--num_hidden_layers", type=int, help="another depth than the model size's")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--image_size", type=int, default=224)
    parser.add_argument("--patch_size", type=int, default=16)
    parser.add_argument("--num_frames", type=int, help="video models, with this many frames")
    parser.add_argument("--device", help="such as cpu, cuda, cuda:1 (the accelerator, where there is one)")
    parser.add_argument("--dtype", choices=("float32", "float64", "bfloat16", "float16"), default="float32")
    parser.add_argument("--attn_implementation", default="sdpa")
    parser.add_argument("--compile", action="store_true", help="torch.compile every model")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=1, help="steps of each model before the first round (1)")
    parser.add_argument("--steps", type=int, help="steps per measurement (1 on CPU, 10 elsewhere)")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="of the ratios (wall); all are recorded")
    parser.add_argument("--threads", type=int, help="threads on CPU (PyTorch's choice)")
    parser.add_argument("--output", type=Path, help="json lines (outputs/speed-<time>.jsonl)")
    parser.add_argument("--resume", action="store_true", help="go on with an output that exists")
    options = parser.parse_args(arguments)
    for name in ("batch_size", "image_size", "patch_size", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: accepted are 1 and more")
    return options


def read_rows(options) -> list[Row]:
    names = options.rows
    if names is None:
        names = [*ENCODING_ROWS, *REFERENCE_ROWS] if options.table == "encodings" else GROWTH_ROWS
        if options.table == "encodings" and timm_installed() and options.num_frames is None:
            names = [*names, *TIMM_ROWS]
        if options.num_frames is not None:
            # A head of 64 channels cannot be divided among three axes.
            names = [name for name in names if name != "comrope_ap8"]
    if options.folded:
        names = [*names, *(f"folded_{row.name}" for row in map(Row.parse, names) if row.kind == "own" and row.learns)]
    names = [BASELINE, *(name for name in names if name != BASELINE)]
    return [Row.parse(name) for name in dict.fromkeys(names)]


def read_cases(options) -> list[Case]:
    device = options.device
    if device is None:
        device = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    settings = Settings(
        model_size=options.model_size,
        num_hidden_layers=options.num_hidden_layers or SIZES[options.model_size]["num_hidden_layers"],
        batch_size=options.batch_size,
        image_size=options.image_size,
        patch_size=options.patch_size,
        num_frames=options.num_frames,
        device=device,
        dtype=options.dtype,
        attn_implementation=options.attn_implementation,
        compile=options.compile,
    )
    rows = read_rows(options)
    cases = [Case(settings, tuple(rows))]
    if options.table == "growth":
        cases = growth_cases(settings, rows, options.axes)
    for case in cases:
        for row in case.rows:
            check_row(case.settings, row)
    return cases


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    transformers.logging.set_verbosity_error()
    if options.threads:
        torch.set_num_threads(options.threads)
    output = options.output or Path("outputs") / f"speed-{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
    interrupted = False
    try:
        cases = read_cases(options)
        settings = cases[0].settings
        records = Records(output, machine(settings.device), options.resume)
        steps = options.steps or (1 if settings.device == "cpu" else 10)
        try:
            for case in cases:
                measure(case, records, options.rounds, options.warmup, steps, options.table == "encodings")
                gc.collect()
        except KeyboardInterrupt:
            interrupted = True
    except BenchmarkError as error:
        print(f"benchmark_speed.py: {error}", file=sys.stderr)
        return 1
    print(", ".join(f"{name} {value}" for name, value in machine(settings.device).items()))
    print(", ".join(f"{name} {value}" for name, value in dataclasses.asdict(settings).items()))
    if options.table == "growth":
        table = growth_table(records, cases, options.clock)
    else:
        table = encodings_table(records, cases[0], options.clock)
    print(f"\n{table}\n\n{failures(records)}".rstrip())
    print(f"\n{'Interrupted; --resume --output' if interrupted else 'Every measurement is in'} {output}")
    return 130 if interrupted else 0


if __name__ == "__main__":
    # A scheduler ends jobs with SIGTERM, and jobs in the background ignore SIGINT: both shall leave a table.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
