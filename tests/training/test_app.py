"""The app as it is served: the page in a real browser, requests side by side, and a Space by itself."""

import ast
import base64
import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import metadata
from urllib.request import urlopen

import numpy as np
import pytest
import yaml
from app_helpers import picture_of, save_classifier, save_classifiers
from browser import console_errors
from checkout import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from PIL import Image

from training.tasks.playground import pictures
from training.tasks.playground.predictions import Classifiers, attention_pictures, find_checkpoints


pytest.importorskip("gradio", reason="gradio is not installed")

from training.app import main
from training.tasks.playground.page import App, build


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two classifiers of puzzles, and one with smaller patches that knows other classes."""
    folder = save_classifiers(tmp_path_factory.mktemp("arrows"))
    small = {"image_size": 40, "patch_size": 10, "id2label": dict(enumerate(["cat", "dog"]))}
    save_classifier(folder / "small", position_encoding="rope_mixed", **small)
    return folder


@pytest.fixture(scope="module")
def checkpoints(folder):
    return find_checkpoints([str(folder)])


# Runs a script and notes every address that it looks up or connects to, and where its modules came from.
WATCHED = """
import atexit, pathlib, runpy, sys
folder, script, *arguments = sys.argv[1:]
def note(name, text):
    with pathlib.Path(folder, name).open("a") as file:
        file.write(f"{text}\\n")
def watch(event, details):
    if event == "socket.getaddrinfo":
        note("contacts.txt", details[0])
    elif event == "socket.connect":
        note("contacts.txt", details[1][0])
def end():
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("hf_liere", "training") and getattr(module, "__file__", None):
            note("modules.txt", module.__file__)
sys.addaudithook(watch)
atexit.register(end)
sys.argv = [script, *arguments]
sys.path[0] = script.rpartition("/")[0]
runpy.run_path(script, run_name="__main__")
"""


class Server:
    """A script of ours in a process of its own, at `url`; it writes what `WATCHED` notes into `folder`."""

    def __init__(self, folder, script, *arguments):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.folder, self.log = folder, folder / "server.log"
        (folder / "watched.py").write_text(WATCHED)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GRADIO_SERVER_PORT": str(port)}
        environment["GRADIO_TEMP_DIR"] = str(folder / "uploads")
        # It must find itself what it imports, and ask nobody though nothing forbids it.
        for name in ("PYTHONPATH", "HF_HUB_OFFLINE"):
            environment.pop(name, None)
        command = [sys.executable, str(folder / "watched.py"), str(folder), str(script), *arguments]
        with self.log.open("w") as log:
            # Tests that run in the background may ignore SIGINT, which ends the server and would be inherited.
            accept = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
            options = {"stdout": log, "stderr": log, "preexec_fn": accept}
            self.process = subprocess.Popen(command, cwd=folder, env=environment, **options)

    def __enter__(self):
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urlopen(self.url, timeout=5):
                    return self
            except OSError:
                time.sleep(0.2)
        self.__exit__()
        raise AssertionError(f"The server did not start:\n{self.log.read_text()[-4000:]}")

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    script = ROOT / "training" / "app.py"
    with Server(tmp_path_factory.mktemp("server"), script, "--checkpoints", str(folder)) as server:
        yield server


class Page:
    """The page as a visitor sees it; every wait ends after half a minute."""

    def __init__(self, browser, url):
        from selenium.webdriver.support.ui import WebDriverWait

        self.browser = browser
        self.wait = WebDriverWait(browser, 30, poll_frequency=0.1)
        browser.get(url)
        self.until(lambda: self.pictures("#first-attention") and self.pictures("#second-attention"))

    def until(self, condition):
        return self.wait.until(lambda _: condition())

    def find(self, selector):
        return self.browser.find_element("css selector", selector)

    def text(self, selector):
        return self.find(selector).text

    def pictures(self, selector):
        """Sources of the pictures in an element, once they are decoded."""
        script = "return [...document.querySelectorAll(arguments[0])].map(i => [i.src, i.complete && i.naturalWidth])"
        found = self.browser.execute_script(script, f"{selector} img")
        return [source for source, width in found] if all(width for _, width in found) else []

    def changes(self, selector, action):
        """Does something and waits until the pictures in an element are others; returns these."""
        before = self.pictures(selector)
        action()
        return self.until(lambda: self.pictures(selector) not in ([], before) and self.pictures(selector))

    def choose(self, selector, value):
        """An option of a drop-down list."""
        from selenium.webdriver.common.keys import Keys

        field = self.find(f"{selector} input")
        field.click()
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(value, Keys.ENTER)

    def upload(self, path):
        self.find("#upload input[type=file]").send_keys(str(path))


def decoded(source):
    return Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2])))


@pytest.fixture
def page(browser, server):
    return Page(browser, server.url)


def test_the_page_shows_predictions_and_attention_without_errors(page, browser, checkpoints):
    puzzle, truth = pictures.draw_puzzle(0, 108)
    assert np.array_equal(decoded(page.pictures("#picture")[0]), puzzle)
    assert f"the answer is {truth}" in page.text("#picture")
    for place, checkpoint in zip(("first", "second"), checkpoints):
        answer = Classifiers()[checkpoint].answer(puzzle, 108)
        said = next(iter(answer.probabilities))
        assert page.text(f"#{place}-prediction h2") == said
        assert ("Right" if said == truth else "Wrong") in page.text(f"#{place}-verdict")
        for source, layer in zip(
            page.pictures(f"#{place}-attention"), attention_pictures(puzzle, 108, answer.attention), strict=True
        ):
            assert np.array_equal(decoded(source), layer)
    images = browser.find_elements("css selector", "figure img")
    assert len(images) == 5 and all(image.get_attribute("alt") for image in images)
    assert console_errors(browser) == []


def test_on_a_phone_nothing_reaches_beyond_the_screen(page, browser):
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        places = [page.find(f"#{name}").location["x"] for name in ("picture", "first", "second")]
        # To a pixel, which a figure has as its border.
        assert max(places) - min(places) <= 1
        assert abs(page.find("#puzzle").location["y"] - page.find("#new-puzzle").location["y"]) < 10
        assert browser.execute_script("return document.documentElement.scrollWidth") == 390
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_one_model_alone_has_the_page_for_itself(checkpoints):
    for shown in (checkpoints[:1], checkpoints):
        (second,) = (block for block in build(App(shown)).blocks.values() if block.elem_id == "second")
        # A form is around the list.
        assert second.parent.parent.visible == (len(shown) > 1)


def test_nothing_outside_is_asked_for(page, browser, server):
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert loaded and all(name.startswith((server.url, "data:", "blob:")) for name in loaded)
    assert set((server.folder / "contacts.txt").read_text().split()) <= {"127.0.0.1", "localhost"}


def test_new_puzzles_and_resolutions_change_pictures(page, browser):
    from selenium.webdriver.common.keys import Keys

    page.changes("#picture", page.find("#new-puzzle").click)
    number = page.find("#puzzle input")
    number.send_keys(Keys.CONTROL, "a")
    (picture,) = page.changes("#picture", lambda: number.send_keys("77", Keys.ENTER))
    assert np.array_equal(decoded(picture), pictures.draw_puzzle(77, 108)[0])

    # As with the keyboard, one step of the slider.
    slider = page.find("#size input[type=range]")
    page.changes("#first-attention", lambda: slider.send_keys(Keys.ARROW_RIGHT))
    page.until(lambda: decoded(page.pictures("#picture")[0]).size == (120, 120))
    page.until(lambda: "10 × 10 patches" in page.text("#second-attention"))
    (shown,) = browser.find_elements("css selector", "#size input[type=number]")
    page.until(lambda: shown.is_displayed() and shown.get_attribute("value") == "120")
    shown.send_keys("7")
    assert shown.get_attribute("value") == "120"
    assert console_errors(browser) == []


@pytest.mark.slow
def test_other_models_have_other_sizes(page, browser):
    slider = page.find("#size input[type=range]")

    def sizes():
        return [slider.get_attribute(name) for name in ("min", "max", "step", "value")]

    page.until(lambda: sizes() == ["60", "384", "12", "108"])
    page.choose("#second", "(none)")
    page.until(lambda: not browser.find_elements("css selector", "#second-attention"))
    page.changes("#first-attention", lambda: page.choose("#first", "small"))
    page.until(lambda: sizes() == ["60", "300", "60", "60"])
    assert "rope_mixed" in page.text("#first-verdict") and "Knows no answers" in page.text("#first-verdict")
    browser.find_elements("css selector", "#source input")[1].click()
    # Puzzles have at least 60 px, its training images 40.
    page.until(lambda: sizes() == ["20", "320", "10", "40"])
    browser.find_elements("css selector", "#source input")[0].click()
    page.until(lambda: sizes() == ["60", "300", "60", "60"])
    page.choose("#first", "liere8")
    page.until(lambda: sizes() == ["60", "384", "12", "108"])
    page.until(lambda: "9 × 9 patches" in page.text("#first-attention"))
    assert console_errors(browser) == []


def test_uploads_of_all_kinds_and_the_page_goes_on(page, browser, tmp_path, checkpoints):
    page.browser.find_elements("css selector", "#source input")[1].click()
    page.until(lambda: "Upload a picture: .png, .jpg" in page.text("#picture"))
    refused = {"notes.txt": "the name ends in '.txt'", "notes.png": "it is not a GIF, JPEG, PNG, WEBP picture"}
    for name, reason in refused.items():
        (tmp_path / name).write_text("hello")
        page.upload(tmp_path / name)
        message = f"{name} cannot be used: {reason}"
        page.until(lambda message=message: message in page.text("#picture"))
        assert page.pictures("#first-attention") == []
        page.find("#upload button[aria-label='Clear']").click()

    picture_of().save(tmp_path / "picture.png")
    page.upload(tmp_path / "picture.png")
    page.until(lambda: page.pictures("#first-attention") and page.pictures("#picture"))
    assert "50 × 40 px, seen at 108 × 108 px" in page.text("#picture")
    answer = Classifiers()[checkpoints[0]].answer(picture_of(), 108)
    assert page.text("#first-prediction h2") == next(iter(answer.probabilities))
    assert console_errors(browser) == []


def test_two_requests_at_once_and_a_bad_one_between(server, tmp_path, checkpoints):
    client_module = pytest.importorskip("gradio_client")
    clients = [client_module.Client(server.url, verbose=False) for _ in range(3)]
    (tmp_path / "long.png").write_bytes(b"\x89PNG" + bytes(11 * 10**6))
    with pytest.raises(Exception, match="exceeds the maximum file size of 10485760 bytes"):
        ask(clients[0], "Your image", client_module.handle_file(str(tmp_path / "long.png")))
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(ask, client, "Arrows puzzle", None, n) for n, client in enumerate(clients)]
        results = [future.result(60) for future in waiting]
    for number, result in enumerate(results):
        answer = Classifiers()[checkpoints[0]].answer(pictures.draw_puzzle(number, 108)[0], 108)
        assert result[2]["label"] == next(iter(answer.probabilities))


def ask(client, source, upload, number=0):
    return client.predict("comrope_ld", "liere8", source, 108, number, upload, api_name="/compare")


def test_messages_are_no_html(checkpoints, tmp_path):
    (tmp_path / "<i>notes.png").write_text("hello")
    # Outside of a request, gradio warns as Python does.
    with pytest.warns(UserWarning, match="&lt;i&gt;notes.png"):
        message = App(checkpoints).compare("liere8", "(none)", "Your image", 108, 0, str(tmp_path / "<i>notes.png"))[0]
    assert "&lt;i&gt;notes.png cannot be used" in message and "<i>" not in message


# Runs a file in a process that finds the modules of these distributions alone, beside those of Python.
CLEAN = """
import importlib.metadata, runpy, sys
from packaging.utils import canonicalize_name
file, *brought = sys.argv[1:]
for name, distributions in importlib.metadata.packages_distributions().items():
    names = {canonicalize_name(each) for each in distributions}
    if name not in sys.stdlib_module_names and not names & {*brought, "hf-liere"}:
        sys.modules[name] = None
runpy.run_path(file, run_name="app")
"""


def brought_by(lines):
    """The distributions that requirements bring with them, by the metadata of those that are installed."""
    found, left = set(), [Requirement(line) for line in lines]
    while left:
        wanted = left.pop()
        key = canonicalize_name(wanted.name), *sorted(wanted.extras)
        if key in found:
            continue
        found.add(key)
        for line in metadata.requires(wanted.name) or []:
            needed = Requirement(line)
            if needed.marker is None or any(needed.marker.evaluate({"extra": each}) for each in ("", *wanted.extras)):
                left.append(needed)
    return sorted({name for name, *_ in found})


def test_the_space_brings_what_the_package_requires(folder, tmp_path):
    """And every other library that the copied scripts import."""
    main(["--write_space", str(tmp_path / "space"), "--checkpoints", str(folder)])
    lines = (tmp_path / "space" / "requirements.txt").read_text().split()
    names = {line.partition("==")[0] for line in lines}
    stated = re.search(r"^dependencies = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert "wrapt" in names and set(re.findall(r'"([\w-]+)', stated[1])) <= names
    brought = set(brought_by([*lines, "gradio"]))
    # Of Python 3.10 it lacks packages without a top_level.txt.
    distributions = metadata.packages_distributions()
    for path in (tmp_path / "space" / "training").rglob("*.py"):
        tree = ast.parse(path.read_text())
        imported = {each.module for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)}
        imported |= {name.name for each in ast.walk(tree) if isinstance(each, ast.Import) for name in each.names}
        others = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names - {"hf_liere", "training"}
        for name in others:
            assert brought & {canonicalize_name(each) for each in distributions.get(name, [name])}, name


@pytest.mark.slow
def test_a_space_runs_by_itself(folder, tmp_path, capsys):
    space = tmp_path / "space"
    main(["--write_space", str(space), "--checkpoints", str(folder)])
    assert f"hf upload me/name {space} --repo-type space" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--write_space", str(space), "--checkpoints", str(folder)])
    assert "exists already and is not an empty directory" in capsys.readouterr().err

    card = yaml.safe_load((space / "README.md").read_text().split("---\n")[1])
    assert card["sdk"] == "gradio" and (space / card["app_file"]).is_file() and "models" not in card
    assert {"title", "sdk_version", "python_version", "license"} <= card.keys()
    # The Hub refuses longer ones.
    assert len(card["short_description"]) <= 60
    requirements = (space / "requirements.txt").read_text().split()
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+\S*", line) for line in requirements)
    assert "gradio==" not in str(requirements)
    kinds = {path.suffix for path in space.rglob("*") if path.is_file()}
    assert kinds == {".py", ".md", ".txt", ".json", ".safetensors", ".jpg", ""}

    moved = tmp_path / "elsewhere" / "app"
    shutil.copytree(space, moved)
    shutil.rmtree(space)
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-c", CLEAN, str(moved / "app.py"), *brought_by([*requirements, "gradio"])]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    clean = subprocess.run(command, cwd=moved, env=environment, capture_output=True, text=True)
    assert clean.returncode == 0, clean.stderr
    with Server(tmp_path / "run", moved / "app.py") as server:
        client = pytest.importorskip("gradio_client").Client(server.url, verbose=False)
        assert "Layer 2" in ask(client, "Arrows puzzle", None)[3]
    # Ctrl-C has ended it, and nothing was imported from anywhere else.
    assert server.process.returncode == 0
    modules = (tmp_path / "run" / "modules.txt").read_text().split()
    assert len(modules) > 10 and all(module.startswith(str(moved)) for module in modules)
