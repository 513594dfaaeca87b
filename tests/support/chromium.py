"""A headless Chromium that chromedriver steers over loopback, by the WebDriver protocol.

with chromium.up_or_skip() as browser:
    browser.open(page, width=390, dark=True)
    assert browser.run("return document.title") == "a"
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = ("chromium", "chromedriver")


class Browser:
    """One window. It keeps what pages write to the console."""

    def __init__(self, session: str) -> None:
        self._session = session

    def open(self, page: Path, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Open a file in a window of this size, with the scheme that the system is said to prefer."""
        self._cdp(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._cdp("Emulation.setEmulatedMedia", features=[scheme])
        post(f"{self._session}/url", url=page.absolute().as_uri())

    def run(self, script: str) -> Any:
        """What the body of a function in JavaScript returns."""
        return post(f"{self._session}/execute/sync", script=script, args=[])

    def run_until(self, script: str, *, seconds: float = 60) -> Any:
        """The first result of the script that is true."""
        end = time.monotonic() + seconds
        while not (result := self.run(script)):
            assert time.monotonic() < end, f"not true after {seconds} s: {script}"
            time.sleep(0.1)
        return result

    def picture(self, path: Path) -> None:
        """Write the whole page as PNG."""
        found = self._cdp("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def console(self) -> list[str]:
        """The errors and warnings of pages since the last call."""
        entries = post(f"{self._session}/se/log", type="browser")
        return [f"{entry['level']}: {entry['message']}" for entry in entries]

    def _cdp(self, command: str, **parameters: Any) -> Any:
        return post(f"{self._session}/goog/cdp/execute", cmd=command, params=parameters)


@contextlib.contextmanager
def up_or_skip() -> Iterator[Browser]:
    """A browser; the test is skipped if a program is missing."""
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        pytest.skip(f"{' and '.join(missing)} missing: no page is opened")
    driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
    session = ""
    try:
        at = f"http://127.0.0.1:{_port(driver)}/session"
        # The sandbox refuses root. Every address but a file is made unreachable.
        arguments = [
            "--headless=new",
            "--no-sandbox",
            "--disable-dev-shm-usage",
            "--disable-gpu",
            "--host-resolver-rules=MAP * ~NOTFOUND",
        ]
        options = {
            "goog:chromeOptions": {"args": arguments},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        found = post(at, capabilities={"alwaysMatch": options})
        session = f"{at}/{found['sessionId']}"
        yield Browser(session)
    finally:
        if session:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(urllib.request.Request(session, method="DELETE"), timeout=20)
        driver.terminate()
        driver.communicate()


def _port(driver: subprocess.Popen[str]) -> int:
    """The port that the driver says it listens on."""
    assert driver.stdout is not None
    for line in driver.stdout:
        if found := re.search(r"started successfully on port (\d+)", line):
            return int(found[1])
    raise AssertionError("chromedriver has ended")


def post(address: str, /, **values: Any) -> Any:
    request = urllib.request.Request(
        address, json.dumps(values).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read().decode()) from None
