"""
The census of `rotary_init="pretrained"`: which model types of the installed transformers accept learned frequencies and
learned blocks, and what a small random model of each does with them. Run to make the record and the page again:

    python tests/support/rope_census.py

Types that the file named by `--rows` contains are not computed again.
"""

import argparse
import contextlib
import copy
import gc
import json
import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]
    os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from census_page import PAGE, make_page
from checkout import ROOT
from patching_cases import same_bits, widen
from patching_checks import check_cached_steps
from tiny_configs import make_config, shrink
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto import modeling_auto

from hf_liere import RotaryPatchConfig, patch, rotary_parameters
from hf_liere.auto import model_types
from hf_liere.patching.modeling_patched import plan
from hf_liere.patching.tower_patch import patched_towers
from hf_liere.probing.coordinate_probe import frequency_buffers
from hf_liere.probing.module_inspection import forward_arguments, names_in_forward


RECORD = ROOT / "tests" / "goldens" / "rope_census.json"
CONFIGS = {
    "planes": RotaryPatchConfig(position_encoding="rope_mixed", rotary_init="pretrained"),
    "blocks": RotaryPatchConfig(position_encoding="liere", block_size=4, rotary_init="pretrained"),
}
# In this order; the first class that can be built is taken.
MAPPINGS = [
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "MODEL_MAPPING",
]
MOST_PARAMETERS = 100_000_000
SECONDS = 240
ROTATING_NAMES = re.compile(r"apply_.*rot.*|rotate_half|rotate_every_two|rotate_pairwise")


class OutOfTime(BaseException):
    """Not an `Exception`: code that catches these goes on."""


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def stop(number, frame):
        raise OutOfTime

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def examine(model_type: str) -> dict:
    """The row of a model type."""
    row: dict = {"type": model_type}
    try:
        with time_limit(SECONDS):
            fill_in(row, model_type)
    except OutOfTime:
        row["error"] = f"not finished in {SECONDS} s"
    except Exception as error:
        row["error"] = shorten(error)
    gc.collect()
    return row


def fill_in(row: dict, model_type: str) -> None:
    config = CONFIG_MAPPING[model_type]()
    plain = build_meta(config)
    row["class"], row["rotates"] = type(plain).__name__, find_rotation(plain)
    if row["rotates"] is None:
        return
    try:
        model, inputs = build_tiny(config)
    except Exception as error:
        row["not_run"] = shorten(error)
        model, inputs = build_shallow(config) or plain, None
    row["class"] = type(model).__name__
    for name, patch_config in CONFIGS.items():
        try:
            plans = plan(model, patch_config)
        except ValueError as error:
            row[name] = shorten(error)
            continue
        row[name] = "yes"
        row["towers"] = [
            [each.tower.name, each.tower.layouts[0].num_axes, len(each.patch.attention_names)] for each in plans
        ]
        if inputs is not None:
            row[f"{name}_run"] = run_patched(model, inputs, patch_config)


def find_rotation(model: nn.Module) -> str | None:
    """The first module of a model that rotates or has frequencies, by its class; `None` if there is none."""
    modules = dict(model.named_modules())
    for module in modules.values():
        if frequency_buffers(module):
            return type(module).__name__
    for module in modules.values():
        if any(ROTATING_NAMES.fullmatch(name) for name in names_in_forward(module)):
            return type(module).__name__
    return None


def build_meta(config: PreTrainedConfig) -> nn.Module:
    with torch.device("meta"):
        return next(iter_models(config, lightest_last=True))


def iter_models(config: PreTrainedConfig, lightest_last: bool = False) -> Iterator[nn.Module]:
    """Models of every class for a configuration that can be built."""
    error: Exception = ValueError(f"{type(config).__name__} has no model that can be built")
    found = False
    for mapping in reversed(MAPPINGS) if lightest_last else MAPPINGS:
        table = getattr(modeling_auto, mapping, {})
        try:
            kinds = table[type(config)] if type(config) in table else ()  # noqa: SIM401
        except Exception as failure:
            error = failure
            continue
        for kind in kinds if isinstance(kinds, (list, tuple)) else (kinds,):
            try:
                built = kind._from_config(copy.deepcopy(config)) if hasattr(kind, "_from_config") else kind(config)
            except Exception as failure:
                error = failure
                continue
            found = True
            yield built
    if not found:
        raise error


def build_shallow(config: PreTrainedConfig) -> nn.Module | None:
    """A model without values and with few layers, of the default width."""
    with contextlib.suppress(Exception):
        return build_meta(make_config(config, shrink(config), ("layers", "experts")))
    return None


def build_tiny(config: PreTrainedConfig) -> tuple[nn.Module, dict]:
    """
    A small random model in evaluation mode, and inputs that it runs with.

    Raises:
        ValueError: if there is none; the message contains the last reason.
    """
    reasons = []
    for sections, names in ((False, None), (True, None), (False, ("layers", "vocab", "experts"))):
        try:
            tiny = make_config(config, shrink(config, sections), names)
            with torch.device("meta"):
                count = sum(value.numel() for value in next(iter_models(tiny)).parameters())
            if count > MOST_PARAMETERS:
                raise ValueError(f"a configuration of few layers has {count} parameters")
        except Exception as error:
            reasons.append(shorten(error))
            continue
        torch.manual_seed(0)
        for model in iter_models(tiny):
            widen(model.eval().float(), std=0.1)
            for inputs in propose_inputs(model):
                try:
                    with torch.no_grad():
                        found = outputs(model, inputs)
                    if not found or not all(value.isfinite().all() for value in found):
                        raise ValueError("a small random model computes values that are not finite")
                    return model, inputs
                except Exception as error:
                    reasons.append(shorten(error))
    raise ValueError(reasons[0])


def propose_inputs(model: nn.Module) -> Iterator[dict]:
    """Inputs of models of text, of images and of sounds."""
    generator = torch.Generator().manual_seed(0)
    patches = next((name for name in ("hidden_states", "pixel_values") if name in forward_arguments(model)), "")
    if patches and "grid_thw" in forward_arguments(model):
        # Packed patches, as the processors of Qwen-VL make them.
        patch_size = model.config.patch_size
        grids = torch.tensor([[1, 4, 6], [1, 2, 2]])
        for frames in (getattr(model.config, "temporal_patch_size", None) or 1, 2):
            values = torch.randn(28, 3 * frames * patch_size**2, generator=generator)
            yield {patches: values, "grid_thw": grids}
        return
    if "context_hidden_states" in forward_arguments(model):
        width, layers = model.config.hidden_size, len(model.config.target_layer_ids)
        states = (torch.randn(2, 5, size, generator=generator) for size in (width, width * layers))
        yield dict(zip(("noise_embeds", "context_hidden_states"), states))
    ids = torch.randint(3, 60, (2, 11), generator=generator)
    if getattr(model.config, "is_encoder_decoder", False):
        yield {"input_ids": ids, "decoder_input_ids": ids[:, :6]}
    yield {"input_ids": ids}
    config = getattr(model.config, "vision_config", None) or model.config
    size = getattr(config, "image_size", None) or 32
    rows, columns = size if isinstance(size, (list, tuple)) else (size, size)
    yield {"pixel_values": torch.randn(2, getattr(config, "num_channels", 3) or 3, rows, columns, generator=generator)}
    yield {"input_values": torch.randn(2, 4000, generator=generator)}
    yield {"input_values": torch.randn(2, 4000, generator=generator), "decoder_input_ids": ids[:, :6]}
    mels = getattr(model.config, "num_mel_bins", None) or 80
    features = torch.randn(2, 40, mels, generator=generator)
    yield {"input_features": features}
    yield {"input_features": features, "decoder_input_ids": ids[:, :6]}
    yield {"input_ids": ids, "input_values": torch.randn(2, 1, 15_360, generator=generator)}
    # Four frames after a stride of two for every token.
    mels = getattr(getattr(model.config, "audio_config", None), "num_mel_bins", 80)
    yield {"input_ids": ids, "input_features": torch.randn(2, mels, 8 * 11, generator=generator)}


def outputs(model: nn.Module, inputs: dict) -> list[torch.Tensor]:
    """All floating point tensors of the output, without a cache."""
    torch.manual_seed(1)
    options = {"use_cache": False} if getattr(model.config, "use_cache", None) is not None else {}
    return list(_find_tensors(model(**inputs, **options)))


def _find_tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        yield value
    elif isinstance(value, (dict, tuple, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _find_tensors(inner)


def run_patched(model: nn.Module, inputs: dict, config: RotaryPatchConfig) -> dict:
    """
    What a patched copy does: whether it starts as the model, the towers whose parameters get gradients and the share of
    these that is not zero in every layer, and whether cached steps are those of a full pass, after a step of training.
    """
    found: dict = {}
    patched = copy.deepcopy(model)
    # With gradients, because some functions round differently without; of a copy, because some modules keep states.
    expected = [value.detach() for value in outputs(copy.deepcopy(model), inputs)]
    try:
        patch(patched, config)
        start = outputs(patched, inputs)
        if config.position_encoding == "rope_mixed":
            found["start"] = same_bits(start, expected)
        else:
            # Angles in float64 and other products in float32, through random layers that amplify.
            pairs = [((x - y).abs().max(), y.abs().max().clamp_min(1)) for x, y in zip(start, expected)]
            found["start"] = all(bool(difference < 1e-3 * scale) for difference, scale in pairs)
        sum(value.square().mean() for value in start if value.requires_grad).backward()
        found["gradients"] = {}
        for name, tower in patched_towers(patched):
            grads = [value.grad for _, value in rotary_parameters(tower)]
            if any(grad is not None and grad.any() for grad in grads):
                found["gradients"][name] = all(has_gradients(tower))
        torch.optim.AdamW([value for _, value in rotary_parameters(patched)], lr=0.05).step()
        if patched.can_generate() and set(inputs) == {"input_ids"}:
            found["cache"] = compare_cached(model, patched, inputs)
    except OutOfTime:
        raise
    except Exception as error:
        found["error"] = shorten(error)
    return found


def has_gradients(tower: nn.Module) -> Iterator[bool]:
    """By parameter, whether the gradient of every layer differs from zero."""
    for name, value in tower.rotary_encoding.named_parameters():
        # (layers, planes), or (A, layers, …) of blocks
        layer_dim = 0 if "log_factors" in name else 1
        rows = None if value.grad is None else value.grad.movedim(layer_dim, 0).flatten(1)  # (layers, …)
        yield rows is not None and bool(rows.any(1).all())


def compare_cached(model: nn.Module, patched: nn.Module, inputs: dict) -> bool | str:
    def is_equal(built):
        built.generation_config.eos_token_id, built.generation_config.pad_token_id = None, 0
        try:
            check_cached_steps(built, inputs)
        except AssertionError:
            return False
        return True

    try:
        if not is_equal(model):
            return "the model itself differs"
    except Exception as error:
        return f"the model itself fails: {shorten(error)}"
    return is_equal(patched)


def shorten(error: Exception) -> str:
    # Without the paths of this machine.
    text = re.sub(r" from '/[^']*'", "", " ".join(str(error).split()))
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"[:300]


def compute_rows(path: Path, types: list[str]) -> None:
    """Append the rows of those types to a file that it does not contain yet, one line each."""
    known = {json.loads(line)["type"] for line in path.read_text().splitlines()} if path.exists() else set()
    for model_type in types:
        if model_type not in known:
            row = examine(model_type)
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def write_record(rows: list[dict]) -> None:
    lines = ",\n".join(json.dumps(row) for row in sorted(rows, key=lambda row: row["type"]))
    head = f'"transformers": "{transformers.__version__}", "types": {json.dumps(model_types())}'
    RECORD.write_text(f'{{{head}, "rows": [\n{lines}\n]}}\n')


def read_record() -> dict:
    return json.loads(RECORD.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "types", nargs="*", help="model types; without any, all, and the record and the page are written"
    )
    parser.add_argument("--rows", type=Path, default=Path("rope_census.jsonl"), help="file to which rows are appended")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    compute_rows(arguments.rows, arguments.types or model_types())
    if not arguments.types:
        rows = [json.loads(line) for line in arguments.rows.read_text().splitlines()]
        write_record(rows)
        PAGE.write_text(make_page(read_record()), encoding="utf-8")


if __name__ == "__main__":
    main()
