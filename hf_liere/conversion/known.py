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


def _rope_vit() -> list[KnownRepository]:
    models: dict[str, tuple[dict[str, object], str]] = {
        "deit": ({"source": "naver", "position_encoding": "absolute"}, "learned table"),
        "rope_axial_deit": ({"source": "naver", "position_encoding": "axial"}, "axial RoPE"),
        "rope_mixed_deit": ({}, "RoPE-Mixed"),
        "rope_axial_ape_deit": ({"source": "naver", "position_encoding": "axial"}, "axial RoPE and learned table"),
        "rope_mixed_ape_deit": ({}, "RoPE-Mixed and learned table"),
    }
    return [
        KnownRepository(f"naver-ai/{name}_{size}_patch16_LS", "naver", options, f"DeiT-III {size}, {about}")
        for size in ("small", "base", "large")
        for name, (options, about) in models.items()
    ]


def _timm() -> list[KnownRepository]:
    kinds = {
        "rope": "axial RoPE",
        "rope_ape": "axial RoPE and learned table",
        "rope_mixed": "RoPE-Mixed",
        "rope_mixed_ape": "RoPE-Mixed and learned table",
    }
    return [
        KnownRepository(f"timm/vit_{size}_patch16_{kind}_224.naver_in1k", "timm", {}, f"ViT {size}, {about}")
        for size in ("small", "base", "large")
        for kind, about in kinds.items()
    ]


# Collections whose repositories have irregular names.
KNOWN_COLLECTIONS = (
    "SophieOstmeier/liere-checkpoints-689bb8433a96b4adbc1876cb (LieRE's authors; kind liere, give --position_encoding, "
    "and --patch_size and --image_size for volumes)",
    "naver-ai/rope-vit-670e367fa2d547b705335153 (RoPE-ViT's authors; kind naver, the repositories above)",
)
REGISTERS = "ViT, axial RoPE of the reference grid, registers, mean"
# Repository, source, description, and the names in place of `{}`.
FAMILIES = (
    ("timm/vit_{}_patch16_rope_reg1_gap_256.sbb_in1k", "timm", REGISTERS, "medium mediumd base"),
    ("timm/vit_{}_patch16_rope_reg4_gap_256.sbb_in1k", "timm", REGISTERS, "betwixt"),
    ("facebook/deit-{}-patch16-224", "vit", "DeiT {}, learned table", "tiny small base"),
    ("google/vit-{}-patch16-224", "vit", "ViT {}, learned table", "base large"),
    ("openai/clip-vit-{}", "clip", "CLIP's vision tower, learned table", "base-patch32 base-patch16 large-patch14"),
)
KNOWN_REPOSITORIES = (
    *_rope_vit(),
    *_timm(),
    *(
        KnownRepository(repo_id.format(name), source, {}, about.format(name))
        for repo_id, source, about, names in FAMILIES
        for name in names.split()
    ),
)


def list_repositories() -> str:
    """One line per known repository: name, kind, options of the command, and description."""
    lines = ["Formats and options follow the authors' code; none of these files was downloaded here.", ""]
    for known in KNOWN_REPOSITORIES:
        options = " ".join(f"--{name} {value}" for name, value in known.options.items())
        lines.append("  ".join(part for part in (known.repo_id, known.source, options, known.about) if part))
    return "\n".join([*lines, "", "Collections:", *KNOWN_COLLECTIONS])
