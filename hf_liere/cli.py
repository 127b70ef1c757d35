"""The console command hf-liere: one thin subcommand per file of this package."""

import argparse
import json
import sys

from .conversion import convert_checkpoint
from .conversion_sources import SOURCES, ConversionError, option_names
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
    return command


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = vars(parser().parse_args(arguments))
    options.pop("command")
    options = {name: given for name, given in options.items() if given is not None}
    checkpoint, output = options.pop("checkpoint"), options.pop("output")
    try:
        conversion = convert_checkpoint(checkpoint, output, **options)
    except (ConversionError, FileExistsError) as error:
        print(f"hf-liere convert: {error}", file=sys.stderr)
        return 1
    print(f"{output}: {conversion.model_class.__name__} from a checkpoint of kind {conversion.source}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
