"""Trains four position encodings on the arrows task in the same way, and compares them.

    python training/demo.py                  # less than four minutes on two cores
    python training/demo.py --images 5120    # a quick look at whether everything runs

Every model is trained on puzzles of 108 px and evaluated on new puzzles of that size and of 168 px, which have more
patches. The results are in outputs/arrows: checkpoints, accuracy.png, example.png, table.md, and puzzles/, images for
`hf-liere predict` and `hf-liere inspect`. An interrupted demo resumes when started again. The exit code is not zero
if a run failed or LieRE did no better than counting arrows.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import matplotlib
import torch
from matplotlib import pyplot
from PIL import Image
from tqdm.auto import tqdm
from transformers import AutoImageProcessor, AutoModelForImageClassification
from transformers.utils.logging import disable_progress_bar

import hf_liere  # noqa: F401 (registers liere_vit with the Auto classes)
from hf_liere.storage.saved_model import SavedModel
from hf_liere.tools.hub.checked_facts import RESULTS_FILE
from training.common.records import CONFIG_FILE, WEIGHTS_FILE, save_figure, write_text
from training.data.arrows import BAG_OF_ARROWS_ACCURACY, LABELS, Arrows
from training.engine.saving import last_complete_checkpoint


matplotlib.use("Agg")
HERE = Path(__file__).resolve().parent
BATCH_SIZE = 64
TRAINED_SIZE, LARGER_SIZE = 108, 168
# Okabe and Ito's colours, distinguishable with any colour vision; line styles help in black and white.
RUNS = {
    "absolute": ("Absolute", ["--position_encoding", "absolute"], "#000000", ":"),
    "rope_mixed": ("RoPE-Mixed", ["--position_encoding", "rope_mixed"], "#E69F00", "--"),
    "liere8": ("LieRE8", ["--position_encoding", "liere", "--block_size", "8"], "#0072B2", "-"),
    "comrope_ld": ("ComRoPE-LD", ["--position_encoding", "comrope_ld"], "#009E73", "-."),
}
RUNS_AT_ONCE = 2
PUZZLES = 8
EVALUATED = 2000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=60_000, help="training images per encoding (60000)")
    parser.add_argument("--output_dir", type=Path, default=HERE.parent / "outputs" / "arrows")
    parser.add_argument(
        "--classify", type=Path, metavar="CHECKPOINT", help="only classify new images with a checkpoint"
    )
    arguments = parser.parse_args()
    if arguments.classify is not None:
        return classify_new_images(arguments.classify)
    if arguments.images < BATCH_SIZE:
        parser.error(f"--images {arguments.images}: accepted are {BATCH_SIZE} (one batch) and more")

    for number in (signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])):
        signal.signal(number, end)
    start = time.perf_counter()
    print(
        f"Training {len(RUNS)} models on {arguments.images:,} images each, {RUNS_AT_ONCE} at a time. On two cores this "
        f"takes about {estimate(arguments.images)}. Nothing is downloaded; the logs are in {arguments.output_dir}.",
        flush=True,
    )
    save_puzzles(arguments.output_dir / "puzzles")
    failed = train_and_evaluate(arguments.output_dir, arguments.images)
    results = {name: read_result(arguments.output_dir, name) for name in RUNS if name not in failed}
    table = format_table(results)
    print(f"\n{table}\n")
    write_text(arguments.output_dir / "table.md", table + "\n")
    plot_accuracy(results, arguments.output_dir / "accuracy.png")
    if "liere8" in failed:
        return 1
    draw_example(arguments.output_dir / "liere8", arguments.output_dir / "example.png")
    print(f"Accuracy over training: {arguments.output_dir / 'accuracy.png'}")
    print(f"An image and the answer: {arguments.output_dir / 'example.png'}\n", flush=True)
    # A fresh process loads the checkpoint, as its users do.
    subprocess.run([sys.executable, __file__, "--classify", str(arguments.output_dir / "liere8")], check=True)
    checkpoint, puzzles = arguments.output_dir / "liere8", arguments.output_dir / "puzzles"
    print(f"What it says about an image: hf-liere predict {checkpoint} {puzzles / '*.png'}")
    print(f"What it has learned and where it looks: hf-liere inspect {checkpoint} --dataset {puzzles} --output REPORT")
    print("Side by side in the browser: python training/app.py")
    print(f"\nFinished after {time.perf_counter() - start:.0f} s.")
    if results["liere8"]["eval_accuracy"] <= BAG_OF_ARROWS_ACCURACY:
        print(
            f"LieRE8 did not beat counting arrows, {BAG_OF_ARROWS_ACCURACY:.1%}; {arguments.images} images are too few."
        )
        return 1
    return int(bool(failed))


def end(number: int, frame: FrameType | None) -> None:
    """Ends on a signal as on Ctrl-C: runs save a checkpoint and end before this process does."""
    print("\nEnded by a signal; the same command goes on.", file=sys.stderr)
    sys.exit(128 + number)


def estimate(images: int) -> str:
    """The time on two cores: four minutes for 60,000 images, half a minute of which any number of images takes."""
    seconds = 30 + 210 * images / 60_000
    return f"{seconds / 60:.0f} minutes" if seconds > 90 else f"{seconds:.0f} seconds"


def train_and_evaluate(folder: Path, images: int) -> list[str]:
    """Runs what is not finished, two runs at a time with one thread each; returns the names of failed runs."""
    folder.mkdir(parents=True, exist_ok=True)
    waiting = list(unfinished_runs(folder, images))
    running: dict[str, tuple[Callable, subprocess.Popen]] = {}
    bars: dict[str, tqdm] = {}
    failed = []
    try:
        while waiting or running:
            while waiting and len(running) < RUNS_AT_ONCE:
                name, start = waiting.pop(0)
                running[name] = start, start(name, folder, images)
                if start is start_training:
                    bars[name] = progress_bar(name, images)
            time.sleep(1)
            for name, (start, process) in list(running.items()):
                if start is start_training:
                    show_progress(folder / name, bars[name])
                if process.poll() is None:
                    continue
                del running[name]
                if process.returncode:
                    failed.append(name)
                    log = log_file(name, folder).read_text(encoding="utf-8").splitlines()[-15:]
                    print(f"The run {name} failed with code {process.returncode}:", *log, sep="\n    ")
                elif start is start_training:
                    tqdm.write(f"{RUNS[name][0]} is trained and waits for its evaluation at {LARGER_SIZE} px.")
                    waiting.insert(0, (name, start_evaluation))
                if start is start_training:
                    bars[name].close()
    finally:
        stop([process for _, process in running.values()])
    return failed


def unfinished_runs(folder: Path, images: int) -> Iterator[tuple[str, Callable]]:
    """Names of runs, each with the function that starts its next step."""
    for name in RUNS:
        if not is_finished(folder / name, images):
            yield name, start_training
        elif not is_evaluated(folder, name):
            yield name, start_evaluation
        else:
            print(f"{name} is finished already.")


def stop(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        # A terminated run saves a checkpoint before it ends.
        process.wait()


def start_training(name: str, folder: Path, images: int) -> subprocess.Popen:
    output_dir, steps = folder / name, step_count(images)
    every = max(steps // 10, 1)
    schedule = {"num_decay_steps": steps // 5, "decay_type": "linear"}
    flags = [str(HERE / "recipes" / "arrows_mini.yaml"), "--output_dir", str(output_dir)]
    flags += ["--max_train_samples", str(images), *RUNS[name][1]]
    flags += ["--warmup_steps", str(min(100, steps // 5)), "--lr_scheduler_kwargs", json.dumps(schedule)]
    flags += [word for flag in ("eval", "save", "logging") for word in (f"--{flag}_steps", str(every))]
    if is_same_run(output_dir, images) and last_complete_checkpoint(output_dir):
        flags += ["--resume_from_checkpoint", "last"]
    else:
        flags += ["--overwrite_output_dir"]
    return start_script(flags, log_file(name, folder), "w")


def start_evaluation(name: str, folder: Path, images: int) -> subprocess.Popen:
    flags = ["--model_name_or_path", str(folder / name), "--output_dir", str(larger_folder(folder, name)), "--do_eval"]
    flags += ["--dataset_name", "arrows", "--image_size", str(LARGER_SIZE), "--max_eval_samples", str(EVALUATED)]
    flags += ["--per_device_eval_batch_size", "100", "--overwrite_output_dir"]
    return start_script(flags, log_file(name, folder), "a")


def start_script(flags: list[str], log: Path, mode: str) -> subprocess.Popen:
    command = [sys.executable, str(HERE / "image_classification.py"), *flags]
    with open(log, mode, encoding="utf-8") as output:
        return subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )


def log_file(name: str, folder: Path) -> Path:
    return folder / f"{name}.log"


def larger_folder(folder: Path, name: str) -> Path:
    """The folder of a run's evaluation on larger images."""
    return folder / f"{name}_at_{LARGER_SIZE}"


def step_count(images: int) -> int:
    return -(-images // BATCH_SIZE)


def is_same_run(output_dir: Path, images: int) -> bool:
    path = output_dir / CONFIG_FILE
    return path.is_file() and SavedModel(path.parent).read_json(path.name)["data"]["max_train_samples"] == images


def is_finished(output_dir: Path, images: int) -> bool:
    return is_same_run(output_dir, images) and (output_dir / RESULTS_FILE).is_file()


def is_evaluated(folder: Path, name: str) -> bool:
    """Whether exactly the weights of the finished run were evaluated on larger images."""
    if not (larger_folder(folder, name) / RESULTS_FILE).is_file():
        return False
    own, evaluated = (
        SavedModel(place).read_json(WEIGHTS_FILE)["sha256"] for place in (folder / name, larger_folder(folder, name))
    )
    return own == evaluated


def progress_bar(name: str, images: int) -> tqdm:
    total = step_count(images) * BATCH_SIZE
    bar = tqdm(total=total, desc=f"{RUNS[name][0]:<11}", unit="img", mininterval=1)
    bar.set_postfix_str("starting; moves with each tenth of the images")
    return bar


def show_progress(output_dir: Path, bar: tqdm) -> None:
    """Shows the progress recorded in the newest checkpoint, because runs print to their log files."""
    checkpoint = last_complete_checkpoint(output_dir)
    try:
        state = json.loads((Path(checkpoint or output_dir) / "trainer_state.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        # The file does not exist yet or is being written.
        return
    accuracies = [entry["eval_accuracy"] for entry in state["log_history"] if "eval_accuracy" in entry]
    if accuracies:
        bar.set_postfix_str(f"accuracy {accuracies[-1]:.1%}", refresh=False)
    bar.update(state["global_step"] * BATCH_SIZE - bar.n)


def read_result(folder: Path, name: str) -> dict:
    """
    The last metrics of a run. `larger` contains those with larger images, `history` pairs of images seen and accuracy.
    """
    saved = SavedModel(folder / name)
    result, state = saved.read_json("all_results.json"), saved.read_json("trainer_state.json")
    result["larger"] = SavedModel(larger_folder(folder, name)).read_json(RESULTS_FILE)
    result["history"] = sorted(
        {
            entry["step"] * BATCH_SIZE: entry["eval_accuracy"]
            for entry in state["log_history"]
            if "eval_accuracy" in entry
        }.items()
    )
    return result


def format_table(results: dict[str, dict]) -> str:
    sizes = [f"accuracy at {size} px (95% interval)" for size in (TRAINED_SIZE, LARGER_SIZE)]
    lines = [f"| encoding | parameters | {' | '.join(sizes)} |", "|---|---:|---:|---:|"]
    for name, result in results.items():
        lines.append(
            f"| {RUNS[name][0]} | {result['parameters']:,} | {accuracy(result)} | {accuracy(result['larger'])} |"
        )
    # Its accuracy depends only on the number of arrows, which is the same for any size.
    lines.append(f"| counting arrows | 0 | {BAG_OF_ARROWS_ACCURACY:.1%} | {BAG_OF_ARROWS_ACCURACY:.1%} |")
    return "\n".join(lines)


def accuracy(metrics: dict) -> str:
    interval = f"{metrics['eval_accuracy_low']:.1%} – {metrics['eval_accuracy_high']:.1%}"
    return f"{metrics['eval_accuracy']:.1%} ({interval})"


def plot_accuracy(results: dict[str, dict], path: Path) -> None:
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for name, result in results.items():
        label, _, color, style = RUNS[name]
        images, accuracies = zip(*result["history"])
        axes.plot(images, [100 * accuracy for accuracy in accuracies], style, color=color, label=label, linewidth=2)
    axes.axhline(100 * BAG_OF_ARROWS_ACCURACY, color="#777777", linewidth=1, label="counting arrows")
    axes.axhline(100 / len(LABELS), color="#BBBBBB", linewidth=1, linestyle="--", label="chance")
    axes.set(xlabel="training images seen", ylabel="accuracy on new images (%)", ylim=(0, 102))
    axes.set_title("Which way does the arrow point that the Y points at?")
    axes.xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,.0f}"))
    axes.legend(loc="lower right", ncols=2, frameon=False)
    save_figure(figure, path, dpi=150)
    pyplot.close(figure)


def draw_example(checkpoint: Path, path: Path) -> None:
    images = Arrows("test", 1)
    image, label = images[0]
    answer = predict(checkpoint, images)[0]
    figure, axes = pyplot.subplots(figsize=(4, 4.4), layout="constrained")
    axes.imshow(image.squeeze(-1), cmap="gray", interpolation="nearest")
    axes.set(xticks=[], yticks=[])
    axes.set_title(f"The Y points at an arrow that points {LABELS[label]}.\nLieRE8 says: {answer}.")
    save_figure(figure, path, dpi=150)
    pyplot.close(figure)


def save_puzzles(folder: Path) -> None:
    """Saves images that no run was trained on, with the answers in their names."""
    folder.mkdir(parents=True, exist_ok=True)
    images = Arrows("test", PUZZLES)
    for index in range(PUZZLES):
        pixels, label = images[index]
        Image.fromarray(pixels.squeeze(-1)).save(folder / f"{index}_{LABELS[label]}.png")


def predict(checkpoint: Path, images: Arrows) -> list[str]:
    """Predictions of a saved classifier for arrows images, loaded like any checkpoint of the Hub."""
    disable_progress_bar()
    model = AutoModelForImageClassification.from_pretrained(checkpoint).eval()
    processor = AutoImageProcessor.from_pretrained(checkpoint)
    pictures = [Image.fromarray(images[index][0].squeeze(-1)).convert("RGB") for index in range(len(images))]
    with torch.no_grad():
        logits = model(**processor(pictures, return_tensors="pt")).logits
    return [model.config.id2label[number] for number in logits.argmax(dim=-1).tolist()]


def classify_new_images(checkpoint: Path) -> int:
    images = Arrows("test", 200)
    said = predict(checkpoint, images)
    truth = [LABELS[images[index][1]] for index in range(len(images))]
    for index in range(5):
        verdict = "right" if said[index] == truth[index] else f"wrong, it is {truth[index]}"
        print(f"New image {index}: the model says {said[index]}, which is {verdict}.")
    right = sum(answer == correct for answer, correct in zip(said, truth))
    print(f"A fresh process with {checkpoint.name} got {right} of {len(truth)} new images right.")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nInterrupted; the same command goes on.", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
