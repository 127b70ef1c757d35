"""
Poses of cameras as a layer for anybody's attention: queries, keys, values, and what attention returns; and as the
attention implementation `"pose_embedding"` for Transformers models, registered when the package is imported. It works
in every model that hands further arguments of `forward` on to its attention, as the models of tokens of this package.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import logging
from transformers.utils.generic import maybe_autocast

from ..encoding.given_positions import require_tensors
from ..encoding.positions import GridPositions, TokenPositions
from ..fast.dispatch import values_are_unknown, working_dtype
from ..layer.rotary_embedding import LieRotaryEmbedding
from ..registers import check_name
from ..rotation.rotation import PlaneRotation
from .poses import check_intrinsics, check_poses, first_pose, invert_poses, lift_intrinsics, relative_poses


logger = logging.get_logger(__name__)
# Rounding of a translation, in its scaled unit, above which a change of the world's frame changes attention noticeably.
COARSE = 1e-5
POSE_ATTENTION = "pose_embedding"


class PoseFrames(NamedTuple):
    """
    The matrices of tokens, from [`PoseEmbedding.frames`].

    Attributes:
        to_camera: (1 or B, N, 4, 4) matrices D from the reference frame to the camera, or to its image.
        from_camera: (1 or B, N, 4, 4) their inverses.
        reference: (1 or B, 4, 4) pose of the reference frame.
        patches: Rotations R(p) of the channels for patches, or `None`.
        options: Arguments of the `PoseEmbedding` that the matrices depend on.
    """

    to_camera: torch.Tensor
    from_camera: torch.Tensor
    reference: torch.Tensor
    patches: PlaneRotation | None
    options: dict[str, float]


class PoseEmbedding(nn.Module):
    r"""
    Attention that depends on the relative poses of cameras: GTA (Miyato et al., "GTA: A Geometry-Aware Attention
    Mechanism for Multi-View Transformers", ICLR 2024, eqs. 4–6) with SE(3) and patches, see `rope_theta`, and PRoPE (Li
    et al., "Cameras as Relative Positional Encoding", arXiv 2507.10496, eqs. 14–20) with intrinsics and patches.

    Every four neighbouring channels of a token are multiplied by a 4 × 4 matrix D = lift(K) P⁻¹, with the pose P of its
    camera and lift(K) = [[K, 0], [0, 1]] (the identity without intrinsics): queries by Dᵀ, keys and values by D⁻¹, and
    the output of attention by D. Token i then attends to token j with the score qᵢᵀ Dᵢ Dⱼ⁻¹ kⱼ and receives
    Dᵢ Dⱼ⁻¹ vⱼ. Because Dᵢ Dⱼ⁻¹ = lift(Kᵢ) Pᵢ⁻¹ Pⱼ lift(Kⱼ)⁻¹, a motion of the whole scene, P → G P with G in SE(3),
    changes nothing.

    ```python
    import torch
    from torch.nn import functional as F

    from hf_liere import PoseEmbedding

    pose = PoseEmbedding(head_dim=64)
    query, key, value = torch.randn(3, 2, 8, 100, 64)  # (B, heads, N, head_dim) each
    poses = torch.eye(4).repeat(2, 100, 1, 1)  # (B, N, 4, 4), camera to world
    poses[..., :3, 3] = torch.randn(2, 100, 3)
    query, key, value = pose(query, key, value, poses)
    output = F.scaled_dot_product_attention(query, key, value)
    output = pose.undo(output, poses)  # (B, heads, N, head_dim)
    ```

    Compute the matrices once for all layers, and with options, by [`frames`]:

    ```python
    import torch

    from hf_liere import PoseEmbedding, grid_positions

    prope = PoseEmbedding(head_dim=64, patch_share=0.5)
    poses = torch.eye(4).repeat(2, 3 * 16, 1, 1)  # 3 cameras with 16 patches each, camera after camera
    intrinsics = torch.tensor([[200.0, 0, 128], [0, 200, 96], [0, 0, 1]]).repeat(2, 3 * 16, 1, 1)
    patches = grid_positions((4, 4), coordinates="index")  # PRoPE counts patches
    frames = prope.frames(poses, intrinsics=intrinsics, image_size=(192, 256), patches=patches)
    query, key, value = prope(*torch.randn(3, 2, 8, 48, 64), frames)
    ```

    Matrices are computed in float64, from poses relative to one camera (`reference` of [`frames`]), and then rounded to
    the type of the states, at least float32; rotations of patches are kept in float32, after `double()` in float64.
    With float64 poses a motion of the scene by kilometres changes float32 outputs by less than 1e-5 of the largest;
    with float32 poses, as long as cameras stay within 50 units of the world's origin. A warning appears for float32
    poses more than 168 units away, whose positions are rounded by 1e-5 units. The error of float32 attention grows with
    the distances between cameras: 4e-6 at 50 units, 4e-5 at 1000. In half types, results are rounded relative to these
    distances: choose a `translation_scale` that makes them about 1.

    Args:
        head_dim: Channels of a head.
        patch_share: Share of the channels, the last of a head, that encode the place of a patch in its image instead of
            the pose: they are rotated by axial RoPE, each axis with half of them. PRoPE uses 0.5. Both shares must be
            multiples of 4 channels.
        translation_scale: Factor of translations, the inverse of a typical distance between cameras, in the units of
            the poses. Changes of the unit change attention, rotations of the scene do not.
        rope_theta: Base θ of the frequencies of patches, θ^(−i/q) for plane i of the q = patch_share · head_dim / 4 of
            an axis; 100 as in PRoPE. GTA's are 2^−i for coordinates from 0 to 2π: θ = 2^q.
        num_heads: Heads with a learned weight of the distance, see [`distance_bias`]; `None` means no weights.

    Raises:
        ValueError: if `head_dim` or a share of it is not a multiple of 4, or an option is out of range.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        patch_share: float = 0.0,
        translation_scale: float = 1.0,
        rope_theta: float = 100.0,
        num_heads: int | None = None,
    ):
        super().__init__()
        if not 0 <= patch_share < 1:
            raise ValueError(f"patch_share={patch_share} must be at least 0 and below 1.")
        if not 0 < translation_scale < float("inf"):
            raise ValueError(f"translation_scale={translation_scale} must be positive and finite.")
        patch_channels = round(patch_share * head_dim)
        if head_dim < 4 or head_dim % 4 or patch_channels % 4 or abs(patch_channels - patch_share * head_dim) > 1e-6:
            shares = f", of which patch_share={patch_share} leaves {head_dim - patch_share * head_dim:g} to poses"
            raise ValueError(
                f"head_dim={head_dim}{shares if patch_share else ''}: 4 × 4 matrices need multiples of 4 channels, at "
                "least 4, for poses and for patches."
            )
        self.head_dim, self.patch_share, self.translation_scale = head_dim, patch_share, translation_scale
        self.pose_channels, self.rope_theta = head_dim - patch_channels, rope_theta
        self.rotary: LieRotaryEmbedding | None = None
        if patch_channels:
            self.rotary = LieRotaryEmbedding(1, patch_channels, 2, "axial_rope", rope_theta=rope_theta)
        self.distance_weight = None if num_heads is None else nn.Parameter(torch.zeros(num_heads))

    def frames(
        self,
        poses: torch.Tensor,
        *,
        intrinsics: torch.Tensor | None = None,
        image_size: Sequence[int] | None = None,
        known: torch.Tensor | None = None,
        patches: torch.Tensor | TokenPositions | None = None,
        reference: torch.Tensor | None = None,
    ) -> PoseFrames:
        """
        The matrices of tokens, which `forward` and `undo` accept instead of poses.

        Args:
            poses: (B, N, 4, 4), or (N, 4, 4) if samples share them, from camera to world, float32 or float64.
            intrinsics: (B, N, 3, 3) or (N, 3, 3) matrices K in pixels, for PRoPE's projections. They are normalised as
                in its code, to f_x/w, f_y/h, c_x/w − ½ and c_y/h − ½.
            image_size: (h, w), height and width of the images in the pixels of `intrinsics`. Where images differ in
                size, divide the first two rows of K by w and h and pass (1, 1).
            known: (B, N) or (N,), true where the pose is known. Other poses (and intrinsics) are ignored: D is the
                identity there, as if the token stood in the reference frame. Attention stays invariant under a motion
                of the scene, but scores with such tokens depend on the choice of the reference.
            patches: (N, 2) or (B, N, 2) positions of tokens in their images, in PRoPE `grid_positions(grid, "index")`;
                if a divisor of N, those of one image, repeated for every camera. Required with `patch_share`.
            reference: (4, 4) or (B, 4, 4) pose relative to which matrices are computed. `None` means the first known
                pose of each sample, and the world's frame without any. If all poses are known it matters for rounding
                alone. Queries and keys need the same: pass `reference` of the queries' frames for keys of other tokens,
                and a fixed one if keys are cached.

        Raises:
            ValueError: if shapes do not fit, options are missing, or a matrix is not a pose (with the deviation).
        """
        require_tensors(reference=reference)
        poses = _as_batch("poses", poses, (4, 4))  # (1 or B, N, 4, 4)
        tokens = poses.shape[1]
        every = poses.new_ones(poses.shape[:2], dtype=torch.bool)  # (1 or B, N)
        known = every if known is None else _as_batch("known", known, (), poses).to(poses.device) & every
        poses = _where_known(known, poses)
        check_poses("poses", poses)
        self._warn_of_rounding(poses)
        with maybe_autocast(poses.device.type, enabled=False):
            poses = poses.to(working_dtype(poses.device))
            reference = first_pose(poses, known) if reference is None else _check_reference(reference, poses)
            from_camera = relative_poses(poses, reference, self.translation_scale)  # (1 or B, N, 4, 4)
            to_camera = invert_poses(from_camera)
            if intrinsics is not None:
                given = _as_batch("intrinsics", intrinsics, (3, 3), poses)
                intrinsics = _where_known(known, given)  # (1 or B, N, 3, 3)
                check_intrinsics(intrinsics)
                to_image, from_image = lift_intrinsics(intrinsics.to(poses), _read_sides(image_size))
                to_camera, from_camera = to_image @ to_camera, from_camera @ from_image
            elif image_size is not None:
                raise ValueError(f"image_size={image_size} was given without intrinsics.")
            to_camera, from_camera = _where_known(known, to_camera), _where_known(known, from_camera)
        return PoseFrames(to_camera, from_camera, reference, self._patch_rotations(patches, tokens), self.options)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        poses: torch.Tensor | PoseFrames,
        key_poses: torch.Tensor | PoseFrames | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Dᵀ q, D⁻¹ k and D⁻¹ v, in the shapes and types of query, key and value.

        Args:
            query: (B, H, N, head_dim).
            key, value: (B, G, M, head_dim), also of fewer heads than the query.
            poses: Those of the queries' tokens, as for [`frames`]; or its result.
            key_poses: Those of the keys' tokens, likewise; `None` if they are the same tokens. They become relative
                to the `reference` of the queries; a result of [`frames`] must have the same.

        Raises:
            ValueError: if shapes, types or references do not fit, or as [`frames`].
        """
        frames = self._find_frames(poses)
        key_frames = frames if key_poses is None else self._find_frames(key_poses, frames.reference)
        return (
            self._transform("query", query, frames, frames.to_camera.mT),
            self._transform("key", key, key_frames, key_frames.from_camera),
            self._transform("value", value, key_frames, key_frames.from_camera),
        )

    def undo(self, output: torch.Tensor, poses: torch.Tensor | PoseFrames) -> torch.Tensor:
        """
        D o: what attention returns for transformed queries, keys and values, in the frame of each query's camera.

        Args:
            output: (B, H, N, head_dim).
            poses: The `poses` of the call that transformed the query.

        Returns:
            The same shape and type.

        Raises:
            ValueError: as `forward`.
        """
        frames = self._find_frames(poses)
        if frames.patches is not None:
            frames = frames._replace(patches=frames.patches.transpose())
        return self._transform("output", output, frames, frames.to_camera)

    def distance_bias(
        self, poses: torch.Tensor | PoseFrames, key_poses: torch.Tensor | PoseFrames | None = None
    ) -> torch.Tensor:
        """
        −w ‖xᵢ − xⱼ‖² of shape (1 or B, num_heads, N, M), for the `attn_mask` of attention, with a learned w of every
        head that starts at zero, and places x times `translation_scale`. Scores of queries and keys alone are linear in
        relative translations, and cannot prefer what is near. Raises `ValueError` without `num_heads`, or as `forward`.
        """
        if self.distance_weight is None:
            raise ValueError("num_heads=None: a PoseEmbedding(…, num_heads=…) has weights of the distance.")
        frames = self._find_frames(poses)
        key_frames = frames if key_poses is None else self._find_frames(key_poses, frames.reference)
        places, key_places = frames.from_camera[..., :3, 3], key_frames.from_camera[..., :3, 3]  # (1 or B, N or M, 3)
        # By differences: products of places cancel far from the reference.
        distances = (places.unsqueeze(-2) - key_places.unsqueeze(-3)).square().sum(-1)  # (1 or B, N, M)
        return -self.distance_weight[:, None, None] * distances[:, None].to(self.distance_weight.dtype)

    @property
    def options(self) -> dict[str, float]:
        """Arguments that the matrices of [`frames`] depend on."""
        of_patches = ("head_dim", "patch_share", "rope_theta") if self.rotary is not None else ()
        return {name: getattr(self, name) for name in ("translation_scale", *of_patches)}

    def extra_repr(self) -> str:
        return _name({"head_dim": self.head_dim, **self.options})

    def _find_frames(self, poses: torch.Tensor | PoseFrames, reference: torch.Tensor | None = None) -> PoseFrames:
        if not isinstance(poses, PoseFrames):
            return self.frames(poses, reference=reference)
        if poses.options != self.options:
            raise ValueError(
                f"The frames are of a PoseEmbedding with {_name(poses.options)}; this one has {_name(self.options)}."
            )
        same = reference is None or poses.reference is reference
        if not (same or values_are_unknown(poses.reference, reference) or (poses.reference == reference).all()):
            raise ValueError(
                "The frames of queries and keys have different references: pass reference=frames.reference, of the "
                "queries' frames, to those of the keys."
            )
        return poses

    def _patch_rotations(self, patches: torch.Tensor | TokenPositions | None, tokens: int) -> PlaneRotation | None:
        """Rotations of all tokens, those of one image repeated."""
        if (patches is None) != (self.rotary is None):
            given = "none were given" if patches is None else "patches were given"
            raise ValueError(
                f"patch_share={self.patch_share} and {given}: positions of patches, frames(poses, patches=…), belong "
                "to a patch_share above 0."
            )
        if self.rotary is None:
            return None
        if isinstance(patches, GridPositions) and (facts := patches.facts) is not None:
            check_name("coordinates of patches", facts.convention, ("index", "train_index"))
        (rotation,) = self.rotary.rotations(patches)
        assert isinstance(rotation, PlaneRotation), "axial RoPE rotates planes"
        times, rest = divmod(tokens, rotation.num_tokens())
        if rest:
            raise ValueError(
                f"There are patches of {rotation.num_tokens()} tokens and poses of {tokens}: as many patches, or a "
                "divisor for the patches of each camera, are needed."
            )
        return PlaneRotation(rotation.cos_sin.repeat(1, 1, times, 1, 1))  # (1 or B, 1, N, planes, 2)

    def _warn_of_rounding(self, poses: torch.Tensor) -> None:
        if values_are_unknown(poses):
            return
        # The largest number that is rounded by at most `COARSE`.
        coarse = COARSE / (torch.finfo(poses.dtype).eps / 2)
        if (poses.detach()[..., :3, 3].abs() * self.translation_scale > coarse).any():
            limit = coarse / self.translation_scale
            # Without the distance, so that the warning appears once.
            logger.warning_once(
                f"Poses of type {poses.dtype} lie more than {limit:.3g} units from the origin, where their rounding is "
                "visible in attention. Keep poses in float64 from the file on, or subtract a common origin in float64."
            )

    def _check_states(self, name: str, states: torch.Tensor, frames: PoseFrames) -> None:
        require_tensors(**{name: states})
        if states.ndim != 4 or states.shape[3] != self.head_dim:
            raise ValueError(
                f"{name} of shape {tuple(states.shape)} must be (batch, heads, tokens, head_dim={self.head_dim})."
            )
        if not states.is_floating_point():
            raise ValueError(f"{name} are {states.dtype}; a floating point type is needed.")
        tokens, patches = frames.to_camera.shape[1], frames.patches
        counts = {"poses": len(frames.to_camera), "patches": 1 if patches is None else patches.num_samples()}
        for kind, samples in counts.items():
            if tokens != states.shape[2] or samples not in (1, len(states)):
                raise ValueError(
                    f"There are {kind} of {tokens} tokens in {samples} samples, but {name} of shape "
                    f"{tuple(states.shape)}: {kind} of {states.shape[2]} tokens in 1 or {len(states)} samples are "
                    "needed; those of keys of other tokens are key_poses."
                )

    def _transform(self, name: str, states: torch.Tensor, frames: PoseFrames, matrices: torch.Tensor) -> torch.Tensor:
        """(B, H, N, head_dim) states by (1 or B, N, 4, 4) matrices, and the last channels by rotations of patches."""
        self._check_states(name, states, frames)
        wide = torch.promote_types(states.dtype, torch.float32)
        with maybe_autocast(states.device.type, enabled=False):
            matrices = matrices.to(wide)[:, None, :, None]  # (1 or B, 1, N, 1, 4, 4)
            columns = states[..., : self.pose_channels].to(wide).unflatten(-1, (-1, 4)).unbind(-1)  # 4 × (B, H, N, D/4)
            # Sums of products: matrix products may be rounded to TF32.
            rows = [sum(column * matrices[..., row, at] for at, column in enumerate(columns)) for row in range(4)]
            result = torch.stack(rows, dim=-1).flatten(-2).to(states.dtype)  # (B, H, N, D)
            if frames.patches is None:
                return result
            others = states[..., self.pose_channels :]
            rotated, _ = frames.patches.rotate(others, others[:0])
            return torch.cat([result, rotated], dim=-1)


def pose_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    poses: torch.Tensor | PoseFrames | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """
    Scaled dot-product attention of queries, keys and values that [`PoseEmbedding`] transforms (GTA, eqs. 4–6).

    Args:
        query, key, value: (B, H, N, head_dim), keys and values also of fewer heads.
        poses: As for [`PoseEmbedding.forward`]: (B, N, 4, 4) or (N, 4, 4) of all tokens, class and register tokens
            included, or the result of [`PoseEmbedding.frames`], with any options.

    Returns:
        (B, N, H, head_dim), and `None` for the weights.

    Raises:
        ValueError: without poses, or as [`PoseEmbedding`].
    """
    if poses is None:
        raise ValueError(
            f"attn_implementation={POSE_ATTENTION!r} needs the poses of all tokens, and none were given: call "
            "model(…, poses=poses) with (batch, tokens, 4, 4) matrices from camera to world."
        )
    options = {"head_dim": query.shape[-1], **(poses.options if isinstance(poses, PoseFrames) else {})}
    embedding = PoseEmbedding(**options)
    frames = poses if isinstance(poses, PoseFrames) else embedding.frames(poses)
    query, key, value = embedding(query, key, value, frames)
    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return embedding.undo(output.transpose(1, 2), frames).transpose(1, 2).contiguous(), None


AttentionInterface.register(POSE_ATTENTION, pose_attention_forward)
AttentionMaskInterface.register(POSE_ATTENTION, sdpa_mask)


def _name(options: dict[str, float]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


def _as_batch(
    name: str, given: torch.Tensor, shape: tuple[int, ...], poses: torch.Tensor | None = None
) -> torch.Tensor:
    """Broadcasts one matrix, or bool if `shape` is (), per token to (1 or B, N, …): one for each of the `poses`."""
    require_tensors(**{name: given})
    batch = given.unsqueeze(0) if given.ndim == 1 + len(shape) else given
    if batch.ndim != 2 + len(shape) or batch.shape[2:] != shape or not batch.shape[1]:
        tokens = ", ".join(map(str, ("tokens", *shape)))
        raise ValueError(
            f"{name} of shape {tuple(given.shape)} must be (batch, {tokens}) or ({tokens}), with at least one token."
        )
    if given.dtype not in ((torch.float32, torch.float64) if shape else (torch.bool,)):
        needed = "float32 or float64 is needed, whatever the type of the states" if shape else "bool is needed"
        raise ValueError(f"{name} of type {given.dtype}: {needed}.")
    if poses is not None and (batch.shape[1] != poses.shape[1] or len({1, len(poses), len(batch)}) > 2):
        raise ValueError(
            f"{name} of {batch.shape[1]} tokens in {len(batch)} samples and poses of {poses.shape[1]} in {len(poses)} "
            "do not fit."
        )
    return batch


def _where_known(known: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """(1 or B, N, n, n) matrices, the identity where (1 or B, N) `known` is false; values there get no gradient."""
    identity = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    return torch.where(known[..., None, None], matrices, identity)


def _check_reference(reference: torch.Tensor, poses: torch.Tensor) -> torch.Tensor:
    """(1 or B, 4, 4) in the type of the poses."""
    batch = reference.unsqueeze(0) if reference.ndim == 2 else reference
    if batch.ndim != 3 or batch.shape[1:] != (4, 4) or len({1, len(poses), len(batch)}) > 2:
        raise ValueError(
            f"reference of shape {tuple(reference.shape)} must be (4, 4) or (batch, 4, 4), for {len(poses)} samples."
        )
    check_poses("reference", batch)
    return batch.to(poses)


def _read_sides(image_size: Any) -> tuple[float, float]:
    # Graphs of torch 2.9 have no `suppress`.
    try:
        height, width = image_size
        if 0 < height < float("inf") and 0 < width < float("inf"):
            return height, width
    except (TypeError, ValueError):
        pass
    raise ValueError(
        f"image_size={image_size!r} must be (height, width) of the image in the pixels of intrinsics, two positive "
        "numbers."
    )
