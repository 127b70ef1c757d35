"""Trains, fine-tunes and evaluates classifiers of tokens with positions, such as series and points.

A file contains features, positions and labels, see training/data/token_files.py. Labels per sample train
`LieRETokensForSequenceClassification`, labels per token `LieRETokensForTokenClassification`. Time series in the format
of aeon and sktime, whose positions are the index, and points on generated solids:

    python training/token_classification.py training/recipes/series_mini.yaml \
        --train_files JapaneseVowels_TRAIN.ts --validation_files JapaneseVowels_TEST.ts --output_dir outputs/vowels
    python training/token_classification.py training/recipes/points_mini.yaml --output_dir outputs/points

Tables of points with other column names, here with a class for every point:

    python training/token_classification.py training/recipes/points_mini.yaml --dataset_name None \
        --train_files train.parquet --validation_files test.parquet --feature_columns intensity \
        --position_columns x y z --label_column part --output_dir outputs/parts

Features are not scaled; scale them beforehand. By default, origin and scale of a new model's positions come from the
training data, so that coordinates run from 0 to 1 or, for RoPE, count tokens. Any flag overrides the recipe.
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

from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, set_seed

from hf_liere.errors import InputError
from training.common.arguments import RunArguments, TokensModelArguments
from training.common.command_line import parse_arguments
from training.common.records import describe_examples
from training.data.tokens import TokenDataArguments, TokenExamples, load_tokens, token_collator
from training.engine.claims import giving_back
from training.engine.model_setup import build_model, check_checkpoint_keys, order_labels
from training.engine.runs import prepare_output_dir, run, start
from training.engine.token_setup import attend_by_poses, resolve_tokens_config
from training.engine.trainer import ClassificationMetrics, ClassificationTrainer, ranks_and_losses


ARGUMENT_CLASSES = (TokensModelArguments, TokenDataArguments, RunArguments)
AUTO_CLASSES = {"sequence": AutoModelForSequenceClassification, "token": AutoModelForTokenClassification}


@giving_back()
def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Runs the script with the given command line, by default the process's own; returns the last metrics."""
    model_args, data_args, args = parse_arguments(arguments, ARGUMENT_CLASSES)
    if args.push_to_hub:
        raise InputError(
            "--push_to_hub: cards are rendered for models of images and videos; write README.md into the finished "
            "run's folder and publish it with hf-liere push."
        )
    checkpoint = prepare_output_dir(args)
    data = load_tokens(data_args, args.parts, args.order_seed)
    config = resolve_tokens_config(model_args, data)
    set_seed(args.seed)
    classes = data.for_model()
    model = build_model(model_args, config, classes, args.do_train, AUTO_CLASSES[data.task])
    if data_args.pose_columns:
        attend_by_poses(model)
    if checkpoint is not None:
        check_checkpoint_keys(checkpoint, model)
    numbers = order_labels(classes, model.config)
    train, evaluation = (table and TokenExamples(table, numbers) for table in (data.train, data.evaluation))
    trainer = ClassificationTrainer(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=evaluation,
        data_collator=token_collator(args.device, data.train, data.evaluation),
        compute_metrics=ClassificationMetrics(model.config.num_labels),
        preprocess_logits_for_metrics=ranks_and_losses,
    )
    described = {"data": data_args, "examples": describe_examples(data_args, {}, *map(_length, (train, evaluation)))}
    return run(trainer, checkpoint, model_args.model_name_or_path, None, described)


def _length(examples: TokenExamples | None) -> int | None:
    return None if examples is None else len(examples)


if __name__ == "__main__":
    start(main)
