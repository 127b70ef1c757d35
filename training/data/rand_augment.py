"""RandAugment with the operations and the ranges of LieRE's code, which are those of EfficientNet's AutoAugment.

Translations and the square of Cutout are numbers of pixels, whatever the size of the image. At magnitude 14, that of
the recipes, translations move by 46.7 px: more than the width of CIFAR's images, of which 23% become constant (1,162 of
the first 5,000 test images of CIFAR-100). torchvision's RandAugment moves them by 6.8 px, and none becomes constant.
"""

import random
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageOps


# Magnitudes run from 0 to this.
LARGEST = 30
GREY = (125, 123, 114)


def _affine(place: int) -> Callable[[Image.Image, float], Image.Image]:
    """Adds the strength to this entry of the identity map (a, b, c, d, e, f), in a random direction; black outside."""

    def apply(image: Image.Image, strength: float) -> Image.Image:
        matrix = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
        matrix[place] += random.choice((-1, 1)) * strength
        return image.transform(image.size, Image.Transform.AFFINE, matrix)

    return apply


def _solarize_add(image: Image.Image, strength: float) -> Image.Image:
    brighter = np.clip(np.asarray(image).astype(int) + strength, 0, 255).astype(np.uint8)
    return ImageOps.solarize(Image.fromarray(brighter), 128)


def _cutout(image: Image.Image, strength: float) -> Image.Image:
    image = image.copy()
    left, top = (max(0, random.uniform(0, extent) - strength / 2) for extent in image.size)
    corner = min(image.width, left + strength), min(image.height, top + strength)
    # PIL draws grey images in one number.
    colour = GREY[: len(image.getbands())] if len(image.getbands()) > 1 else GREY[0]
    ImageDraw.Draw(image).rectangle((int(left), int(top), *corner), colour)
    return image


def _enhanced(kind: type) -> Callable[[Image.Image, float], Image.Image]:
    return lambda image, strength: kind(image).enhance(strength)


# Operations with their strengths at magnitude 0 and at the largest one.
OPERATIONS: dict[str, tuple[Callable[[Image.Image, float], Image.Image], float, float]] = {
    "AutoContrast": (lambda image, strength: ImageOps.autocontrast(image), 0, 1),
    "Equalize": (lambda image, strength: ImageOps.equalize(image), 0, 1),
    "Invert": (lambda image, strength: ImageOps.invert(image), 0, 1),
    "Rotate": (lambda image, strength: image.rotate(random.choice((-1, 1)) * strength), 0, 30),
    "Posterize": (lambda image, strength: ImageOps.posterize(image, max(1, int(strength))), 0, 4),
    "Solarize": (lambda image, strength: ImageOps.solarize(image, strength), 0, 256),
    "SolarizeAdd": (_solarize_add, 0, 110),
    "Color": (_enhanced(ImageEnhance.Color), 0.1, 1.9),
    "Contrast": (_enhanced(ImageEnhance.Contrast), 0.1, 1.9),
    "Brightness": (_enhanced(ImageEnhance.Brightness), 0.1, 1.9),
    "Sharpness": (_enhanced(ImageEnhance.Sharpness), 0.1, 1.9),
    "ShearX": (_affine(1), 0, 0.3),
    "ShearY": (_affine(3), 0, 0.3),
    "Cutout": (_cutout, 0, 40),
    "TranslateX": (_affine(2), 0, 100),
    "TranslateY": (_affine(5), 0, 100),
}


class LieRERandAugment:
    """
    Applies `count` operations, drawn with repetition, at the same magnitude.

    All randomness comes from the module `random`.
    """

    def __init__(self, count: int, magnitude: int):
        self.count = count
        self.magnitude = magnitude

    def __call__(self, image: Image.Image) -> Image.Image:
        for name in random.choices(list(OPERATIONS), k=self.count):
            operation, low, high = OPERATIONS[name]
            image = operation(image, low + (high - low) * self.magnitude / LARGEST)
        return image
