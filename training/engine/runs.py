"""What every script does once its data and model are known: train, evaluate, and leave records of both."""

import errno
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file
from transformers import Trainer

from hf_liere.storage.client import HubError
from hf_liere.storage.saved_weights import saved_weights_digest, weights_digest
from training.engine.arguments import InputError, RunArguments
from training.engine.checkpoints import last_complete_checkpoint, require_free, require_writable
from training.engine.hub import fetch_checkpoint, warn_of_other_settings
from training.engine.records import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    WEIGHTS_FILE,
    claim_output_dir,
    environment,
    portable,
    write_record,
)


EXAMPLES_FILE = "eval_examples.safetensors"
# What a system says when a file cannot grow any more.
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def start(main: Callable[[], Any]) -> None:
    """Runs a script from the command line: what its user can mend is told in a sentence, without a traceback."""
    try:
        main()
    except (InputError, HubError, FloatingPointError) as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        sys.exit(f"error: {error.strerror}: {error.filename or 'a file'} could not be written.")
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def claim(args: RunArguments) -> str | None:
    """
    Makes sure that the run can be made and overwrites no other; the checkpoint that it goes on from, if any.

    Raises:
        InputError: if the output directory holds another run, or not the checkpoint to go on from, or is not writable.
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
            raise InputError("--resume_from_hub: the first process fetched no checkpoint, and says why.")
    return checkpoint


def claim_folder(args: RunArguments, besides: tuple[str, ...] = ()) -> None:
    """
    Makes sure that a run can write into its folder and that it is nobody else's.

    Args:
        besides: names that may be there already.

    Raises:
        InputError: naming the folder, what it holds and what is accepted.
    """
    claim_output_dir(args)
    if not args.overwrite_output_dir and not args.resume_from_checkpoint:
        require_free(args.output_dir, besides)
    require_writable(args.output_dir)


def run(
    trainer: Trainer,
    checkpoint: str | None,
    model_name_or_path: str | None,
    input_size: Sequence[int],
    described: dict[str, Any],
) -> dict[str, float]:
    """
    Trains and evaluates as the trainer's arguments say.

    Args:
        trainer: one with datasets, `evaluation_seconds` and, to keep the results of single examples, metrics that hold
            them as `examples`.
        checkpoint: where to go on from.
        input_size: sizes of the model's input in this run, for the record.
        described: dataclasses of arguments for the record, by name.

    Returns:
        The last metrics.
    """
    args = trainer.args
    if trainer.is_world_process_zero():
        resolved = {name: vars(arguments) for name, arguments in described.items()}
        if model_name_or_path and Path(model_name_or_path).is_dir():
            # By its last part, so that a name with a slash is one of the Hub.
            model_name_or_path = Path(model_name_or_path).resolve().name
        resolved |= {"training": args.to_dict(), "model": trainer.model.config.to_diff_dict()}
        resolved = portable({**resolved, "model_name_or_path": model_name_or_path, "image_size": input_size})
        write_record(args.output_dir, CONFIG_FILE, resolved)
        if args.resume_from_hub:
            warn_of_other_settings(checkpoint, resolved)
        write_record(args.output_dir, ENVIRONMENT_FILE, environment())
        if not args.do_train:
            write_record(args.output_dir, WEIGHTS_FILE, {"sha256": weights_digest(trainer.model.state_dict())})
    metrics = {}
    if args.do_train:
        metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
        # Trainer's own rate counts the evaluations in between as training.
        training_seconds = max(metrics["train_runtime"] - trainer.evaluation_seconds, 1e-3)
        trained_images = metrics["train_samples_per_second"] * metrics["train_runtime"]
        metrics["train_images_per_second"] = round(trained_images / training_seconds, 1)
        metrics["parameters"] = sum(parameter.numel() for parameter in trainer.model.parameters())
        trainer.save_whole(trainer.save_model)
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()
        if trainer.is_world_process_zero():
            digest = saved_weights_digest(args.output_dir)
            write_record(args.output_dir, WEIGHTS_FILE, {"sha256": digest, "step": trainer.state.global_step})
    if args.do_eval:
        metrics = trainer.evaluate()
        metrics["eval_samples"] = len(trainer.eval_dataset)
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
        examples = getattr(trainer.compute_metrics, "examples", None)
        if examples and trainer.is_world_process_zero():
            save_file(examples, Path(args.output_dir) / EXAMPLES_FILE)
    if args.push_to_hub:
        published = trainer.push_to_hub()
        if published is not None:
            print(f"Published: {published}")
    return metrics


def _resumed_checkpoint(args: RunArguments) -> str | None:
    """The checkpoint to go on from; `last` and `true` mean the newest in the output directory."""
    given = args.resume_from_checkpoint
    if given is None or given in ("False", "false"):
        return None
    if given not in ("last", "True", "true", True):
        if not (Path(given) / "trainer_state.json").is_file():
            raise InputError(
                f"--resume_from_checkpoint {given!r} is no checkpoint of a run; accepted: `last` or its folder."
            )
        return given
    last = last_complete_checkpoint(args.output_dir)
    if last is None:
        raise InputError(f"--resume_from_checkpoint {given}: {args.output_dir!r} holds no checkpoint that is complete.")
    return last
