"""A report of `hf-liere inspect` as a browser reads it, and saved models and pictures to inspect."""

from html.parser import HTMLParser

import numpy as np
import transformers
from PIL import Image

from hf_liere.tools.inspection.report import environment


VOID = {"br", "img", "link", "meta", "source"}


class Page(HTMLParser):
    """Checks that elements are nested, and keeps what a page shows and asks for."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.images, self.addresses, self.text = [], [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.addresses += [attributes[name] for name in ("src", "href", "srcset", "action") if name in attributes]
        if tag == "img":
            self.images.append(attributes)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data


def save(model, folder, processor=True):
    model.save_pretrained(folder)
    if processor:
        size = {"height": 16, "width": 16}
        transformers.ViTImageProcessor(size=size, image_mean=[0.4] * 3, image_std=[0.2] * 3).save_pretrained(folder)
    return folder


def picture(path, size=(20, 30), seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return str(path)


def describe_start(encoding):
    """What a report says about the start of an analysed encoding."""
    described = environment().get_template("wording.html.jinja").module.describe_start(encoding.initialization, "patch")
    return " ".join(described.split())
