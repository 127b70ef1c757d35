"""
transformers' common tests of models, backbones and configurations on ours: test classes named by encoding and kind.

test_common.py runs this file in a process of its own, in which HF_LIERE_COMMON_TESTS is the `tests` folder of the
sources of the installed transformers.
"""

import importlib
import os
import sys
import types
import unittest

import torch
from common_cases import ENCODINGS, KINDS
from transformers.models.auto import modeling_auto

import hf_liere


# A name of its own, because our folder is `tests` too.
PACKAGE = "transformers_common_tests"


def _package(name: str, path: list[str], **content) -> None:
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(__path__=path, **content)


def _stand_in(name: str, **content) -> None:
    """Released sources have no folders below `tests`; this is what the mixins import from there."""
    try:
        importlib.import_module(f"{PACKAGE}.{name}")
    except ModuleNotFoundError:
        _package(f"{PACKAGE}.{name.partition('.')[0]}", [])
        _package(f"{PACKAGE}.{name}", [], **content)


_package(PACKAGE, [os.environ["HF_LIERE_COMMON_TESTS"]])
_stand_in("exporters.test_export", ExportTesterMixin=type("ExportTesterMixin", (), {}))
_stand_in("generation.test_utils", GenerationTesterMixin=type("GenerationTesterMixin", (), {}))
_stand_in("utils.test_configuration_utils", config_common_kwargs={"return_dict": False, "output_attentions": True})
modeling = importlib.import_module(f"{PACKAGE}.test_modeling_common")
backbone = importlib.import_module(f"{PACKAGE}.test_backbone_common")
configuration = importlib.import_module(f"{PACKAGE}.test_configuration_common")

# By these tables the tests know which inputs and which loss a model has.
modeling_auto.MODEL_MAPPING_NAMES.update(
    liere_vit="LieREViTModel", liere_video="LieREVideoModel", liere_tokens="LieRETokensModel"
)
modeling_auto.MODEL_FOR_BACKBONE_MAPPING_NAMES["liere_vit"] = "LieREViTBackbone"
modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES["liere_vit"] = "LieREViTForImageClassification"
modeling_auto.MODEL_FOR_MASKED_IMAGE_MODELING_MAPPING_NAMES["liere_vit"] = "LieREViTForMaskedImageModeling"
modeling_auto.MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES["liere_video"] = "LieREVideoForVideoClassification"
modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES["liere_tokens"] = "LieRETokensForSequenceClassification"
modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES["liere_tokens"] = "LieRETokensForTokenClassification"


class ModelTester:
    """What the mixins ask for: a small configuration, inputs for it, and some of its sizes."""

    batch_size = 2
    hidden_size = 48
    num_hidden_layers = 2
    num_attention_heads = 2
    is_training = True

    def get_config(self):
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", *self.fields)
        sizes = {name: getattr(self, name) for name in names}
        return self.config_class(**sizes, intermediate_size=64, num_labels=3, **self.encoding)


class ImageModelTester(ModelTester):
    config_class = hf_liere.LieREViTConfig
    fields = ("image_size", "patch_size")
    input_shape = (3, 8, 8)
    image_size = 8
    patch_size = 4
    num_patches = 4
    num_masks = 1

    def __init__(self, encoding: dict):
        self.encoding = encoding
        self.seq_length = 1 + self.num_patches
        self.mask_length = self.num_patches

    def prepare_config_and_inputs_for_common(self):
        return self.get_config(), {"pixel_values": torch.randn(self.batch_size, *self.input_shape)}


class VideoModelTester(ImageModelTester):
    config_class = hf_liere.LieREVideoConfig
    # As many frames as the configuration's default, in tubelets of two.
    input_shape = (8, 3, 8, 8)
    num_patches = 16


class TokensModelTester(ModelTester):
    """Points in three dimensions."""

    config_class = hf_liere.LieRETokensConfig
    fields = ("feature_size",)
    seq_length = 7
    feature_size = 5

    def __init__(self, encoding: dict):
        self.encoding = encoding | {"num_axes": 3}
        if encoding["position_encoding"] == "absolute":
            self.encoding["position_table_size"] = [3, 3, 3]
        # The class token comes before the tokens.
        self.encoder_seq_length = self.key_length = 1 + self.seq_length

    def prepare_config_and_inputs_for_common(self):
        features = torch.randn(self.batch_size, self.seq_length, self.feature_size)
        positions = torch.rand(self.seq_length, 3)
        mask = torch.ones(self.batch_size, self.seq_length, dtype=torch.long)
        inputs = {"inputs_embeds": features, "positions": positions.repeat(self.batch_size, 1, 1)}
        return self.get_config(), inputs | {"attention_mask": mask}


class ModelTests(modeling.ModelTesterMixin):
    # There are no token embeddings.
    test_resize_embeddings = False

    def test_training_gradient_checkpointing_use_reentrant_true(self):
        """Refused: it differentiates with respect to single tensors, not to rotations."""
        for model_class in self.all_model_classes:
            model = model_class(self.model_tester.prepare_config_and_inputs_for_common()[0])
            with self.assertRaisesRegex(ValueError, "use_reentrant=True was given"):
                model.gradient_checkpointing_enable({"use_reentrant": True})

    def test_model_get_set_embeddings(self):
        """As transformers' own image models have it: what embeds patches is no `nn.Embedding`."""
        for model_class in self.all_model_classes:
            model = model_class(self.model_tester.get_config())
            self.assertIs(
                model.get_input_embeddings(), getattr(model.base_model.embeddings, model_class._input_embed_layer)
            )
            self.assertIsNone(model.get_output_embeddings())

    def test_config(self):
        configuration.ConfigTester(
            self,
            config_class=self.model_tester.config_class,
            has_text_modality=False,
            hidden_size=48,
            num_attention_heads=2,
            **self.model_tester.encoding,
        ).run_common_tests()


class ImageTests(ModelTests):
    make_model_tester = ImageModelTester
    all_model_classes = (
        hf_liere.LieREViTModel,
        hf_liere.LieREViTForImageClassification,
        hf_liere.LieREViTForMaskedImageModeling,
        hf_liere.LieREViTBackbone,
    )


class VideoTests(ModelTests):
    make_model_tester = VideoModelTester
    all_model_classes = (hf_liere.LieREVideoModel, hf_liere.LieREVideoForVideoClassification)


class TokensTests(ModelTests):
    make_model_tester = TokensModelTester
    additional_model_inputs = ["positions"]
    # This test enlarges a vocabulary; there is none.
    test_mismatched_shapes = False
    all_model_classes = (
        hf_liere.LieRETokensModel,
        hf_liere.LieRETokensForSequenceClassification,
        hf_liere.LieRETokensForTokenClassification,
    )

    @unittest.skip("The features are no embeddings of token ids.")
    def test_inputs_embeds(self):
        pass

    @unittest.skip("The features are no embeddings of token ids.")
    def test_inputs_embeds_matches_input_ids(self):
        pass


class BackboneTests(backbone.BackboneTesterMixin):
    make_model_tester = ImageModelTester
    config_class = hf_liere.LieREViTConfig
    all_model_classes = (hf_liere.LieREViTBackbone,)


def _test_class(name: str, tests: type, encoding: dict) -> type:
    def set_up(self):
        self.model_tester = tests.make_model_tester(encoding)

    return type(name, (tests, unittest.TestCase), {"setUp": set_up, "__module__": __name__})


for _encoding, _fields in ENCODINGS.items():
    for _kind, _tests in zip(KINDS, (ImageTests, VideoTests, BackboneTests, TokensTests)):
        globals()[f"{_encoding}_{_kind}"] = _test_class(f"{_encoding}_{_kind}", _tests, _fields)
