"""Training of models of other projects on the tasks on real structures."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, set_seed

from training.common.command_line import parse_arguments
from training.common.records import describe_examples
from training.data.tokens import POSES, TokenExamples, load_tokens, token_collator
from training.engine.runs import prepare_output_dir, run
from training.engine.trainer import ClassificationMetrics, ClassificationTrainer, ranks_and_losses


SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


class PeerModel(PreTrainedModel):
    """A classifier of samples of tokens with poses: what the Trainer calls, around a model's `logits`."""

    config_class = PreTrainedConfig

    def forward(self, inputs_embeds: torch.Tensor, poses: torch.Tensor, **others: torch.Tensor) -> dict[str, Any]:
        """
        Args:
            inputs_embeds: (B, N, features).
            poses: (B, N, 4, 4).

        Returns:
            `logits` (B, labels).
        """
        return {"logits": self.logits(inputs_embeds, poses)}

    def logits(self, inputs_embeds: torch.Tensor, poses: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def train_peer(
    arguments: list[str] | None, classes: tuple[type, ...], make: Callable[[PreTrainedConfig], PreTrainedModel]
) -> dict[str, float]:
    """
    One run of another project's model on samples of tokens with poses; returns the last metrics.

    Args:
        classes: Dataclasses of the flags; those of the model itself are the third.
        make: Makes the model of a configuration with these, `feature_size`, `tokens`, `num_labels`, and the size
            of a transformer that the flags of `token_classification.py` give.
    """
    model_args, data_args, peer_args, args = parse_arguments(arguments, classes)
    checkpoint = prepare_output_dir(args)
    data_args.pose_columns = [POSES]
    data = load_tokens(data_args, args.parts, args.order_seed)
    set_seed(args.seed)
    given = model_args.architecture()
    size = {name: given[name] for name in SIZES if name in given}
    size |= {"feature_size": data.some.sizes[0], "tokens": len(data.some.features[0])}
    config = PreTrainedConfig(num_labels=len(data.label_names), **size, **vars(peer_args))
    numbers = list(range(config.num_labels))
    train, evaluation = (table and TokenExamples(table, numbers) for table in (data.train, data.evaluation))
    trainer = ClassificationTrainer(
        model=make(config),
        args=args,
        train_dataset=train,
        eval_dataset=evaluation,
        data_collator=token_collator(args.device, data.train, data.evaluation),
        compute_metrics=ClassificationMetrics(config.num_labels),
        preprocess_logits_for_metrics=ranks_and_losses,
    )
    counts = (None if examples is None else len(examples) for examples in (train, evaluation))
    described = {"data": data_args, "peer": peer_args, "examples": describe_examples(data_args, {}, *counts)}
    return run(trainer, checkpoint, model_args.model_name_or_path, None, described)
