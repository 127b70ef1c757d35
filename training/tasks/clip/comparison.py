"""Training a patched and an unpatched vision tower in the same way, and comparing their results."""

import copy
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.numpy import save
from transformers import (
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForZeroShotImageClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from hf_liere import RotaryPatchConfig, patch
from hf_liere.errors import InputError
from hf_liere.storage.loading import require_all_keys
from hf_liere.storage.saved_code import replace_file
from training.common.arguments import AugmentationArguments, DataArguments
from training.common.folders import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    EXAMPLES_FILE,
    MODEL_FOLDERS,
    RESOLUTIONS_FILE,
    last_complete_checkpoint,
    require_free,
)
from training.common.records import environment, remove_private, write_record
from training.data.augmentation import Augmentation, Collator, EvaluationImages, EvaluationView, TrainingImages
from training.data.images import load_images
from training.data.sources import DataRequest, Relabelled
from training.engine.fine_tuning import HEAD, TRAINABLE, Classifier, FineTuningTrainer, add_lora
from training.engine.model_setup import (
    build_model,
    check_checkpoint_keys,
    order_labels,
    resolve_image_size,
    resolve_processor,
)
from training.engine.patching import (
    UNPATCHED,
    PatchArguments,
    check_patch,
    patch_config,
    refuse_other_patch,
    save_patched,
)
from training.engine.runs import claim_folder
from training.engine.trainer import ClassificationMetrics, ranks_and_losses
from training.tasks.clip.arguments import FineTuningArguments, FineTuningTrainingArguments, resolve_config
from training.tasks.clip.classifiers import ZeroShotClassifier


MEASURES = [*(f"{name}{bound}" for name in ("accuracy", "loss") for bound in ("", "_low", "_high")), "chance"]


@dataclass
class Comparison:
    """Trains and evaluates the patched and the unpatched model of one command line, from the same seed and data."""

    model_args: FineTuningArguments
    patch_args: PatchArguments
    data_args: DataArguments
    augmentation_args: AugmentationArguments
    args: FineTuningTrainingArguments

    def __post_init__(self):
        self.config = resolve_config(self.model_args)
        self.patches = self._resolve_patches()
        self.image_size = resolve_image_size(self.model_args, self.config)
        sizes = self.model_args.eval_image_sizes or []
        self.eval_sizes = [
            resolve_image_size(dataclasses.replace(self.model_args, image_size=size), self.config) for size in sizes
        ] or [self.image_size]
        self.folders = {name: Path(self.args.output_dir, name) for name in self.patches}
        self.is_resumed = _is_resumed(self.args, self.folders)
        if self.args.process_index == 0:
            self._claim_folders()
        self.processor = resolve_processor(self.model_args, self.data_args, self.image_size, self.config)
        request = DataRequest(self.image_size, parts=self.args.parts, seed=self.args.seed)
        self.images = load_images(self.data_args, request)
        self.tokenizer = self._load_tokenizer() if self.model_args.head == "zero_shot" else None

    def _claim_folders(self) -> None:
        if not self.is_resumed and not self.args.overwrite_output_dir and "" not in self.patches:
            require_free(self.args.output_dir, besides=MODEL_FOLDERS)
        for name in self.patches:
            claim_folder(self.arguments_of(name))

    def _load_tokenizer(self) -> PreTrainedTokenizerBase:
        if not self.images.named:
            raise InputError("--head zero_shot: the data set only numbers its classes; accepted: classes with names.")
        arguments = self.model_args
        return AutoTokenizer.from_pretrained(
            arguments.model_name_or_path, revision=arguments.model_revision, trust_remote_code=False
        )

    def _resolve_patches(self) -> dict[str, RotaryPatchConfig | None]:
        """The patch for each subfolder of the results, which the model takes; the empty name is the folder itself."""
        own = getattr(self.config, "rotary_patch", None)
        refuse_other_patch(self.patch_args, own, self.args.do_train)
        if not self.args.do_train:
            return {"": None}
        if own is not None:
            return {"patched": None}
        if self.patch_args.position_encoding == UNPATCHED:
            return {"unpatched": None}
        baseline = {"unpatched": None} if self.model_args.baseline else {}
        is_zero_shot = self.model_args.head == "zero_shot"
        auto_class = _zero_shot_class(self.config) if is_zero_shot else AutoModelForImageClassification
        wanted = patch_config(self.patch_args)
        check_patch(auto_class, self.config, wanted)
        return {"patched": wanted, **baseline}

    def arguments_of(self, name: str) -> FineTuningTrainingArguments:
        arguments = copy.copy(self.args)
        arguments.output_dir = str(self.folders[name])
        return arguments

    def build_classifier(self, wanted: RotaryPatchConfig | None) -> Classifier:
        """The pretrained model with its head. Patched and unpatched models differ only in the rotations."""
        # Loading a model writes its labels into the configuration.
        arguments, config = self.model_args, copy.deepcopy(self.config)
        set_seed(self.args.seed)
        trains = self.args.do_train
        if arguments.head == "zero_shot":
            model = _load_zero_shot(arguments, config)
        else:
            model = build_model(arguments, config, self.images, trains and arguments.trainable != "rotary")
        try:
            if wanted is not None:
                patch(model, wanted)
            if self.tokenizer is None:
                classifier = Classifier(model)
            else:
                names = [name.replace("_", " ") for name in self.images.label_names]
                classifier = ZeroShotClassifier(model, self.tokenizer, names, arguments.prompts)
        except ValueError as error:
            raise InputError(str(error)) from error
        if trains and arguments.trainable == "lora+rotary":
            # Patching draws random numbers. Reset the seed so that LoRA starts equally in both models.
            set_seed(self.args.seed)
            add_lora(classifier, arguments)
        return classifier

    def trainer(self, name: str, classifier: Classifier) -> FineTuningTrainer:
        is_zero_shot = self.model_args.head == "zero_shot"
        config = classifier.pretrained.config
        numbers = range(len(self.images.label_names)) if is_zero_shot else order_labels(self.images, config)
        sources = (self.images.train, self.images.evaluation)
        train, self.evaluation = (source and Relabelled(source, numbers) for source in sources)
        resample, args = int(self.processor.resample), self.arguments_of(name)
        mean, std, seed = self.processor.image_mean, self.processor.image_std, args.order_seed
        augment = Augmentation(self.image_size, resample, self.augmentation_args, seed)
        return FineTuningTrainer(
            model=classifier,
            args=args,
            train_dataset=train and TrainingImages(train, augment),
            eval_dataset=self.evaluation and EvaluationImages(self.evaluation, self._view(self.image_size)),
            data_collator=Collator(self.image_size, 3, mean, std, self.augmentation_args, seed),
            processing_class=self.processor,
            compute_metrics=ClassificationMetrics(len(self.images.label_names)),
            preprocess_logits_for_metrics=ranks_and_losses,
            head_learning_rate_factor=self.model_args.head_learning_rate_factor,
        )

    def _view(self, size: tuple[int, int]) -> EvaluationView:
        resample, arguments = int(self.processor.resample), self.data_args
        return EvaluationView(size, resample, arguments.eval_crops or 0, arguments.eval_crop_ratio)

    def run(self, name: str) -> list[dict[str, Any]]:
        """Trains and evaluates one model; returns one result per image size."""
        folder, wanted = self.folders[name], self.patches[name]
        if self.is_resumed and (folder / RESOLUTIONS_FILE).is_file():
            return json.loads((folder / RESOLUTIONS_FILE).read_text(encoding="utf-8"))["resolutions"]
        checkpoint = last_complete_checkpoint(folder) if self.is_resumed else None
        classifier = self.build_classifier(wanted)
        learning = self._freeze(classifier, name) if self.args.do_train else 0
        if checkpoint is not None:
            check_checkpoint_keys(checkpoint, classifier)
        trainer = self.trainer(name, classifier)
        if trainer.is_world_process_zero():
            write_record(folder, CONFIG_FILE, self._resolved(wanted))
            write_record(folder, ENVIRONMENT_FILE, environment())
        trainer.starts_new = self.model_args.model_name_or_path is None
        if learning:
            metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
            metrics["parameters"] = sum(parameter.numel() for _, parameter in classifier.own_parameters())
            metrics["trained_parameters"] = learning
            trainer.log_metrics("train", metrics)
            trainer.save_metrics("train", metrics)
            trainer.save_state()
            trainer.save_whole(lambda aside: self._save(classifier, Path(aside)))
        return self._evaluate(trainer, name) if self.args.do_eval else []

    def _save(self, classifier: Classifier, folder: Path) -> None:
        if self.args.process_index == 0:
            processors = [self.processor, *([] if self.tokenizer is None else [self.tokenizer])]
            for processor in processors:
                processor.save_pretrained(folder)
            save_patched(classifier.model, folder, *processors)

    def _freeze(self, classifier: Classifier, name: str) -> int:
        """Freezes what is not trained; returns the number of trained parameters."""
        count = classifier.freeze(self.model_args.trainable)
        if not count and name != "unpatched":
            raise InputError(
                f"--trainable {self.model_args.trainable} trains no parameter with --position_encoding "
                f"{self.patches[name].position_encoding}; accepted: {', '.join(TRAINABLE[1:])}."
            )
        return count

    def _evaluate(self, trainer: FineTuningTrainer, name: str) -> list[dict[str, Any]]:
        # Named data sets, because Trainer caches loaders with persistent workers by name.
        trainer.eval_dataset = {
            str(size[0]): EvaluationImages(self.evaluation, self._view(size)) for size in self.eval_sizes
        }
        results, examples = [], {}
        for size in trainer.eval_dataset:
            metrics = trainer.evaluate(size, metric_key_prefix=f"eval_{size}")
            measured = {measure: metrics[f"eval_{size}_{measure}"] for measure in MEASURES}
            results.append({"model": name, "image_size": int(size), "samples": len(self.evaluation), **measured})
            examples |= {f"{size}_{key}": values for key, values in trainer.compute_metrics.examples.items()}
        if trainer.is_world_process_zero():
            replace_file(self.folders[name] / EXAMPLES_FILE, save(examples))
            write_record(self.folders[name], RESOLUTIONS_FILE, {"resolutions": results})
        return results

    def _resolved(self, wanted: RotaryPatchConfig | None) -> dict[str, Any]:
        content = {"model": vars(self.model_args), "data": vars(self.data_args), "training": self.args.to_dict()}
        content["augmentation"] = vars(self.augmentation_args)
        content["rotary_patch"] = getattr(self.config, "rotary_patch", None)
        if wanted is not None:
            content["rotary_patch"] = wanted.to_dict()
        return remove_private(content)


def _is_resumed(arguments: FineTuningTrainingArguments, folders: dict[str, Path]) -> bool:
    given = arguments.resume_from_checkpoint
    if not arguments.resumes:
        return False
    if not arguments.resumes_last:
        raise InputError(f"--resume_from_checkpoint {given!r}; accepted: `last`, which finishes all models of the run.")
    if not any(map(last_complete_checkpoint, folders.values())):
        raise InputError(f"--resume_from_checkpoint {given}: {arguments.output_dir!r} contains no checkpoint.")
    return True


def _zero_shot_class(config: PreTrainedConfig) -> type:
    """The Auto class for zero-shot classification, or `AutoModel` for models without one."""
    has_task = type(config) in AutoModelForZeroShotImageClassification._model_mapping
    return AutoModelForZeroShotImageClassification if has_task else AutoModel


def _load_zero_shot(arguments: FineTuningArguments, config: PreTrainedConfig) -> PreTrainedModel:
    try:
        model, loading = _zero_shot_class(config).from_pretrained(
            arguments.model_name_or_path,
            revision=arguments.model_revision,
            config=config,
            trust_remote_code=False,
            dtype=torch.float32,
            output_loading_info=True,
        )
    except ValueError as error:
        raise InputError(f"--head zero_shot: {error}") from error
    unexpected = {key for key in loading["unexpected_keys"] if not key.startswith(HEAD)}
    require_all_keys(loading["missing_keys"], unexpected, arguments.model_name_or_path)
    return model
