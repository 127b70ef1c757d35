"""Reproduces the tables of the LieRE and ComRoPE papers that need no training, beside the papers' figures.

    python training/evidence/paper_tables.py              # about half a minute
    python training/evidence/paper_tables.py --no_measure # without the cost of our own models

LieRE Table 8 (inference FLOPs) and Table 10 (parameters of the generators), ComRoPE Table 7 (commutativity, extra
parameters, extra time). Notes below the tables explain contradictions within the papers.
"""

import argparse
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from transformers.utils import logging

from hf_liere import LieREVideoConfig, LieREViTConfig, LieREViTForImageClassification
from hf_liere.encoding.folding import build_rotary_encoding
from hf_liere.rotation.exponential import skew
from hf_liere.tools.inspection.costs import count_cost, count_forward
from training.evidence.reporting.markdown import markdown


# LieRE's code on CIFAR-100: 32 × 32 images in patches of 4 × 4, so 64 patches and a class token; heads are always 64
# channels wide, and the last norm sees the pooled token only.
CIFAR = {
    "image_size": 32,
    "patch_size": 4,
    "num_labels": 100,
    "head_dim": 64,
    "qkv_bias": False,
    "final_norm": "pooled",
}
SIZES = {
    "Tiny": {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 768},
    "Base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "Large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
}
PAPER_PARAMETERS = {"Tiny": 22, "Base": 85, "Large": 302}
ENCODINGS = {
    "Absolute": {"position_encoding": "absolute"},
    "VisionLLaMA": {"position_encoding": "axial_rope", "coordinates": "train_grid"},
    "RoPE-Mixed": {"position_encoding": "rope_mixed", "coordinates": "train_grid"},
    "LieRE8": {"position_encoding": "liere", "block_size": 8},
    "LieRE64": {"position_encoding": "liere", "block_size": 64},
}
TABLE_8 = {
    "Absolute": {"Tiny": 0.963, "Base": 5.607, "Large": 19.856},
    "VisionLLaMA": {"Tiny": 0.963, "Base": 5.607, "Large": 19.856},
    "RoPE-Mixed": {"Tiny": 0.964, "Base": 5.609, "Large": 19.863},
    "LieRE8": {"Tiny": 0.968, "Base": 5.617, "Large": 19.882},
    "LieRE64": {"Tiny": 0.970, "Base": 5.684, "Large": 20.061},
}
NOTES_8 = """\
Convention: multiply-accumulates of all matrix products, 5 operations per element of a layer norm, and for q and k of
every layer one b-fold product per channel and token, class token included: 2·L·65·(H·64)·b. VisionLLaMA's rotations,
which are the same in every layer, are counted for one layer; counted for all it would equal RoPE-Mixed, which it does
not in the paper. Two of the fifteen cells do not follow:
- Tiny, LieRE64: 1.002 by the formula that gives Base and Large to the digit; the paper's 0.970 (+0.727%) would be a
  fifth of the added products, while its own LieRE8 column grows from Tiny to Base as the formula says.
- Large, VisionLLaMA: 19.857; the paper adds 0.000% to the largest model and 0.002% to Base, although whatever the
  rotations of Base cost, those of Large, with more heads and layers, cannot cost less.
"Ours" is what this package executes for one image: the products that PyTorch counts, the same norms, and 2 products
per channel for rotations of planes. The rotations themselves are computed once per forward, whatever the batch ("+");
the paper leaves the matrix exponentials out. VisionLLaMA's planes are rotated in every layer, at RoPE-Mixed's cost.
"""
NOTES_PARAMETERS = """\
The paper calls the smallest model "ViT-Tiny (22M)". Width 384, 12 layers, 6 heads and an MLP of 768, the sizes of the
official code that Table 8 follows, make {tiny:.1f} million; {small:.1f} million would take an MLP of 1536. The paper
states an MLP of 3096 for Base, the official code has 3072: with 3096 it would be {wide:.1f} million parameters instead
of {base:.1f}, and {wide_flops:.3f} GFLOPs instead of Table 8's 5.607.
"""
TABLE_10 = {2: 9216, 4: 27648, 8: 64512, 16: 138240, 32: 285696, 64: 580608}
NOTES_10 = """\
Counted are the free entries of all layers, which is what is stored and trained here. The official code stores full
b × b matrices (1,179,648 numbers for b = 64) and uses those of the first layer alone, a twelfth of the table's figures.
The paper prints the same numbers for UCF101, whose positions have three axes: generators for three axes are half as
many again, as in the last column.
"""
# ViT-B/16 of ComRoPE's experiments: n patches, width d, L layers, N axes, h heads, blocks of b.
COMROPE_VIT = {"image_size": 224, "patch_size": 16, "num_labels": 1000}
COMROPE_METHODS = {
    "APE": {"position_encoding": "absolute"},
    "Vanilla RoPE": {"position_encoding": "axial_rope"},
    "LieRE": {"position_encoding": "liere", "block_size": 8},
    "ComRoPE-AP": {"position_encoding": "comrope_ap", "block_size": 8},
    "ComRoPE-LD": {"position_encoding": "comrope_ld", "block_size": 8},
}
COMMUTES = {"APE": "–", "Vanilla RoPE": "Yes", "LieRE": "Commonly Not", "ComRoPE-AP": "Yes", "ComRoPE-LD": "Yes"}
NOTES_7 = """\
APE: one entry more, for the class token. The paper counts full b × b matrices, of whose entries only F − Fᵀ acts; here
the b(b−1)/2 free entries of each block are stored, so 7/16 of them for b = 8. ComRoPE-LD's multipliers are one per
axis, block and head in the paper's count and here (N·d/b per layer); the official code shares them over heads, 73,920
parameters in all. Extra time is stated up to a constant: "paper" adds its terms nd(bN + b² + d/h) over all layers, for
APE nd; "ours" are the products executed for rotations of one image, exponentials included, of which all but the
rotating of q and k is done once per forward.
"""


def meta_model(**fields) -> LieREViTForImageClassification:
    """A model on the meta device, which has only shapes."""
    with torch.device("meta"):
        return LieREViTForImageClassification(LieREViTConfig(**fields)).eval()


def blank_image(model: LieREViTForImageClassification) -> torch.Tensor:
    return torch.zeros(1, 3, *model.config.input_shape, device=model.device)


def convention(size: str, encoding: str) -> float:
    """GFLOPs of a cell of Table 8, see `NOTES_8`."""
    model = meta_model(**CIFAR, **SIZES[size], position_encoding="absolute")
    operations = count_forward(model, blank_image(model))
    config = LieREViTConfig(**CIFAR, **SIZES[size], **ENCODINGS[encoding])
    tokens = config.num_prefix_tokens + config.train_grid[0] * config.train_grid[1]
    channels = config.num_attention_heads * config.head_dim
    layers = 1 if encoding == "VisionLLaMA" else config.num_hidden_layers
    rotated = 2 * layers * tokens * channels * (config.block_size or 0)
    return (operations + rotated) / 1e9


def measure_depth(fields: dict, depth: int) -> tuple[int, int]:
    """Operations of a model with `depth` layers for one image and for the rotations of one forward pass."""
    torch.manual_seed(0)
    model = LieREViTForImageClassification(LieREViTConfig(**{**fields, "num_hidden_layers": depth})).eval()
    cost = count_cost(model, blank_image(model))
    return cost.operations - cost.rotation_operations, cost.rotation_operations


def measure(fields: dict) -> tuple[float, float]:
    """GFLOPs for one image and for the rotations of one forward pass, extrapolated from one and two layers."""
    (first, first_rotations), (second, second_rotations) = (measure_depth(fields, depth) for depth in (1, 2))
    layers = LieREViTConfig(**fields).num_hidden_layers
    image = first + (layers - 1) * (second - first)
    rotations = first_rotations + (layers - 1) * (second_rotations - first_rotations)
    return image / 1e9, rotations / 1e9


def table_8(measured: bool = True) -> list[list[str]]:
    """Rows of size, encoding, the figure by the paper's convention, the paper's, their difference, our model's cost."""
    rows = []
    for size in SIZES:
        for encoding, paper in TABLE_8.items():
            figure = convention(size, encoding)
            row = [size, encoding, f"{figure:.3f}", f"{paper[size]:.3f}", f"{round(figure, 3) - paper[size]:+.3f}"]
            if measured:
                image, rotations = measure({**CIFAR, **SIZES[size], **ENCODINGS[encoding]})
                row.append(f"{image:.3f} + {rotations:.3f}")
            rows.append(row)
    return rows


def size_rows() -> list[list[str]]:
    """Rows of size, our million parameters, the paper's and the difference."""
    rows = []
    for size, paper in PAPER_PARAMETERS.items():
        millions = meta_model(**CIFAR, **SIZES[size], position_encoding="absolute").num_parameters() / 1e6
        rows.append([f"ViT-{size}", f"{millions:.1f}", str(paper), f"{millions - paper:+.1f}"])
    return rows


def stated_sizes() -> dict[str, float]:
    """Million parameters and GFLOPs of the sizes stated in the paper's text and in the official code."""

    def model(size, **fields):
        return meta_model(**{**CIFAR, **SIZES[size], "position_encoding": "absolute", **fields})

    sizes = {
        "tiny": model("Tiny"),
        "small": model("Tiny", intermediate_size=1536),
        "base": model("Base"),
        "wide": model("Base", intermediate_size=3096),
    }
    operations = count_forward(sizes["wide"], blank_image(sizes["wide"]))
    millions = {name: model.num_parameters() / 1e6 for name, model in sizes.items()}
    return millions | {"wide_flops": operations / 1e9}


def table_10() -> list[list[str]]:
    """Rows of block size, our generator parameters, the paper's, the difference, the share and the count of videos."""
    rows = []
    for size, paper in TABLE_10.items():
        fields = {"position_encoding": "liere", "block_size": size}
        model = meta_model(**CIFAR, **SIZES["Base"], **fields)
        count = sum(parameter.numel() for _, parameter in model.rotary_parameters())
        share = 100 * count / (model.num_parameters() - count)
        with torch.device("meta"):
            video = build_rotary_encoding(LieREVideoConfig(**SIZES["Base"], **fields), 3)
        three_axes = sum(parameter.numel() for parameter in video.parameters())
        rows.append([str(size), f"{count:,}", f"{paper:,}", f"{count - paper:+,}", f"{share:.2f} %", f"{three_axes:,}"])
    return rows


def commutator(encoding) -> float:
    """Largest entry of A₁A₂ − A₂A₁ relative to the largest of A₁A₂."""
    generators = skew(encoding.entries(torch.device("cpu")).detach().double(), encoding.block_size)
    first, second = generators[0], generators[1]
    scale = max((first @ second).abs().max().item(), first.abs().max().item() * second.abs().max().item())
    return (first @ second - second @ first).abs().max().item() / scale


def table_7(measured: bool = True) -> list[list[str]]:
    """Rows of method, measured and stated commutativity, our and the paper's extra parameters, and extra time."""
    rows = []
    plain = meta_model(**COMROPE_VIT, position_encoding="none")
    for method, fields in COMROPE_METHODS.items():
        config = LieREViTConfig(**COMROPE_VIT, **fields)
        torch.manual_seed(0)
        encoding = build_rotary_encoding(config, 2)
        if encoding is None:
            commutes = "–"
        else:
            encoding.reset_parameters()
            largest = commutator(encoding)
            # Products of commuting float64 matrices differ only by rounding.
            commutes = f"{'Yes' if largest < 1e-12 else 'No'} ({largest:.0e})"
        count = meta_model(**COMROPE_VIT, **fields).num_parameters() - plain.num_parameters()
        layers, width, heads, axes = config.num_hidden_layers, config.hidden_size, config.num_attention_heads, 2
        patches, size = config.train_grid[0] * config.train_grid[1], config.block_size or 0
        paper = {
            "APE": patches * width,
            "Vanilla RoPE": 0,
            "LieRE": layers * axes * width * size,
            "ComRoPE-AP": layers * width * size,
            "ComRoPE-LD": layers * width * size + layers * width * axes // max(size, 1),
        }[method]
        time = patches * width
        if encoding is not None:
            time *= layers * (size * axes + size**2 + width // heads)
        row = [method, commutes, COMMUTES[method], f"{count:,}", f"{paper:,}", f"{count - paper:+,}"]
        row.append(f"{time / 1e9:.3f}")
        if measured:
            image, rotations = measure({**COMROPE_VIT, **fields})
            without, _ = measure({**COMROPE_VIT, "position_encoding": "none"})
            row.append(f"{image - without + rotations:.3f}")
        rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no_measure", action="store_true", help="leave out what our own models cost")
    measured = not parser.parse_args().no_measure
    logging.set_verbosity_error()

    print("## LieRE Table 8: inference GFLOPs, CIFAR-100\n")
    header = ["size", "encoding", "convention", "paper", "difference"]
    header += ["ours: image + rotations"] if measured else []
    print(markdown(header, table_8(measured)), NOTES_8, sep="\n\n")
    print(markdown(["model", "million parameters", "paper", "difference"], size_rows()), sep="\n\n")
    print("", NOTES_PARAMETERS.format(**stated_sizes()), sep="\n")

    print("## LieRE Table 10: parameters of the generators, ViT-Base\n")
    header = ["block", "ours", "paper", "difference", "of the rest", "three axes"]
    print(markdown(header, table_10()), NOTES_10, sep="\n\n")

    print("## ComRoPE Table 7: ViT-B/16 at 224 pixels, b = 8\n")
    header = ["method", "commutes: ours (measured)", "paper", "extra parameters: ours", "paper", "difference"]
    header += ["extra GFLOPs: paper's terms", *(["ours"] if measured else [])]
    print(markdown(header, table_7(measured)), NOTES_7, sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
