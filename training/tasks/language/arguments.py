"""Command line of training/language_modeling.py: the model, its patch and which part is trained."""

import dataclasses
import json
from dataclasses import dataclass

from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from hf_liere import RotaryPatchConfig
from hf_liere.errors import InputError
from hf_liere.probing.rope_layout import frequency_buffers
from hf_liere.registers import closest
from training.common.arguments import RunArguments, flag
from training.data.texts import TextDataArguments, byte_tokenizer
from training.engine.model_setup import checkpoint_config, translate_errors
from training.engine.patching import (
    UNPATCHED,
    LoraArguments,
    PatchArguments,
    build_on_meta,
    check_patch,
    find_adapters,
    patch_config,
    refuse_other_patch,
)


TRAINABLE = ("rotary", "lora+rotary", "all")


@dataclass
class LanguageModelArguments(LoraArguments):
    model_name_or_path: str | None = flag(
        None,
        "Causal language model to train further or evaluate: a folder or a name on the Hub. By default a new model.",
    )
    model_revision: str = flag("main", "Branch, tag or commit of a checkpoint on the Hub.")
    model_type: str = flag("llama", "model_type in transformers of a new model.")
    config_overrides: str | None = flag(None, "Fields of a new model's configuration, as json.")
    tokenizer_name: str | None = flag(
        None, "Folder or Hub name of the tokenizer; by default the checkpoint's, or UTF-8 bytes for a new model."
    )
    lora_rank: int = flag(8, "Rank of LoRA's matrices; existing adapters keep theirs.")
    trainable: str = flag(
        "all", "What is trained: the rotations, also LoRA in attention, or the whole model.", choices=list(TRAINABLE)
    )

    def __post_init__(self):
        super().__post_init__()
        if self.model_name_or_path is not None and self.config_overrides is not None:
            raise InputError("--config_overrides is for new models; accepted: without --model_name_or_path.")
        if self.model_name_or_path is None and self.trainable != "all":
            raise InputError(f"--trainable {self.trainable}: a new model has nothing pretrained; accepted: all.")


@dataclass
class LanguagePatchArguments(PatchArguments):
    """Language models have RoPE, so learned rotations start at the pretrained ones."""

    rotary_init: str | None = dataclasses.field(default="pretrained")


@dataclass
class LanguageTrainingArguments(RunArguments):
    per_device_eval_batch_size: int = flag(8, "Blocks per process in an evaluation.")
    dataloader_num_workers: int = flag(0, "Processes that read batches; texts are in memory, as numbers.")

    def __post_init__(self):
        super().__post_init__()
        if self.push_to_hub:
            raise InputError("--push_to_hub: cards are rendered for models of images and videos; publish the folder.")
        if self.dataloader_persistent_workers:
            raise InputError("--dataloader_persistent_workers would evaluate every length on the first one's blocks.")


def resolve_config(arguments: LanguageModelArguments) -> PreTrainedConfig:
    """The configuration of the checkpoint, or a new one from the flags. Raises [`InputError`] for wrong values."""
    if (adapters := find_adapters(arguments.model_name_or_path)) is not None:
        return checkpoint_config(f"--model_name_or_path {arguments.model_name_or_path} is for", adapters.base)
    if arguments.model_name_or_path is not None:
        return checkpoint_config("--model_name_or_path", arguments.model_name_or_path, arguments.model_revision)
    if arguments.model_type not in CONFIG_MAPPING:
        raise InputError(
            f"--model_type {arguments.model_type!r} is unknown to transformers"
            f"{closest(arguments.model_type, CONFIG_MAPPING)}; accepted: llama and others."
        )
    try:
        given = json.loads(arguments.config_overrides or "{}")
        return CONFIG_MAPPING[arguments.model_type](**given)
    except Exception as error:
        # Strict configurations raise several classes of errors; all name the field and what it accepts.
        raise InputError(f"--config_overrides {arguments.config_overrides}: {error}") from error


def resolve_tokenizer(arguments: LanguageModelArguments, config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    """
    The tokenizer of the run. Copies its vocabulary size and special tokens into the configuration of a new model.

    Raises:
        InputError: if it cannot be loaded, or the model has fewer tokens.
    """
    name = arguments.tokenizer_name or arguments.model_name_or_path
    if name is None:
        tokenizer = byte_tokenizer()
    else:
        given = "--tokenizer_name" if arguments.tokenizer_name else "--model_name_or_path"
        with translate_errors(given, name):
            revision = "main" if arguments.tokenizer_name else arguments.model_revision
            tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
    if arguments.model_name_or_path is None:
        if "vocab_size" not in json.loads(arguments.config_overrides or "{}"):
            config.vocab_size = len(tokenizer)
        for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(config, token, getattr(tokenizer, token))
    size = config.get_text_config().vocab_size
    if len(tokenizer) > size:
        raise InputError(f"The tokenizer has {len(tokenizer)} tokens, the model {size}; accepted: at most {size}.")
    return tokenizer


def resolve_patch(
    arguments: LanguageModelArguments, patch_args: LanguagePatchArguments, config: PreTrainedConfig, trains: bool
) -> RotaryPatchConfig | None:
    """
    The patch of the run; `None` to leave the model unchanged.

    Raises:
        InputError: if the model does not take the patch, or nothing would be trained.
    """
    adapters, own = find_adapters(arguments.model_name_or_path), getattr(config, "rotary_patch", None)
    if adapters is not None:
        own = adapters.rotary_patch
        if trains and arguments.trainable == "all":
            raise InputError(
                f"--trainable all: {arguments.model_name_or_path} contains adapters for the weights of "
                f"{adapters.base}; accepted: lora+rotary and rotary."
            )
    refuse_other_patch(patch_args, own, trains)
    is_patched = own is not None
    defaults = vars(type(patch_args)())
    unused = [name for name, value in vars(patch_args).items() if value != defaults[name]]
    if trains and not is_patched and patch_args.position_encoding is None and unused:
        raise InputError(
            f"{', '.join(f'--{name}' for name in unused)} without --position_encoding has no effect; accepted: with it."
        )
    if not trains or is_patched or patch_args.position_encoding in (None, UNPATCHED):
        if trains and arguments.trainable == "rotary" and not is_patched:
            raise InputError("--trainable rotary: nothing is patched; accepted: with --position_encoding, or all.")
        return None
    wanted = patch_config(patch_args)
    check_patch(AutoModelForCausalLM, config, wanted)
    return wanted


def check_lengths(data_args: TextDataArguments, config: PreTrainedConfig) -> None:
    """Raises [`InputError`] for blocks longer than a model's position table."""
    longest, most = max(data_args.lengths), getattr(config.get_text_config(), "max_position_embeddings", None)
    if most is None or longest <= most:
        return
    model = build_on_meta(AutoModelForCausalLM, config)
    if not any(frequency_buffers(module) for module in model.modules()):
        raise InputError(
            f"Blocks of {longest} tokens: {type(model).__name__} has {most} positions; accepted: up to {most}."
        )
