"""The console command hf-liere: one thin subcommand per file of this package."""

import argparse
import json
import sys

from .conversion import convert_checkpoint
from .conversion_sources import SOURCES, ConversionError, option_names
from .export import ExportError, export_checkpoint
from .version import __version__


def value(text: str):
    """A number, list, truth value or, if it is no JSON, a string."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(prog="hf-liere", description="Learned Lie-group position encodings for ViTs.")
    command.add_argument("--version", action="version", version=__version__)
    subcommands = command.add_subparsers(dest="command", required=True)
    _add_convert(subcommands)
    _add_export(subcommands)
    return command


def _add_convert(subcommands) -> None:
    convert = subcommands.add_parser(
        "convert",
        help="an official or pretrained checkpoint to a directory that from_pretrained reads",
        description="Convert a checkpoint of LieRE, ComRoPE, rope-vit, timm, ViT, DeiT or CLIP. The options say what "
        "its shapes do not tell; their defaults are in the documentation of hf_liere.conversion.",
    )
    convert.add_argument("checkpoint", help="file, directory or repository on the Hub")
    convert.add_argument("output", help="directory to write; it must not exist or be empty")
    convert.add_argument("--source", choices=SOURCES, help="kind of the checkpoint, if its names do not tell")
    convert.add_argument("--revision", help="branch, tag or commit of the repository")
    convert.add_argument("--image_mean", type=float, nargs="+", metavar="MEAN", help="of each channel in training")
    convert.add_argument("--image_std", type=float, nargs="+", metavar="STD", help="of each channel in training")
    takers = {}
    for source in SOURCES:
        for name in option_names(source):
            takers.setdefault(name, []).append(source)
    for name, sources in sorted(takers.items()):
        convert.add_argument(f"--{name}", type=value, metavar="VALUE", help=f"of {', '.join(sources)}")
    convert.set_defaults(run=run_convert)


def _add_export(subcommands) -> None:
    export = subcommands.add_parser(
        "export",
        help="a saved model to an ONNX file or a torch.export archive",
        description="Write a saved model for inference outside of Python and compare the outputs of what was written "
        "with the model's. Which encodings take inputs of any size is in the documentation of hf_liere.export.",
    )
    export.add_argument("checkpoint", help="directory or repository on the Hub")
    export.add_argument("output", help="file to write, ending in .onnx or .pt2")
    export.add_argument("--revision", help="branch, tag or commit of the repository")
    export.add_argument("--image_size", type=int, nargs="+", metavar="SIZE", help="of inputs of a fixed size (or two)")
    export.add_argument("--num_frames", type=int, help="of videos of a fixed size")
    export.add_argument("--dynamic_size", type=value, metavar="true|false", help="whether inputs may have any size")
    export.add_argument("--opset", type=int, help="version of ONNX's operators")
    export.set_defaults(run=run_export)


def run_convert(checkpoint: str, output: str, **options) -> str:
    options = {name: given for name, given in options.items() if given is not None}
    conversion = convert_checkpoint(checkpoint, output, **options)
    return f"{output}: {conversion.model_class.__name__} from a checkpoint of kind {conversion.source}"


def run_export(checkpoint: str, output: str, image_size: list[int] | None, dynamic_size, **options) -> str:
    if image_size is not None:
        if len(image_size) > 2:
            raise ExportError(f"--image_size {image_size}: accepted are one size, or height and width.")
        image_size = (image_size[0], image_size[-1])
    if dynamic_size not in (None, True, False):
        raise ExportError(f"--dynamic_size {dynamic_size}: accepted are true and false.")
    return export_checkpoint(checkpoint, output, image_size=image_size, dynamic_size=dynamic_size, **options)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = vars(parser().parse_args(arguments))
    command, run = options.pop("command"), options.pop("run")
    try:
        print(run(**options))
    except (ConversionError, ExportError, FileExistsError) as error:
        print(f"hf-liere {command}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
