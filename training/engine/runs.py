"""The run that all scripts share: prepare the output directory, train, evaluate, write records."""

import errno
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.numpy import save
from safetensors.torch import load_file
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import SAFE_WEIGHTS_NAME, logging

from hf_liere.errors import InputError, printable, printable_messages
from hf_liere.storage.client import HubError
from hf_liere.storage.saved_code import replace_file
from hf_liere.storage.saved_model import SavedModel, weights_digest
from training.common.arguments import RunArguments
from training.common.chance import describe_unlearned
from training.common.folders import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    EXAMPLES_FILE,
    WEIGHTS_FILE,
    files_of_run,
    last_complete_checkpoint,
    require_free,
    require_no_run,
)
from training.common.heap import keep_freed_memory
from training.common.messages import is_lost_worker, reason
from training.common.process_group import leave_process_group
from training.common.records import environment, remove_private, write_record
from training.engine.claims import claim, release
from training.engine.progress import quiet_libraries
from training.engine.pushing import fetch_checkpoint, warn_of_other_settings
from training.engine.saving import StoppedError, require_writable


logger = logging.get_logger(__name__)
# Full disk or quota, or file too large.
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def start(main: Callable[[], Any]) -> None:
    """Runs a script. Errors that users can correct are printed as one sentence without a traceback."""
    stopped = None
    keep_freed_memory()
    quiet_libraries()
    try:
        try:
            with printable_messages():
                main()
        except StoppedError as error:
            # All processes stop after the same step. The error's traceback keeps the trainer alive until here.
            stopped = error.code
        leave_process_group()
        if stopped is not None:
            sys.exit(stopped)
    except (InputError, HubError, FloatingPointError) as error:
        sys.exit(printable(f"error: {error}"))
    except (OSError, EOFError, RuntimeError) as error:
        if is_lost_worker(error):
            # A late SIGCHLD would raise again.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            sys.exit(printable(f"error: {reason(error)}."))
        if getattr(error, "errno", None) not in NO_SPACE:
            raise
        sys.exit(printable(f"error: {error.strerror}: {error.filename or 'a file'} could not be written."))
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def prepare_output_dir(args: RunArguments) -> str | None:
    """
    Claims the output directory for the run; returns the checkpoint to resume from, if any.

    Raises:
        InputError: if the directory contains or is that of another run, lacks the checkpoint to resume from or is not
            writable.
    """
    if args.n_gpu > 1:
        raise InputError(f"{args.n_gpu} GPUs in one process; accepted: torchrun, accelerate launch or one visible GPU.")
    checkpoint = _resumed_checkpoint(args)
    if args.process_index == 0:
        claim_folder(args)
    if args.resume_from_hub:
        with args.main_process_first(local=False, desc="fetching the checkpoint"):
            if args.process_index == 0:
                fetch_checkpoint(args)
        checkpoint = last_complete_checkpoint(args.output_dir)
        if checkpoint is None:
            raise InputError("--resume_from_hub: the first process fetched no checkpoint; see its message.")
    return checkpoint


def claim_folder(args: RunArguments) -> None:
    """
    Takes the output directory for a run, see [`claims.claim`], if it is writable and contains no other run;
    `overwrite_output_dir` deletes another run that has ended.

    Raises:
        InputError: naming the folder, its contents and what is accepted.
    """
    folder = Path(args.output_dir)
    require_writable(folder)
    claim(folder)
    try:
        _require_no_other_run(folder, args)
    except BaseException:
        release(folder)
        raise


def _require_no_other_run(folder: Path, args: RunArguments) -> None:
    if args.overwrite_output_dir and not args.resumes:
        for path in files_of_run(folder):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    elif not args.resumes:
        require_no_run(folder)
        require_free(folder)


def run(
    trainer: Trainer,
    checkpoint: str | None,
    model_name_or_path: str | None,
    input_size: Sequence[int] | None,
    described: dict[str, Any],
) -> dict[str, float]:
    """
    Trains and evaluates as the trainer's arguments request.

    Args:
        trainer: a trainer with data sets and `evaluation_seconds`. If its metrics have `examples`, the results of
            single examples are saved.
        checkpoint: the checkpoint to resume from, if any.
        input_size: size of the model's input, for the record; `None` if inputs have different sizes.
        described: dataclasses of arguments for the record, by name.

    Returns:
        The last metrics.
    """
    args, metrics = trainer.args, {}
    if trainer.is_world_process_zero():
        resolved = {name: vars(arguments) for name, arguments in described.items()}
        resolved |= {"model_name_or_path": model_name_or_path, "image_size": input_size}
        _record(trainer, checkpoint, resolved)
    if args.do_train:
        trainer.starts_new = model_name_or_path is None
        metrics = _train(trainer, checkpoint)
    if args.do_eval:
        metrics = trainer.evaluate()
        metrics["eval_samples"] = len(trainer.eval_dataset)
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
        if args.do_train and trainer.is_world_process_zero() and (unlearned := describe_unlearned(metrics)):
            logger.warning(unlearned)
        examples = getattr(trainer.compute_metrics, "examples", None)
        if examples and trainer.is_world_process_zero():
            replace_file(Path(args.output_dir) / EXAMPLES_FILE, save(examples))
    if args.push_to_hub:
        published = trainer.push_to_hub()
        if published is not None:
            print(f"Published: {published}")
    # DeepSpeed's hooks keep the model otherwise, and with it a process group.
    trainer.accelerator.free_memory()
    return metrics


def _record(trainer: Trainer, checkpoint: str | None, resolved: dict[str, Any]) -> None:
    """Writes the run's configuration and environment and, if it only evaluates, the digest of the weights."""
    args, name = trainer.args, resolved["model_name_or_path"]
    if name and Path(name).is_dir():
        # Only the last part of a folder is recorded, so a name with a slash is always a Hub name.
        resolved["model_name_or_path"] = Path(name).resolve().name
    resolved = remove_private(resolved | {"training": args.to_dict(), "model": trainer.model.config.to_diff_dict()})
    write_record(args.output_dir, CONFIG_FILE, resolved)
    if args.resume_from_hub:
        warn_of_other_settings(checkpoint, resolved)
    write_record(args.output_dir, ENVIRONMENT_FILE, environment())
    if not args.do_train:
        write_record(args.output_dir, WEIGHTS_FILE, {"sha256": _evaluated_digest(trainer.model.state_dict(), name)})


def _evaluated_digest(weights: dict[str, torch.Tensor], checkpoint: str | None) -> str:
    """The digest of the file of the checkpoint if it has these values, else of the weights themselves."""
    file = Path(checkpoint or "") / SAFE_WEIGHTS_NAME
    # Scripts evaluate weights in half precision in float32, which keeps their values.
    stored = load_file(file) if checkpoint and file.is_file() else {}
    same = stored.keys() == weights.keys() and all(
        torch.equal(weights[name].cpu(), stored[name].to(weights[name].dtype)) for name in stored
    )
    return weights_digest(stored if same else weights)


def _train(trainer: Trainer, checkpoint: str | None) -> dict[str, float]:
    """Trains and saves the model with its records; returns the training metrics."""
    metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
    # Trainer's rate counts evaluations during training as training time.
    training_seconds = max(metrics["train_runtime"] - trainer.evaluation_seconds, 1e-3)
    trained_images = metrics["train_samples_per_second"] * metrics["train_runtime"]
    metrics["train_images_per_second"] = round(trained_images / training_seconds, 1)
    metrics["parameters"] = sum(parameter.numel() for parameter in trainer.model.parameters())
    trainer.save_whole(trainer.save_finished)
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    if trainer.is_world_process_zero():
        folder, step = trainer.args.output_dir, trainer.state.global_step
        if trainer.leaves_whole_model:
            write_record(folder, WEIGHTS_FILE, {"sha256": SavedModel(folder).digest, "step": step})
    return metrics


def _resumed_checkpoint(args: RunArguments) -> str | None:
    """The checkpoint to resume from; `None` for a new run."""
    given = args.resume_from_checkpoint
    if not args.resumes:
        return None
    if not args.resumes_last:
        if not (Path(given) / TRAINER_STATE_NAME).is_file():
            raise InputError(
                f"--resume_from_checkpoint {given!r} is not a checkpoint of a run; accepted: `last` or its folder."
            )
        return given
    last = last_complete_checkpoint(args.output_dir)
    if last is None:
        raise InputError(f"--resume_from_checkpoint {given}: {args.output_dir!r} contains no complete checkpoint.")
    return last
