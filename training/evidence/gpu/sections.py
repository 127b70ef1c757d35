"""The sections of gpu_check.py: functions that yield Markdown and raise if a check fails."""

import copy
import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import hf_liere.tools.environment
from hf_liere.kernels import cuda
from hf_liere.plain import plain_layer
from hf_liere.rotation.grouped_rotation import Rotation
from training.evidence.gpu.comparisons import FIRST, HAS_KERNEL, OTHERS, WITH_KERNEL, measure_cases, switched
from training.evidence.gpu.graphs import graphs_table
from training.evidence.gpu.models import (
    ENCODINGS,
    CheckFailed,
    Settings,
    batch,
    build_model,
    largest_error,
    milliseconds,
    relative_error,
    step,
)
from training.evidence.gpu.patched import measure_patched
from training.evidence.gpu.privacy import describe_error
from training.evidence.reporting.markdown import markdown


ROOT = Path(__file__).resolve().parents[3]
# The tests that use a GPU if there is one. The last are transformers' own and need its sources.
TESTS = ("kernels/test_kernels.py", "kernels/test_exponential_kernels.py", "kernels/test_self_check.py")
TESTS += ("test_environment.py", "test_common.py")
QUICK_TESTS = ("kernels/test_kernels.py", "-k", "without_triton")
# The kernels that models of the speed sections run: types, block sizes, and widths of a head.
FIRST_KERNELS = list(itertools.product((torch.bfloat16, torch.float32), (2, 8, 64, 4), (64,)))
# Sizes of blocks whose exponentials and eigenbases have a kernel.
EXPONENTIALS = (8, 4, 16)
# Multiples of the initial norm.
NORMS = (1, 10)
# Accepted errors of float32: of rotations and of gradients of generators, which sum over tokens, beside float64; of the
# gradients of compiled models beside eager ones.
ROTATION_ERROR, GENERATOR_ERROR, GRADIENT_ERROR = 1e-6, 1e-4, 1e-3


def environment(settings: Settings) -> Iterator[str]:
    """Prints as `hf-liere env`."""
    if shutil.which("nvidia-smi"):
        query = "--query-gpu=name,driver_version,memory.total,power.limit,clocks.max.sm"
        yield "```text\n" + _run(["nvidia-smi", query, "--format=csv"]).strip() + "\n```\n"
    yield hf_liere.tools.environment.report(as_json=False)


def self_check(settings: Settings) -> Iterator[str]:
    """The Triton kernels of the speed sections compared with plain operations."""
    yield from _check_kernels(settings, FIRST_KERNELS, EXPONENTIALS)


def kernels(settings: Settings) -> Iterator[str]:
    """All other Triton kernels compared with plain operations."""
    cases = itertools.product(cuda.TYPES, (2, 4, 5, 8, 16, 32, 64), (64, 128))
    yield from _check_kernels(settings, [case for case in cases if case not in FIRST_KERNELS], ())


def _check_kernels(
    settings: Settings, cases: list[tuple[torch.dtype, int, int]], exponentials: tuple[int, ...]
) -> Iterator[str]:
    if settings.device == "cpu":
        # Triton's interpreter takes seconds, and multiplies the bit patterns of bfloat16 matrices.
        cases = [case for case in cases if case[0] != torch.bfloat16 and case[1] in (2, 8)][-2:]
        exponentials = exponentials[:1]
    rows, failed = [], []
    for dtype, block_size, head_dim in cases:
        states = torch.zeros(1, 1, 1, head_dim, dtype=dtype, device=settings.device)
        if reason := cuda.refusal(states, dtype, block_size):
            failed.append(reason)
    with switched(WITH_KERNEL):
        for block_size in exponentials if HAS_KERNEL else ():
            generators = torch.zeros(block_size, block_size, device=settings.device)
            if reason := cuda.refusal(generators, torch.float32, block_size, "batched_rotations"):
                failed.append(reason)
    for case, outcome in cuda.self_check.outcomes.items():
        error = "–" if outcome.error is None else f"{outcome.error:.3f}"
        rows.append([str(case), outcome.failure or "equal", error, f"{outcome.seconds:.1f} s"])
        settings.add(section="kernels", row=str(case), failed=outcome.failure, error=outcome.error)
    yield markdown(["case", "outcome", "largest error as a fraction of what rounding explains", "time"], rows)
    if failed:
        raise CheckFailed(f"{len(failed)} cases are refused, the first because: {failed[0]}")


def tests(settings: Settings) -> Iterator[str]:
    """The tests that use a GPU."""
    chosen = [f"tests/{QUICK_TESTS[0]}", *QUICK_TESTS[1:]] if settings.quick else [f"tests/{name}" for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "-rfEs", *chosen]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line.rstrip())
    # Skipped and failed tests, and the counts.
    start = next((number for number, line in enumerate(lines) if "short test summary" in line), len(lines) - 1)
    yield "\n".join([f"`pytest {' '.join(chosen)}`\n", "```text", *lines[max(start, 0) :], "```"])
    if process.wait():
        raise CheckFailed(f"pytest ended with exit code {process.returncode}.")


def precision(settings: Settings) -> Iterator[str]:
    """Rotations in float32, and gradients of their generators, beside float64 on the CPU."""
    rows, wrong = [], []
    cases = [(encoding, factor, None) for encoding in ENCODINGS for factor in NORMS]
    if HAS_KERNEL and settings.device == "cuda":
        cases += [(encoding, factor, WITH_KERNEL) for encoding in ("liere", "comrope_ld") for factor in NORMS]
    for encoding, factor, switch in cases:
        model = build_model(settings, encoding, num_hidden_layers=2)
        if factor != 1 and not list(model.rotary_parameters()):
            continue
        with torch.no_grad():
            for _, parameter in model.rotary_parameters():
                parameter.mul_(factor)
        gradient_error = None
        with switched(switch):
            rotation_error = _rotation_error(settings, model)
            if list(model.rotary_parameters()):
                inputs = batch(Settings(settings.device, quick=True), model.config)
                gradient_error = _gradient_error(settings, model, inputs)
        name = encoding + (", with the kernel" if switch else "")
        name += "" if factor == 1 else f", {factor} times its initial norm"
        rows.append([name, f"{rotation_error:.1e}", "–" if gradient_error is None else f"{gradient_error:.1e}"])
        settings.add(section="precision", row=name, rotation_error=rotation_error, gradient_error=gradient_error)
        # NaN compares as false.
        if not (rotation_error < ROTATION_ERROR and (gradient_error or 0) < GENERATOR_ERROR):
            wrong.append(name)
    yield markdown(["encoding", "largest error of an entry of R(p)", "of the generators' gradient, relative"], rows)
    if wrong:
        raise CheckFailed(f"{', '.join(wrong)}: accepted are {ROTATION_ERROR} and {GENERATOR_ERROR}.")


@torch.no_grad()
def _rotation_error(settings: Settings, model) -> float:
    """The largest error of rotations in the first and last layer."""
    config, error = model.config, 0.0
    parameters = {name.split(".")[-1]: parameter for name, parameter in model.rotary_parameters()}
    positions = model.liere.grid_positions(config.train_grid, model.device)
    with settings.accelerated():
        rotations: list[Rotation] = list(model.liere.rotations(positions))
    for layer in (0, config.num_hidden_layers - 1):
        expected = plain_layer(config, config.num_axes, parameters, layer).rotations(positions.coordinates.cpu())[0]
        found = rotations[layer].matrices().cpu()  # (1, heads or 1, N, blocks, b, b)
        error = max(error, (found - expected).abs().max().item())
    return error


def _gradient_error(settings: Settings, model, inputs: dict[str, torch.Tensor]) -> float:
    exact = copy.deepcopy(model).cpu().double()
    with settings.accelerated():
        step(model, inputs)
    step(exact, {"pixel_values": inputs["pixel_values"].cpu().double(), "labels": inputs["labels"].cpu()})
    pairs = zip(model.rotary_parameters(), exact.rotary_parameters())
    return max(relative_error(found.grad, expected.grad) for (_, found), (_, expected) in pairs)


def speed(settings: Settings) -> Iterator[str]:
    """Time and peak memory of the models that the goals name, beside transformers' ViT."""
    measure_cases(settings, "speed", FIRST)
    yield _failures(settings, "speed")


def patched(settings: Settings) -> Iterator[str]:
    """A patched DINOv2 and a patched Llama beside LoRA."""
    measure_patched(settings, "patched")
    yield _failures(settings, "patched")


def speed_others(settings: Settings) -> Iterator[str]:
    """Time and peak memory at other sizes, in float32, at inference and compiled."""
    measure_cases(settings, "speed_others", OTHERS)
    yield _failures(settings, "speed_others")


def _failures(settings: Settings, section: str) -> str:
    """
    The text of a section whose models are in the record.

    Raises:
        CheckFailed: if models failed but for want of memory.
    """
    lines = [line for line in settings.lines() if line.get("section") == section and "failed" in line]
    if failed := [f"{x['row']}: {x['failed']}" for x in lines if not x["failed"].startswith("OutOfMemoryError")]:
        raise CheckFailed(f"{len(failed)} models failed: {'; '.join(failed)}")
    return "The tables are above."


def graphs(settings: Settings) -> Iterator[str]:
    """Training steps of every encoding in CUDA graphs, captured and by torch.compile."""
    text, wrong = graphs_table(settings)
    yield text
    if wrong:
        raise CheckFailed(f"Failed: {', '.join(wrong)}.")


def attention(settings: Settings) -> Iterator[str]:
    """Attention implementations: outputs, gradients and time."""
    model = build_model(settings, "liere")
    inputs, results, wrong = batch(settings, model.config), {}, []
    exact = copy.deepcopy(model)
    exact.set_attn_implementation("eager")
    expected = _outputs_and_gradient(exact, inputs, torch.float32)
    rows = []
    for name, missing in _attention_implementations(settings):
        if missing:
            rows.append([name, missing, "–", "–"])
            continue
        print(name, flush=True)
        tested = copy.deepcopy(model)
        try:
            tested.set_attn_implementation(name)
            found = _outputs_and_gradient(tested, inputs, settings.half)
            results[name] = [relative_error(*pair) for pair in zip(found, expected)]
            time = milliseconds(settings, lambda tested=tested: step(tested, inputs, settings.half))
        except Exception as error:
            rows.append([name, describe_error(error), "–", "–"])
            wrong.append(name)
            continue
        # Half types may have about the errors of eager attention.
        accepted = [max(1e-4, 3 * error) for error in results["eager"]]
        agrees = all(error <= limit for error, limit in zip(results[name], accepted))
        wrong += [] if agrees else [name]
        errors = " and ".join(f"{error:.1e}" for error in results[name])
        rows.append([name, "agrees" if agrees else "differs", errors, f"{time:.1f} ms"])
    header = ["implementation", "outcome", "relative errors of logits and of q_proj's gradient", "forward and backward"]
    yield f"LieRE8, batch {settings.batch_size}, {settings.half}, beside eager attention in float32:\n"
    yield markdown(header, rows)
    if wrong:
        raise CheckFailed(f"{', '.join(wrong)} failed or differ.")


def _attention_implementations(settings: Settings) -> Iterator[tuple[str, str | None]]:
    """Names of implementations, each with the reason if it cannot run."""
    on_gpu = None if settings.device == "cuda" else "not run: needs a GPU"

    def needs(package):
        return on_gpu or (None if importlib.util.find_spec(package) else f"not run: {package} is not installed")

    yield from (("eager", None), ("sdpa", None))
    # Compiling takes a minute on a CPU.
    yield "flex_attention", on_gpu
    yield "flash_attention_2", needs("flash_attn")
    yield "kernels-community/flash-attn2", needs("kernels")


def _outputs_and_gradient(model, inputs, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    outputs = step(model, inputs, dtype)
    gradient = model.liere.layers[0].attention.q_proj.weight.grad.clone()
    model.zero_grad(set_to_none=True)
    return outputs.logits, gradient


def compilation(settings: Settings) -> Iterator[str]:
    """torch.compile, forward and backward, beside eager execution."""
    rows, wrong = [], []
    for encoding in list(ENCODINGS)[1:4]:
        print(encoding, flush=True)
        model = build_model(settings, encoding)
        inputs = batch(settings, model.config)
        # Inductor takes a minute on a CPU.
        compiled = torch.compile(model, backend="aot_eager" if settings.device == "cpu" else "inductor")
        gradients, losses = [], []
        for call in (model, compiled):
            losses.append(step(call, inputs).loss)
            gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
            model.zero_grad(set_to_none=True)
        errors = relative_error(losses[1], losses[0]), largest_error(*gradients)
        if not max(errors) < GRADIENT_ERROR:
            wrong.append(encoding)
        times = [
            milliseconds(settings, lambda call=call, inputs=inputs: step(call, inputs, settings.half))
            for call in (model, compiled)
        ]
        rows.append([encoding, *(f"{error:.1e}" for error in errors), *(f"{time:.1f} ms" for time in times)])
    yield f"Errors in float32; times in {settings.half}, batch {settings.batch_size}:\n"
    yield markdown(["encoding", "error of the loss", "of gradients", "eager step", "compiled step"], rows)
    if wrong:
        raise CheckFailed(f"{', '.join(wrong)}: accepted are errors below {GRADIENT_ERROR}.")


def distributed(settings: Settings) -> Iterator[str]:
    """A step of DDP in two processes or more beside that of one, and a short training run on all GPUs."""
    count = torch.cuda.device_count() if settings.device == "cuda" else 2
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    # A single GPU is shared by two.
    processes = max(2, count)
    yield f"{processes} processes.\n"
    step_command = [f"--nproc_per_node={processes}", "-m", "training.evidence.gpu.distributed_step", settings.device]
    yield _run([*launcher, *step_command]).strip()
    torchrun = [*launcher, f"--nproc_per_node={count}"]
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        "training/recipes/accelerate/ddp.yaml",
    ]
    launch += ["--num_processes", str(count)]
    if settings.device == "cpu" or count == 1:
        # The file is for several GPUs.
        launch = torchrun
    flags = "training/recipes/arrows_mini.yaml --max_steps 6 --logging_steps 2 --max_eval_samples 100".split()
    flags += ["--total_train_batch_size", str(8 * count), "--eval_strategy", "no", "--save_strategy", "no"]
    with tempfile.TemporaryDirectory() as folder:
        command = [*launch, "training/image_classification.py", *flags, "--output_dir", f"{folder}/run"]
        printed = _run(command)
    losses = [line for line in printed.splitlines() if ": loss " in line]
    yield "\nA training run:\n\n```text\n" + "\n".join(losses) + "\n```"
    if not losses or any(word in "".join(losses).lower() for word in ("nan", "inf")):
        raise CheckFailed("The training run logged no finite loss.")


def _run(command: list[str], **variables: str) -> str:
    """
    The output of a command. Its stderr is that of this process.

    Raises:
        CheckFailed: if it fails.
    """
    environment = {**os.environ, **variables}
    process = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    if process.returncode:
        raise CheckFailed(
            f"{' '.join(command[1:4])} … ended with exit code {process.returncode}. {process.stdout[-2000:]}"
        )
    return process.stdout


# In order of worth: whether results are right, what the goals name, what is new on a GPU, and last what other machines
# check too.
SECTIONS: dict[str, Callable[[Settings], Iterator[str]]] = {
    section.__name__: section
    for section in (
        *(environment, self_check, precision, speed, patched, graphs, speed_others),
        *(attention, compilation, kernels, distributed, tests),
    )
}
# Those that run as users run models, with TF32 where PyTorch has it by default.
TIMED = ("speed", "patched", "graphs", "speed_others")
# The page or the form to which the text of a section belongs.
DESTINATIONS = dict.fromkeys(SECTIONS, "a bug report, if it did not pass")
TIMES = "docs/reference/speed_tables.md, section GPUs"
DESTINATIONS |= dict.fromkeys(("environment", "self_check", "precision", *TIMED), TIMES)
DESTINATIONS |= dict.fromkeys(("attention", "compilation"), "docs/deploy.md, section torch.compile")
DESTINATIONS["distributed"] = "docs/training.md, section Several GPUs and machines"
