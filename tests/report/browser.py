"""A headless Chromium, driven by chromedriver over HTTP: what a reader of a page sees, without a network."""

import base64
import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import urllib.request
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
MISSING = "chromium and chromedriver are not installed: apt-get install chromium chromium-driver"
NEEDS_BROWSER = pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason=MISSING)
FLAGS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--disable-extensions", "--host-resolver-rules=MAP * ~NOTFOUND",
]  # fmt: skip
SECONDS = 60
STARTS = 5


class Browser:
    """A session; `open_page` loads a file as a screen of some width shows it."""

    def __init__(self, address, session):
        self._base = f"{address}/session/{session}"

    def open_page(self, path, *, width=1280, height=900, is_dark=False):
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}]
        self.cdp("Emulation.setEmulatedMedia", features=scheme)
        self.cdp(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self._post("url", url=Path(path).resolve().as_uri())

    def run(self, script, *arguments):
        """The value that a piece of JavaScript returns."""
        return self._post("execute/sync", script=script, args=list(arguments))

    def errors(self):
        """What the page has written to the console as errors."""
        return [each["message"] for each in self._post("se/log", type="browser") if each["level"] == "SEVERE"]

    def picture(self, path, *, is_whole=True):
        """Write a PNG of the page, or of what fits on the screen."""
        made = self.cdp(
            "Page.captureScreenshot", format="png", captureBeyondViewport=is_whole, **self._clip(is_whole)
        )
        Path(path).write_bytes(base64.b64decode(made["data"]))

    def move_to(self, x, y):
        self.cdp("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def cdp(self, command, **parameters):
        return self._post("goog/cdp/execute", cmd=command, params=parameters)

    def _clip(self, is_whole):
        if not is_whole:
            return {}
        size = self.cdp("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def _post(self, path, **content):
        return post(f"{self._base}/{path}", content)


def post(address, content, method="POST"):
    data = json.dumps(content).encode() if method == "POST" else None
    request = urllib.request.Request(address, data=data, method=method)
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        return json.load(answer)["value"]


@contextlib.contextmanager
def open_browser():
    """A browser with a profile of its own; both are gone afterwards."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home, run_driver(home) as address:
        chrome = {"binary": CHROMIUM, "args": [*FLAGS, f"--user-data-dir={home}/profile"]}
        wanted = {"goog:chromeOptions": chrome, "goog:loggingPrefs": {"browser": "ALL"}}
        session = post(f"{address}/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        try:
            yield Browser(address, session)
        finally:
            post(f"{address}/session/{session}", {}, "DELETE")


@contextlib.contextmanager
def run_driver(home):
    """The address of a chromedriver.

    It takes a free port of IPv4, and ends if another program has that port of IPv6: then it is started again.
    """
    env = {**os.environ, "HOME": home, "NO_PROXY": "localhost,127.0.0.1", "no_proxy": "localhost,127.0.0.1"}
    for _ in range(STARTS):
        with subprocess.Popen(
            [DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
        ) as driver:
            try:
                said = ""
                for line in driver.stdout:
                    said += line
                    if found := re.search(r"successfully on port (\d+)", line):
                        yield f"http://127.0.0.1:{found[1]}"
                        return
            finally:
                driver.terminate()
    raise RuntimeError(f"chromedriver ended {STARTS} times before it was ready; its last words:\n{said}")
