"""Registration with the Auto classes, and the checkpoint loader; no other file of the package imports Auto classes."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoImageProcessor, AutoModel, AutoVideoProcessor
from transformers.utils import is_torchvision_available, is_vision_available

from .patching import modeling_patched
from .patching.libraries import library_of
from .patching.modeling_patched import PREFIX, rotary_config
from .patching.patched_configuration import TYPE_PREFIX
from .patching.tower_patch import patched_towers
from .registers import closest
from .storage.loading import (
    CheckpointError,
    find_beside,
    loading_options,
    refuse_diffusers,
    require_finite_parameters,
    require_loaded_keys,
    translate_loading_errors,
)
from .storage.saved_model import ADAPTER_CONFIG, SavedModel
from .transformer import modeling_liere, modeling_liere_heads, modeling_liere_tokens, modeling_liere_video
from .transformer.configuration_liere import LieREVideoConfig, LieREViTConfig
from .transformer.configuration_liere_tokens import LieRETokensConfig


if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel


CONFIGS = (LieREViTConfig, LieREVideoConfig, LieRETokensConfig)
# The modules with the models that their `_auto_map` names.
MODULES = (modeling_liere, modeling_liere_heads, modeling_liere_tokens, modeling_liere_video, modeling_patched)
# peft's names of tasks whose models have heads that a base may lack.
HEADS = {
    "SEQ_CLS": transformers.AutoModelForSequenceClassification,
    "TOKEN_CLS": transformers.AutoModelForTokenClassification,
    "QUESTION_ANS": transformers.AutoModelForQuestionAnswering,
}
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


def models_of(config_class: type[transformers.PreTrainedConfig]) -> dict[str, type[transformers.PreTrainedModel]]:
    """The model of each Auto class, by its name, for a configuration class; empty if the class is not ours."""
    places = getattr(config_class, "_auto_map", {})
    names = {auto: place.rpartition(".")[2] for auto, place in places.items() if auto != "AutoConfig"}
    return {auto: next(getattr(one, name) for one in MODULES if hasattr(one, name)) for auto, name in names.items()}


def model_class(architecture: str | None) -> type[transformers.PreTrainedModel]:
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
    checkpoint: str | os.PathLike, revision: str | None = None, trust_remote_code: bool = False, dtype: str = "float32"
) -> tuple[transformers.PreTrainedModel, object | None]:
    """
    Load any model that `from_pretrained` reads, of the class that its configuration names, with all of its weights and
    in evaluation mode, and its image or video processor (`None` if it has no readable one).

    Args:
        checkpoint: Directory or repository on the Hub.
        revision: Branch, tag or commit of the repository.
        trust_remote_code: Whether the checkpoint's own code may run for models that are unknown here.
        dtype: Of the weights; `"auto"` keeps the saved one.

    Raises:
        CheckpointError: if the checkpoint does not exist, cannot be read, needs untrusted code or contains only an
            adapter, or if weights are missing, unexpected, of another shape or not finite.
        HubError: if the Hub does not answer or refuses the request.
    """
    _refuse_adapter(checkpoint)
    options = {**loading_options(checkpoint, revision), "trust_remote_code": trust_remote_code}
    with translate_loading_errors(checkpoint, revision):
        config = AutoConfig.from_pretrained(checkpoint, **options)
        loader, architecture, is_ours = _loader(config, checkpoint)
        # Report weights of another shape together with missing and unexpected ones.
        loading = {"ignore_mismatched_sizes": True, "output_loading_info": True}
        model, keys = loader.from_pretrained(checkpoint, dtype=dtype, **loading, **options)
    if loader is AutoModel and architecture not in (None, type(model).__name__):
        # This is the bare model of an architecture whose head only the checkpoint's own code defines.
        keys["unexpected_keys"] = set()
    # Some Transformers models were published without the pooler, which is not used here.
    require_loaded_keys(keys, checkpoint, () if is_ours else ("pooler.",))
    require_finite_parameters(model, f"The checkpoint {checkpoint}")
    return model.eval(), _processor(checkpoint, model, options)


def build_without_weights(
    checkpoint: str | os.PathLike, revision: str | None = None, trust_remote_code: bool = False
) -> transformers.PreTrainedModel:
    """
    The model of a configuration on the meta device: as [`load_checkpoint`], but only the configuration is read. The
    checkpoint may also be a `model_type` of transformers, for its default configuration.
    """
    _refuse_adapter(checkpoint)
    is_type = str(checkpoint) in CONFIG_MAPPING and not Path(checkpoint).exists()
    if not (is_type or Path(checkpoint).exists()) and (near := closest(checkpoint, model_types())):
        raise CheckpointError(f"{checkpoint}: neither a file or directory nor a model_type of transformers{near}.")
    options = {} if is_type else {**loading_options(checkpoint, revision), "trust_remote_code": trust_remote_code}
    with translate_loading_errors(checkpoint, revision), torch.device("meta"):
        config = CONFIG_MAPPING[str(checkpoint)]() if is_type else AutoConfig.from_pretrained(checkpoint, **options)
        loader, *_ = _loader(config, checkpoint)
        if loader is AutoModel:
            return AutoModel.from_config(config, trust_remote_code=trust_remote_code).eval()
        return loader._from_config(config).eval()


def _refuse_adapter(checkpoint: str | os.PathLike) -> None:
    """Raise [`CheckpointError`] for a folder with rotations that no model of transformers contains."""
    if (Path(checkpoint) / ADAPTER_CONFIG).is_file():
        refuse_diffusers(checkpoint)
        with translate_loading_errors(checkpoint):
            (base, *_) = SavedModel(checkpoint).read_json(ADAPTER_CONFIG).get("base") or [{}]
            library = library_of(base.get("model_type"))
        advice = (
            "load_rotary and save complete_model(model), which is accepted here."
            if library == "transformers"
            else f"load_rotary. That model is of {library}, and accepted here are Transformers models."
        )
        raise CheckpointError(
            f"{checkpoint} contains rotations without a model (save_rotary): load them into their model with {advice}"
        )


def model_types() -> list[str]:
    """The model types of transformers itself."""
    own = {config_class.model_type for config_class in CONFIGS}
    return [name for name in CONFIG_MAPPING if name not in own and not name.startswith(TYPE_PREFIX)]


def load_peft(
    source: str | os.PathLike,
    base: str | os.PathLike | transformers.PreTrainedModel | None = None,
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
    from peft import PeftConfig, PeftModel

    if not isinstance(base, transformers.PreTrainedModel):
        adapter = PeftConfig.from_pretrained(source, revision=revision)
        base = adapter.base_model_name_or_path if base is None else base
        if base is None:
            raise ValueError(f"The adapter {source} does not name its base model: pass it as base.")
        config = AutoConfig.from_pretrained(base)
        labels = _count_labels(source, revision)
        if labels not in (None, config.num_labels):
            options = {"num_labels": labels, **options}
        base = _adapted_class(adapter, config, source).from_pretrained(base, **options)
    model = PeftModel.from_pretrained(base, source, revision=revision, is_trainable=is_trainable)
    if not any(patched_towers(model)) and find_beside(str(source), ADAPTER_CONFIG, {"revision": revision}) is not None:
        raise ValueError(
            f"The rotations of {source} were not put into the base, since peft is left as it is (HF_LIERE_GUARDS=0 or "
            "uninstall_guards): call load_rotary(base, …) before, and pass the base."
        )
    return model


def _adapted_class(adapter: "PeftConfig", config: transformers.PreTrainedConfig, source: str | os.PathLike) -> Any:
    """The class that was adapted, which may have a head that the base on disk lacks."""
    if adapter.task_type in HEADS:
        return HEADS[adapter.task_type]
    if not adapter.auto_mapping:
        return _loader(config, source)[0]
    name = adapter.auto_mapping["base_model_class"]
    if not hasattr(transformers, name):
        raise ValueError(f"{source} adapts a {name}, which transformers does not export: pass the model as base.")
    return getattr(transformers, name)


def _count_labels(source: str | os.PathLike, revision: str | None) -> int | None:
    """The rows of the classifier that was trained with an adapter; `None` if there is none."""
    from peft.utils import load_peft_weights

    weights = load_peft_weights(str(source), device="cpu", **({"revision": revision} if revision else {}))
    return next((len(value) for name, value in weights.items() if name.endswith(CLASSIFIERS)), None)


def _loader(
    config: transformers.PreTrainedConfig, checkpoint: str | os.PathLike
) -> tuple[type[transformers.PreTrainedModel], str | None, bool]:
    """The class that loads a model of this configuration, the architecture in it, and whether that is one of ours."""
    architecture, *others = getattr(config, "architectures", None) or [None]
    if others:
        names = ", ".join([str(architecture), *others])
        raise CheckpointError(f"{checkpoint} names the architectures {names}; accepted: one.")
    try:
        return model_class(architecture), architecture, True
    except ValueError:
        return getattr(transformers, architecture or "", AutoModel), architecture, False


def _processor(checkpoint: str | os.PathLike, model: transformers.PreTrainedModel, options: dict) -> object | None:
    is_video = "video" in getattr(model, "input_modalities", ())
    for auto_class in (AutoVideoProcessor, AutoImageProcessor) if is_video else (AutoImageProcessor,):
        try:
            return auto_class.from_pretrained(checkpoint, **options)
        except (ImportError, OSError, ValueError):
            continue
    return None
