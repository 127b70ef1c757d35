"""The console command hf-liere: one thin subcommand per file of this package."""

import argparse
import difflib
import json
import os
import re
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeAlias


# This file imports only the standard library; a command imports what it needs when it runs, see hf_liere/launcher.

SOURCES = ("liere", "comrope", "naver", "timm", "vit", "clip", "dinov3")
# Default block_size of each encoding that a model can be upgraded to; `None` means the whole head.
UPGRADED_ENCODINGS = {
    "rope_mixed": 2,
    "liere": 8,
    "comrope_ap": 8,
    "comrope_ld": 8,
    "cayley_string": None,
    "circulant_string": 16,
    "liere_product": None,
}
_ALL_BUT_LIERE, _TIMM, _DINOV3 = SOURCES[1:], ("naver", "timm"), ("dinov3",)
Subcommands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
# For each option of `convert`, the kinds of source that take it and the values that each accepts.
CONVERT_OPTIONS: dict[str, dict[tuple[str, ...], str]] = {
    "axis_order": {_TIMM: "columns_first or rows_first"},
    "axis_scale": {("comrope",): "true or false"},
    "cls_position": {("comrope",): "a number"},
    "hidden_act": {_ALL_BUT_LIERE: "an activation of transformers, such as gelu or quick_gelu"},
    "image_size": {("liere", *_ALL_BUT_LIERE): "a number, or a list of one for each axis"},
    "layer_generators": {("liere",): "official or paper"},
    "layer_norm_eps": {_ALL_BUT_LIERE: "a positive number"},
    "num_attention_heads": {_ALL_BUT_LIERE: "a number that divides the width"},
    "num_axes": {("liere", "comrope"): "2 (images) or 3 (volumes, videos)"},
    "num_channels": {("liere",): "a number"},
    "num_frames": {("comrope",): "a number"},
    "patch_size": {("liere",): "a number, or a list of one for each axis"},
    "pooling": {("liere", *_TIMM): "cls or mean"},
    "position_encoding": {
        ("liere",): "liere, rope_mixed, absolute or visionllama",
        ("comrope",): "liere, comrope-ap, comrope-ld, vanilla-rope, raw or none",
        _TIMM: "mixed, axial, absolute or none",
    },
    "position_jitter": {_DINOV3: "a number of at least 1"},
    "position_rescale": {_DINOV3: "a number of at least 1"},
    "position_shift": {_DINOV3: "a number of at least 0"},
    "reference_grid": {_TIMM: "a number of patches, or a list of two"},
    "rope_theta": {(*_TIMM, *_DINOV3): "a positive number"},
    "scale_factor": {("comrope",): "a number"},
    "theta_base": {("comrope",): "a positive number"},
}
TRUST = {"action": "store_true", "help": "run code of the checkpoint, if its model is not known here"}


def parse_value(text: str) -> Any:
    """The JSON value that a text spells; any other text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


class _Parser(argparse.ArgumentParser):
    """Names the closest command or value beside an unknown one."""

    def error(self, message: str) -> NoReturn:
        found = re.search(r"invalid choice: '(.+?)' \(choose from (.*)\)", message)
        close = difflib.get_close_matches(found[1], re.findall(r"\w+", found[2]), n=1) if found else []
        super().error(f"{message}; the closest is {close[0]!r}" if close else message)


def build_parser() -> argparse.ArgumentParser:
    # Run as a file: importing it as a module would import the package.
    version = runpy.run_path(str(Path(__file__).with_name("version.py")))["__version__"]
    command: argparse.ArgumentParser = _Parser(
        prog="hf-liere", description="Learned Lie-group position encodings for ViTs."
    )
    command.add_argument("--version", action="version", version=version)
    subcommands = command.add_subparsers(dest="command", required=True)
    for add_arguments in (_add_convert, _add_upgrade, _add_export, _add_inspect, _add_predict, _add_push, _add_rope):
        add_arguments(subcommands)
    add = _add_command(
        subcommands,
        run_verify,
        "compare a published model with a local one",
        "Compare code, every tensor, configuration and processor of a repository with what a push of a local model "
        "would write. No code of the repository runs, except the expected code with --run.",
    )
    add("folder", help="the local model")
    add("repo_id", help="repository on the Hub")
    add("--revision", default="main", help="branch, tag or commit")
    compared = "also load the model with its code, in a process without tokens, and compare its outputs"
    add("--run", action="store_true", dest="runs", help=compared)
    add = _add_command(
        subcommands,
        run_pull,
        "download a model and compare its files with the Hub's hashes",
        "Download a repository and compare every file with the hash that the Hub lists. No code runs.",
    )
    add("repo_id", help="repository on the Hub")
    add("folder", nargs="?", help="folder to write; without one, the files stay in the Hub's cache")
    add("--revision", default="main", help="branch, tag or commit")
    add = _add_command(
        subcommands,
        run_card,
        "print the model card of a facts file",
        "Print the model card of a facts file; missing figures appear as not measured. No code runs.",
    )
    add("facts", help="a yaml file, or the name of one in model_cards/")
    add = _add_command(
        subcommands,
        run_env,
        "print what a bug report needs: versions, hardware, and which kernels are used",
        "Print versions, hardware, environment variables (no tokens), and which kernels or plain operations compute "
        "each function, with the reason where no kernel does.",
    )
    add("--json", action="store_true", dest="as_json", help="print json instead of Markdown")
    return command


def _add_command(subcommands: Subcommands, run: Callable[..., str], help: str, description: str) -> Callable:
    """Add the command of a function `run_…`; returns the method that adds its arguments."""
    parser = subcommands.add_parser(run.__name__.removeprefix("run_"), help=help, description=description)
    parser.set_defaults(run=run)
    return parser.add_argument


def _add_convert(subcommands: Subcommands) -> None:
    add = _add_command(
        subcommands,
        run_convert,
        "convert an official or pretrained checkpoint to a directory that from_pretrained reads",
        "Convert a checkpoint of LieRE, ComRoPE, rope-vit, timm, ViT, DeiT, CLIP or DINOv3. The options supply what "
        "the tensor shapes do not determine; their defaults are in the documentation of "
        "hf_liere.conversion.checkpoints. No code of the checkpoint runs.",
    )
    add("checkpoint", nargs="?", help="file, directory or repository on the Hub")
    add("output", nargs="?", help="directory to write; it must not exist or be empty")
    add("--list", action="store_true", dest="lists", help="print known repositories with their kinds and options")
    add("--source", choices=SOURCES, help="kind of the checkpoint, where its tensor names do not determine it")
    add("--revision", help="branch, tag or commit of the repository")
    add("--image_mean", type=float, nargs="+", metavar="MEAN", help="mean of each channel in training")
    add("--image_std", type=float, nargs="+", metavar="STD", help="deviation of each channel")
    for name, accepted in CONVERT_OPTIONS.items():
        text = "; ".join(f"{', '.join(sources)}: {values}" for sources, values in accepted.items())
        add(f"--{name}", type=parse_value, metavar="VALUE", help=text)


def _add_upgrade(subcommands: Subcommands) -> None:
    add = _add_command(
        subcommands,
        run_upgrade,
        "give a model a more general position encoding or another image size without changing its outputs",
        "Write a model that computes the same as a checkpoint and has more to learn: a pretrained ViT with rotations "
        "that start at zero, RoPE-Mixed as LieRE, larger blocks, a position table for larger images. The "
        "documentation of hf_liere.conversion.upgrades lists the upgrades that exist; others are refused with the "
        "reason. No code of the checkpoint runs.",
    )
    add("checkpoint", help="a model of this package, or a checkpoint that `hf-liere convert` reads")
    add("output", help="directory to write; it must not exist or be empty")
    add("--position_encoding", choices=UPGRADED_ENCODINGS, help="of the new model")
    sizes = ", ".join(f"{size or 'head_dim'} for {name}" for name, size in UPGRADED_ENCODINGS.items())
    add("--block_size", type=int, help=f"of its generators; without it {sizes}")
    add("--share_heads", type=parse_value, metavar="true|false", help="one set of generators for all heads")
    add("--share_layers", type=parse_value, metavar="true|false", help="one set for all layers")
    add("--coordinates", metavar="CONVENTION", help="of the patches, such as centred_grid (as before)")
    add("--relative_axis", type=int, metavar="AXIS", help="along which liere_product stays relative (0, the rows)")
    add("--image_size", type=int, nargs="+", metavar="SIZE", help="of the images (or height, width)")
    add("--revision", help="branch, tag or commit of the repository")


def _add_export(subcommands: Subcommands) -> None:
    add = _add_command(
        subcommands,
        run_export,
        "export a saved model to an ONNX file or a torch.export archive",
        "Write a saved model for inference outside of Python and compare the exported outputs with the model's. The "
        "documentation of hf_liere.export lists the encodings that accept inputs of any size. No code of the "
        "checkpoint runs.",
    )
    add("checkpoint", help="directory or repository on the Hub")
    add("output", help="file to write, ending in .onnx or .pt2")
    add("--revision", help="branch, tag or commit of the repository")
    add("--image_size", type=int, nargs="+", metavar="SIZE", help="fixed input size (or two)")
    add("--num_frames", type=int, help="fixed number of video frames")
    add("--dynamic_size", type=parse_value, metavar="true|false", help="whether inputs may have any size")
    add("--opset", type=int, help="version of ONNX's operators")


def _add_inspect(subcommands: Subcommands) -> None:
    add = _add_command(
        subcommands,
        run_inspect,
        "report what a model's position encoding has learned, where the model looks and what it costs",
        "Write report.html, one page that needs no network, and the numbers behind it, analysis.json and "
        "analysis.npz. Without images, attention is left out. Code of the checkpoint runs only if you trust it.",
    )
    add("checkpoint", help="directory or repository on the Hub")
    add("--output", required=True, help="directory to write; it must not exist or be empty")
    add("--image", nargs="+", default=[], metavar="FILE", help="images, videos, volumes, or folders of frames")
    add("--dataset", help="folder of such files, parquet or json file, or data set on the Hub")
    add("--split", help="of the data set; without one, its test, validation or first split")
    add("--max_samples", type=int, default=16, help="images to take from the data set (16)")
    sizes = "height and width of inputs; without any, the trained size, one and a half times and twice as large"
    add("--image_sizes", type=int, nargs="+", metavar="SIZE", help=sizes)
    add("--batch_size", type=int, default=8, help="images at a time (8)")
    add("--revision", help="branch, tag or commit of the repository")
    add("--compare", dest="compare_with", metavar="CHECKPOINT", help="a second model, shown beside the first")
    add("--compare_revision", help="branch, tag or commit of its repository")
    add("--trust_remote_code", **TRUST)


def _add_predict(subcommands: Subcommands) -> None:
    add = _add_command(
        subcommands,
        run_predict,
        "print the classes that a classifier predicts for images, with their probabilities",
        "Print the most probable classes of images or videos, prepared by the checkpoint's processor. Code of the "
        "checkpoint runs only if you trust it.",
    )
    add("checkpoint", help="directory or repository on the Hub")
    add("files", nargs="+", metavar="FILE", help="images, videos, volumes, or folders of frames")
    add("--top_k", type=int, default=3, help="number of classes for each file (3)")
    picture = "picture to write (.png, .svg or .pdf): where the model looks, by layer"
    add("--attention", metavar="PICTURE", help=picture)
    add("--json", action="store_true", dest="as_json", help="print json instead of lines")
    add("--revision", help="branch, tag or commit of the repository")
    add("--trust_remote_code", **TRUST)


def _add_push(subcommands: Subcommands) -> None:
    add = _add_command(
        subcommands,
        run_push,
        "publish a saved model as one commit and check it",
        "Publish the output of a training script, of `hf-liere convert`, of save_pretrained or of save_rotary: one "
        "commit with weights, configuration, code, processor, card, recipe and metrics. The commit's hashes are "
        "compared with the local files; then it is downloaded and loaded with its own code (a copy of this "
        "package's) in a process without tokens. Secrets and links out of the folder are refused.",
    )
    add("folder", help="the saved model")
    add("repo_id", help="repository on the Hub; made if it does not exist")
    add("--card", metavar="FACTS", help="facts to render the card from, or a name in model_cards/")
    evaluations = "outputs of evaluations of this model at other image sizes, for the card"
    add("--evaluation", nargs="+", default=[], metavar="FOLDER", help=evaluations)
    add("--license", help="licence of the weights as the Hub calls it, such as apache-2.0; else none")
    add("--revision", default="main", help="branch; made if it does not exist")
    add("--message", help="title of the commit")
    add("--private", action="store_true", default=None, help="make a new repository private")
    add("--parent_commit", help="refuse unless this is the newest commit")
    add("--max_shard_size", default="5GB", help="larger weights are split (5GB)")
    add("--no_reload", action="store_true", help="do not download and load what was published")


def _add_rope(subcommands: Subcommands) -> None:
    add = _add_command(
        subcommands,
        run_rope,
        "say what a model rotates and what is wrong with it; test vectors for other engines",
        "Describe the rotary position embedding of models from their configurations alone, and its errors on this "
        "machine; write test vectors; or name the fault in what another engine computed.",
    )
    add("models", nargs="*", metavar="MODEL", help="directory, repository on the Hub, or model type such as llama")
    add("--vectors", metavar="FOLDER", help="write the test vectors of each model to a file in a new folder")
    add("--all", action="store_true", dest="every", help="of all model types of transformers")
    checked = "results of another engine for test vectors; MODEL may then be the file of these"
    add("--check", dest="check_path", metavar="FILE", help=checked)
    add("--weights", action="store_true", help="load the model with its weights and examine it as it is")
    add("--revision", help="branch, tag or commit of the repository")
    add("--trust_remote_code", **TRUST)


def run_convert(checkpoint: str | None, output: str | None, lists: bool, **options: Any) -> str:
    if lists:
        from .conversion.known import list_repositories

        return list_repositories()
    if checkpoint is None or output is None:
        raise ValueError("accepted are a checkpoint and the directory to write, or --list.")
    from .convert import convert_checkpoint

    options = {name: given for name, given in options.items() if given is not None}
    conversion = convert_checkpoint(checkpoint, output, **options)
    return f"{output}: {conversion.model_class.__name__} from a checkpoint of kind {conversion.source}"


def run_upgrade(checkpoint: str, output: str, image_size: list[int] | None, **options: Any) -> str:
    from .convert import upgrade_checkpoint

    options = {name: given for name, given in options.items() if given is not None}
    if image_size is not None:
        options["image_size"] = image_size[0] if len(image_size) == 1 else image_size
    model = upgrade_checkpoint(checkpoint, output, **options)
    return f"{output}: {type(model).__name__} with position_encoding={model.config.position_encoding!r}"


def run_export(
    checkpoint: str, output: str, image_size: list[int] | None, dynamic_size: bool | None, **options: Any
) -> str:
    from .export import ExportError, export_checkpoint

    if image_size is not None:
        if len(image_size) > 2:
            raise ExportError(f"--image_size {image_size}: accepted are one size, or height and width.")
        image_size = (image_size[0], image_size[-1])
    if dynamic_size not in (None, True, False):
        raise ExportError(f"--dynamic_size {dynamic_size}: accepted are true and false.")
    return export_checkpoint(checkpoint, output, image_size=image_size, dynamic_size=dynamic_size, **options)


def run_inspect(
    checkpoint: str,
    output: str,
    image: list[str],
    revision: str | None,
    compare_with: str | None,
    compare_revision: str | None,
    **options: Any,
) -> str:
    from .inspection.command import inspect_checkpoints

    if compare_with is None and compare_revision is not None:
        raise ValueError(f"--compare_revision {compare_revision} needs --compare.")
    checkpoints = [(checkpoint, revision)] + ([] if compare_with is None else [(compare_with, compare_revision)])
    report = inspect_checkpoints(checkpoints, output, image, progress=True, **options)
    return f"{report}: open it in a browser"


def run_predict(checkpoint: str, files: list[str], as_json: bool, **options: Any) -> str:
    from .inspection.prediction import predict

    predictions = predict(checkpoint, files, **options)
    for remark in predictions.remarks:
        print(f"hf-liere predict: {remark}", file=sys.stderr)
    return predictions.json() if as_json else "\n".join(map(str, predictions.files))


def run_rope(models: list[str], **options: Any) -> str:
    from .errors import InputError
    from .rope_check.command import run

    text, is_right = run(models, **options)
    if is_right:
        return text
    print(text)
    raise InputError("the rotations differ from what is right.")


def run_push(
    folder: str,
    repo_id: str,
    card: str | None,
    evaluation: list[str],
    license: str | None,
    no_reload: bool,
    **options: Any,
) -> str:
    from .hub.cards import push_card
    from .hub.facts import load_facts
    from .hub.publishing import push
    from .storage.saved_model import SavedModel

    saved, facts = SavedModel(folder), load_facts(card) if card else None
    rendered = push_card(saved, repo_id, facts, evaluation, license)
    return str(push(saved, repo_id, card=rendered, reload=not no_reload, **options))


def run_verify(folder: str, repo_id: str, revision: str, runs: bool) -> str:
    from .hub.publishing import verify

    published = verify(folder, repo_id, revision=revision, run=runs)
    outputs = ", with the same outputs" if published.reloaded else ""
    return f"{published.url}: what a push of {folder} would write{outputs}"


def run_pull(repo_id: str, folder: str | None, revision: str) -> str:
    from .hub.pulling import pull

    pulled = pull(repo_id, folder, revision=revision)
    return f"{pulled.folder}: commit {pulled.commit}, hashes compared"


def run_card(facts: str) -> str:
    from .hub.cards import render_card
    from .hub.facts import load_facts

    return render_card(load_facts(facts)).text.rstrip()


def run_env(as_json: bool) -> str:
    # Run as a file: the report must also work where the package cannot be imported.
    path = str(Path(__file__).with_name("environment.py"))
    return runpy.run_path(path, run_name="hf_liere.environment")["report"](as_json)


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
    options = vars(build_parser().parse_args(arguments))
    command, run = options.pop("command"), options.pop("run")
    try:
        text = run(**options)
    except KeyboardInterrupt:
        print(f"hf-liere {command}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:
        from .errors import memory_shortage
        from .storage.client import HubError

        shortage = memory_shortage(error)
        if shortage is None and not isinstance(error, (HubError, OSError, ValueError)):
            raise
        print(f"hf-liere {command}: {shortage or _one_line(error)}", file=sys.stderr)
        return 1
    print(text)
    return 0


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(line.strip() for line in str(error).splitlines())


if __name__ == "__main__":
    sys.exit(main())
