"""The page of training/app.py: pictures, up to two models, and the actions of the controls."""

import base64
import html
import io
import itertools
import random
from collections.abc import Sequence
from typing import NamedTuple

import gradio as gr
from PIL import Image

from hf_liere.errors import InputError
from training.tasks.playground.pictures import (
    EXAMPLE,
    EXTENSIONS,
    MAX_MEGABYTES,
    MAX_MEGAPIXELS,
    PUZZLES,
    draw_puzzle,
    open_picture,
)
from training.tasks.playground.predictions import (
    MAX_PATCHES_PER_SIDE,
    MIN_PATCHES_PER_SIDE,
    Answer,
    Checkpoint,
    Classifiers,
    attention_pictures,
    image_sizes,
    model_view,
    nearest_size,
)


PUZZLE, UPLOAD = "Arrows puzzle", "Your image"
NO_SECOND = "(none)"
CLASSES_SHOWN = 5
# Verdict, probabilities and attention without a model.
EMPTY = ("", None, "")
REQUESTS_AT_ONCE = 2
REQUESTS_WAITING = 32
# Every this many seconds, uploaded files that are older than that are deleted.
KEPT_FOR = 600
INTRODUCTION = """# Where does it look?
Vision transformers with learned position encodings, side by side. **The puzzle** (LieRE §5.2): which way does the arrow
point that the base of the Y points at?"""
SYSTEM_FONTS = ("ui-sans-serif", "system-ui", "sans-serif")
MONOSPACED_FONTS = ("ui-monospace", "Consolas", "monospace")
CSS = """
.gradio-container { max-width: 1240px !important; margin: 0 auto !important; }
figure { margin: 0; }
figure img { width: 100%; image-rendering: pixelated; border: 1px solid var(--border-color-primary); }
figcaption { margin-top: 4px; font-size: var(--text-sm); color: var(--body-text-color); }
.layers { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 8px; margin-top: 8px; }
.html-container { padding: 0 !important; }
.viridis { display: inline-block; width: 5em; height: 0.8em; margin: 0 2px;
    background: linear-gradient(90deg, #440154, #3b528b, #21918c, #5ec962, #fde725); }
"""
# A half-typed number is not a resolution: the field is read-only and the slider changes it.
READ_ONLY = "() => { document.querySelector('#size input[type=number]').readOnly = true; }"
# When the smallest size changes, browsers round the slider to its old step.
SHOW_SIZE = "(...inputs) => { document.querySelector('#size input[type=range]').value = inputs[3]; return inputs; }"
# Captions for the token or tokens that a model pools.
QUERIES = {"class token": "class token", "mean of patches": "patches, on average,"}


class App:
    """
    The page and the actions of its controls.

    Args:
        checkpoints: At least one. The first two with the same classes are shown initially, else the first two.
    """

    def __init__(self, checkpoints: Sequence[Checkpoint]):
        self.checkpoints = {checkpoint.name: checkpoint for checkpoint in checkpoints}
        self.classifiers = Classifiers()

    def chosen(self, first: str, second: str) -> list[Checkpoint]:
        return [self.checkpoints[name] for name in (first, second) if name != NO_SECOND]

    def sizes(self, first: str, second: str, source: str, size: float) -> gr.Slider:
        """The slider with the sizes that the chosen models take. An invalid size is replaced by a trained one."""
        try:
            chosen = self.chosen(first, second)
            sizes = image_sizes(chosen, source == PUZZLE)
        except InputError:
            # `compare` is called next and shows the error.
            return gr.skip()
        value = size if size in sizes else nearest_size(sizes, chosen[0].image_size)
        return gr.Slider(minimum=sizes[0], maximum=sizes[-1], step=sizes.step, value=value)

    def trained_sizes(self, first: str, second: str, source: str, size: float) -> gr.Slider:
        """The slider at the size of the first model's training images, for another first model or kind of picture."""
        return self.sizes(first, second, source, self.checkpoints[first].image_size)

    def compare(
        self, first: str, second: str, source: str, size: float, number: int, upload: str | None
    ) -> tuple[str, str, dict | None, str, gr.Column, str, dict | None, str]:
        """
        The models' input, then for each model its verdict, its probabilities by class and its attention as HTML. Before
        those of the second model comes an update that hides its column if there is no second model.
        """
        chosen = self.chosen(first, second)
        try:
            shown, columns = self._look(chosen, source, size, number, upload)
        except InputError as error:
            # Gradio shows messages as HTML, and file names may contain markup.
            message = html.escape(str(error))
            gr.Warning(message, duration=5)
            shown, columns = f"<p>⚠️ {message}</p>", []
        columns = columns + [EMPTY] * (2 - len(columns))
        return shown, *columns[0], gr.Column(visible=len(chosen) > 1), *columns[1]

    def _look(
        self, chosen: list[Checkpoint], source: str, size: float, number: int, upload: str | None
    ) -> tuple[str, list[tuple]]:
        if source == UPLOAD and upload is None:
            if any(checkpoint.solves_puzzles for checkpoint in chosen) or not EXAMPLE.is_file():
                return f"<p>Upload a picture: {', '.join(EXTENSIONS)}.</p>", []
            upload = str(EXAMPLE)
        # A slider that is dragged while models change may be between two sizes.
        size = nearest_size(image_sizes(chosen, source == PUZZLE), size)
        picture, text, truth = self._picture(source, size, number, upload)
        return figure(model_view(picture, size), text), [self._column(each, picture, size, truth) for each in chosen]

    def _picture(self, source: str, size: int, number: int, upload: str | None) -> tuple[Image.Image, str, str | None]:
        """The picture, its caption, and the answer to a puzzle."""
        if source == PUZZLE:
            picture, truth = draw_puzzle(number, size)
            return picture, f"Puzzle {number} at {size} × {size} px; the answer is {truth}.", truth
        picture, notes = open_picture(upload)
        kind = ["an example"] if upload == str(EXAMPLE) else []
        notes = [*kind, f"{picture.width} × {picture.height} px", f"seen at {size} × {size} px", *notes]
        return picture, f"{', '.join(notes)}.", None

    def _column(self, checkpoint: Checkpoint, picture: Image.Image, size: int, truth: str | None) -> tuple:
        try:
            answer = self.classifiers[checkpoint].answer(picture, size)
        except InputError as error:
            # The other model may have an answer.
            return f"⚠️ {html.escape(str(error))}", None, ""
        probabilities = dict(list(answer.probabilities.items())[:CLASSES_SHOWN])
        return verdict(checkpoint, answer, truth), probabilities, attention_figures(answer, picture, size)


def verdict(checkpoint: Checkpoint, answer: Answer, truth: str | None) -> str:
    if truth is None:
        return checkpoint.encoding
    if not checkpoint.solves_puzzles:
        return f"**Knows no answers to puzzles** · {checkpoint.encoding}"
    right = next(iter(answer.probabilities)) == truth
    return f"**{'✓ Right' if right else '✗ Wrong'}** · {checkpoint.encoding}"


def attention_figures(answer: Answer, picture: Image.Image, size: int) -> str:
    """A figure for every layer, with a colour legend."""
    rows, columns = answer.attention.grid
    layers = enumerate(attention_pictures(picture, size, answer.attention), 1)
    return (
        f"<p>Where it looks, layer by layer: attention of the {QUERIES[answer.attention.query]} on {rows} × {columns} "
        'patches, in each layer from its least <span class="viridis"></span> to its most.</p>'
        f'<div class="layers">{"".join(figure(layer, f"Layer {number}") for number, layer in layers)}</div>'
    )


def figure(picture: Image.Image, caption: str) -> str:
    content = io.BytesIO()
    picture.save(content, "PNG")
    source = f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"
    caption = html.escape(caption)
    return f'<figure><img src="{source}" alt="{caption}"><figcaption>{caption}</figcaption></figure>'


def results(place: str) -> list[gr.components.Component]:
    return [
        gr.Markdown(elem_id=f"{place}-verdict"),
        gr.Label(num_top_classes=CLASSES_SHOWN, label="Prediction", elem_id=f"{place}-prediction"),
        gr.HTML(elem_id=f"{place}-attention"),
    ]


def initial_view(app: App) -> tuple[tuple[str, str], str, range]:
    """The initial models, the source of pictures and their sizes. Beside a model for puzzles is another or none."""
    pairs = itertools.combinations(app.checkpoints.values(), 2)
    alike = (pair for pair in pairs if sorted(pair[0].class_names) == sorted(pair[1].class_names))
    first, *others = (checkpoint.name for checkpoint in next(alike, app.checkpoints.values()))
    solves = app.checkpoints[first].solves_puzzles
    second = next((name for name in others if not solves or app.checkpoints[name].solves_puzzles), NO_SECOND)
    for pair, source in (((first, second), PUZZLE if solves else UPLOAD), ((first, second), UPLOAD)):
        try:
            return pair, source, image_sizes(app.chosen(*pair), source == PUZZLE)
        except InputError:
            continue
    return (first, NO_SECOND), UPLOAD, image_sizes(app.chosen(first, NO_SECOND), puzzle=False)


def build(app: App) -> gr.Blocks:
    pair, source, sizes = initial_view(app)
    with gr.Blocks(title="Where does it look?", analytics_enabled=False, delete_cache=(KEPT_FOR, KEPT_FOR)) as page:
        gr.Markdown(INTRODUCTION)
        with gr.Row():
            with gr.Column(min_width=300):
                controls = _picture_controls(source, sizes, app.checkpoints[pair[0]].image_size)
            with gr.Column(min_width=300):
                first = gr.Dropdown([*app.checkpoints], value=pair[0], label="First model", elem_id="first")
                first_results = results("first")
            with gr.Column(min_width=300, visible=len(app.checkpoints) > 1):
                second = gr.Dropdown(
                    [*app.checkpoints, NO_SECOND], value=pair[1], label="Second model", elem_id="second"
                )
                with gr.Column() as second_column:
                    second_results = results("second")
        outputs = [controls.picture, *first_results, second_column, *second_results]
        _connect(app, page, controls, (first, second), outputs)
    return page.queue(max_size=REQUESTS_WAITING, api_open=False)


class PictureControls(NamedTuple):
    """The controls that choose the picture, and the picture."""

    source: gr.Radio
    puzzle_row: gr.Row
    number: gr.Number
    new_puzzle: gr.Button
    upload: gr.File
    size: gr.Slider
    picture: gr.HTML


def _picture_controls(source: str, sizes: range, size: int) -> PictureControls:
    source_input = gr.Radio([PUZZLE, UPLOAD], value=source, label="Picture", elem_id="source")
    with gr.Row(visible=source == PUZZLE, equal_height=True) as puzzle_row:
        # Side by side on phones too.
        narrow = {"min_width": 120}
        number = gr.Number(
            0, label="Puzzle", minimum=0, maximum=len(PUZZLES) - 1, precision=0, elem_id="puzzle", **narrow
        )
        new_puzzle = gr.Button("New puzzle", variant="primary", elem_id="new-puzzle", **narrow)
    upload = gr.File(
        label=f"Up to {MAX_MEGABYTES} MB and {MAX_MEGAPIXELS} megapixels",
        height=140,
        visible=source == UPLOAD,
        elem_id="upload",
    )
    slider = gr.Slider(
        sizes[0],
        sizes[-1],
        nearest_size(sizes, size),
        step=sizes.step,
        label="Resolution (px)",
        info=f"Multiples of the patch, {MIN_PATCHES_PER_SIDE} … {MAX_PATCHES_PER_SIDE} patches per side. A "
        "larger puzzle has more cells, not larger ones; an image is scaled to a square.",
        buttons=[],
        elem_id="size",
    )
    return PictureControls(source_input, puzzle_row, number, new_puzzle, upload, slider, gr.HTML(elem_id="picture"))


def _connect(app: App, page: gr.Blocks, controls: PictureControls, models: tuple, outputs: list) -> None:
    """Connects the controls with their actions."""
    inputs = [*models, controls.source, controls.size, controls.number, controls.upload]
    private = {"api_visibility": "private", "show_progress": "hidden"}

    def compare_after(event, **options):
        # A dragged slider sends many requests; only the last is answered.
        event(
            app.compare,
            inputs,
            outputs,
            concurrency_id="compare",
            concurrency_limit=REQUESTS_AT_ONCE,
            show_progress="minimal",
            trigger_mode="always_last",
            **{"api_visibility": "private", **options},
        )

    page.load(js=READ_ONLY)
    compare_after(page.load, api_name="compare", api_visibility="undocumented")
    compare_after(controls.size.input)
    compare_after(controls.number.submit)
    compare_after(controls.upload.change)
    drawn = controls.new_puzzle.click(lambda: random.randrange(len(PUZZLES)), None, controls.number, **private)
    compare_after(drawn.then)
    controls.source.input(
        lambda source: (gr.Row(visible=source == PUZZLE), gr.File(visible=source == UPLOAD)),
        controls.source,
        [controls.puzzle_row, controls.upload],
        **private,
    )
    first, second = models
    for control, sizes in ((first, app.trained_sizes), (second, app.sizes), (controls.source, app.trained_sizes)):
        adjusted = control.input(sizes, [*models, controls.source, controls.size], controls.size, **private)
        compare_after(adjusted.then, js=SHOW_SIZE)


def theme() -> gr.themes.Base:
    """Gradio's theme with system fonts, so that none is downloaded, and darker small print."""
    return gr.themes.Default(font=SYSTEM_FONTS, font_mono=MONOSPACED_FONTS).set(
        block_info_text_color="*neutral_600",
        block_info_text_color_dark="*neutral_300",
        body_text_color_subdued="*neutral_600",
        body_text_color_subdued_dark="*neutral_300",
    )
