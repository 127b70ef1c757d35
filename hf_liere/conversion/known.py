"""
Repositories on the Hub that `hf-liere convert` accepts, with the options that their files do not contain: `hf-liere
convert --list`. Formats and options follow the authors' code; the files themselves were not downloaded.
"""

from typing import NamedTuple


class KnownRepository(NamedTuple):
    """
    Attributes:
        repo_id: Name on the Hub.
        source: Kind of its checkpoint.
        options: Required options by name; `source` if the tensor names do not determine it.
        about: Description.
    """

    repo_id: str
    source: str
    options: dict[str, object]
    about: str


# Collections whose repositories have irregular names.
KNOWN_COLLECTIONS = (
    "SophieOstmeier/liere-checkpoints-689bb8433a96b4adbc1876cb (LieRE's authors; kind liere, give --position_encoding, "
    "and --patch_size and --image_size for volumes)",
    "naver-ai/rope-vit-670e367fa2d547b705335153 (RoPE-ViT's authors; kind naver, the repositories above)",
)
SIZES = "small base large"
REGISTERS = "ViT, axial RoPE of the reference grid, registers, mean"
TABLE: dict[str, object] = {"source": "naver", "position_encoding": "absolute"}
AXIAL: dict[str, object] = {"source": "naver", "position_encoding": "axial"}
# Repository, source, description, the names in place of `{}`, and options.
FAMILIES: tuple[tuple[str, str, str, str, dict[str, object]], ...] = (
    ("naver-ai/deit_{}_patch16_LS", "naver", "DeiT-III {}, learned table", SIZES, TABLE),
    ("naver-ai/rope_axial_deit_{}_patch16_LS", "naver", "DeiT-III {}, axial RoPE", SIZES, AXIAL),
    ("naver-ai/rope_mixed_deit_{}_patch16_LS", "naver", "DeiT-III {}, RoPE-Mixed", SIZES, {}),
    ("naver-ai/rope_axial_ape_deit_{}_patch16_LS", "naver", "DeiT-III {}, axial RoPE and learned table", SIZES, AXIAL),
    ("naver-ai/rope_mixed_ape_deit_{}_patch16_LS", "naver", "DeiT-III {}, RoPE-Mixed and learned table", SIZES, {}),
    ("timm/vit_{}_patch16_rope_224.naver_in1k", "timm", "ViT {}, axial RoPE", SIZES, {}),
    ("timm/vit_{}_patch16_rope_ape_224.naver_in1k", "timm", "ViT {}, axial RoPE and learned table", SIZES, {}),
    ("timm/vit_{}_patch16_rope_mixed_224.naver_in1k", "timm", "ViT {}, RoPE-Mixed", SIZES, {}),
    ("timm/vit_{}_patch16_rope_mixed_ape_224.naver_in1k", "timm", "ViT {}, RoPE-Mixed and learned table", SIZES, {}),
    ("timm/vit_{}_patch16_rope_reg1_gap_256.sbb_in1k", "timm", REGISTERS, "medium mediumd base", {}),
    ("timm/vit_{}_patch16_rope_reg4_gap_256.sbb_in1k", "timm", REGISTERS, "betwixt", {}),
    ("facebook/deit-{}-patch16-224", "vit", "DeiT {}, learned table", "tiny small base", {}),
    ("google/vit-{}-patch16-224", "vit", "ViT {}, learned table", "base large", {}),
    ("openai/clip-vit-{}", "clip", "CLIP's vision tower, learned table", "base-patch32 base-patch16 large-patch14", {}),
)
KNOWN_REPOSITORIES = tuple(
    KnownRepository(repo_id.format(name), source, options, about.format(name))
    for repo_id, source, about, names, options in FAMILIES
    for name in names.split()
)


def list_repositories() -> str:
    """One line per known repository: name, kind, options of the command, and description."""
    lines = ["Formats and options follow the authors' code; none of these files was downloaded here.", ""]
    for known in KNOWN_REPOSITORIES:
        options = " ".join(f"--{name} {value}" for name, value in known.options.items())
        lines.append("  ".join(part for part in (known.repo_id, known.source, options, known.about) if part))
    return "\n".join([*lines, "", "Collections:", *KNOWN_COLLECTIONS])
