"""What the tests of training/ share: the scripts as modules, small data sets, and runs in processes of their own."""

import re
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pyarrow.parquet
import torch
import transformers
from checkout import ROOT, SUPPORT
from fresh_process import run_with_torchrun
from patching_cases import IMAGE, clip_config, widen
from PIL import Image
from safetensors.torch import load_file

from training.image_classification import main


SCRIPT = ROOT / "training" / "image_classification.py"
TINY_MODEL = "--hidden_size 16 --num_hidden_layers 2 --num_attention_heads 2 --intermediate_size 32".split()
TINY_MODEL += "--image_size 16 --patch_size 4".split()
TINY_RUN = "--use_cpu true --disable_tqdm true --learning_rate 1e-3 --per_device_train_batch_size 8".split()


def pictures(count: int, size: int = 16, seed: int = 0) -> list[Image.Image]:
    pixels = np.random.default_rng(seed).integers(256, size=(count, size, size, 3), dtype=np.uint8)
    return [Image.fromarray(image) for image in pixels]


def write_parquet(path: Path, count: int, num_labels: int = 3, seed: int = 0, size: int = 16) -> str:
    """A parquet file of random pictures in columns `image` and `label`, every class present; its path."""
    names = [f"class{number}" for number in range(num_labels)]
    table = datasets.Dataset.from_dict(
        {"image": pictures(count, size, seed), "label": [number % num_labels for number in range(count)]},
        features=datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)}),
    )
    table.to_parquet(path)
    return str(path)


def write_images(folder: Path, train: int = 18, test: int = 13, size: int = 16) -> list[str]:
    """Flags of a file of pictures to train on and of one to evaluate, of another size perhaps."""
    files = write_parquet(folder / "train.parquet", train), write_parquet(folder / "test.parquet", test, 3, 1, size)
    return ["--train_files", files[0], "--validation_files", files[1]]


def write_points(path: Path, count: int, seed: int = 0, per_token: bool = True) -> str:
    """Points on a line with one feature; above the middle, tokens or samples are of the class `upper`."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 9, count)
    columns = {"x": [rng.uniform(-2, 2, length).tolist() for length in lengths]}
    columns["height"] = [[[value, 1.0] for value in rng.standard_normal(length).tolist()] for length in lengths]
    names = [["upper" if value > 0 else "lower" for value in xs] for xs in columns["x"]]
    columns["part"] = names if per_token else [sample[0] for sample in names]
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return str(path)


def small_clip() -> tuple[transformers.CLIPModel, transformers.CLIPTokenizer]:
    """A CLIP of images and text with a tokenizer of letters."""
    torch.manual_seed(0)
    letters = [f"{letter}{end}" for letter in "abcdefghijklmnopqrstuvwxyz0123456789." for end in ("", "</w>")]
    vocabulary = {token: number for number, token in enumerate([*letters, "<|startoftext|>", "<|endoftext|>"])}
    tokenizer = transformers.CLIPTokenizer(vocab=vocabulary, merges=[])
    config = clip_config()
    config.text_config.vocab_size = len(vocabulary)
    config.text_config.max_position_embeddings = 32
    config.text_config.eos_token_id = tokenizer.eos_token_id
    return widen(transformers.CLIPModel(config)), tokenizer


def write_dual_encoder(folder: Path) -> str:
    """A small DINOv3 with the text tower of a small CLIP, its processor and its tokenizer; the path of their folder."""
    clip, tokenizer = small_clip()
    vision = widen(transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**IMAGE, num_register_tokens=2)))
    text = transformers.CLIPTextModel(clip.config.text_config)
    config = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(
        vision.config, text.config, projection_dim=8
    )
    model = widen(transformers.VisionTextDualEncoderModel(config, vision_model=vision, text_model=text))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = {"height": 16, "width": 16}
    transformers.DINOv3ViTImageProcessor(size=size, resample=3).save_pretrained(folder)
    return str(folder)


def write_dinov2(folder: Path) -> str:
    """A small DINOv2 and its processor; the path of their folder."""
    widen(transformers.Dinov2Model(transformers.Dinov2Config(**IMAGE | {"patch_size": 14}))).save_pretrained(folder)
    transformers.BitImageProcessor(size={"shortest_edge": 28}, crop_size=28).save_pretrained(folder)
    return str(folder)


def write_images_folder(folder: Path, splits: dict[str, int], classes: tuple[str, ...] = ("cat", "dog")) -> str:
    for split, count in splits.items():
        for number, picture in enumerate(pictures(count, seed=len(split))):
            path = folder / split / classes[number % len(classes)] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture.save(path)
    return str(folder)


def train(output_dir: Path, *flags: str) -> dict[str, float]:
    """A tiny training run in this process."""
    return main(["--output_dir", str(output_dir), "--do_train", *TINY_MODEL, *TINY_RUN, *map(str, flags)])


def train_with_torchrun(output_dir: Path, *flags: str, script: Path = SCRIPT) -> subprocess.CompletedProcess:
    """Two processes without an accelerator. No flag says so: the script finds out."""
    flags = ["--output_dir", output_dir, "--do_train", *TINY_MODEL, *TINY_RUN, "--use_cpu", "false", *flags]
    return run_script_twice(script, *flags)


def run_script_twice(script: Path, *flags: str) -> subprocess.CompletedProcess:
    """A training script in two processes, whose threads of Gloo must have ended before the processes end."""
    process = run_with_torchrun(SUPPORT / "watched_script.py", script.stem, *flags)
    if sys.platform.startswith("linux"):
        ends = re.findall(r"threads of Gloo: (\d+), then (\d+)", process.stdout)
        assert len(ends) == 2 and all(int(after) == 0 for _, after in ends), ends
        # torch 2.9 does not name them.
        assert all(int(before) > 0 for before, _ in ends) or torch.__version__ < (2, 10), ends
    return process


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_weights(first: Path, second: Path, tolerance: float = 0.0) -> None:
    left, right = weights(first), weights(second)
    assert left.keys() == right.keys()
    for name, value in left.items():
        difference = (value.double() - right[name].double()).abs().max().item()
        assert difference <= tolerance, f"{name} differs by {difference}"
