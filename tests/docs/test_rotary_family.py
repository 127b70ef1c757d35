"""Every row of the table of docs/rotary_family.md and every arrow of its diagram, computed."""

import re

import pytest
import torch
from checkout import ROOT
from encoding_cases import OWN_PLAIN as ENCODINGS
from encoding_cases import perturb

import hf_liere
from hf_liere import upgrade_encoding
from hf_liere.encoding.folding import build_rotary_encoding
from hf_liere.geometry.common_planes import find_common_planes
from hf_liere.tools.inspection.encodings import generator_matrices, learned_frequencies, relativity_error
from hf_liere.upgrades import ConversionError


PAGE = ROOT / "docs" / "rotary_family.md"
ROW = re.compile(r"^\| `(\w+)` \| [^|]+ \| (\d+) \| ([\d,]+) \| (yes|no) \|", re.MULTILINE)
ROWS = {name: rest for name, *rest in ROW.findall(PAGE.read_text(encoding="utf-8"))}
# Those whose outputs are compared have these blocks in heads of 24 channels.
BLOCKS = {"comrope_ap": 4, "comrope_ld": 8, "cayley_string": 24, "circulant_string": 8, "liere": 8, "liere_product": 24}


def classifier(tiny, encoding):
    """A model whose generators are not those it starts with, and whose outputs depend on positions."""
    torch.manual_seed(0)
    config = tiny(position_encoding=encoding, block_size=BLOCKS.get(encoding), initializer_range=0.2)
    model = hf_liere.LieREViTForImageClassification(config).eval()
    return perturb(model)


def test_the_table_has_every_encoding():
    assert set(ROWS) == set(ENCODINGS)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_sizes_of_blocks_and_numbers_of_parameters(encoding):
    block_size, parameters, _ = ROWS[encoding]
    config = hf_liere.LieREViTConfig(position_encoding=encoding)
    assert config.block_size == int(block_size)
    learned = build_rotary_encoding(config, 2).parameters()
    assert sum(parameter.numel() for parameter in learned) == int(parameters.replace(",", ""))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_which_generators_commute_and_are_relative(tiny, encoding):
    rotary = classifier(tiny, encoding).liere.rotary_encoding
    commutes = ROWS[encoding][2] == "yes"
    # Far above and far below rounding in float64.
    assert (find_common_planes(generator_matrices(rotary)).error.max() < 1e-9) == commutes
    assert (relativity_error(rotary).largest.max() < 1e-9) == commutes
    assert (learned_frequencies(rotary) is not None) == commutes


ARROWS = [
    *((encoding, "rope_mixed") for encoding in ENCODINGS if ROWS[encoding][2] == "yes"),
    *((encoding, "cayley_string") for encoding in ENCODINGS if ROWS[encoding][2] == "yes"),
    *((encoding, "liere") for encoding in ENCODINGS if ROWS[encoding][2] == "yes"),
    *((encoding, "liere_product") for encoding in ENCODINGS if ROWS[encoding][2] == "yes"),
    ("axial_rope", "comrope_ap"),
]


@pytest.mark.parametrize("old, new", ARROWS)
@torch.no_grad()
def test_an_encoding_contains_another(tiny, old, new):
    model = classifier(tiny, old)
    upgraded = upgrade_encoding(model, position_encoding=new, block_size=BLOCKS.get(new))
    pixel_values = torch.randn(2, 3, 16, 24, generator=torch.Generator().manual_seed(1))
    # The same function in another order of float32 operations.
    torch.testing.assert_close(upgraded(pixel_values).logits, model(pixel_values).logits, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "old, new",
    [
        ("liere", "rope_mixed"),
        ("rope_mixed", "comrope_ap"),
        ("rope_mixed", "comrope_ld"),
        ("rope_mixed", "circulant_string"),
        ("spherical_rope", "rope_mixed"),
        ("spherical_rope", "liere"),
        ("liere_product", "rope_mixed"),
        ("liere_product", "liere"),
        ("liere", "liere_product"),
    ],
)
def test_an_encoding_does_not_contain_another(tiny, old, new):
    with pytest.raises(ConversionError, match="No exact upgrade"):
        upgrade_encoding(classifier(tiny, old), position_encoding=new, block_size=BLOCKS.get(new))
