"""Transformers of tokens with features and positions: points, steps of a series, anything with coordinates."""

import math

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPooling, SequenceClassifierOutput, TokenClassifierOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from ..encoding.given_positions import check_coordinates, check_shape, place_given, require_tensors, zero_hidden
from ..encoding.positions import TokenPositions
from ..fast.dispatch import values_are_unknown
from .configuration_liere_tokens import LieRETokensConfig
from .embeddings import LieRETokenEmbeddings
from .losses import IGNORED_LABEL
from .modeling_liere import LieREEncoderModel, LieREForClassification
from .pretrained import LieREPreTrainedModel


class LieREFeatureEmbeddings(LieRETokenEmbeddings):
    """Linear embedding of the features of every token, with table, class token and register tokens as configured."""

    def __init__(self, config: LieRETokensConfig):
        super().__init__(config, math.prod(config.position_table_size or ()))
        self.feature_size = config.feature_size
        self.feature_embeddings = nn.Linear(config.feature_size, config.hidden_size)

    def shape(self, features: torch.Tensor) -> tuple[int, int]:
        """
        Batch size B and number of tokens N of (B, N, feature_size) features. Raises `ValueError` if they have another
        shape or are not floating point.
        """
        require_tensors(inputs_embeds=features)
        if features.ndim != 3 or features.shape[1] == 0 or features.shape[2] != self.feature_size:
            raise ValueError(
                f"inputs_embeds of shape {tuple(features.shape)} must be (batch, tokens, feature_size), with at least "
                f"one token and feature_size={self.feature_size}."
            )
        if not features.is_floating_point():
            raise ValueError(f"inputs_embeds are {features.dtype}; a floating point type is needed.")
        return features.shape[0], features.shape[1]

    def forward(self, features: torch.Tensor, positions: TokenPositions | None = None) -> torch.Tensor:
        """(B, N, feature_size) features → (B, prefix + N, hidden_size), with the `positions` of all tokens."""
        features = features.to(self.feature_embeddings.weight.dtype)
        return self.assemble(self.feature_embeddings(features), positions)  # (B, prefix + N, hidden_size)


class LieRETokensPreTrainedModel(LieREPreTrainedModel):
    """Loading, saving and initialisation of the token models."""

    config: LieRETokensConfig
    main_input_name = "inputs_embeds"
    # The modality of series models: transformers has none for tokens with positions.
    input_modalities = ("time",)
    _no_split_modules = ["LieREFeatureEmbeddings", "LieRELayer"]
    _input_embed_layer = "feature_embeddings"


class LieRETokensModel(LieRETokensPreTrainedModel, LieREEncoderModel):
    """
    Transformer of tokens with positions on one to six axes, without a head.

    Permuting tokens together with their positions permutes the outputs. Without class and register tokens, moving all
    positions by the same vector does not change the outputs of encodings whose generators commute: all but LieRE with
    `block_size` above 2 on more than one axis.

    ```python
    import torch
    from hf_liere import LieRETokensConfig, LieRETokensModel

    sizes = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3}
    model = LieRETokensModel(LieRETokensConfig(feature_size=3, num_axes=2, **sizes))
    features, positions = torch.randn(1, 50, 3), torch.rand(1, 50, 2)  # 50 tokens on a plane
    states = model(inputs_embeds=features, positions=positions).last_hidden_state  # (1, 1 + 50, 96)
    ```

    Args:
        config: A [`LieRETokensConfig`].
    """

    embeddings_class = LieREFeatureEmbeddings

    def place_tokens(
        self,
        positions: torch.Tensor | None,
        batch_size: int,
        num_tokens: int,
        visible: torch.Tensor | None = None,
    ) -> TokenPositions | None:
        """
        Positions of all tokens, from those that `forward` takes; `None` if nothing in the model uses them. Raises
        `ValueError` as [`check_shape`] and [`check_coordinates`], or if positions are missing.
        """
        config = self.config
        if config.uses_positions and positions is not None:
            return place_given(config, positions, batch_size, num_tokens, visible)
        if config.uses_positions:
            raise ValueError(
                f"position_encoding={config.position_encoding!r} needs positions, of shape "
                f"{(num_tokens, config.num_axes)} or {(batch_size, num_tokens, config.num_axes)}; none were given."
            )
        if positions is not None:
            check_shape(positions, batch_size, num_tokens, config.num_axes)
            check_coordinates(zero_hidden(positions, visible))
        return None

    def extend_mask(
        self, attention_mask: torch.Tensor | object | None, batch_size: int, num_tokens: int
    ) -> torch.Tensor | object | None:
        """
        Extend a (B, N) mask of tokens to class and register tokens, (B, prefix + N); other masks stay unchanged. Raises
        `ValueError` if a mask of tokens has the wrong shape or hides every token of a sample.
        """
        if not isinstance(attention_mask, torch.Tensor) or attention_mask.ndim == 4:
            return attention_mask
        if tuple(attention_mask.shape) != (batch_size, num_tokens):
            raise ValueError(
                f"attention_mask of shape {tuple(attention_mask.shape)} must be {(batch_size, num_tokens)} (batch, "
                "tokens), without class and register tokens."
            )
        if not values_are_unknown(attention_mask):
            present = attention_mask.bool().any(dim=1)  # (B,)
            if not present.all():
                samples = (~present).nonzero().flatten().tolist()
                raise ValueError(f"attention_mask hides all {num_tokens} tokens of samples {samples}.")
        prefix = attention_mask.new_ones(batch_size, self.config.num_prefix_tokens)  # (B, prefix)
        return torch.cat([prefix, attention_mask], dim=1)  # (B, prefix + N)

    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        inputs_embeds: torch.Tensor,
        positions: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        """
        Args:
            inputs_embeds: (B, N, feature_size) features of the tokens.
            positions: (N, A) or (B, N, A), floating point, see `position_scale`. Where class and register
                tokens have coordinates (`rotate_prefix`, `position_table_size`), theirs may come first: (prefix + N, A)
                or (B, prefix + N, A). Encodings without positions only check them.
            attention_mask: (B, N), true or 1 for tokens to attend to, false or 0 for padding, whose features and
                positions are ignored, even NaN. Or a mask of pairs of tokens, class and register tokens included, as in
                [`LieREPixelModel.forward`], which leaves features as they are.

        Returns:
            As [`LieREPixelModel.forward`].

        Raises:
            ValueError: if features, positions or a mask do not fit the configuration or each other, positions of
                visible tokens are missing or not finite, or a mask hides every token of a sample.
        """
        batch, length = self.embeddings.shape(inputs_embeds)
        is_token_mask = isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2
        visible = attention_mask if is_token_mask else None  # (B, N)
        attention_mask = self.extend_mask(attention_mask, batch, length)  # (B, prefix + N) or pairs
        placed = self.place_tokens(positions, batch, length, visible)  # (…, prefix + N, A)
        embeddings = self.embeddings(zero_hidden(inputs_embeds, visible), placed)  # (B, prefix + N, hidden_size)
        if (axes := self.config.distance_axes) is not None and placed is not None:
            prefix = self.config.num_prefix_tokens
            places = placed.on_axes(axes).coordinates[..., prefix:, :].view(-1, length, len(axes))  # (1 or B, N, axes)
            distances = (places.unsqueeze(2) - places.unsqueeze(1)).square().sum(-1).to(embeddings.dtype)
            kwargs["distances"] = nn.functional.pad(distances, (prefix, 0, prefix, 0))  # (1 or B, prefix + N, …)
        return self.transform(embeddings, placed, attention_mask, **kwargs)


class LieRETokensForSequenceClassification(LieRETokensPreTrainedModel, LieREForClassification):
    """
    [`LieRETokensModel`] with a classifier on its pooled output: linear, or with one hidden layer.

    ```python
    import torch
    from hf_liere import LieRETokensConfig, LieRETokensForSequenceClassification

    sizes = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3}
    model = LieRETokensForSequenceClassification(LieRETokensConfig(feature_size=3, num_axes=2, num_labels=4, **sizes))
    features, positions = torch.randn(2, 50, 3), torch.rand(2, 50, 2)
    model(inputs_embeds=features, positions=positions, labels=torch.tensor([0, 3])).loss.backward()
    ```
    """

    encoder_class = LieRETokensModel

    @can_return_tuple
    def forward(
        self,
        inputs_embeds: torch.Tensor,
        positions: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        """
        As [`LieRETokensModel.forward`], with (B,) `labels` in [0, num_labels) for a cross-entropy loss, or floating
        point (B, num_labels) `labels` for independent binary losses; returns `logits` (B, num_labels).
        """
        outputs = self.liere(inputs_embeds, positions, attention_mask, **kwargs)
        logits = self.classifier(outputs.pooler_output)  # (B, num_labels)
        loss = None if labels is None else self.loss_function(labels, logits, self.config, **kwargs)
        return SequenceClassifierOutput(loss, logits, outputs.hidden_states, outputs.attentions)


class LieRETokensForTokenClassification(LieRETokensPreTrainedModel, LieREForClassification):
    """
    [`LieRETokensModel`] with a classifier on every token: linear, or with one hidden layer.

    ```python
    import torch
    from hf_liere import LieRETokensConfig, LieRETokensForTokenClassification

    sizes = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3}
    model = LieRETokensForTokenClassification(LieRETokensConfig(feature_size=3, num_axes=2, num_labels=4, **sizes))
    logits = model(inputs_embeds=torch.randn(2, 50, 3), positions=torch.rand(2, 50, 2)).logits  # (2, 50, 4)
    ```

    Raises:
        ValueError: with `final_norm="pooled"`, which does not normalise tokens.
    """

    encoder_class = LieRETokensModel
    # The loss of transformers divides by the number that it finds among its options.
    accepts_loss_kwargs = True

    def __init__(self, config: LieRETokensConfig):
        if config.final_norm == "pooled":
            raise ValueError(
                "final_norm='pooled' normalises the pooled output, which a classifier of tokens does not use; accepted "
                "here: 'tokens', 'none'."
            )
        super().__init__(config)

    @can_return_tuple
    def forward(
        self,
        inputs_embeds: torch.Tensor,
        positions: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> TokenClassifierOutput:
        """
        As [`LieRETokensModel.forward`], with (B, N) `labels` in [0, num_labels); the cross-entropy loss ignores tokens
        labelled −100 and those that `attention_mask` hides. Returns `logits` (B, N, num_labels).

        Raises:
            ValueError: also if the labels have another shape.
        """
        outputs = self.liere(inputs_embeds, positions, attention_mask, **kwargs)
        tokens = outputs.last_hidden_state[:, self.config.num_prefix_tokens :]  # (B, N, hidden_size)
        logits = self.classifier(tokens)  # (B, N, num_labels)
        loss = None
        if labels is not None:
            if labels.shape != logits.shape[:2]:
                raise ValueError(
                    f"labels of shape {tuple(labels.shape)} must be {tuple(logits.shape[:2])} (batch, tokens)."
                )
            if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
                labels = labels.masked_fill(~attention_mask.bool().to(labels.device), IGNORED_LABEL)  # (B, N)
            loss = self.loss_function(logits, labels, self.config, **kwargs)  # scalar
        return TokenClassifierOutput(loss, logits, outputs.hidden_states, outputs.attentions)
