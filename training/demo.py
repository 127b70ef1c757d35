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

from PIL import Image
from tqdm.auto import tqdm

# Neither torch nor transformers, which the runs import: they start at once.
from training.common.folders import CONFIG_FILE, RESULTS_FILE, STATE_FILE, WEIGHTS_FILE, last_complete_checkpoint
from training.data.arrows import BAG_OF_ARROWS_ACCURACY, LABELS, Arrows


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=60_000, help="training images per encoding (60000)")
    parser.add_argument("--output_dir", type=Path, default=HERE.parent / "outputs" / "arrows")
    parser.add_argument(
        "--classify", type=Path, metavar="CHECKPOINT", help="only classify new images with a checkpoint"
    )
    parser.add_argument("--show", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.classify is not None or arguments.show:
        return show(arguments.output_dir, arguments.classify)
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
    (arguments.output_dir / "table.md").write_text(table + "\n", encoding="utf-8")
    if "liere8" in failed:
        return 1
    # A fresh process loads the checkpoint, as its users do.
    command = [sys.executable, __file__, "--show", "--output_dir", str(arguments.output_dir)]
    subprocess.run(command, check=True)
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
    """The time on two cores: four minutes for 60,000 images, 45 seconds of which the processes take to start."""
    seconds = 45 + 195 * images / 60_000
    return f"{seconds / 60:.0f} minutes" if seconds > 90 else f"{seconds:.0f} seconds"


def evaluated(images: int) -> int:
    """How many images each evaluation has, of which there are ten in training and two after it."""
    return min(max(images // 60, 250), 1000)


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
    flags += ["--max_train_samples", str(images), "--max_eval_samples", str(evaluated(images)), *RUNS[name][1]]
    flags += ["--warmup_steps", str(min(100, steps // 5)), "--lr_scheduler_kwargs", json.dumps(schedule)]
    flags += [word for flag in ("eval", "save", "logging") for word in (f"--{flag}_steps", str(every))]
    if is_same_run(output_dir, images) and last_complete_checkpoint(output_dir):
        flags += ["--resume_from_checkpoint", "last"]
    else:
        flags += ["--overwrite_output_dir"]
    return start_script(flags, log_file(name, folder), "w")


def start_evaluation(name: str, folder: Path, images: int) -> subprocess.Popen:
    flags = ["--model_name_or_path", str(folder / name), "--output_dir", str(larger_folder(folder, name)), "--do_eval"]
    flags += ["--dataset_name", "arrows", "--image_size", str(LARGER_SIZE), "--overwrite_output_dir"]
    flags += ["--max_eval_samples", str(evaluated(images)), "--per_device_eval_batch_size", "100"]
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
    return path.is_file() and read_json(path)["data"]["max_train_samples"] == images


def is_finished(output_dir: Path, images: int) -> bool:
    return is_same_run(output_dir, images) and (output_dir / RESULTS_FILE).is_file()


def is_evaluated(folder: Path, name: str) -> bool:
    """Whether exactly the weights of the finished run were evaluated on larger images."""
    if not (larger_folder(folder, name) / RESULTS_FILE).is_file():
        return False
    own, evaluated = (read_json(place / WEIGHTS_FILE) for place in (folder / name, larger_folder(folder, name)))
    return own["sha256"] == evaluated["sha256"]


def progress_bar(name: str, images: int) -> tqdm:
    total = step_count(images) * BATCH_SIZE
    bar = tqdm(total=total, desc=f"{RUNS[name][0]:<11}", unit="img", mininterval=1)
    bar.set_postfix_str("starting; moves with each tenth of the images")
    return bar


def show_progress(output_dir: Path, bar: tqdm) -> None:
    """Shows the progress recorded in the newest checkpoint, because runs print to their log files."""
    checkpoint = last_complete_checkpoint(output_dir)
    try:
        state = read_json(Path(checkpoint or output_dir) / STATE_FILE)
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
    result, state = read_json(folder / name / "all_results.json"), read_json(folder / name / STATE_FILE)
    result["larger"] = read_json(larger_folder(folder, name) / RESULTS_FILE)
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


def save_puzzles(folder: Path) -> None:
    """Saves images that no run was trained on, with the answers in their names."""
    folder.mkdir(parents=True, exist_ok=True)
    images = Arrows("test", PUZZLES)
    for index in range(PUZZLES):
        pixels, label = images[index]
        Image.fromarray(pixels.squeeze(-1)).save(folder / f"{index}_{LABELS[label]}.png")


def show(folder: Path, checkpoint: Path | None) -> int:
    """Prints answers of a checkpoint, by default those of LieRE8, which the pictures of the demo then show."""
    # It imports torch and transformers.
    from training.tasks.arrows.pictures import classify_new_images, draw_example, plot_accuracy

    if checkpoint is not None:
        classify_new_images(checkpoint)
        return 0
    histories = {
        label: {"color": color, "style": style, "history": read_result(folder, name)["history"]}
        for name, (label, _, color, style) in RUNS.items()
        if is_evaluated(folder, name)
    }
    plot_accuracy(histories, folder / "accuracy.png")
    said = classify_new_images(folder / "liere8")
    draw_example(said[0], folder / "example.png")
    print(f"\nAccuracy over training: {folder / 'accuracy.png'}")
    print(f"An image and the answer: {folder / 'example.png'}")
    return 0


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nInterrupted; the same command goes on.", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
