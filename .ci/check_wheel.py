"""
Checks an installation from a wheel: the kernels for CPUs, a small model, and the command. It needs no compiler and runs
outside of the checkout, whose package Python would find first.
"""

import subprocess
import sysconfig
import tempfile
from pathlib import Path

import torch

import hf_liere
from hf_liere.fast.dispatch import plain_operations
from hf_liere.kernels import cpu_library


CONFIG = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 4}
CONFIG |= {"image_size": 32, "patch_size": 8, "position_encoding": "liere", "block_size": 8}


def step(model: torch.nn.Module, pixel_values: torch.Tensor) -> list[torch.Tensor]:
    """The logits, and the gradients of the parameters."""
    model.zero_grad()
    logits = model(pixel_values).logits
    logits.square().sum().backward()
    return [logits.detach(), *(parameter.grad for parameter in model.parameters())]


def main() -> None:
    """
    Raises:
        AssertionError: if the installation lacks kernels, or computes something else with them than without.
    """
    package, site = Path(hf_liere.__file__).parent, Path(sysconfig.get_path("purelib"))
    assert package.parent == site, f"{package} is imported; accepted: hf_liere in {site}."
    library = cpu_library.library()
    assert library is not None, cpu_library.failure(CONFIG["block_size"])
    assert Path(library._name).parent == package / "kernels", library._name

    torch.manual_seed(0)
    model = hf_liere.LieREViTForImageClassification(hf_liere.LieREViTConfig(**CONFIG))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        model = hf_liere.LieREViTForImageClassification.from_pretrained(folder)
    pixel_values = torch.rand(2, 3, 32, 32)
    found = step(model, pixel_values)
    with plain_operations():
        expected = step(model, pixel_values)
    # float32 sums in another order.
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)

    command = Path(sysconfig.get_path("scripts")) / "hf-liere"
    printed = subprocess.run([command, "env"], check=True, capture_output=True, text=True).stdout
    assert library._name.replace(str(Path.home()), "~") in printed, printed
    print(f"{hf_liere.__version__}: {Path(library._name).name}")


if __name__ == "__main__":
    main()
