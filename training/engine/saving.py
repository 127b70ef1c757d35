"""Atomic saving of models and checkpoints, and runs that save a checkpoint and stop on SIGTERM or SIGINT.

Trainer's just-in-time checkpoint (`enable_jit_checkpoint`) does not suffice. It saves in the middle of a step, after
random numbers were drawn, so a resumed run differs. Each process decides alone, so several processes can deadlock. And
the script continues as if training were complete.
"""

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from hf_liere.errors import InputError
from training.common.folders import last_complete_checkpoint
from training.common.messages import reason


# Inside the output directory, so that a rename stays on one file system; the dot hides it from listings.
ASIDE = ".incomplete"
# Batch systems send SIGTERM, Ctrl-C sends SIGINT.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StoppedError(SystemExit):
    """The run was stopped by a signal and can be resumed. The exit code is the one that shells use for the signal."""

    def __init__(self, number: int):
        super().__init__(128 + number)


def require_writable(folder: str | Path) -> None:
    """Raises [`InputError`] if the folder is not writable."""
    probe = Path(folder) / f"{ASIDE}-probe"
    try:
        probe.mkdir(parents=True, exist_ok=True)
        (probe / "file").write_bytes(bytes(4096))
        shutil.rmtree(probe)
    except OSError as error:
        raise InputError(f"--output_dir {str(folder)!r} is not writable: {error.strerror}.") from error


class WholeCheckpoints:
    """
    A mixin before `Trainer`. Checkpoints and the finished model are written to a temporary folder, flushed to disk, and
    renamed when they are complete.

    Raises:
        InputError: if saving fails, for example because the disk is full. Partial files are removed, and the last
            complete checkpoint is unchanged.
    """

    _is_saving = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.stop_request = StopRequest(self)
        self.add_callback(self.stop_request)

    def train(self, *args, **kwargs):
        """Raises [`StoppedError`] after SIGTERM or SIGINT, when the current step is finished and saved."""
        result = super().train(*args, **kwargs)
        if self.stop_request.stopped:
            # The signal may have reached another process only.
            number = next(iter(self.stop_request.received), signal.SIGTERM)
            step = self.state.global_step
            if self.is_world_process_zero():
                print(f"Stopped by {number.name}; checkpoint-{step} is saved, --resume_from_checkpoint last resumes.")
            raise StoppedError(number)
        return result

    def save_whole(self, save: Callable[[str], None]) -> None:
        """
        Writes all files of a finished model into the output directory, or none. Every process calls it.

        Args:
            save: writes the files into the given folder.

        Raises:
            InputError: if saving fails, for example because the disk is full.
        """
        folder = Path(self.args.output_dir)
        aside = folder / ASIDE / "model"
        with self._write_aside(folder, "The model"):
            save(str(aside))
            self.accelerator.wait_for_everyone()
            if self.args.should_save and aside.is_dir():
                for path in [*aside.rglob("*"), aside]:
                    _flush(path)
                # The weights come last: if they exist, so do the other files.
                for path in sorted(aside.iterdir(), key=lambda path: path.suffix == ".safetensors"):
                    if (folder / path.name).is_dir():
                        shutil.rmtree(folder / path.name)
                    path.replace(folder / path.name)
                _flush(folder)
                shutil.rmtree(aside.parent)
        self.accelerator.wait_for_everyone()

    @contextlib.contextmanager
    def _write_aside(self, folder: Path, what: str) -> Iterator[None]:
        """Inside, files are written into `ASIDE`. On errors it is deleted, and the message says what remains."""
        aside = folder / ASIDE
        if self.args.should_save:
            # Left by a run that was killed while saving.
            shutil.rmtree(aside, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        try:
            yield
        except Exception as error:
            shutil.rmtree(aside, ignore_errors=True)
            last = last_complete_checkpoint(folder)
            remains = (
                f"{Path(last).name} is intact, --resume_from_checkpoint last resumes from it"
                if last
                else "there is no checkpoint to resume from"
            )
            raise InputError(f"{what} could not be saved ({reason(error)}); {remains}.") from error

    def _get_output_dir(self, trial) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, ASIDE) if self._is_saving else folder

    def _save_checkpoint(self, model, trial) -> None:
        folder = Path(super()._get_output_dir(trial))
        aside, target = folder / ASIDE, folder / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        with self._write_aside(folder, target.name):
            self._is_saving = True
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._is_saving = False
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                self._complete(aside / target.name, target)
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
    """
    Saves a checkpoint and stops after the step in which the process received SIGTERM or SIGINT, or, among several, one
    step after any of them did. A second SIGINT ends the process immediately.
    """

    def __init__(self, trainer):
        self.trainer = trainer
        self.received: list[signal.Signals] = []
        self.stopped = False
        self._copied: tuple[torch.Tensor, torch.Event | None] | None = None
        self._previous = {}
        self._process = os.getpid()

    def on_train_begin(self, args, state, control, **kwargs):
        # Only the main thread may set handlers. In other threads the default handler ends the process.
        if threading.current_thread() is not threading.main_thread():
            return
        for number in STOP_SIGNALS:
            # Shells make background processes ignore SIGINT; leave that unchanged.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._receive)

    def on_train_end(self, args, state, control, **kwargs):
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def on_step_end(self, args, state, control, **kwargs):
        # Training ends after the last step anyway.
        if self._received_anywhere() and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = self.stopped = True

    def _receive(self, number, frame):
        # Data loader workers inherit this handler and also receive Ctrl-C, but the current step still needs them.
        is_worker = os.getpid() != self._process
        if is_worker and number == signal.SIGINT:
            return
        if is_worker or (number == signal.SIGINT and number in self.received):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.received.append(signal.Signals(number))

    def _received_anywhere(self) -> bool:
        accelerator = self.trainer.accelerator
        if accelerator.num_processes == 1:
            return bool(self.received)
        flag = torch.full((), int(bool(self.received)), device=accelerator.device)
        number = accelerator.reduce(flag, reduction="sum").to("cpu", non_blocking=True)
        event = None if flag.device.type == "cpu" else torch.Event(flag.device)
        if event is not None:
            event.record()
        # That of the last step has arrived, and all processes read the same one; this one would wait for the device.
        before, self._copied = self._copied, (number, event)
        if before is None:
            return False
        if before[1] is not None:
            before[1].synchronize()
        return bool(before[0])


def _flush(path: Path) -> None:
    """Flushes a file or folder to disk, so that it survives a power failure."""
    if os.name == "nt" and path.is_dir():
        # Windows opens no folders, and flushes only files that may be written.
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
