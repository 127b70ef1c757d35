"""The base class of our models: loading, saving, initialisation and folding."""

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers import initialization as init

from ..encoding.content_positions import ContentPositions
from ..encoding.folding import fold_rotations
from ..encoding.rotary_encoding import RotaryEncoding
from .configuration_liere import LieREConfig
from .embeddings import LieRETokenEmbeddings
from .layers import LieREAttention, LieRELayer, LieRELayerScale
from .losses import AcceptsCount


class LieREPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation shared by all models."""

    config: LieREConfig
    base_model_prefix = "liere"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    accepts_loss_kwargs: Any = AcceptsCount()
    _no_split_modules = ["LieREEmbeddings", "LieRELayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": LieRELayer, "attentions": LieREAttention}
    _input_embed_layer = "patch_embeddings"
    # A generator rounded to bfloat16 rotates distant patches by several degrees too far.
    _keep_in_fp32_modules_strict: Collection[str] = ["rotary_encoding"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LieRETokenEmbeddings):
            for parameter in (module.cls_token, module.register_tokens, module.position_embeddings):
                if parameter is None:
                    continue
                if self.config.token_initializer_range is None:
                    init.trunc_normal_(parameter, mean=0.0, std=self.config.initializer_range)
                else:
                    init.normal_(parameter, mean=0.0, std=self.config.token_initializer_range)
            if module.mask_token is not None:
                init.zeros_(module.mask_token)
        elif isinstance(module, LieRELayerScale):
            init.constant_(module.scale, module.initial_value)
        elif isinstance(module, RotaryEncoding):
            module.reset_parameters()
        elif isinstance(module, ContentPositions):
            init.zeros_(module.weight)
        elif isinstance(module, LieREAttention) and module.distance_weight is not None:
            init.zeros_(module.distance_weight)

    def post_init(self) -> None:
        super().post_init()
        # Some encodings have no parameters.
        if next(self.rotary_parameters(), None) is None:
            self._keep_in_fp32_modules_strict = set(self._keep_in_fp32_modules_strict) - {"rotary_encoding"}
        if self.config.folded_grids is not None:
            self.eval()

    def train(self, mode: bool = True):
        """Raises `ValueError` if the model is folded, see `fold_rotations`."""
        # transformers sets a mode before it sets the configuration.
        if mode and getattr(self, "config", None) is not None and self.config.folded_grids is not None:
            raise ValueError(
                "The rotations of this model are folded (folded_grids="
                f"{self.config.folded_grids}), which is for inference: train the original model."
            )
        return super().train(mode)

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoModel") -> None:
        """Code is saved with the configuration; transformers would copy the files of the package."""

    def _set_gradient_checkpointing(self, enable: bool = True, gradient_checkpointing_func=checkpoint, **kwargs):
        """Raises `ValueError` for `use_reentrant=True`, which would lose the gradients of the rotations."""
        if enable and getattr(gradient_checkpointing_func, "keywords", {}).get("use_reentrant"):
            raise ValueError(
                "use_reentrant=True was given, which differentiates with respect to single tensors, not to rotations; "
                "accepted: False, the default."
            )
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func, **kwargs)

    def fold_rotations(self, grids: Iterable[tuple[int, ...]] | None = None) -> "LieREPreTrainedModel":
        """
        Copy the model for inference: commuting rotations cost as much as RoPE, dense rotations are constants.

        Commuting encodings become RoPE: exp(s S) = U rot(s μ) Uᵀ, with Uᵀ in the query and key weights. Dense rotations
        of LieRE become constants for the requested grids; others are computed as before. The copy is saved and loaded
        like any model, and `config.folded_grids` marks it.

        Args:
            grids: Patches per axis, for example `[(14, 14)]`; `None` means the grid of the training input. Only LieRE
                with a block size above 2 uses them.

        Raises:
            ValueError: if the model is already folded or has no rotations, its weights are offloaded or computed by
                hooks (pruning), or adapters or quantized layers replace weights that folding would change.
            `huggingface_hub.errors.StrictDataclassError`: if a grid does not fit the configuration.
        """
        return fold_rotations(self, grids)

    def rotary_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters of the rotary encoding: train them without weight decay."""
        for name, parameter in self.named_parameters():
            if "rotary_encoding." in name:
                yield name, parameter
