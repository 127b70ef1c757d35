"""Outputs of two models, and how much they differ."""

import torch


@torch.no_grad()
def call(model, inputs):
    return results(model(**inputs))


def results(outputs) -> dict[str, torch.Tensor]:
    found = {
        name: x for name in ("loss", "logits", "reconstruction") if (x := getattr(outputs, name, None)) is not None
    }
    maps = getattr(outputs, "feature_maps", ())
    return found | {f"map {index}": x for index, x in enumerate(maps)}


def compare_outputs(what, found, expected, bound):
    assert found.keys() == expected.keys()
    for name, value in found.items():
        # A loss may be small by accident.
        yield f"{name} of {what}", relative(value, expected[name], 1.0 if name == "loss" else 0.0), bound


def relative(found, expected, smallest: float = 0.0) -> float:
    """Largest difference by the largest number, or the smallest that counts; infinite for other shapes or NaN."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return torch.inf
    size = max(expected.abs().max().item(), smallest)
    difference = (found - expected).abs().max().item()
    return torch.inf if difference != difference else difference / size if size else difference


def relative_norm(found, expected, smallest: float) -> float:
    """Norm of the difference by that of the gradient, or by the smallest norm that counts."""
    difference = (found - expected).norm().item() / max(expected.norm().item(), smallest, 1e-30)
    return torch.inf if difference != difference else difference
