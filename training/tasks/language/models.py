"""Causal language models in a run: loading, patching, training and evaluation."""

import copy
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, EvalPrediction, PreTrainedConfig, PreTrainedModel

from hf_liere import RotaryPatchConfig, is_patched, patch
from hf_liere.errors import InputError
from hf_liere.patching.tower_patch import patched_towers
from hf_liere.probing.rope_layout import find_rope_towers
from hf_liere.storage.loading import require_loaded_keys
from training.data.texts import TokenBlocks, TokenStream
from training.engine.model_setup import translate_errors
from training.engine.patching import apply_lora, find_adapters, save_patched, unwrap_peft
from training.engine.trainer import ClassificationMetrics, ClassificationTrainer
from training.engine.wrapped_models import WrappedModel
from training.tasks.language.arguments import LanguageModelArguments


class LanguageModel(WrappedModel):
    """Logits of a causal language model for whole blocks."""

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """(B, N) → logits (B, N, vocab_size)."""
        return {"logits": self.model(input_ids=input_ids, use_cache=False).logits}

    def state_dict(self, *args, prefix: str = "", **kwargs) -> dict[str, torch.Tensor]:
        """Lists tied weights, such as those of embedding and head, only once, because files may not repeat tensors."""
        state = super().state_dict(*args, prefix=prefix, **kwargs)
        for name in self._other_names():
            state.pop(prefix + name, None)
        return state

    def load_state_dict(self, state_dict: dict[str, torch.Tensor], strict: bool = True, assign: bool = False):
        """Restores the tied weights that `state_dict` omits."""
        others = {other: state_dict[name] for other, name in self._other_names().items() if name in state_dict}
        return super().load_state_dict({**others, **state_dict}, strict, assign)

    def _other_names(self) -> dict[str, str]:
        """For parameters with several names: the first name by every other name."""
        first = {id(parameter): name for name, parameter in self.named_parameters()}
        every = self.named_parameters(remove_duplicate=False)
        return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}


def build_model(
    arguments: LanguageModelArguments, config: PreTrainedConfig, wanted: RotaryPatchConfig | None, trains: bool
) -> LanguageModel:
    """
    The model of a run, with rotations and LoRA.

    Raises:
        InputError: if a weight is missing or unexpected, the model does not take the patch, or peft is missing.
    """
    name, adapters = arguments.model_name_or_path, find_adapters(arguments.model_name_or_path)
    if adapters is not None:
        name = adapters.base
    if name is None:
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    else:
        with translate_errors("--model_name_or_path", name):
            model, loading = AutoModelForCausalLM.from_pretrained(
                name,
                revision="main" if adapters else arguments.model_revision,
                config=config,
                trust_remote_code=False,
                # Half-precision weights would lose small updates. With --bf16 the computation is still in bfloat16.
                dtype=torch.float32,
                output_loading_info=True,
            )
        require_loaded_keys(loading, name)
    try:
        if adapters is not None:
            model = adapters.attach(model, trains)
        if trains and arguments.trainable == "lora+rotary" and unwrap_peft(model) is model:
            model = apply_lora(model, _attentions(model), arguments)
        if wanted is not None:
            patch(unwrap_peft(model), wanted)
    except ValueError as error:
        raise InputError(str(error)) from error
    language_model = LanguageModel(model)
    if trains and not language_model.freeze(arguments.trainable):
        raise InputError(f"--trainable {arguments.trainable} trains no parameter; accepted: all.")
    return language_model


def _attentions(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """(name, module) of the attention modules with RoPE or, in a patched model, with learned rotations."""
    if not is_patched(model):
        return [attention for tower in find_rope_towers(model) for attention in tower.attentions]
    names = [
        f"{tower_name}.{name}" if tower_name else name
        for tower_name, tower in patched_towers(model)
        for name in tower.rotary_patch.attention_names
    ]
    return [(name, model.get_submodule(name)) for name in names]


class LanguageMetrics(ClassificationMetrics):
    """
    Metrics of next-token prediction, and the perplexity exp(loss) with its interval. `examples` contains the results of
    the resampling units, documents unless these are few, for every length that was evaluated: `losses` of the first
    length, and `<length>_losses` of others.

    Args:
        vocab_size: Vocabulary size of the model.
        stream: The evaluated tokens, which define the resampling units.
        lengths: Lengths of the blocks that they are cut into.
    """

    def __init__(self, vocab_size: int, stream: TokenStream, lengths: list[int]):
        super().__init__(vocab_size)
        self.units = {length: stream.units(length, max(lengths)) for length in lengths}

    def __call__(self, results: EvalPrediction) -> dict[str, float]:
        others, length = self.examples, np.asarray(results.label_ids).shape[1]
        metrics = super().__call__(results)
        prefix = "" if length == next(iter(self.units)) else f"{length}_"
        self.examples = others | {f"{prefix}{name}": values for name, values in self.examples.items()}
        bounds = {bound: float(np.exp(metrics[f"loss{bound}"])) for bound in ("", "_low", "_high")}
        return metrics | {f"perplexity{bound}": value for bound, value in bounds.items()}

    def groups(self, read: np.ndarray) -> np.ndarray:
        return self.units[read.shape[1]][read]


class LanguageTrainer(ClassificationTrainer):
    """
    Evaluates blocks of several lengths after training.

    Args:
        further: Further blocks by length, beside `eval_dataset`. Their metrics are called `eval_<length>_…`.
    """

    def __init__(self, *args, further: dict[int, TokenBlocks], **kwargs):
        super().__init__(*args, **kwargs)
        self.further = further

    @property
    def leaves_whole_model(self) -> bool:
        return any(Path(self.args.output_dir).glob("model*.safetensors"))

    def learning_rate_groups(self, model: nn.Module) -> list[tuple[str, float, list[nn.Parameter]]]:
        # An unpatched model has no rotations.
        return super().learning_rate_groups(model) if is_patched(model) else []

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        if eval_dataset is None and not self.is_in_train:
            for length, blocks in self.further.items():
                prefix = f"{metric_key_prefix}_{length}"
                metrics |= super().evaluate(blocks, ignore_keys, prefix) | {f"{prefix}_samples": len(blocks)}
        return metrics

    def save_finished(self, folder: str) -> None:
        if self.args.should_save:
            self.processing_class.save_pretrained(folder)
            save_patched(self.model.model, Path(folder), self.processing_class)
