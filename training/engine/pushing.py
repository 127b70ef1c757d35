"""
Pushing a run to the Hub while it trains, and resuming from there.

Differences from Trainer's pushes:

- The files of a step are copied before the next step changes them, so a commit contains the step in its title.
- Each step is one commit. Failed pushes are remembered and make the script fail.
- Only files that `hf_liere.tools.hub.staging` knows are pushed, never `training_args.bin` with its paths and token.

During a run, `--hub_strategy checkpoint` keeps what `--resume_from_hub` needs in `last-checkpoint/`. The commit of the
finished model removes it.
"""

import json
import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from huggingface_hub import HfApi, constants
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import HubStrategy
from transformers.utils import logging

from hf_liere.errors import InputError
from hf_liere.storage.client import HubError, translate_hub_errors
from hf_liere.storage.saved_model import SavedModel
from hf_liere.tools.hub.cards import push_card, render_card
from hf_liere.tools.hub.checked_facts import facts_of_run
from hf_liere.tools.hub.publishing import Published, ensure_repository, publish, push
from hf_liere.tools.hub.pulling import pull
from hf_liere.tools.hub.staging import PROCESSOR_FILES, refuse_private, secret_scanner
from training.common.arguments import RunArguments
from training.common.folders import CONFIG_FILE, ENVIRONMENT_FILE, WEIGHTS_FILE
from training.common.records import write_record


logger = logging.get_logger(__name__)

LAST_CHECKPOINT = "last-checkpoint"
# Beside the checkpoints, so that files can be hard-linked; the dot hides it from listings.
SNAPSHOTS = ".hub"


def hub_client(args: RunArguments) -> HfApi:
    return HfApi(endpoint=constants.ENDPOINT, token=args.hub_token)


class HubPushes:
    """A mixin before `Trainer` that replaces its pushes."""

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Called by Trainer before training, so that a token without write access fails early."""
        if not self.is_world_process_zero():
            return
        secret_scanner()
        api = hub_client(self.args)
        name = self.args.hub_model_id or Path(self.args.output_dir).resolve().name
        with translate_hub_errors(api, name):
            self.hub_model_id = ensure_repository(api, name, self.args.hub_private_repo)
        self._pushes: dict[int, Future] = {}
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="push")

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)
        # This pickle of the arguments contains the folders and the token that the records omit.
        (Path(output_dir or self.args.output_dir) / "training_args.bin").unlink(missing_ok=True)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves without pushing: `push_to_hub` pushes after the evaluation."""
        super().save_model(output_dir, _internal_call=True)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Copies the files of this step and pushes the copies in the background."""
        if not self.is_world_process_zero() or self.args.hub_strategy == HubStrategy.END:
            return
        step = self.state.global_step
        if not self.args.hub_always_push and any(not job.done() for job in self._pushes.values()):
            logger.info(f"Step {step} is not pushed: an earlier push is still running (see --hub_always_push).")
            return
        snapshot = Path(self.args.output_dir) / SNAPSHOTS / f"step-{step}"
        self._set_aside(Path(checkpoint_folder), snapshot)
        self._pushes[step] = self._executor.submit(self._push_snapshot, snapshot, step)

    def _set_aside(self, checkpoint: Path, snapshot: Path) -> None:
        shutil.rmtree(snapshot, ignore_errors=True)
        snapshot.mkdir(parents=True)
        output_dir, step = Path(self.args.output_dir), self.state.global_step
        model_files = [*SavedModel(checkpoint).weight_files, *checkpoint.glob("*.py"), *checkpoint.glob("*.index.json")]
        model_files += [
            checkpoint / name for name in ("config.json", *PROCESSOR_FILES) if (checkpoint / name).is_file()
        ]
        model_files += [output_dir / CONFIG_FILE, output_dir / ENVIRONMENT_FILE]
        for path in model_files:
            _set_aside(path, snapshot / path.name)
        saved = SavedModel(snapshot)
        write_record(snapshot, WEIGHTS_FILE, {"sha256": saved.digest, "step": step})
        logged = [entry for entry in self.state.log_history if entry["step"] == step and "eval_accuracy" in entry]
        progress = {"step": step, "max_steps": self.state.max_steps, "metrics": logged[-1] if logged else None}
        facts = facts_of_run(saved, title=self.hub_model_id.rpartition("/")[2], progress=progress)
        render_card(replace(facts, license=self.args.hub_license), self.hub_model_id).write(snapshot)
        if self.args.hub_strategy == HubStrategy.CHECKPOINT:
            states = snapshot / LAST_CHECKPOINT
            states.mkdir()
            for path in checkpoint.iterdir():
                if path.is_file() and path.name != TRAINER_STATE_NAME:
                    _set_aside(path, states / path.name)
            state = json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
            # A local path means nothing on the Hub.
            write_record(states, TRAINER_STATE_NAME, state | {"best_model_checkpoint": None})
            shutil.copyfile(output_dir / CONFIG_FILE, states / CONFIG_FILE)

    def _push_snapshot(self, snapshot: Path, step: int) -> str:
        api = hub_client(self.args)
        refuse_private(snapshot, api, [Path(self.args.output_dir).resolve()])
        published = publish(
            snapshot,
            self.hub_model_id,
            message=f"Training in progress, step {step}",
            revision=self.args.hub_revision or "main",
            api=api,
        )
        shutil.rmtree(snapshot, ignore_errors=True)
        return published.commit

    def _finish_current_push(self) -> None:
        """Called by Trainer when training ends. [`push_to_hub`] reports failures."""
        for job in getattr(self, "_pushes", {}).values():
            job.exception()

    def push_to_hub(self, **kwargs) -> Published | None:
        """
        Publishes the output folder after its evaluation. Returns `None` in all processes but the first.

        Raises:
            HubError: if this push or that of any step failed; the message lists what the repository lacks.
        """
        if not self.is_world_process_zero():
            return None
        self._finish_current_push()
        output_dir, api = Path(self.args.output_dir), hub_client(self.args)
        missing = [
            f"step {step} ({error})" for step, job in self._pushes.items() if (error := job.exception()) is not None
        ]
        try:
            saved = SavedModel(output_dir)
            published = push(
                saved,
                self.hub_model_id,
                card=push_card(saved, self.hub_model_id, license=self.args.hub_license),
                revision=self.args.hub_revision or "main",
                message=f"Trained model, step {self.state.global_step}",
                api=api,
            )
        except (HubError, ValueError) as error:
            missing.append(f"the trained model ({error})")
        shutil.rmtree(output_dir / SNAPSHOTS, ignore_errors=True)
        if missing:
            raise HubError(
                f"{self.hub_model_id} lacks {'; '.join(missing)}. Everything is in {output_dir}: "
                f"`hf-liere push {output_dir} {self.hub_model_id}` publishes the trained model."
            )
        return published


def _set_aside(source: Path, target: Path) -> None:
    """Hard-links large files, which are never rewritten, and copies all others."""
    if source.suffix in (".safetensors", ".pt", ".pth"):
        try:
            os.link(source, target)
            return
        except OSError:
            # Not every file system has hard links.
            pass
    shutil.copyfile(source, target)


def warn_of_other_settings(checkpoint: str | Path, resolved: dict) -> None:
    """Warns about settings that differ from those that a fetched checkpoint was trained with."""
    path = Path(checkpoint) / CONFIG_FILE
    if not path.is_file():
        return
    # Convert to json and back to compare with the file's values.
    before, now = json.loads(path.read_text(encoding="utf-8")), json.loads(json.dumps(resolved, default=str))
    different = [
        f"{name} {before[group].get(name)} there, {value} here"
        for group in ("data", "augmentation", "training")
        for name, value in now[group].items()
        if before[group].get(name) != value
    ]
    if different:
        logger.warning(f"The run resumes with other settings than it was started with: {'; '.join(different)}.")


def fetch_checkpoint(args: RunArguments) -> None:
    """
    Downloads the last checkpoint that a run has pushed into the output folder.

    Raises:
        InputError: if the repository is not given or has no checkpoint.
    """
    if args.hub_model_id is None or "/" not in args.hub_model_id:
        raise InputError(
            f"--resume_from_hub needs the repository with its owner; given: --hub_model_id {args.hub_model_id}."
        )
    folder = Path(args.output_dir) / SNAPSHOTS / "fetched"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        pulled = pull(
            args.hub_model_id,
            folder,
            revision=args.hub_revision or "main",
            path=LAST_CHECKPOINT,
            api=hub_client(args),
            cache_dir=Path(args.output_dir) / SNAPSHOTS / "cache",
        )
    except HubError as error:
        raise InputError(
            f"--resume_from_hub: {error} Only unfinished runs that were started with --push_to_hub --hub_strategy "
            "checkpoint can be resumed."
        ) from None
    step = json.loads((folder / TRAINER_STATE_NAME).read_text(encoding="utf-8"))["global_step"]
    os.replace(folder, Path(args.output_dir) / f"checkpoint-{step}")
    shutil.rmtree(Path(args.output_dir) / SNAPSHOTS, ignore_errors=True)
    logger.warning(f"Resuming from step {step} of {args.hub_model_id}, commit {pulled.commit}.")
