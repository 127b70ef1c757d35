"""LieRE with Cayley's map in the place of the exponential, as some diffusion transformers copy it."""

import torch

from hf_liere.encoding.kinds import ENCODINGS
from hf_liere.encoding.rotary_encoding import LieRE
from hf_liere.rotation.exponential import skew
from hf_liere.rotation.rotation import BlockRotation


# `register_encoding` refuses rotations that are not exponentials of the entries.
@ENCODINGS.add("cayley_liere")
class CayleyLieRE(LieRE):
    """R(p) = (I − A/2)⁻¹(I + A/2) with A = Σ_a p_a A_a: equal to exp(A) up to A³/12, and without the eigenvalue −1."""

    name = "cayley_liere"
    description = "Cayley-LieRE: rotations (I − A/2)⁻¹(I + A/2), A = Σ pₐ Aₐ, with free skew-symmetric generators Aₐ"
    rotary_inits = ("uniform", "normal", "zeros")
    pretrained = "Cayley's map turns a plane by 2 arctan(ωp/2), and RoPE by ωp"

    def rotations_from(self, positions, entries, dtype, rays=None):
        entries = positions.by_head(entries)  # (A, layers, heads, blocks, b(b−1)/2)
        generators = skew(entries.flatten(2, 3), self.block_size)  # (A, layers, H · blocks, b, b)
        coordinates = self.working_coordinates(positions)  # (B · N, A)
        half = torch.einsum("na,algij->lngij", coordinates, generators.to(coordinates.dtype)) / 2
        identity = torch.eye(self.block_size, dtype=half.dtype, device=half.device)
        rotations = torch.linalg.solve(identity - half, identity + half).to(self.rotation_dtype)
        # (layers, B · N, H · blocks, b, b)
        layers = [self.to_tokens(layer, positions, entries.shape[2]) for layer in rotations]
        return self.repeat_for_layers([BlockRotation(layer) for layer in layers])
