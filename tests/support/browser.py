"""A headless Chromium for tests of pages; tests that ask for it are skipped where there is none."""

import base64
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest


WIDTH, HEIGHT = 1200, 900


@pytest.fixture(scope="session")
def chromium(tmp_path_factory, lacking) -> Iterator:
    """One browser for all tests of a process; use `browser`, which forgets what the last test did."""
    try:
        from selenium import webdriver
    except ImportError:
        lacking("browser", "selenium is not installed")
    binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        lacking("browser", "no chromium with chromedriver on this machine (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in (
        "--headless=new",
        # Containers run tests as root, and have little shared memory.
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--window-size={WIDTH},{HEIGHT}",
        f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",
        # A page that needs the network must fail here.
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost, EXCLUDE 127.0.0.1",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    session = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=driver))
    yield session
    session.quit()


@pytest.fixture
def browser(chromium) -> Iterator:
    """Selenium's driver of a headless Chromium, with an empty page and an empty console."""
    chromium.get("about:blank")
    prefer_color_scheme(chromium, "light")
    console_errors(chromium)
    yield chromium


def console_errors(browser) -> list[str]:
    """What the console has reported as errors since the last call."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def prefer_color_scheme(browser, scheme: str) -> None:
    """`"light"` or `"dark"`, for `prefers-color-scheme`."""
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def screenshot(browser, path: Path) -> None:
    """The whole page, beyond the window too, as a PNG file."""
    size = browser.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
    clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
    captured = browser.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
    path.write_bytes(base64.b64decode(captured["data"]))
