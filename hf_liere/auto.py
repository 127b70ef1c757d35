"""Registration with the Auto classes, and the checkpoint loader; no other file of the package imports Auto classes."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoImageProcessor, AutoModel, AutoVideoProcessor, PreTrainedModel
from transformers.utils import is_torchvision_available, is_vision_available

from .patching import modeling_patched
from .patching.adapters import PEFT_WEIGHTS, load_rotary
from .patching.modeling_patched import PREFIX, rotary_config
from .patching.patched_configuration import TYPE_PREFIX
from .patching.peft_adapters import read_labels, restore_rotations
from .registers import closest
from .storage.client import HubError
from .storage.loading import (
    CheckpointError,
    choose_place,
    loading_options,
    locate,
    require_finite_parameters,
    require_loaded_keys,
    translate_loading_errors,
)
from .storage.saved_model import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONFIG, LABELS, PEFT_CONFIG, SavedModel, first_line
from .transformer import modeling_liere, modeling_liere_heads, modeling_liere_tokens, modeling_liere_video
from .transformer.configuration_liere import LieREVideoConfig, LieREViTConfig
from .transformer.configuration_liere_tokens import LieRETokensConfig


if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel


Place = str | os.PathLike
CONFIGS = (LieREViTConfig, LieREVideoConfig, LieRETokensConfig)
# The modules with the models that their `_auto_map` names.
MODULES = (modeling_liere, modeling_liere_heads, modeling_liere_tokens, modeling_liere_video, modeling_patched)
# peft's names of tasks whose models have heads that a base may lack.
HEADS = {"SEQ_CLS": "SequenceClassification", "TOKEN_CLS": "TokenClassification", "QUESTION_ANS": "QuestionAnswering"}
ADAPTER_FILES = (PEFT_CONFIG, *PEFT_WEIGHTS, ADAPTER_CONFIG, ADAPTER_WEIGHTS, LABELS)
GIVE_BASE = "accepted: the folder or repository of that model as base (--base)"
CLASSIFIERS = (".classifier.weight", ".classifier.out_proj.weight", ".score.weight")


class FamilyWithRotations:
    """Lazy stand-in for one family's Rotary…Config; building them all would import all of transformers."""

    family = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> transformers.PreTrainedConfig:
        return cls._make()(*args, **kwargs)

    @classmethod
    def from_dict(cls, *args: Any, **kwargs: Any) -> transformers.PreTrainedConfig:
        return cls._make().from_dict(*args, **kwargs)

    @classmethod
    def _make(cls) -> type[transformers.PreTrainedConfig]:
        config = rotary_config(CONFIG_MAPPING[cls.family])
        AutoConfig.register(config.model_type, config, exist_ok=True)
        return config


def register() -> None:
    """
    Register our models with the Auto classes and pipelines; repeated calls are safe.
    """
    for config_class in CONFIGS:
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        for auto_class, model in models_of(config_class).items():
            getattr(transformers, auto_class).register(config_class, model, exist_ok=True)
    for family in model_types():
        model_type = f"{TYPE_PREFIX}{family}"
        if model_type not in CONFIG_MAPPING:
            attributes = {"family": family, "model_type": model_type, "__module__": __name__}
            AutoConfig.register(model_type, type(model_type, (FamilyWithRotations,), attributes))
    # ViT's processors for the installed backends.
    processors = {"pil": transformers.ViTImageProcessorPil} if is_vision_available() else {}
    if is_torchvision_available():
        from .transformer.video_processing_liere import LieREVideoProcessor

        AutoVideoProcessor.register(LieREVideoConfig, LieREVideoProcessor, exist_ok=True)
        processors["torchvision"] = transformers.ViTImageProcessor
    if processors:
        AutoImageProcessor.register(LieREViTConfig, image_processor_classes=processors, exist_ok=True)


def models_of(config_class: type[transformers.PreTrainedConfig]) -> dict[str, type[PreTrainedModel]]:
    """The model of each Auto class, by its name, for a configuration class; empty if the class is not ours."""
    places = getattr(config_class, "_auto_map", {})
    names = {auto: place.rpartition(".")[2] for auto, place in places.items() if auto != "AutoConfig"}
    return {auto: next(getattr(one, name) for one in MODULES if hasattr(one, name)) for auto, name in names.items()}


def model_class(architecture: str | None) -> type[PreTrainedModel]:
    """
    Our model class with this name, as in `architectures` of a saved configuration. Raises `ValueError` if no model of
    ours has this name.
    """
    classes = {cls.__name__: cls for config_class in CONFIGS for cls in models_of(config_class).values()}
    if architecture in classes:
        return classes[architecture]
    made = getattr(modeling_patched, str(architecture), None) if str(architecture).startswith(PREFIX) else None
    if made is None or not hasattr(made, "plain_class"):
        raise ValueError(
            f"{architecture!r} is none of our models; accepted: {', '.join(sorted(classes))}, and {PREFIX} before the "
            "name of a model of transformers."
        )
    return made


def load_checkpoint(
    checkpoint: Place,
    revision: str | None = None,
    trust_remote_code: bool = False,
    dtype: str = "float32",
    base: Place | None = None,
) -> tuple[PreTrainedModel, object | None]:
    """
    Load any model that `from_pretrained` reads, of the class that its configuration names, with all of its weights and
    in evaluation mode, and its image or video processor (`None` if it has no readable one). An adapter of peft is
    merged into its base, and rotations of `save_rotary` are put into theirs.

    Args:
        checkpoint: Directory or repository on the Hub.
        revision: Branch, tag or commit of the repository.
        trust_remote_code: Whether the checkpoint's own code may run for models that are unknown here.
        dtype: Of the weights; `"auto"` keeps the saved one.
        base: Directory or repository of the base of an adapter; `None` means the one that the adapter names.

    Raises:
        CheckpointError: if the checkpoint does not exist, cannot be read, needs untrusted code or is an adapter without
            its base, or if weights are missing, unexpected, of another shape or not finite.
        HubError: if the Hub does not answer or refuses the request.
    """
    options = {**loading_options(checkpoint, revision), "trust_remote_code": trust_remote_code}
    with translate_loading_errors(checkpoint, revision):
        kind = _find_kind(checkpoint, revision)
        if kind == "peft":
            loading: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
            model = load_peft(checkpoint, base, revision=revision, **loading).merge_and_unload()
        elif kind == "model":
            model = _load_model(checkpoint, {"dtype": dtype, **options})
        elif base is None:
            raise CheckpointError(f"{checkpoint} contains rotations that do not name their model; {GIVE_BASE}.")
        else:
            model = load_rotary(load_checkpoint(base, None, trust_remote_code, dtype)[0], str(checkpoint), revision)
    require_finite_parameters(model, f"The checkpoint {checkpoint}")
    processor = _processor(checkpoint, model, options)
    if processor is None and kind != "model":
        processor = _processor(model.name_or_path, model, {"trust_remote_code": trust_remote_code})
    return model.eval(), processor


def _find_kind(checkpoint: Place, revision: str | None) -> str:
    return SavedModel(locate(checkpoint, (CONFIG, PEFT_CONFIG, ADAPTER_CONFIG), revision)).kind


def _load_model(checkpoint: Place, options: dict, adapted: Any = None, trained: Iterable[str] = ()) -> PreTrainedModel:
    """A model, or an adapter's base of the `adapted` class, with all weights that the adapter has not `trained`."""
    place = choose_place(options) | {"trust_remote_code": options.get("trust_remote_code")}
    loader, architecture, is_ours = _loader(AutoConfig.from_pretrained(checkpoint, **place), checkpoint)
    # Report weights of another shape together with missing and unexpected ones.
    loading = {"ignore_mismatched_sizes": True, "output_loading_info": True}
    model, keys = (adapted or loader).from_pretrained(checkpoint, **loading, **options)
    if adapted or loader is AutoModel and architecture not in (None, type(model).__name__):
        # This is another class, or the bare model of an architecture whose head only the checkpoint's own code defines.
        keys["unexpected_keys"] = set()
    # Some Transformers models were published without the pooler, which is not used here.
    require_loaded_keys(keys, checkpoint, (*trained, *(() if is_ours else ("pooler.",))))
    return model


def build_without_weights(
    checkpoint: Place, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """
    The model of a configuration on the meta device: as [`load_checkpoint`], but only the configuration is read. The
    checkpoint may also be a `model_type` of transformers, for its default configuration.
    """
    is_type = str(checkpoint) in CONFIG_MAPPING and not Path(checkpoint).exists()
    if not (is_type or Path(checkpoint).exists()) and (near := closest(checkpoint, model_types())):
        raise CheckpointError(f"{checkpoint}: neither a file or directory nor a model_type of transformers{near}.")
    options = {} if is_type else {**loading_options(checkpoint, revision), "trust_remote_code": trust_remote_code}
    with translate_loading_errors(checkpoint, revision), torch.device("meta"):
        if not is_type and (kind := _find_kind(checkpoint, revision)) != "model":
            raise CheckpointError(
                f"{checkpoint} contains {'an adapter' if kind == 'peft' else kind} without the configuration of a "
                "model; accepted: that of its base, or a model_type of transformers."
            )
        config = CONFIG_MAPPING[str(checkpoint)]() if is_type else AutoConfig.from_pretrained(checkpoint, **options)
        loader, *_ = _loader(config, checkpoint)
        if loader is AutoModel:
            return AutoModel.from_config(config, trust_remote_code=trust_remote_code).eval()
        return loader._from_config(config).eval()


def model_types() -> list[str]:
    """The model types of transformers itself."""
    own = {config_class.model_type for config_class in CONFIGS}
    return [name for name in CONFIG_MAPPING if name not in own and not name.startswith(TYPE_PREFIX)]


def load_peft(
    source: Place,
    base: Place | PreTrainedModel | None = None,
    *,
    revision: str | None = None,
    is_trainable: bool = False,
    **options: Any,
) -> "PeftModel":
    """
    Load a model with a peft adapter, such as LoRA, and the learned rotations saved with it.

    ```python
    import hf_liere
    from peft import LoraConfig, get_peft_model
    from transformers import CLIPModel

    base = CLIPModel.from_pretrained("openai/clip-vit-base-patch16")
    hf_liere.patch(base, hf_liere.RotaryPatchConfig(position_encoding="comrope_ld", block_size=8))
    lora = LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["rotary_encoding"])
    get_peft_model(base, lora).save_pretrained("clip-lora")

    fresh = CLIPModel.from_pretrained("openai/clip-vit-base-patch16")
    model = hf_liere.load_peft("clip-lora", fresh)  # LoRA and the rotations
    ```

    Args:
        source: Folder or repository that the `save_pretrained` of peft's model wrote.
        base: The adapted model, patched or not, or its name; `None` means the name in the adapter's configuration. A
            name is loaded as the class that was adapted, with as many labels as a trained classifier has.
        revision: Branch, tag or commit of the adapter.
        is_trainable: Whether to train the adapter further.
        options: Arguments of the base's `from_pretrained`, such as `dtype` or `device_map`.

    Returns:
        The `PeftModel`.

    Raises:
        ImportError: if peft is not installed.
        ValueError: if the adapter does not name its base, or its rotations do not fit the base.
    """
    from peft import PeftModel

    folder = locate(source, ADAPTER_FILES, revision)
    if not isinstance(base, PreTrainedModel):
        base = _load_base(source, folder, base, options)
    # Also where peft is left as it is.
    restore_rotations(base, folder, {})
    return PeftModel.from_pretrained(base, folder, is_trainable=is_trainable)


def _load_base(source: Place, folder: Path, base: Place | None, options: dict) -> PreTrainedModel:
    """The model that the adapter in a folder was trained in, with the classes of its classifier."""
    from peft import PeftConfig
    from peft.utils import load_peft_weights

    adapter, weights = PeftConfig.from_pretrained(folder), load_peft_weights(str(folder), device="cpu")
    if base is None:
        base, options = adapter.base_model_name_or_path, {"revision": adapter.revision, **options}
    if base is None:
        raise ValueError(f"The adapter {source} does not name its model; {GIVE_BASE}.")
    rows = [len(value) for name, value in weights.items() if name.endswith(CLASSIFIERS)]
    labels = read_labels(folder) or ({"num_labels": rows[0]} if rows else {})
    trained = [name.removeprefix("base_model.model.") for name in weights]
    try:
        # Names of the Hub without an owner are known to transformers alone.
        if not choose_place(options) and ("/" in str(base) or Path(base).exists()):
            options = {**options, **loading_options(base)}
        return _load_model(base, labels | options, _adapted_class(adapter, source), trained)
    except (CheckpointError, HubError, OSError) as error:
        raise CheckpointError(f"{source} is an adapter of {base}; {GIVE_BASE}. {first_line(error)}") from None


def _adapted_class(adapter: "PeftConfig", source: Place) -> Any:
    """The class that was adapted, which may have a head that the base on disk lacks; `None` if it is not named."""
    name = (adapter.auto_mapping or {}).get("base_model_class")
    if adapter.task_type in HEADS:
        name = f"AutoModelFor{HEADS[adapter.task_type]}"
    if name is not None and not hasattr(transformers, name):
        raise ValueError(f"{source} adapts a {name}, which transformers does not export: pass the model as base.")
    return None if name is None else getattr(transformers, name)


def _loader(config: transformers.PreTrainedConfig, checkpoint: Place) -> tuple[type[PreTrainedModel], str | None, bool]:
    """The class that loads a model of this configuration, the architecture in it, and whether that is one of ours."""
    architecture, *others = getattr(config, "architectures", None) or [None]
    if others:
        names = ", ".join([str(architecture), *others])
        raise CheckpointError(f"{checkpoint} names the architectures {names}; accepted: one.")
    try:
        return model_class(architecture), architecture, True
    except ValueError:
        return getattr(transformers, architecture or "", AutoModel), architecture, False


def _processor(checkpoint: Place, model: PreTrainedModel, options: dict) -> object | None:
    is_video = "video" in getattr(model, "input_modalities", ())
    for auto_class in (AutoVideoProcessor, AutoImageProcessor) if is_video else (AutoImageProcessor,):
        try:
            return auto_class.from_pretrained(checkpoint, **options)
        except (ImportError, OSError, ValueError):
            continue
    return None
