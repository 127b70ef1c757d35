"""Across process boundaries: checkpoints, Auto classes and pipelines as a user meets them."""

import json

import numpy as np
import pytest
import torch
from fresh_process import run_code
from PIL import Image
from transformers import (
    AutoBackbone,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    AutoVideoProcessor,
    ViTImageProcessor,
)

import hf_liere
from hf_liere.auto import load_checkpoint
from hf_liere.storage.loading import CheckpointError
from hf_liere.transformer.video_processing_liere import LieREVideoProcessor


@pytest.fixture
def checkpoint(tiny, tmp_path):
    """A saved classifier with its processor, and the logits it gives for a fixed input."""
    labels = {0: "up", 1: "down", 2: "left"}
    config = tiny(position_encoding="comrope_ld", block_size=4, id2label=labels, initializer_range=0.2)
    config.label2id = {label: index for index, label in labels.items()}
    model = hf_liere.LieREViTForImageClassification(config).eval()
    path = tmp_path / "checkpoint"
    model.save_pretrained(path)
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(path)
    torch.save(torch.randn(2, 3, 16, 16), tmp_path / "pixels.pt")
    with torch.no_grad():
        return path, model(torch.load(tmp_path / "pixels.pt")).logits


def test_every_auto_class_finds_its_model_without_the_package(checkpoint, tiny_video, tmp_path):
    path, _ = checkpoint
    video = tmp_path / "video"
    hf_liere.LieREVideoForVideoClassification(tiny_video()).save_pretrained(video)
    code = f"""
        from transformers import AutoBackbone, AutoConfig, AutoModel, AutoModelForMaskedImageModeling
        from transformers import AutoModelForVideoClassification
        try:
            import hf_liere
        except ModuleNotFoundError:
            print("absent")
        for auto, path in ((AutoModel, "{path}"), (AutoModelForMaskedImageModeling, "{path}"),
                           (AutoModel, "{video}"), (AutoModelForVideoClassification, "{video}")):
            print(type(auto.from_pretrained(path, trust_remote_code=True)).__name__)
        config = AutoConfig.from_pretrained("{path}", trust_remote_code=True)
        print(type(AutoBackbone.from_config(config, trust_remote_code=True)).__name__)
    """
    assert run_code(code, tmp_path, package=False) == [
        "absent",
        "LieREViTModel",
        "LieREViTForMaskedImageModeling",
        "LieREVideoModel",
        "LieREVideoForVideoClassification",
        "LieREViTBackbone",
    ]


def test_remote_code_does_not_run_unasked(checkpoint, tmp_path):
    path, _ = checkpoint
    code = f"""
        from transformers import AutoModel
        try:
            AutoModel.from_pretrained("{path}", trust_remote_code=False)
        except ValueError as error:
            print("refused" if "trust_remote_code" in str(error) else error)
    """
    assert run_code(code, tmp_path, package=False) == ["refused"]


def test_two_architectures_are_refused(tiny, tmp_path):
    config = tiny(architectures=["LieREViTModel", "LieREViTForImageClassification"])
    config.save_pretrained(tmp_path)
    with pytest.raises(
        CheckpointError, match="names the architectures LieREViTModel, LieREViTForImageClassification; "
    ):
        load_checkpoint(tmp_path)


def test_auto_classes_know_models_without_a_head(tiny, tiny_video):
    tokens = hf_liere.LieRETokensConfig(hidden_size=48, num_hidden_layers=1, num_attention_heads=2)
    for auto, config, expected in (
        (AutoModel, tiny(), hf_liere.LieREViTModel),
        (AutoBackbone, tiny(), hf_liere.LieREViTBackbone),
        (AutoModel, tiny_video(), hf_liere.LieREVideoModel),
        (AutoModel, tokens, hf_liere.LieRETokensModel),
    ):
        assert type(auto.from_config(config)) is expected


def test_backbone_loads_a_classifier(checkpoint, tmp_path):
    path, _ = checkpoint
    backbone = hf_liere.LieREViTBackbone.from_pretrained(path, out_features=["stage1", "stage2"]).eval()
    model = AutoModel.from_pretrained(path).eval()
    pixels = torch.load(tmp_path / "pixels.pt")
    expected = model(pixels).last_hidden_state[:, 1:].transpose(1, 2).unflatten(-1, (4, 4))
    assert torch.equal(backbone(pixels).feature_maps[1], expected)


def test_processors_load_from_a_checkpoint(checkpoint, tiny_video, tmp_path):
    path, _ = checkpoint
    processor = AutoImageProcessor.from_pretrained(path)
    image = Image.fromarray(np.zeros((20, 30, 3), dtype=np.uint8))
    assert processor(image, return_tensors="pt").pixel_values.shape == (1, 3, 16, 16)
    tiny_video().save_pretrained(tmp_path / "video")
    LieREVideoProcessor().save_pretrained(tmp_path / "video")
    processor = AutoVideoProcessor.from_pretrained(tmp_path / "video")
    assert isinstance(processor, LieREVideoProcessor)
    clip = np.zeros((5, 20, 30, 3), dtype=np.uint8)
    assert processor(clip, return_tensors="pt").pixel_values.shape == (1, 5, 3, 224, 224)


@pytest.mark.slow
def test_image_pipelines_in_a_fresh_process(checkpoint, tmp_path):
    path, _ = checkpoint
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 24, 3), dtype=np.uint8))
    image.save(tmp_path / "image.png")
    code = f"""
        import json
        from transformers import pipeline
        classified = pipeline("image-classification", "{path}")("image.png")
        features = pipeline("image-feature-extraction", "{path}")("image.png")
        print(json.dumps([classified, [len(features[0]), len(features[0][0])]]))
    """
    classified, shape = json.loads(run_code(code, tmp_path)[-1])
    pixels = AutoImageProcessor.from_pretrained(path)(image, return_tensors="pt").pixel_values
    expected = AutoModelForImageClassification.from_pretrained(path).eval()(pixels).logits.softmax(-1)[0]
    assert [entry["label"] for entry in classified] == [["up", "down", "left"][i] for i in expected.argsort().flip(0)]
    torch.testing.assert_close(
        torch.tensor([entry["score"] for entry in classified]), expected.sort(descending=True).values, rtol=0, atol=1e-5
    )
    assert shape == [17, 48]


@pytest.mark.slow
@pytest.mark.parametrize("package", [True, False])
def test_video_pipeline_in_a_fresh_process(tiny_video, tmp_path, package):
    av = pytest.importorskip("av", reason="PyAV decodes videos; install hf-liere[video]")
    path = tmp_path / "video"
    hf_liere.LieREVideoForVideoClassification(tiny_video()).save_pretrained(path)
    size = {"height": 8, "width": 8}
    LieREVideoProcessor(size=size, crop_size=size).save_pretrained(path)
    with av.open(str(tmp_path / "clip.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width = stream.height = 32
        for brightness in range(0, 240, 20):
            frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), brightness, dtype=np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    code = f"""
        import json
        from transformers import pipeline
        print(json.dumps(pipeline("video-classification", "{path}", trust_remote_code={not package})("clip.mp4")))
    """
    classified = json.loads(run_code(code, tmp_path, package)[-1])
    assert len(classified) == 3 and abs(sum(entry["score"] for entry in classified) - 1) < 1e-5
