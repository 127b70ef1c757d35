"""Checkpoints that are whole or not there, and runs that stop with one when they are told to stop (SIGTERM).

Trainer's own just-in-time checkpoint (`enable_jit_checkpoint`) does not serve: it saves in the middle of a step, whose
random numbers are then used up, so that a resumed run differs; every process decides for itself, so that several wait
for each other for ever; and the script goes on as if the training were complete.
"""

import os
import re
import shutil
import signal
import threading
from pathlib import Path

import torch
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from training.arguments import InputError


# In the output directory, so that a rename is one on the same file system; the dot hides it from those who list.
ASIDE = ".incomplete"
# What a shell reports for a process that ended by SIGTERM.
STOPPED_EXIT_CODE = 128 + signal.SIGTERM


class StoppedError(SystemExit):
    """The run was told to stop, and can be resumed."""


def last_complete_checkpoint(folder: str | Path) -> str | None:
    """The newest checkpoint of a run that was written to its end; its state is written last."""
    found = {}
    for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        match = re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", path.name)
        if match and (path / TRAINER_STATE_NAME).is_file():
            found[int(match[1])] = path
    return str(found[max(found)]) if found else None


def require_writable(folder: str | Path) -> None:
    """
    Raises:
        InputError: if nothing can be written to the folder, before anything else is done.
    """
    probe = Path(folder) / f"{ASIDE}-probe"
    try:
        probe.mkdir(parents=True, exist_ok=True)
        (probe / "file").write_bytes(bytes(4096))
        shutil.rmtree(probe)
    except OSError as error:
        raise InputError(f"Nothing can be written to --output_dir {str(folder)!r}: {error.strerror}.") from error


class WholeCheckpoints:
    """
    A mixin before `Trainer`: a checkpoint is written aside, flushed to the disk, and renamed when it is complete.

    Raises:
        InputError: from a save that fails, say for a full disk. What was written is removed again, and the last
            complete checkpoint is as it was.
    """

    _is_saving = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.stop_request = StopRequest(self)
        self.add_callback(self.stop_request)

    def train(self, *args, **kwargs):
        """
        Raises:
            StoppedError: if SIGTERM came while training; the step under way was finished and saved.
        """
        result = super().train(*args, **kwargs)
        if self.stop_request.stopped:
            step = self.state.global_step
            if self.is_world_process_zero():
                print(f"Stopped by SIGTERM; checkpoint-{step} is saved, --resume_from_checkpoint last goes on.")
            raise StoppedError(STOPPED_EXIT_CODE)
        return result

    def _get_output_dir(self, trial) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, ASIDE) if self._is_saving else folder

    def _save_checkpoint(self, model, trial) -> None:
        folder = Path(super()._get_output_dir(trial))
        aside, target = folder / ASIDE, folder / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.should_save:
            # Of a run that was killed while it was saving.
            shutil.rmtree(aside, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self._is_saving = True
        try:
            super()._save_checkpoint(model, trial)
            self._is_saving = False
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                self._complete(aside / target.name, target)
        except Exception as error:
            shutil.rmtree(aside, ignore_errors=True)
            last = last_complete_checkpoint(folder)
            remains = (
                f"{Path(last).name} is intact, --resume_from_checkpoint last goes on from there"
                if last
                else ("there is no earlier one")
            )
            raise InputError(f"{target.name} could not be saved ({_reason(error)}); {remains}.") from error
        finally:
            self._is_saving = False
        self.accelerator.wait_for_everyone()

    def _complete(self, written: Path, target: Path) -> None:
        best = self.state.best_model_checkpoint
        if best is not None and Path(best).parent.name == ASIDE:
            self.state.best_model_checkpoint = str(target.with_name(Path(best).name))
            self.state.save_to_json(str(written / TRAINER_STATE_NAME))
        for path in [*written.rglob("*"), written]:
            _flush(path)
        if target.exists():
            target.rename(written.with_name("replaced"))
        written.rename(target)
        _flush(target.parent)
        shutil.rmtree(written.parent, ignore_errors=True)
        rotate_checkpoints(
            output_dir=str(target.parent),
            save_total_limit=self.args.save_total_limit,
            best_model_checkpoint=self.state.best_model_checkpoint,
            use_mtime=True,
        )


class StopRequest(TrainerCallback):
    """Ends the training after the step in which any process has received SIGTERM, with a checkpoint."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.received = False
        self.stopped = False
        self._previous = None
        self._process = os.getpid()

    def on_train_begin(self, args, state, control, **kwargs):
        # Only the main thread may set handlers; elsewhere the default one ends the process.
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._receive)

    def on_train_end(self, args, state, control, **kwargs):
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None

    def on_step_end(self, args, state, control, **kwargs):
        # The end of the training is a better place to stop.
        if self._received_anywhere() and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = self.stopped = True

    def _receive(self, number, frame):
        if os.getpid() != self._process:
            # A worker of a data loader, which has inherited this: it is to end.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        self.received = True

    def _received_anywhere(self) -> bool:
        accelerator = self.trainer.accelerator
        if accelerator.num_processes == 1:
            return self.received
        flag = torch.tensor(int(self.received), device=accelerator.device)
        return bool(accelerator.reduce(flag, reduction="sum").item())


def _flush(path: Path) -> None:
    """Makes a file, or the list of files in a folder, survive a machine that loses power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
