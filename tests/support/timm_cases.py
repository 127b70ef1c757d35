"""Vision transformers of timm with random weights: one table for the tests and for the page."""

import dataclasses

import timm
import torch
from library_checks import normal
from torch import nn

from hf_liere import RotaryPatchConfig


PLANES = RotaryPatchConfig(position_encoding="rope_mixed", rotary_init="pretrained")
BLOCKS = RotaryPatchConfig(position_encoding="liere", block_size=4, rotary_init="pretrained")
ZEROS = RotaryPatchConfig(position_encoding="liere", block_size=4)
SMALL = {"depth": 2, "num_heads": 2, "embed_dim": 32, "num_classes": 5}
# Rows and columns differ, so that exchanged axes show.
IMAGE = {"img_size": (48, 64)}


@dataclasses.dataclass
class Case:
    """
    Attributes:
        name: Of the model in timm.
        options: Arguments of `create_model`.
        rotates: Whether the model rotates.
        learned: Whether it learns the frequencies of every layer already.
        size: (height, width) of its images.
    """

    name: str
    options: dict
    rotates: bool = True
    learned: bool = False
    size: tuple[int, int] = (48, 64)

    @property
    def configs(self) -> tuple[RotaryPatchConfig, ...]:
        return ((BLOCKS,) if self.learned else (PLANES, BLOCKS)) if self.rotates else (ZEROS,)

    def build(self, seed: int = 0, **options) -> nn.Module:
        torch.manual_seed(seed)
        model = timm.create_model(self.name, **{**SMALL, **self.options, **options}).eval()
        # Some weights start at zero or one, or small, and frequencies in proportion, which would hide an error.
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim < 2 or parameter.std() < 0.1 or name == "rope.freqs":
                    parameter.add_(0.3 * torch.randn_like(parameter))
        return model

    def inputs(self, batch: int = 2) -> dict:
        return {"x": normal(batch, 3, *self.size)}


def naflex(*grids, seed=1):
    """A batch of images with these numbers of patches, as timm's collator makes it."""
    length = max(rows * columns for rows, columns in grids)
    patches, places = normal(len(grids), length, 16 * 16 * 3, seed=seed), torch.zeros(len(grids), length, 2).long()
    valid = torch.zeros(len(grids), length, dtype=torch.bool)
    for sample, (rows, columns) in enumerate(grids):
        grid = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
        places[sample, : len(grid)], valid[sample, : len(grid)] = grid, True
    return {"x": {"patches": patches, "patch_coord": places, "patch_valid": valid}}


class NaFlexCase(Case):
    def inputs(self, batch: int = 2) -> dict:
        return naflex((3, 4), (2, 5), (3, 4))


NAFLEX = {"pos_embed_grid_size": (3, 4), "reg_tokens": 1, "class_token": True}
CASES = [
    Case("vit_tiny_patch16_224", {**IMAGE, "reg_tokens": 2}, rotates=False),
    Case("deit_tiny_distilled_patch16_224", IMAGE, rotates=False),
    Case("vit_base_patch16_siglip_224", {**IMAGE, "dynamic_img_size": True, "qk_norm": True}, rotates=False),
    Case("eva_giant_patch14_224", {"img_size": (42, 56), "mlp_ratio": 2}, rotates=False, size=(42, 56)),
    Case("eva02_tiny_patch14_224", {"img_size": (42, 56)}, size=(42, 56)),
    Case("vit_small_patch16_rope_224", IMAGE),
    Case("vit_small_patch16_rope_mixed_224", IMAGE, learned=True),
    Case("vit_pe_core_tiny_patch16_384", {**IMAGE, "attn_pool_num_heads": 2}),
    Case("vit_small_patch16_dinov3", IMAGE),
    Case(
        "vit_base_patch16_sapiens2",
        {**IMAGE, "num_heads": 4, "embed_dim": 64, "num_kv_heads": 2, "rope_rescale_coords": 1.0},
    ),
    Case(
        "vit_small_patch16_lingbot", {**IMAGE, "rope_type": "mrope", "rope_mrope_section": (2, 3, 3), "qk_norm": True}
    ),
    NaFlexCase("naflexvit_base_patch16_gap", NAFLEX, rotates=False),
    NaFlexCase("naflexvit_base_patch16_par_gap", {**NAFLEX, "rope_type": "axial", "rope_ref_feat_shape": (6, 6)}),
    NaFlexCase("naflexvit_base_patch16_parfac_gap", {**NAFLEX, "rope_type": "mixed"}, learned=True),
    NaFlexCase(
        "naflexvit_base_patch16_map", {**NAFLEX, "rope_type": "dinov3", "rope_rotate_half": True, "pos_embed": "none"}
    ),
    NaFlexCase(
        "naflexvit_so150m2_patch16_reg1_gap",
        {**NAFLEX, "rope_type": "mrope", "rope_mrope_section": (2, 3, 3), "rope_rotate_half": True},
    ),
]
BY_NAME = {case.name: case for case in CASES}


def build(name):
    """The model of a case, whose name may have a suffix after a hyphen, and its inputs."""
    case = BY_NAME[name.partition("-")[0]]
    return case.build(), case.inputs()


def run(model, inputs):
    return model(**inputs)


def outputs(model, inputs):
    """As other modules of cases name it: all tensors of the output."""
    return [run(model, inputs)]
