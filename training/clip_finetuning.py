"""Fine-tunes a pretrained CLIP, or any ViT, with learned rotations in its vision tower (ComRoPE §4.4 and App. B.2).

The vision tower is patched with zero generators, so training starts from the pretrained model's outputs. The unpatched
model is also trained, with the same seed, images and number of steps. Both are evaluated at every size of
`--eval_image_sizes`:

    python training/clip_finetuning.py training/recipes/clip_finetuning.yaml \
        --model_name_or_path openai/clip-vit-base-patch16 --dataset_name ILSVRC/imagenet-1k --output_dir outputs/clip

`outputs/clip/patched` and `outputs/clip/unpatched` then contain the models and, in `resolutions.json`, the results.
Zero-shot classification instead of a linear classifier, training only rotations and LoRA:

    python training/clip_finetuning.py training/recipes/clip_finetuning.yaml --head zero_shot \
        --prompts "a photo of a {}." --trainable lora+rotary …

`--resume_from_checkpoint last` resumes an interrupted run. `--vision_config` trains a new CLIP vision tower
(`training/recipes/clip_pretraining_mini.yaml`). `--do_eval` alone evaluates an existing model, patched or not.
"""

import sys
from pathlib import Path
from typing import Any


# `training` is not installed; the scripts find it, and an hf_liere that is not installed either, beside themselves.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training.common.early import answer_early


if __name__ == "__main__":
    # Before the imports that take seconds.
    answer_early(__file__)

from training.common.arguments import AugmentationArguments, DataArguments
from training.common.chance import describe_unlearned
from training.common.command_line import parse_arguments
from training.engine.claims import giving_back
from training.engine.patching import PatchArguments
from training.engine.runs import start
from training.tasks.clip.arguments import FineTuningArguments, FineTuningTrainingArguments
from training.tasks.clip.comparison import Comparison


ARGUMENT_CLASSES = (
    FineTuningArguments,
    PatchArguments,
    DataArguments,
    AugmentationArguments,
    FineTuningTrainingArguments,
)


@giving_back()
def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Runs the script with the given command line, by default the process's own; returns the results of all models."""
    comparison = Comparison(*parse_arguments(arguments, ARGUMENT_CLASSES))
    results = [result for name in comparison.patches for result in comparison.run(name)]
    if comparison.args.process_index == 0:
        for result in results:
            interval = f"{result['accuracy_low']:.1%} – {result['accuracy_high']:.1%}"
            print(
                f"{result['model'] or 'as it is':10} {result['image_size']:4} px  {result['accuracy']:.1%} ({interval})"
            )
            unlearned = describe_unlearned({f"eval_{name}": value for name, value in result.items()})
            if comparison.args.do_train and unlearned:
                print(unlearned)
    return results


if __name__ == "__main__":
    start(main)
