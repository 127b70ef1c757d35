"""Which library a model is of, by the name of its class: adapters and cards have nothing else."""

from .families import FAMILIES
from .timm_patch import EMBEDDINGS


LIBRARIES = {
    **dict.fromkeys(FAMILIES, "diffusers"),
    **dict.fromkeys((*EMBEDDINGS, "VisionTransformerDistilled"), "timm"),
}


def library_of(class_name: str | None) -> str:
    """The library of a model class; transformers for names that are of no other."""
    return LIBRARIES.get(class_name or "", "transformers")
