"""Trainer of detectors, and COCO's average precisions of their detections."""

import contextlib
import io

import numpy as np
import torch
from pycocotools.cocoeval import COCOeval
from transformers import EvalPrediction

from hf_liere.errors import InputError
from hf_liere.storage.loading import require_loaded_keys
from training.data.detection_data import UNREADABLE, Detections
from training.engine.trainer import RotaryTrainer


# Names of COCOeval's statistics, in its order.
STATISTICS = ("map", "map_50", "map_75", "map_small", "map_medium", "map_large")


class DetectionTrainer(RotaryTrainer):
    """Uses the detector's loss. Evaluations gather the detections of every image instead of logits."""

    top_k = 100

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """Returns no loss, detections (B, top_k, 6) (score, label, corners relative to the image) and indices (B,)."""
        inputs = self._prepare_inputs(inputs)
        indices = torch.cat([label["index"] for label in inputs["labels"]])
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs = model(pixel_values=inputs["pixel_values"], pixel_mask=inputs["pixel_mask"])
        return None, best_detections(outputs.logits.float(), outputs.pred_boxes.float(), self.top_k), indices

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        """
        Loads by `from_pretrained` and checks every key. transformers saves detectors under other names than in memory;
        Trainer would ignore these.
        """
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        detector = self.accelerator.unwrap_model(self.model if model is None else model)
        saved, loading = type(detector).from_pretrained(
            resume_from_checkpoint, config=detector.config, output_loading_info=True
        )
        require_loaded_keys(loading, str(resume_from_checkpoint))
        detector.load_state_dict(saved.state_dict())


def best_detections(logits: torch.Tensor, boxes: torch.Tensor, top_k: int) -> torch.Tensor:
    """
    The detections with the highest scores, (B, top_k, 6): score, label, left, top, right, bottom.

    Args:
        logits: (B, queries, classes).
        boxes: (B, queries, 4), centre and size relative to the image.
    """
    scores, places = logits.sigmoid().flatten(1).topk(min(top_k, logits[0].numel()), dim=1)
    queries, labels = places // logits.shape[2], places % logits.shape[2]
    chosen = boxes.gather(1, queries[..., None].expand(-1, -1, 4))
    corners = torch.cat([chosen[..., :2] - chosen[..., 2:] / 2, chosen[..., :2] + chosen[..., 2:] / 2], dim=-1)
    return torch.cat([scores[..., None], labels[..., None].to(scores.dtype), corners], dim=-1)


class CocoMetrics:
    """Trainer's `compute_metrics`: COCO's average precisions, except for sizes that no object has."""

    def __init__(self, source: Detections):
        self.source = source

    def __call__(self, results: EvalPrediction) -> dict[str, float]:
        coco, found, unreadable = self.source.coco, [], set(self.source.image_ids)
        for detections, index in zip(results.predictions, results.label_ids):
            if index == UNREADABLE:
                continue
            image_id = self.source.image_ids[int(index)]
            unreadable.discard(image_id)
            image = coco.imgs[image_id]
            extent = np.array([image["width"], image["height"]] * 2)
            for score, label, *corners in detections:
                left, top, right, bottom = (np.clip(corners, 0, 1) * extent).tolist()
                found.append(
                    {
                        "image_id": image_id,
                        "category_id": self.source.category_ids[int(label)],
                        "bbox": [left, top, right - left, bottom - top],
                        "score": float(score),
                    }
                )
        if not found:
            raise InputError(f"None of the {len(unreadable)} pictures of the evaluation can be read.")
        with contextlib.redirect_stdout(io.StringIO()):
            evaluation = COCOeval(coco, coco.loadRes(found), "bbox")
            evaluation.params.imgIds = [each for each in self.source.image_ids if each not in unreadable]
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
        metrics = {name: float(value) for name, value in zip(STATISTICS, evaluation.stats) if value >= 0}
        return metrics | ({"unreadable": len(unreadable)} if unreadable else {})
