"""Safetensors files whose headers lie: every reader refuses them, names the file and takes no memory for them."""

import json
import resource
import shutil
import sys

import pytest
from checkout import TESTS
from transformers import ViTConfig, ViTModel

from hf_liere import load_rotary
from hf_liere.auto import load_checkpoint
from hf_liere.patching.peft_adapters import restore_rotations
from hf_liere.storage.saved_model import SavedModel
from hf_liere.tools.conversion.reading import read_checkpoint


STORED = TESTS / "checkpoints" / "format_1"


def base():
    return ViTModel(ViTConfig.from_pretrained(STORED / "rotary_vit"))


def stored(header, **fields):
    """The header with other fields of its last tensor."""
    name = next(reversed(header))
    return json.dumps({**header, name: {**header[name], **fields}}).encode()


def with_length(header, length):
    return length.to_bytes(8, "little") + header


def framed(header):
    return with_length(header, len(header))


HUGE = 1 << 40
# What the file contains before its data, from the header's tensors.
LIES = {
    "a header beyond the file": lambda header: with_length(json.dumps(header).encode(), HUGE),
    "a header of 2^64 − 1 bytes": lambda header: with_length(json.dumps(header).encode(), (1 << 64) - 1),
    "no header": lambda header: b"\x01\x02",
    "a deep header": lambda header: framed(b"[" * 100_000 + b"]" * 100_000),
    "a header that is a list": lambda header: framed(b"[]"),
    "offsets beyond the file": lambda header: framed(stored(header, shape=[HUGE], data_offsets=[0, 4 * HUGE])),
    "offsets that overlap": lambda header: framed(json.dumps({**header, "more": next(iter(header.values()))}).encode()),
    "offsets in the wrong order": lambda header: framed(stored(header, data_offsets=[8, 0])),
    "negative offsets": lambda header: framed(stored(header, data_offsets=[-8, 0])),
    "a shape of another size": lambda header: framed(stored(header, shape=[3, 1000])),
    "a negative shape": lambda header: framed(stored(header, shape=[-1])),
    "a shape whose size overflows": lambda header: framed(stored(header, shape=[1 << 32, 1 << 32])),
    "an unknown type": lambda header: framed(stored(header, dtype="F99")),
    "a type of another size": lambda header: framed(stored(header, dtype="F64")),
    "a name that occurs twice": lambda header: framed(
        json.dumps(header).encode()[:-1] + b", " + stored(header, shape=[HUGE]).strip(b"{}")
    ),
}
READERS = {
    "digest": ("rope_mixed", "model.safetensors", lambda folder: SavedModel(folder).digest),
    "shapes": ("rope_mixed", "model.safetensors", lambda folder: SavedModel(folder).shapes),
    "finite": ("rope_mixed", "model.safetensors", lambda folder: SavedModel(folder).require_finite_weights()),
    "model": ("rope_mixed", "model.safetensors", load_checkpoint),
    "conversion": ("rope_mixed", "model.safetensors", lambda folder: read_checkpoint(folder / "model.safetensors")),
    "adapter": ("rotary_vit/adapter", "rotary.safetensors", lambda folder: load_rotary(base(), folder)),
    "adapter of peft": (
        "rotary_vit/adapter",
        "adapter_model.safetensors",
        lambda folder: restore_rotations(base(), folder, {}),
    ),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused(lie, reader, tmp_path):
    source, name, read = READERS[reader]
    shutil.copytree(STORED / source, tmp_path / "saved")
    path = tmp_path / "saved" / name
    content = next((STORED / source).glob("[mr]*.safetensors")).read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = {name: entry for name, entry in json.loads(content[8:start]).items() if name != "__metadata__"}
    header = dict(sorted(header.items(), key=lambda item: item[1]["data_offsets"]))
    path.write_bytes(LIES[lie](header) + content[start:])
    if reader == "adapter of peft":
        for other in path.parent.glob("rotary*"):
            other.unlink()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="saved" if reader == "model" else path.name):
        read(tmp_path / "saved")
    if sys.platform.startswith("linux"):
        # KiB. The headers promise tebibytes; libraries that are imported on the way take less than this.
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000
