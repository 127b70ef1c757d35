"""Trains causal language models, new or pretrained, with learned rotations that start at their RoPE.

A small Llama of bytes from scratch, on Python's standard library, and its perplexity at one, two and four times the
length of the blocks that it was trained on:

    python training/language_modeling.py training/recipes/language_pretraining_mini.yaml \
        --text_folder /usr/lib/python3.11 --text_patterns "*.py" "[a-r]*/*.py" --output_dir outputs/llama

The same model trained further with learned frequencies; `--position_encoding liere --block_size 4` learns blocks, and
`none` leaves its RoPE as it is:

    python training/language_modeling.py training/recipes/language_tuning_mini.yaml --model_name_or_path outputs/llama \
        --position_encoding rope_mixed … --output_dir outputs/learned

Texts are files (one document each), columns of parquet, json or csv files, or data sets on the Hub. They are packed
into blocks of `--max_length` tokens. A finished run saves the whole model if its class reloads with rotations (every
class that transformers exports), and otherwise the model in `base` and its rotations in `rotary`. `--trainable
lora+rotary` saves adapters in `lora` and `rotary`: load them by `PeftModel.from_pretrained` and then
`load_rotary(model.get_base_model(), …)`. `--model_name_or_path` accepts both kinds of folders.
`--resume_from_checkpoint last` resumes an interrupted run.
"""

import sys
from pathlib import Path


# `training` is not installed; the scripts find it, and an hf_liere that is not installed either, beside themselves.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training.common.early import answer_early


if __name__ == "__main__":
    # Before the imports that take seconds.
    answer_early(__file__)

from transformers import set_seed

from hf_liere.errors import InputError
from training.common.command_line import parse_arguments
from training.common.records import describe_examples
from training.data.texts import TextDataArguments, TokenBlocks, collate_blocks, load_texts
from training.engine.claims import giving_back
from training.engine.model_setup import check_checkpoint_keys
from training.engine.runs import prepare_output_dir, run, start
from training.engine.trainer import ranks_and_losses
from training.tasks.language.arguments import (
    LanguageModelArguments,
    LanguagePatchArguments,
    LanguageTrainingArguments,
    check_lengths,
    resolve_config,
    resolve_patch,
    resolve_tokenizer,
)
from training.tasks.language.models import LanguageMetrics, LanguageTrainer, build_model


ARGUMENT_CLASSES = (LanguageModelArguments, LanguagePatchArguments, TextDataArguments, LanguageTrainingArguments)


@giving_back()
def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Runs the script with the given command line, by default the process's own; returns the last metrics."""
    model_args, patch_args, data_args, args = parse_arguments(arguments, ARGUMENT_CLASSES)
    config = resolve_config(model_args)
    tokenizer = resolve_tokenizer(model_args, config)
    wanted = resolve_patch(model_args, patch_args, config, args.do_train)
    check_lengths(data_args, config)
    checkpoint = prepare_output_dir(args)
    data = load_texts(data_args, tokenizer, args.parts, args.order_seed)
    set_seed(args.seed)
    model = build_model(model_args, config, wanted, args.do_train)
    if checkpoint is not None:
        check_checkpoint_keys(checkpoint, model)
    blocks, metrics, stream = {}, None, data.evaluation
    if stream is not None:
        blocks = {length: TokenBlocks(stream.cut(length)) for length in data_args.lengths}
        metrics = LanguageMetrics(config.get_text_config().vocab_size, stream, data_args.lengths)
    evaluation = blocks.pop(data_args.max_length, None)
    trainer = LanguageTrainer(
        model=model,
        args=args,
        train_dataset=data.train,
        eval_dataset=evaluation,
        further=blocks,
        data_collator=collate_blocks,
        processing_class=tokenizer,
        compute_metrics=metrics,
        preprocess_logits_for_metrics=ranks_and_losses,
    )
    if trainer.is_fsdp_enabled:
        raise InputError("FSDP shards what is saved here in one piece; accepted: one process, or several by DDP.")
    counts = (None if examples is None else len(examples) for examples in (data.train, evaluation))
    described = {
        "data": data_args,
        "examples": describe_examples(data_args, data.splits, *counts),
        "patch": patch_args,
        "lora": model_args,
    }
    return run(trainer, checkpoint, model_args.model_name_or_path, None, described)


if __name__ == "__main__":
    start(main)
