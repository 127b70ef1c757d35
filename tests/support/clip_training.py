"""Small runs of training/clip_finetuning.py, and their results computed again."""

from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from training.clip_finetuning import main


TINY_RUN = "--use_cpu true --disable_tqdm true --learning_rate 1e-2 --total_train_batch_size 8 --seed 3".split()


TINY_RUN += "--do_train --do_eval --position_encoding comrope_ld --block_size 4 --max_steps 2".split()


CLASSES = ["class0", "class1", "class2"]


def train(folder, checkpoint, data, *flags):
    return main(["--output_dir", str(folder), "--model_name_or_path", checkpoint, *data, *TINY_RUN, *map(str, flags)])


def accuracies(results):
    return {(result["model"], result["image_size"]): (result["accuracy"], result["loss"]) for result in results}


def measured_again(model, data, size):
    """Accuracy and mean cross entropy of a classifier, computed without the script."""
    table = datasets.load_dataset("parquet", data_files=data[3], split="train")
    images = [row["image"].resize((size, size), Image.Resampling.BICUBIC) for row in table]
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2) / 127.5 - 1
    with torch.no_grad():
        logits = model.eval()(pixel_values=pixels).logits.double()
    labels = torch.tensor(table["label"][:])
    loss = torch.nn.functional.cross_entropy(logits, labels).item()
    # Losses are float32 before they are averaged.
    return (logits.argmax(1) == labels).double().mean().item(), pytest.approx(loss, abs=1e-5)


def but_for_rounding(found):
    """
    What an evaluation of the same weights finds after they were saved and loaded.

    Weights stay where the file that they are read from puts them, and products of matrices and vectors may be rounded
    otherwise at another address (MKL, with the instructions that it uses on AMD's CPUs).
    """
    accuracy, loss = found
    return accuracy, pytest.approx(loss, abs=1e-6)


class ZeroShot(torch.nn.Module):
    """Logits of the classes by a model's own forward and tokenizer, without the script."""

    def __init__(self, model, folder, mean=0.5, std=0.5):
        super().__init__()
        self.model, self.mean, self.std = model.eval(), torch.tensor(mean), torch.tensor(std)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.tokens = tokenizer([f"a photo of a {name}." for name in CLASSES], padding=True, return_tensors="pt")

    def forward(self, pixel_values):
        # `measured_again` has a mean and a deviation of 0.5; the model may have others.
        pixel_values = ((pixel_values + 1) / 2 - self.mean.view(-1, 1, 1)) / self.std.view(-1, 1, 1)
        return SimpleNamespace(logits=self.model(pixel_values=pixel_values, **self.tokens).logits_per_image)
