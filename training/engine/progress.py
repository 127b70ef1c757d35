"""
What a run prints while it trains: for each evaluation two figures, and on a terminal a bar. In a file, the pieces of
bars would stand between the lines.
"""

import sys
from typing import Any

import datasets
from huggingface_hub.utils import enable_progress_bars
from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback
from transformers.utils import logging


# The figure that tells most of an evaluation: the first of these that it has.
FIGURES = {
    "eval_accuracy": "accuracy {:.1%}",
    "eval_map": "mAP {:.1%}",
    "eval_perplexity": "perplexity {:.4g}",
    "eval_loss": "evaluation loss {:.4g}",
}


def quiet_libraries() -> None:
    """Turns off the bars of saving and loading, and where no terminal shows them, of downloads and data sets."""
    logging.disable_progress_bar()
    if sys.stderr.isatty():
        enable_progress_bars()
    else:
        datasets.disable_progress_bars()


def print_figures(trainer: Trainer) -> None:
    """Lets a trainer print what this module does, instead of all that is logged."""
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    if sys.stderr.isatty() and not trainer.args.disable_tqdm:
        trainer.add_callback(Bars)
    trainer.add_callback(Figures)


class Bars(ProgressCallback):
    """The bars of training and evaluation, without figures."""

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        pass


class Figures(TrainerCallback):
    """
    Prints a line for each evaluation in training, or for each log if there is none; with `--verbose` all that is
    logged. Whatever a run ends with is printed as a table elsewhere.
    """

    def __init__(self) -> None:
        self.is_training = False
        self.loss: float | None = None

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.is_training = True

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.is_training = False

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or not logs:
            return
        line = self.describe(logs, args.eval_strategy != "no")
        if args.verbose:
            shown = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in logs.items()}
            tqdm.write(str(shown))
        elif self.is_training and line:
            tqdm.write(f"epoch {logs['epoch']:.4g}: {line}")
        # Whoever follows a log file sees the line now.
        sys.stdout.flush()

    def describe(self, logs: dict[str, float], is_evaluated: bool) -> str:
        """The last loss and the figure of an evaluation; nothing of other logs in a run that is evaluated."""
        self.loss = logs.get("loss", self.loss)
        figure = next((text.format(logs[name]) for name, text in FIGURES.items() if name in logs), None)
        if figure is None and ("loss" not in logs or is_evaluated):
            return ""
        return ", ".join(filter(None, ["" if self.loss is None else f"loss {self.loss:.4g}", figure]))
