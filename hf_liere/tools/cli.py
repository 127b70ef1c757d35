"""The console command hf-liere: one thin subcommand per file of this package."""

import argparse
import json
import os
import re
import runpy
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO, TypeAlias


# This file imports only the standard library; a command imports what it needs when it runs, see hf_liere/launcher.
UPGRADED_ENCODINGS = ("liere", "rope_mixed", "comrope_ap", "comrope_ld", "cayley_string", "circulant_string")
UPGRADED_ENCODINGS += ("liere_product",)


def parse_value(text: str) -> Any:
    """The JSON value that a text spells; any other text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


# Run as files: importing them as modules would import the package.
FOLDER = Path(__file__).parent
VERSION = runpy.run_path(str(FOLDER.parent / "version.py"))["__version__"]
closest = runpy.run_path(str(FOLDER.parent / "registers.py"))["closest"]
ERRORS = runpy.run_path(str(FOLDER.parent / "errors.py"))


def tell(text: str, file: TextIO | None = None) -> None:
    """Print a text, which may contain names from files."""
    print(ERRORS["printable"](text), file=file)


class _Parser(argparse.ArgumentParser):
    """Names the closest command, value or option beside an unknown one."""

    def error(self, message: str) -> NoReturn:
        found = re.search(r"invalid choice: '(.+?)' \(choose from (.*)\)", message)
        super().error(message + (closest(found[1], re.findall(r"\w+", found[2])) if found else ""))

    def _print_message(self, message: str, file: Any = None) -> None:
        super()._print_message(ERRORS["printable"](message), file)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [option.strip("-") for option in self._option_string_actions]
            self.error(f"unrecognized arguments: {' '.join(unknown)}{closest(unknown[0].strip('-'), options)}")
        return found, unknown


PARSER = _Parser(prog="hf-liere", description="Learned rotary position encodings (LieRE, ComRoPE).")
PARSER.add_argument("--version", action="version", version=VERSION)
REGISTER = "before the command: a Python file that registers encodings, starts or coordinates of yours"
PARSER.add_argument("--register", help=REGISTER, metavar="FILE", action="append", default=[])
COMMANDS = PARSER.add_subparsers(dest="command", required=True)
Argument: TypeAlias = tuple[str, dict[str, Any]]


def argument(name: str, help: str, **settings: Any) -> Argument:
    """An argument of a command, as for `add_argument`. Without a default, a command is run without it."""
    return name, {"help": help, **settings}


def command(description: str, *arguments: Argument) -> Callable:
    """Decorator of the function `run_…` of a command. The first sentence describes it in the list of commands."""

    def add(run: Callable[..., str]) -> Callable[..., str]:
        name = run.__name__.removeprefix("run_")
        first = description[0].lower() + description[1:].split(". ")[0].rstrip(".")
        parser = COMMANDS.add_parser(name, help=first, description=description, argument_default=argparse.SUPPRESS)
        parser.set_defaults(run_command=run)
        for argument_name, settings in arguments:
            parser.add_argument(argument_name, **settings)
        return run

    return add


CHECKPOINT = argument("checkpoint", "directory or repository on the Hub")
NEW_DIRECTORY = "directory to write; it must not exist or be empty"
REVISION = argument("--revision", "branch, tag or commit of the repository")
REPO_ID = argument("repo_id", "repository on the Hub")
BASE = argument("--base", "model that an adapter was trained on, if not where it says", metavar="CHECKPOINT")
TRUST = argument("--trust_remote_code", "run code of the checkpoint, if its model is unknown here", action="store_true")


def describe_options(options: dict[str, dict[str, object]]) -> Iterator[Argument]:
    """The options of `convert`, each with what it means for the kinds of checkpoints that take it."""
    for name in sorted({name for of_kind in options.values() for name in of_kind}):
        kinds: dict[str, list[str]] = {}
        for kind in options:
            if name in options[kind]:
                kinds.setdefault(str(options[kind][name]), []).append(kind)
        text = "; ".join(f"{', '.join(taking)}: {meaning}" for meaning, taking in kinds.items())
        yield argument(f"--{name}", text, type=parse_value, metavar="VALUE")


@command(
    "Convert a checkpoint of the authors of LieRE, ComRoPE or rope-vit to a directory that from_pretrained reads. The "
    "options supply what the tensor shapes do not determine; what holds without them is in parentheses. No code of the "
    "checkpoint runs. Models of transformers and timm, such as CLIP, are not converted: hf_liere.patch gives them "
    "learned rotations.",
    argument("checkpoint", "file, directory or repository on the Hub"),
    argument("output", NEW_DIRECTORY),
    # Without `choices`, so that the refusal of a kind that is patched says so.
    argument("--source", "liere, comrope or naver, where tensor names do not determine it", metavar="KIND"),
    REVISION,
    argument("--image_mean", "mean of each channel in training", type=float, nargs="+", metavar="MEAN"),
    argument("--image_std", "deviation of each channel", type=float, nargs="+", metavar="STD"),
    *describe_options(runpy.run_path(str(FOLDER / "conversion" / "options.py"))["OPTIONS"]),
)
def run_convert(checkpoint: str, output: str, **options: Any) -> str:
    from .convert import convert_checkpoint

    conversion = convert_checkpoint(checkpoint, output, **options)
    return f"{output}: {conversion.model_class.__name__} from a checkpoint of kind {conversion.source}"


@command(
    "Give a model a more general position encoding or another image size without changing its outputs. It has more to "
    "learn: absolute positions with rotations that start at zero, RoPE-Mixed as LieRE, larger blocks, a position table "
    "for larger images. The documentation of hf_liere.upgrades lists the upgrades that exist; others "
    "are refused with the reason. No code of the checkpoint runs.",
    argument("checkpoint", "a model of this package, such as `hf-liere convert` writes"),
    argument("output", NEW_DIRECTORY),
    argument("--position_encoding", "of the new model", choices=UPGRADED_ENCODINGS),
    argument("--block_size", "of its generators; without it the usual one of the encoding", type=int),
    argument("--share_heads", "one set of generators for all heads", type=parse_value, metavar="true|false"),
    argument("--share_layers", "one set for all layers", type=parse_value, metavar="true|false"),
    argument("--coordinates", "of the patches, such as centred_grid (as before)", metavar="CONVENTION"),
    argument("--image_size", "of the images (or height, width)", type=int, nargs="+", metavar="SIZE"),
    REVISION,
)
def run_upgrade(checkpoint: str, output: str, image_size: list[int] | None = None, **options: Any) -> str:
    from .convert import upgrade_checkpoint

    size = image_size[0] if image_size is not None and len(image_size) == 1 else image_size
    model = upgrade_checkpoint(checkpoint, output, image_size=size, **options)
    return f"{output}: {type(model).__name__} with position_encoding={model.config.position_encoding!r}"


@command(
    "Export a saved model to an ONNX file or a torch.export archive, and compare its outputs with the model's; or its "
    "learned frequencies to a GGUF file. docs/deploy.md lists the encodings that accept inputs of any size. No code of "
    "the checkpoint runs.",
    CHECKPOINT,
    argument("output", "file to write, ending in .onnx, .pt2 or .gguf"),
    REVISION,
    BASE,
    argument("--image_size", "fixed input size (or two)", type=int, nargs="+", metavar="SIZE"),
    argument("--num_frames", "fixed number of video frames", type=int),
    argument("--dynamic_size", "whether inputs may have any size", type=parse_value, metavar="true|false"),
    argument("--opset", "version of ONNX's operators", type=int),
    argument("--gguf", "for .gguf: the plain model's file, to be copied with learned frequencies", metavar="FILE"),
)
def run_export(checkpoint: str, output: str, image_size: list[int] | None = None, **options: Any) -> str:
    from .export import ExportError, export_checkpoint

    if ("gguf" in options) != output.endswith(".gguf"):
        raise ExportError(f"{output}: files that end in .gguf need --gguf, and no others take it.")
    if image_size is not None:
        if len(image_size) > 2:
            raise ExportError(f"--image_size {image_size}: accepted are one size, or height and width.")
        options["image_size"] = (image_size[0], image_size[-1])
    if options.get("dynamic_size") not in (None, True, False):
        raise ExportError(f"--dynamic_size {options['dynamic_size']}: accepted are true and false.")
    if "gguf" in options:
        from .engines import export_gguf

        if others := options.keys() - {"gguf", "revision"}:
            raise ExportError(f"{', '.join(others)}: files that end in .gguf have no such option.")
        return export_gguf(checkpoint, output, **options)
    return export_checkpoint(checkpoint, output, **options)


@command(
    "Report what a model's position encoding has learned, where the model looks and what it costs. report.html is one "
    "page that needs no network, and analysis.json and analysis.npz contain its numbers. Without images, attention is "
    "left out. Code of the checkpoint runs only if you trust it.",
    CHECKPOINT,
    argument("--output", NEW_DIRECTORY, required=True),
    argument("--image", "images, videos, volumes, or folders of frames", nargs="+", dest="images", metavar="FILE"),
    argument("--dataset", "folder of such files, parquet or json file, or data set on the Hub"),
    argument("--split", "of the data set; without one, its test, validation or first split"),
    argument("--max_samples", "images to take from the data set (16)", type=int),
    argument(
        "--image_sizes",
        "height and width of inputs; without any, the trained size, one and a half times and twice as large",
        type=int,
        nargs="+",
        metavar="SIZE",
    ),
    argument("--batch_size", "images at a time (8)", type=int),
    REVISION,
    BASE,
    argument("--compare", "a second model, shown beside the first", dest="compare_with", metavar="CHECKPOINT"),
    argument("--compare_revision", "branch, tag or commit of its repository"),
    TRUST,
)
def run_inspect(checkpoint: str, output: str, **options: Any) -> str:
    from .inspection.command import inspect_checkpoint

    return f"{inspect_checkpoint(checkpoint, output, **options)}: open it in a browser"


@command(
    "Print the most probable classes of images or videos, with their probabilities. The checkpoint's processor "
    "prepares them. Code of the checkpoint runs only if you trust it.",
    CHECKPOINT,
    argument("files", "images, videos, volumes, folders of frames, or folders of these", nargs="+", metavar="FILE"),
    argument("--top_k", "number of classes for each file (3)", type=int),
    argument("--attention", "picture to write (.png, .svg, .pdf): where the model looks, by layer", metavar="PICTURE"),
    argument("--json", "print json instead of lines", action="store_true", dest="as_json"),
    REVISION,
    BASE,
    TRUST,
)
def run_predict(checkpoint: str, files: list[str], as_json: bool = False, **options: Any) -> str:
    from .inspection.prediction import predict

    predictions = predict(checkpoint, files, **options)
    for remark in predictions.remarks:
        tell(f"hf-liere predict: {remark}", file=sys.stderr)
    return predictions.json() if as_json else "\n".join(map(str, predictions.files))


@command(
    "Publish a saved model as one commit and check it. It is the output of a training script, of `hf-liere "
    "convert`, of save_pretrained or of save_rotary. The commit has weights, configuration, code, processor, card, "
    "recipe and metrics. Its hashes are compared with the local files; then it is downloaded and loaded with its own "
    "code (a copy of this package's) in a process without tokens. Secrets and links out of the folder are refused.",
    argument("folder", "the saved model"),
    argument("repo_id", "repository on the Hub; made if it does not exist"),
    argument("--card", "facts to render the card from, or a name in model_cards/", metavar="FACTS"),
    argument("--evaluation", "its evaluations at other image sizes, for the card", nargs="+", metavar="FOLDER"),
    argument("--license", "licence of the weights as the Hub calls it, such as apache-2.0; else none"),
    argument("--revision", "branch; made if it does not exist"),
    argument("--message", "title of the commit"),
    argument("--private", "make a new repository private", action="store_true"),
    argument("--parent_commit", "refuse unless this is the newest commit"),
    argument("--max_shard_size", "larger weights are split (5GB)"),
    argument("--no_reload", "do not download and load what was published", action="store_false", dest="reload"),
)
def run_push(
    folder: str,
    repo_id: str,
    card: str | None = None,
    evaluation: Iterable[str] = (),
    license: str | None = None,
    **options: Any,
) -> str:
    from ..storage.saved_model import SavedModel
    from .hub.cards import push_card
    from .hub.facts import load_facts
    from .hub.publishing import push

    saved, facts = SavedModel(folder), load_facts(card) if card else None
    return str(push(saved, repo_id, card=push_card(saved, repo_id, facts, evaluation, license), **options))


@command(
    "Say what a model rotates and what is wrong with it, or with another engine. Read from configurations alone, with "
    "the errors on this machine; writes test vectors, and names the fault in what another engine computed for them.",
    argument("models", "directory, repository on the Hub, or model type such as llama", nargs="*", metavar="MODEL"),
    argument("--vectors", "write the test vectors of each model to a file in a new folder", metavar="FOLDER"),
    argument("--all", "of all model types of transformers", action="store_true", dest="every"),
    argument(
        "--check",
        "results of another engine for test vectors; MODEL may then be the file of these",
        dest="check_path",
        metavar="FILE",
    ),
    argument("--weights", "load the model with its weights and examine it as it is", action="store_true"),
    REVISION,
    TRUST,
)
def run_rope(models: Sequence[str] = (), **options: Any) -> str:
    from ..errors import InputError
    from .rope_check.command import run

    text, is_right = run(models, **options)
    if is_right:
        return text
    tell(text)
    raise InputError("the rotations differ from what is right.")


@command(
    "Compare a published model with a local one: code, every tensor, configuration and processor of a repository with "
    "what a push would write. No code of the repository runs, except the expected code with --run.",
    argument("folder", "the local model"),
    REPO_ID,
    REVISION,
    argument("--run", "also load it with its code, in a process without tokens, and compare", action="store_true"),
)
def run_verify(folder: str, repo_id: str, **options: Any) -> str:
    from .hub.publishing import verify

    published = verify(folder, repo_id, **options)
    outputs = ", with the same outputs" if published.reloaded else ""
    return f"{published.url}: what a push of {folder} would write{outputs}"


@command(
    "Download a model and compare its files with the Hub's hashes. No code runs.",
    REPO_ID,
    argument("folder", "folder to write; without one, the files stay in the Hub's cache", nargs="?"),
    REVISION,
)
def run_pull(repo_id: str, **options: Any) -> str:
    from .hub.pulling import pull

    pulled = pull(repo_id, **options)
    return f"{pulled.folder}: commit {pulled.commit}, hashes compared"


@command(
    "Print the model card of a facts file. Missing figures appear as not measured. No code runs.",
    argument("facts", "a yaml file, or the name of one in model_cards/"),
)
def run_card(facts: str) -> str:
    from .hub.cards import render_card
    from .hub.facts import load_facts

    return render_card(load_facts(facts)).text.rstrip()


@command(
    "Write a layer with learned rotations as one file that needs torch alone, for people who copy code.",
    argument("kind", "what to write", choices=["layer"]),
    argument("output", "file to write, such as lie_rotary.py; it must not exist"),
    argument("--position_encoding", "a rotary encoding (liere)"),
)
def run_bundle(kind: str, output: str, position_encoding: str = "liere") -> str:
    from ..plain import PLAIN_ENCODINGS, layer_code
    from ..registers import check_name
    from ..storage.targets import new_file

    check_name("position_encoding", position_encoding, PLAIN_ENCODINGS)
    code = layer_code(position_encoding, Path(output).stem)
    with new_file(output) as partial:
        partial.write_text(code, encoding="utf-8")
    return f"{output}: {len(code.splitlines())} lines"


@command(
    "Print what a bug report needs: versions, hardware, and which kernels are used. It has environment variables, no "
    "tokens, and for each function the reason why no kernel computes it.",
    argument("--json", "print json instead of Markdown", action="store_true", dest="as_json"),
)
def run_env(as_json: bool = False) -> str:
    # Run as a file: the report must also work where the package cannot be imported.
    return runpy.run_path(str(FOLDER / "environment.py"), run_name="hf_liere.tools.environment")["report"](as_json)


def main(arguments: list[str] | None = None) -> int:
    """
    Run the command and return its exit status: 1, with one line of explanation, for errors that the user can fix; after
    Ctrl-C or a closed pipe, the status that a shell reports for such a process.
    """
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader closed the pipe. Python flushes stdout again at exit and would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _run(arguments: list[str] | None) -> int:
    options = vars(PARSER.parse_args(arguments))
    command, run, files = options.pop("command"), options.pop("run_command"), options.pop("register")
    try:
        for file in files:
            from ..encoding.registration import import_file

            import_file(file)
        with ERRORS["printable_messages"]():
            text = run(**options)
    except KeyboardInterrupt:
        tell(f"hf-liere {command}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:
        from ..errors import memory_shortage
        from ..storage.client import HubError

        shortage = memory_shortage(error)
        if shortage is None and not isinstance(error, (HubError, OSError, ValueError)):
            raise
        tell(f"hf-liere {command}: {shortage or _one_line(error)}", file=sys.stderr)
        return 1
    tell(text)
    return 0


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(line.strip() for line in str(error).splitlines())


if __name__ == "__main__":
    sys.exit(main())
