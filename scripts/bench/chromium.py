"""Drives a headless Chromium over its DevTools protocol, through a pipe.

Playwright would bring a driver of 53 MB, and browsers of its own; of it only these few calls would be used.
https://chromedevtools.github.io/devtools-protocol/; `--remote-debugging-pipe` reads commands from descriptor 3 and
writes answers and events to 4, each a JSON text that ends with a NUL.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
)
PATIENCE = 60.0  # seconds for an answer


class ChromiumError(Exception):
    """It did not start, answer or do what was asked."""


class Chromium:
    """A browser with one page. events: what it has reported since they were cleared, in order."""

    def __init__(self) -> None:
        assert PROGRAM is not None
        self.events: list[dict[str, Any]] = []
        self._profile = tempfile.TemporaryDirectory(prefix="trainkit-chromium-", ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        argv = [PROGRAM, *FLAGS, f"--user-data-dir={self._profile.name}", "--remote-debugging-pipe"]
        moved = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "chromium", *argv]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(
            moved, pass_fds=(theirs_in, theirs_out), stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._rest, self._count, self._session = b"", 0, ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Chromium:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session = ""
        try:
            self.call("Browser.close")
            self._process.wait(10)
        except (ChromiumError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """What a method answers. ChromiumError for an error, or silence."""
        self._count += 1
        asked = {"id": self._count, "method": method, "params": params}
        asked |= {"sessionId": self._session} if self._session else {}
        try:
            os.write(self._out, json.dumps(asked).encode() + b"\0")
        except OSError as error:
            raise ChromiumError(f"{method}: the browser has ended") from error
        while (message := self._message()).get("id") != self._count:
            self.events.append(message)
        if "error" in message:
            raise ChromiumError(f"{method}: {message['error']}")
        found: dict[str, Any] = message["result"]
        return found

    def _message(self) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            if not select.select([self._in], [], [], max(0.0, until - time.monotonic()))[0]:
                raise ChromiumError(f"no answer for {PATIENCE:.0f} s")
            if not (data := os.read(self._in, 1 << 20)):
                raise ChromiumError("the browser has ended")
            self._rest += data
        text, self._rest = self._rest.split(b"\0", 1)
        found: dict[str, Any] = json.loads(text)
        return found

    def wait_for(self, method: str) -> dict[str, Any]:
        """The parameters of the next event of a name."""
        while True:
            message = self._message()
            self.events.append(message)
            if message.get("method") == method:
                found: dict[str, Any] = message["params"]
                return found

    def open(self, address: str, width: int = 1600, *, dark: bool = False) -> None:
        """Show an address in a window so wide, and wait until it is loaded. Events before are forgotten."""
        self.events.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=address)
        self.wait_for("Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript in the page, once a promise is kept; it must be JSON."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise ChromiumError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, *, clicks: int = 0) -> None:
        """`mouseMoved`, or with clicks `mousePressed` and `mouseReleased` of the left button."""
        button = {"button": "left", "buttons": 1, "clickCount": clicks} if clicks else {}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def key(self, name: str) -> None:
        """Press a key, by the name that JavaScript has for it."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name)

    def picture(self, file: Path) -> None:
        """Write a picture of the whole page, as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 16_000), "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        file.write_bytes(base64.b64decode(shot["data"]))

    @property
    def complaints(self) -> list[str]:
        """What the console has said of errors, warnings and violations of the page's policy since `open`."""
        named = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [json.dumps(each["params"]) for each in self.events if each.get("method") in named]

    @property
    def requests(self) -> list[str]:
        """The addresses that were asked for since `open`."""
        asked = (
            each["params"]["request"]["url"]
            for each in self.events
            if each.get("method") == "Network.requestWillBeSent"
        )
        return list(asked)
