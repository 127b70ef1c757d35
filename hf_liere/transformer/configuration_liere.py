"""Configurations of the LieRE image, video and token transformers."""

import copy
import dataclasses
from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.backbone_utils import BackboneConfigMixin

from ..encoding.kinds import encoding_of
from ..encoding.rotary_fields import (
    OWN_FIELDS,
    UNROTATED,
    GridFields,
    RotaryFields,
    default_rotate_prefix,
    own_fields,
    require_modules,
    rotated_prefix,
)
from ..plain import model_code
from .attention_functions import SavesPoseAttention
from .foreign_names import warn_of_names
from .validation import FORMAT_VERSION, check_architecture, check_pixels


# Fields whose defaults follow from the encoding, its start and sizes.
FILLED_IN = {
    *("head_dim", "block_size", "rotary_init_scale", "rope_theta", "coordinates", *OWN_FIELDS),
    *("use_absolute_position_embeddings", "rotate_prefix"),
}


@strict
class LieREConfig(RotaryFields, SavesPoseAttention, PreTrainedConfig):
    r"""
    Fields of all configurations: the transformer and its position encoding, see [`RotaryFields`]. Subclasses add
    `num_axes`, the number of axes of a position.

    Args:
        hidden_size (`int`, defaults to 768): Channels of a token.
        num_hidden_layers (`int`, defaults to 12): Layers of the transformer.
        num_attention_heads (`int`, defaults to 12): Heads of each layer.
        head_dim (`int`, *optional*):
            Width of an attention head; `None` means `hidden_size / num_attention_heads`. It is 64 in LieRE's code.
        intermediate_size (`int`, defaults to 3072): Channels inside the MLP.
        use_absolute_position_embeddings (`bool`, *optional*):
            Whether a learned table is added to the embeddings. `None` means only for `absolute`; `True` adds it to
            a rotary encoding.
        rotate_prefix (`bool`, *optional*):
            Whether class and register tokens are rotated, at `prefix_coordinate` of every axis. `None` means yes for
            `comrope_ap` and `comrope_ld` on images and videos with the `coordinates` `unit` (their default),
            `unit_width`, `fixed_grid` or `physical`, as in ComRoPE's code: the attention of these tokens then depends
            on differences of coordinates too. Otherwise it means no (LieRE, RoPE-Mixed; models of tokens, whose
            positions have no common centre).
        rotate_values (`bool`, defaults to `False`):
            Whether attention also rotates values, and its outputs back: token i receives R(pᵢ)ᵀ Σⱼ wᵢⱼ R(pⱼ) vⱼ, as in
            GTA (Miyato et al., ICLR 2024, eqs. 4–6). Where R(p)ᵀR(q) is relative, what a token receives is so too, in
            the frame of that token. Class and register tokens that are not rotated receive values in the common frame.
        use_class_token (`bool`, defaults to `True`): Whether a class token precedes the patches.
        num_register_tokens (`int`, defaults to 0): Number of register tokens, placed after the class token.
        pooling (`str`, defaults to `"cls"`):
            `"cls"` (class token), `"mean"` (patch tokens) or `"mean_all"` (all tokens, as in official LieRE).
        hidden_dropout_prob (`float`, defaults to 0.0): Dropout of the embeddings and outputs of attention and MLP.
        attention_probs_dropout_prob (`float`, defaults to 0.0): Dropout of the attention weights.
        initializer_range (`float`, defaults to 0.02): Standard deviation of the initial weights.
        mlp_dropout_prob (`float`, defaults to 0.0): Dropout of the activations inside the MLP, as in LieRE's code.
        layerscale_value (`float`, *optional*): Initial value of layer scale; `None` means no layer scale.
        drop_path_rate (`float`, defaults to 0.0): Stochastic depth rate of the last layer, linear from 0 at the first.
        hidden_act (`str`, defaults to `"gelu"`): Activation of the MLP, by its name in transformers.
        layer_norm_eps (`float`, defaults to 1e-6): The epsilon of layer norms.
        qkv_bias (`bool`, defaults to `True`): Whether queries, keys and values have a bias.
        position_table_size (`list[int]`, *optional*):
            `None`: the table has one entry for each patch of a training input and one for the class token. Otherwise
            the number of entries per axis: every token reads the table at its coordinate by linear interpolation, with
            0 at the first and 1 at the last entry of an axis, and the border outside (ComRoPE's code).
        prefix_coordinate (`float`, defaults to 0.5):
            Coordinate of class and register tokens on every axis, for `rotate_prefix` and `position_table_size`;
            in `centred_grid` it is 0.
        final_norm (`str`, defaults to `"tokens"`):
            Whether the last layer norm is applied to all tokens before pooling (`"tokens"`), to the pooled output
            (`"pooled"`, as in LieRE and CLIP; `last_hidden_state` is then not normalised) or not at all (`"none"`).
        use_pre_layernorm (`bool`, defaults to `False`): Layer norm of the embeddings before the first layer (CLIP).
        classifier_hidden_size (`int`, *optional*):
            Width of a hidden ReLU layer in the classifier (ComRoPE); `None` means a linear classifier.
        token_initializer_range (`float`, *optional*):
            Standard deviation of the normal distribution that class token, register tokens and position table start
            from; it is 1 in the code of LieRE and of ComRoPE. `None` means a truncated one of `initializer_range`.
        folded_grids (`list`, *optional*):
            Patch grids with constant rotations in a model from `fold_rotations`; an empty list for encodings whose
            rotations are in the query and key weights, `None` for models that are not folded.
        format_version (`int`): Version of the configuration format; versions newer than this release are refused.

    Raises:
        `huggingface_hub.errors.StrictDataclassError`: if a field has the wrong type or fields contradict each other.
    """

    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    head_dim: int | None = None
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = 0.0
    mlp_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    drop_path_rate: float | int = 0.0
    layerscale_value: float | None = None
    initializer_range: float = 0.02
    token_initializer_range: float | int | None = None
    layer_norm_eps: float = 1e-6
    qkv_bias: bool = True
    use_class_token: bool = True
    num_register_tokens: int = 0
    use_pre_layernorm: bool = False
    final_norm: Literal["tokens", "pooled", "none"] = "tokens"
    pooling: Literal["cls", "mean", "mean_all"] = "cls"
    classifier_hidden_size: int | None = None

    use_absolute_position_embeddings: bool | None = None
    position_table_size: list[int] | tuple[int, ...] | None = None
    rotate_prefix: bool | None = None
    prefix_coordinate: float | int = 0.5
    rotate_values: bool = False
    folded_grids: list[list[int]] | None = None
    format_version: int = FORMAT_VERSION

    _auto_map: ClassVar[dict[str, str]] = {}

    def __post_init__(self, **kwargs):
        encoding, size, heads = self.position_encoding, self.hidden_size, self.num_attention_heads
        # Validation refuses a division with a remainder.
        if self.head_dim is None and 0 < heads <= size and size % heads == 0:
            self.head_dim = size // heads
        if self.use_absolute_position_embeddings is None:
            self.use_absolute_position_embeddings = encoding == "absolute"
        if self.rotate_prefix is None:
            self.rotate_prefix = False
        self.fill_in_rotations()
        # A checkpoint loads with every Auto class of its family.
        kwargs["auto_map"] = {**self._auto_map, **(kwargs.get("auto_map") or {})}
        super().__post_init__(**kwargs)
        # As in transformers, unknown names are stored.
        warn_of_names(self, kwargs)

    def plain_code(self) -> dict[str, str] | None:
        """The plain model, which does not fold and has neither poses, distances nor positions from content."""
        lacking = self.folded_grids, self.content_positions, getattr(self, "distance_axes", None)
        needs_package = self.attends_by_poses or any(field is not None for field in lacking)
        return None if needs_package else {"modeling_liere.py": model_code()}

    def to_dict(self) -> dict[str, Any]:
        """Without fields of other encodings and starts."""
        values, own = super().to_dict(), own_fields(self)
        return {name: value for name, value in values.items() if name not in OWN_FIELDS or name in own}

    def __repr__(self) -> str:
        """The fields that differ from what the class, the encoding and its start imply."""
        implied, encoding = copy.copy(self), encoding_of(self)
        for name in FILLED_IN & vars(self).keys():
            setattr(implied, name, None)
        implied.__post_init__()
        expected = {field.name: field.default for field in dataclasses.fields(self)}
        expected |= {name: getattr(implied, name) for name in FILLED_IN & vars(self).keys()}
        expected["rotary_init"] = next(iter(encoding.rotary_inits), None) if encoding else None
        names = [name for name in expected if name not in PreTrainedConfig.__dataclass_fields__ and name[0] != "_"]
        shown = [name for name in names if name == "position_encoding" or getattr(self, name) != expected[name]]
        shown += ["num_labels"] if self.num_labels != 2 else []
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        require_modules(config_dict, config_dict.get("modules_of_parts"))
        return super().from_dict(config_dict, **kwargs)

    @property
    def train_grid(self) -> tuple[int, ...] | None:
        """Number of patches per axis of a training input; `None` for models of tokens."""
        return None

    @property
    def uses_positions(self) -> bool:
        """Whether the model depends on the coordinates of tokens."""
        fields = self.position_table_size, getattr(self, "distance_axes", None)
        return self.position_encoding not in UNROTATED or any(field is not None for field in fields)

    @property
    def num_prefix_tokens(self) -> int:
        return int(self.use_class_token) + self.num_register_tokens

    @property
    def places_prefix(self) -> bool:
        """Whether class and register tokens have coordinates, for rotations or a table that is read at coordinates."""
        return self.rotate_prefix or self.position_table_size is not None

    @property
    def prefix(self) -> tuple[int, float]:
        """Number of class and register tokens, and their coordinate on every axis; at zero they are not rotated."""
        coordinate = rotated_prefix(self, self.prefix_coordinate) if self.places_prefix else 0.0
        return self.num_prefix_tokens, coordinate

    def validate_architecture(self):
        """Raise `ValueError` if fields that are valid alone contradict each other."""
        check_architecture(self)


@strict
class LieREPixelConfig(GridFields, LieREConfig):
    r"""
    Fields shared by the image and video configurations: patches of pixels on a grid. See [`GridFields`] for their
    coordinates and [`LieREConfig`] for the rest.

    Args:
        num_channels (`int`, defaults to 3): Channels of the input.
        image_size (`int` or `(int, int)`, defaults to 224): Height and width of training images, in pixels.
        patch_size (`int` or `(int, int)`, defaults to 16): Height and width of a patch, in pixels.
        position_table_resize (`str`, defaults to `"interpolate"`):
            How the table of training patches is resized for another grid: `"interpolate"` (bicubic, trilinear for
            video) or `"truncate"` (its first entries in raster order, as in LieRE's code for VisionLLaMA; larger grids
            are refused).
        physical_unit (`float` or `list[float]`, *optional*):
            The length, in the unit of `spacing` such as mm or s, that counts as 1 in `coordinates="physical"` (required
            there, refused elsewhere), for all axes or one per axis (rows, columns; frames or slices, rows, columns). A
            good choice is the extent of a training input, such as 192 for 128 voxels of 1.5 mm.
        patch_dropout_prob (`float`, defaults to 0.0):
            Share of the patches, rounded down, that a forward pass in training leaves out (FLIP, timm's
            `PatchDropout`). Each sample keeps all class and register tokens and the same number of random patches, at
            their positions; `last_hidden_state` contains only these. Not for masked image modeling and backbones, which
            return all patches.

    Raises:
        `huggingface_hub.errors.StrictDataclassError`: as [`LieREConfig`].
    """

    num_channels: int = 3
    image_size: int | list[int] | tuple[int, int] = 224
    patch_size: int | list[int] | tuple[int, int] = 16
    position_table_resize: Literal["interpolate", "truncate"] = "interpolate"
    physical_unit: float | int | list[float | int] | tuple[float | int, ...] | None = None
    patch_dropout_prob: float | int = 0.0

    def __post_init__(self, **kwargs):
        self.name_shares()
        self.fill_in_coordinates()
        if self.coordinates is None and self.position_table_size is not None:
            # ComRoPE's convention: its table is the one that is read at coordinates.
            self.coordinates = "unit"
        if self.rotate_prefix is None:
            self.rotate_prefix = self.num_prefix_tokens > 0 and default_rotate_prefix(self)
        super().__post_init__(**kwargs)

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """Extent of a patch in pixels (and frames), in the order of the input's axes."""
        return pair("patch_size", self.patch_size)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Extent of a training input in pixels (and frames), in the order of its axes."""
        return pair("image_size", self.image_size)

    @property
    def num_axes(self) -> int:
        return len(self.patch_shape)

    @property
    def train_grid(self) -> tuple[int, ...]:
        """Number of patches per axis of a training input."""
        return tuple(size // patch for size, patch in zip(self.input_shape, self.patch_shape))

    def validate_architecture(self):
        """As [`LieREConfig.validate_architecture`]."""
        check_architecture(self)
        check_pixels(self)


@strict
class LieREViTConfig(BackboneConfigMixin, LieREPixelConfig):
    r"""
    Configuration of the image models. These fields make a model; [`LieREPixelConfig`], [`LieREConfig`],
    [`RotaryFields`] and [`GridFields`] have the others, and `print(config)` shows those that are not the default.

    | field | values | default | meaning |
    |---|---|---|---|
    | `position_encoding` | `"liere"`, `"comrope_ld"`, `"rope_mixed"`, … | `"liere"` | how attention sees positions |
    | `block_size` | 2 … head_dim, as the encoding accepts | 8 | size of the rotations' blocks |
    | `coordinates` | `"train_grid"`, `"unit"`, `"index"`, … | the encoding's | where patches sit |
    | `image_size`, `patch_size` | pixels, or (height, width) | 224, 16 | of training images |
    | `hidden_size`, `intermediate_size` | channels | 768, 3072 | of tokens, and inside the MLP |
    | `num_hidden_layers`, `num_attention_heads` | numbers | 12, 12 | of the transformer |
    | `num_labels` | number | 2 | classes of a classifier |

    ```python
    from hf_liere import LieREViTConfig, LieREViTModel

    config = LieREViTConfig(position_encoding="liere", block_size=8, hidden_size=384, num_attention_heads=6)
    model = LieREViTModel(config)  # its weights are random
    ```

    Args:
        apply_layernorm (`bool`, defaults to `True`): Whether the backbone normalises its feature maps.
        reshape_hidden_states (`bool`, defaults to `True`):
            Whether the backbone's feature maps are (B, hidden_size, H, W) instead of token sequences.

    Raises:
        `huggingface_hub.errors.StrictDataclassError`: as [`LieREConfig`].
    """

    model_type = "liere_vit"

    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None
    apply_layernorm: bool = True
    reshape_hidden_states: bool = True

    _auto_map = {
        "AutoConfig": "modeling_liere.LieREViTConfig",
        "AutoModel": "modeling_liere.LieREViTModel",
        "AutoModelForImageClassification": "modeling_liere.LieREViTForImageClassification",
        "AutoModelForMaskedImageModeling": "modeling_liere.LieREViTForMaskedImageModeling",
        "AutoBackbone": "modeling_liere.LieREViTBackbone",
    }

    def __post_init__(self, **kwargs):
        self.stage_names = ["stem"] + [f"stage{index}" for index in range(1, self.num_hidden_layers + 1)]
        self.set_output_features_output_indices(
            out_indices=kwargs.pop("out_indices", None), out_features=kwargs.pop("out_features", None)
        )
        super().__post_init__(**kwargs)


@strict
class LieREVideoConfig(LieREPixelConfig):
    r"""
    Configuration of the video and volume models. See [`LieREPixelConfig`] for the fields shared with image models.

    ```python
    from hf_liere import LieREVideoConfig

    config = LieREVideoConfig(position_encoding="liere", block_size=8, num_frames=16, image_size=112)
    print(config.train_grid)  # patches of a training clip: time, rows, columns
    ```

    ```text
    (8, 7, 7)
    ```

    Args:
        num_frames (`int`, defaults to 8): Frames (or slices) of a training clip.
        tubelet_size (`int`, defaults to 2): Frames (or slices) of one patch; LieRE trains UCF101 with 8 and 2.

    Raises:
        `huggingface_hub.errors.StrictDataclassError`: as [`LieREConfig`].
    """

    model_type = "liere_video"

    num_frames: int = 8
    tubelet_size: int = 2

    _auto_map = {
        "AutoConfig": "modeling_liere.LieREVideoConfig",
        "AutoModel": "modeling_liere.LieREVideoModel",
        "AutoModelForVideoClassification": "modeling_liere.LieREVideoForVideoClassification",
    }

    @property
    def patch_shape(self) -> tuple[int, ...]:
        return (self.tubelet_size, *pair("patch_size", self.patch_size))

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.num_frames, *pair("image_size", self.image_size))


def pair(name: str, value: int | list[int] | tuple[int, ...]) -> tuple[int, int]:
    """(height, width) of the field `name`, from one or two integers. Raises `ValueError` for other values."""
    sides = (value, value) if isinstance(value, int) else tuple(value)
    if len(sides) != 2:
        raise ValueError(f"{name}={value!r} must be one integer or (height, width).")
    return sides
