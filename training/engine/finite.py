"""Losses and gradients that are not finite, found on the device and read at logs: reading a value waits for it."""

import math

import torch


class FirstBroken:
    """
    The first value that is not finite, if there is one.

    Attributes:
        sentences: What the values since the last `check` were, and in which step.
        latest: (2,) the first value that is not finite, else the latest one, and its number among `sentences`.
    """

    def __init__(self):
        self.sentences: list[str] = []
        self.latest: torch.Tensor | None = None

    def record(self, value: torch.Tensor, sentence: str) -> None:
        """
        Args:
            value: of a single number.
            sentence: with {} for the value.
        """
        value = value.detach().float()
        latest = torch.stack([value, torch.full_like(value, len(self.sentences))])
        self.sentences.append(sentence)
        self.latest = latest if self.latest is None else torch.where(self.latest[0].isfinite(), latest, self.latest)

    def found(self) -> torch.Tensor:
        """Whether a value was not finite, a float of one number: 1 or 0."""
        assert self.latest is not None, "nothing was recorded"
        return 1 - self.latest[0].isfinite().float()

    def check(self) -> None:
        """Raises `FloatingPointError` with the sentence of the first value that was not finite."""
        if self.latest is None:
            return
        value, number = self.latest.tolist()
        if not math.isfinite(value):
            raise FloatingPointError(self.sentences[int(number)].format(value))
        self.sentences, self.latest = [], None
