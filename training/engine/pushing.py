"""
Pushing a run to the Hub while it trains, and going on from what is there.

Differences from Trainer's own pushes: the files of a step are set aside before the next step changes them, so a commit
holds the step that its title names; a step is one commit; failed pushes are remembered and make the script fail; only
the files that `hf_liere.hub.staging` knows are pushed, never `training_args.bin`, which holds paths and the token.
While a run goes on, `--hub_strategy checkpoint` keeps what `--resume_from_hub` needs in `last-checkpoint/`; the commit
of the finished model takes it away.
"""

import json
import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from huggingface_hub import HfApi, constants
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import HubStrategy
from transformers.utils import logging

from hf_liere.errors import InputError
from hf_liere.hub.cards import push_card, render
from hf_liere.hub.checked_facts import facts_of_run
from hf_liere.hub.publishing import Published, ensure_repository, publish, push
from hf_liere.hub.pulling import pull
from hf_liere.hub.staging import PROCESSOR_FILES, refuse_private, secret_scanner
from hf_liere.storage.client import HubError, translate_hub_errors
from hf_liere.storage.saved_weights import saved_weights_digest, weight_files
from training.common.arguments import RunArguments
from training.common.records import CONFIG_FILE, ENVIRONMENT_FILE, WEIGHTS_FILE, write_record


logger = logging.get_logger(__name__)

LAST_CHECKPOINT = "last-checkpoint"
# Beside the checkpoints, so that files can be set aside as hard links; the dot hides it from listings.
SNAPSHOTS = ".hub"


def hub_client(args: RunArguments) -> HfApi:
    return HfApi(endpoint=constants.ENDPOINT, token=args.hub_token)


class HubPushes:
    """A mixin before `Trainer` that replaces its pushes."""

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Trainer calls it before training: a token that may not write, and what pushes need, are found now."""
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
        # The file is a pickle of the arguments, with the folders and the token that the records leave out.
        (Path(output_dir or self.args.output_dir) / "training_args.bin").unlink(missing_ok=True)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saving never pushes: `push_to_hub` does, when the model has been evaluated."""
        super().save_model(output_dir, _internal_call=True)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Set the files of this step aside, and push them in the background."""
        if not self.is_world_process_zero() or self.args.hub_strategy == HubStrategy.END:
            return
        step = self.state.global_step
        if not self.args.hub_always_push and any(not job.done() for job in self._pushes.values()):
            logger.info(f"Step {step} is not pushed: an earlier push is under way (see --hub_always_push).")
            return
        snapshot = Path(self.args.output_dir) / SNAPSHOTS / f"step-{step}"
        self._set_aside(Path(checkpoint_folder), snapshot)
        self._pushes[step] = self._executor.submit(self._push_snapshot, snapshot, step)

    def _set_aside(self, checkpoint: Path, snapshot: Path) -> None:
        shutil.rmtree(snapshot, ignore_errors=True)
        snapshot.mkdir(parents=True)
        output_dir, step = Path(self.args.output_dir), self.state.global_step
        model_files = [*weight_files(checkpoint), *checkpoint.glob("*.py"), *checkpoint.glob("*.index.json")]
        model_files += [
            checkpoint / name for name in ("config.json", *PROCESSOR_FILES) if (checkpoint / name).is_file()
        ]
        model_files += [output_dir / CONFIG_FILE, output_dir / ENVIRONMENT_FILE]
        for path in model_files:
            _set_aside(path, snapshot / path.name)
        digest = saved_weights_digest(snapshot)
        write_record(snapshot, WEIGHTS_FILE, {"sha256": digest, "step": step})
        logged = [entry for entry in self.state.log_history if entry["step"] == step and "eval_accuracy" in entry]
        progress = {"step": step, "max_steps": self.state.max_steps, "metrics": logged[-1] if logged else None}
        facts = facts_of_run(snapshot, digest, title=self.hub_model_id.rpartition("/")[2], progress=progress)
        facts.license = self.args.hub_license
        render(facts, self.hub_model_id).write(snapshot)
        if self.args.hub_strategy == HubStrategy.CHECKPOINT:
            states = snapshot / LAST_CHECKPOINT
            states.mkdir()
            for path in checkpoint.iterdir():
                if path.is_file() and path.name != TRAINER_STATE_NAME:
                    _set_aside(path, states / path.name)
            state = json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
            # The path of a folder on this machine means nothing on the Hub.
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
        """Trainer calls it when training ends; what failed is reported by [`push_to_hub`]."""
        for job in getattr(self, "_pushes", {}).values():
            job.exception()

    def push_to_hub(self, **kwargs) -> Published | None:
        """
        Publish the output folder, after its evaluation; `None` in all processes but the first.

        Raises:
            HubError: if this, or the push of any step, failed; the message says what the repository lacks.
        """
        if not self.is_world_process_zero():
            return None
        self._finish_current_push()
        output_dir, api = Path(self.args.output_dir), hub_client(self.args)
        missing = [
            f"step {step} ({error})" for step, job in self._pushes.items() if (error := job.exception()) is not None
        ]
        try:
            published = push(
                output_dir,
                self.hub_model_id,
                card=push_card(
                    output_dir, saved_weights_digest(output_dir), self.hub_model_id, license=self.args.hub_license
                ),
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
    """A hard link where the file is large and never written again, else a copy."""
    if source.suffix in (".safetensors", ".pt", ".pth"):
        try:
            os.link(source, target)
            return
        except OSError:
            # Not every file system has hard links.
            pass
    shutil.copyfile(source, target)


def warn_of_other_settings(checkpoint: str | Path, resolved: dict) -> None:
    """Say which settings of a run differ from those that a fetched checkpoint was trained with."""
    path = Path(checkpoint) / CONFIG_FILE
    if not path.is_file():
        return
    # Converted to json and back, so that the values can be compared with those of the file.
    before, now = json.loads(path.read_text(encoding="utf-8")), json.loads(json.dumps(resolved, default=str))
    different = [
        f"{name} {before[group].get(name)} there, {value} here"
        for group in ("data", "augmentation", "training")
        for name, value in now[group].items()
        if before[group].get(name) != value
    ]
    if different:
        logger.warning(f"The run goes on with other settings than it was started with: {'; '.join(different)}.")


def fetch_checkpoint(args: RunArguments) -> None:
    """
    Put the last checkpoint that a run has pushed into the output folder.

    Raises:
        InputError: if the repository is not given or holds none.
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
            f"--resume_from_hub: {error} Runs that were started with --push_to_hub --hub_strategy checkpoint and have "
            "not finished can be resumed."
        ) from None
    step = json.loads((folder / TRAINER_STATE_NAME).read_text(encoding="utf-8"))["global_step"]
    os.replace(folder, Path(args.output_dir) / f"checkpoint-{step}")
    shutil.rmtree(Path(args.output_dir) / SNAPSHOTS, ignore_errors=True)
    logger.warning(f"Going on from step {step} of {args.hub_model_id}, commit {pulled.commit}.")
