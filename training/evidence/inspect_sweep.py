"""Shows what the models of a sweep learned, side by side: generators, and attention to a picture.

ComRoPE Table 8 and Figure 8, deviations and densities of the elements above the diagonal of the angle matrices, of all
models of the sweep comrope_block_size:

    python training/evidence/inspect_sweep.py outputs/imagenet_comrope --output_dir outputs/angle_matrices

LieRE Figures 10 to 12, attention maps of all models of the sweep arrows, a row for each model, a column for each layer:

    python training/evidence/inspect_sweep.py outputs/arrows_sweep --image outputs/arrows/puzzles/0_left.png \
        --image_sizes 108 276 --output_dir outputs/attention

Writes angle_matrices.md and angle_matrices.png, and attention_<size>.png for every size.
"""

import argparse
import sys
from pathlib import Path
from typing import NamedTuple


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import matplotlib
from matplotlib import pyplot
from torch import nn

from hf_liere.auto import load_checkpoint
from hf_liere.errors import InputError
from hf_liere.tools.inspection.attention import attention_maps, vision_tower
from hf_liere.tools.inspection.encodings import angle_statistics, rotary_encoding
from hf_liere.tools.inspection.inputs import Preparation, read_file
from hf_liere.tools.inspection.plots import AttentionRow, attention_rows, save_attention
from training.common.records import save_figure, write_text
from training.engine.runs import start
from training.evidence.reporting.markdown import markdown


class SweptModel(NamedTuple):
    """A model of a sweep, with its processor; the name of its folder says its settings."""

    name: str
    model: nn.Module
    processor: object | None


def main(arguments: list[str] | None = None) -> Path:
    """Inspects the models of a folder; returns the folder of the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, help="folder with a folder for each model, as a sweep leaves it")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--image", type=Path, help="picture for attention maps; none without it")
    parser.add_argument("--image_sizes", type=int, nargs="+", help="height and width of the picture")
    given = parser.parse_args(arguments)
    if (given.image is None) != (given.image_sizes is None):
        raise InputError("Attention maps need --image and --image_sizes; accepted: both or none.")
    folders = sorted(path.parent for path in given.models.glob("*/config.json"))
    if not folders:
        raise InputError(f"{given.models} contains no folder with a model; accepted: the --output_dir of a sweep.")
    models = [SweptModel(folder.name, *load_checkpoint(folder)) for folder in folders]
    given.output_dir.mkdir(parents=True, exist_ok=True)
    matplotlib.use("Agg")
    write_angle_matrices(models, given.output_dir)
    for size in given.image_sizes or []:
        rows = [row for model in models for row in _attention(model, given.image, size)]
        save_attention(rows, given.output_dir / f"attention_{size}.png")
    return given.output_dir


def write_angle_matrices(models: list[SweptModel], folder: Path) -> None:
    """The table of deviations, and the densities on a linear and on a logarithmic scale."""
    encodings = {name: rotary_encoding(vision_tower(model).module) for name, model, _ in models}
    found = {name: angle_statistics(encoding) for name, encoding in encodings.items() if encoding is not None}
    if not found:
        return
    rows = [[name, f"{angles.std:.3f}"] for name, angles in found.items()]
    text = markdown(["model", "standard deviation of elements"], rows, "---:")
    write_text(folder / "angle_matrices.md", text + "\n")
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for axis, scale in zip(panels, ("linear", "log")):
        for name, angles in found.items():
            centres = (angles.edges[1:] + angles.edges[:-1]) / 2  # (bins,)
            axis.plot(centres.numpy(), angles.density.numpy(), label=name, linewidth=1)
        axis.set(xlabel="element of the angle matrices", ylabel="density", yscale=scale)
    panels[1].legend(fontsize=6)
    save_figure(figure, folder / "angle_matrices.png", dpi=144)
    pyplot.close(figure)


def _attention(swept: SweptModel, image: Path, size: int) -> list[AttentionRow]:
    """A row, or rows for the frames of a clip."""
    preparation = Preparation.for_tower(vision_tower(swept.model), swept.processor)
    shown = preparation.resize(read_file(image, preparation.num_frames is not None), (size, size))
    found = attention_maps(swept.model, preparation.pixel_values([shown]))
    return attention_rows(swept.name, found.maps[:, 0], shown)


if __name__ == "__main__":
    start(lambda: print(f"Results: {main()}"))
