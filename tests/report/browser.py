"""A small client for a real browser: headless Chromium behind chromedriver, by the W3C WebDriver protocol."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
CHROMEDRIVER = shutil.which("chromedriver")
MISSING = None if CHROMIUM and CHROMEDRIVER else "no chromium with chromedriver here: see `make browser`"

OPTIONS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]


class Browser:
    """One window."""

    def __init__(self, port: int) -> None:
        self.root = f"http://127.0.0.1:{port}"
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"binary": CHROMIUM, "args": OPTIONS},
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        found = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.root += f"/session/{found['sessionId']}"

    def open(self, address: str) -> None:
        self._ask("POST", "/url", {"url": address})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a JavaScript function's body; it may await."""
        body = f"(async (...args) => {{ {script} }})(...arguments)"
        wrapped = f"const done = arguments[arguments.length - 1]; {body}.then(done)"
        return self._ask("POST", "/execute/async", {"script": wrapped, "args": list(arguments)})

    def until(self, script: str, *arguments: Any, seconds: float = 10.0) -> Any:
        """The first value of a script that is true."""
        end = time.monotonic() + seconds
        while not (found := self.run(script, *arguments)):
            assert time.monotonic() < end, f"waited {seconds} s for: {script}"
            time.sleep(0.02)
        return found

    def press(self, *keys: str) -> None:
        strokes = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._ask("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": strokes}]})

    def point(self, x: float, y: float, *, click: bool = False) -> None:
        moves: list[dict[str, Any]] = [{"type": "pointerMove", "x": round(x), "y": round(y), "duration": 0}]
        moves += [{"type": kind, "button": 0} for kind in ("pointerDown", "pointerUp") if click]
        self._ask("POST", "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": moves}]})

    def screen(self, width: int, height: int, *, dark: bool = False) -> None:
        """The size of what is seen, and the colours that the reader likes."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.command("Emulation.setDeviceMetricsOverride", metrics)
        preference = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", {"features": [preference]})

    def enter_frame(self, number: int) -> None:
        """Scripts run inside a frame of the page from now on, until another page is opened."""
        self._ask("POST", "/frame", {"id": number})

    def command(self, name: str, parameters: dict[str, Any]) -> Any:
        """One of Chromium's own."""
        return self._ask("POST", "/goog/cdp/execute", {"cmd": name, "params": parameters})

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._ask("GET", "/screenshot")))

    def complaints(self) -> list[str]:
        """What the console said since it was last asked."""
        return [entry["message"] for entry in self._ask("POST", "/se/log", {"type": "browser"})]

    def requests(self) -> list[str]:
        """Addresses that were asked for since this was last called."""
        entries = [
            json.loads(entry["message"])["message"] for entry in self._ask("POST", "/se/log", {"type": "performance"})
        ]
        sent = [
            entry["params"]["request"]["url"] for entry in entries if entry["method"] == "Network.requestWillBeSent"
        ]
        return [address for address in sent if not address.startswith(("blob:", "data:"))]

    def close(self) -> None:
        self._ask("DELETE", "")

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.root + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from None


@contextlib.contextmanager
def browsing() -> Iterator[Browser]:
    """A browser that is closed at the end."""
    assert CHROMEDRIVER is not None
    with subprocess.Popen(
        [CHROMEDRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as driver:
        try:
            assert driver.stdout is not None
            port = next(
                int(line.split("port ")[1].rstrip(".\n"))
                for line in driver.stdout
                if "started successfully on port" in line
            )
            browser = Browser(port)
            try:
                yield browser
            finally:
                browser.close()  # the driver alone would leave Chromium running
        finally:
            driver.terminate()
