"""A headless Chromium, controlled over the WebDriver protocol with the standard library."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

CHROMIUM, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
MISSING = None if CHROMIUM and DRIVER else "needs chromium and chromedriver (Debian: apt-get install chromium chromium-driver)"
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # key of an element reference in the protocol
KEYS = {"left": "\ue012", "up": "\ue013", "right": "\ue014", "down": "\ue015", "end": "\ue010", "tab": "\ue004", "enter": "\ue007"}
FLAGS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-default-apps", "--hide-scrollbars", "--force-device-scale-factor=1",
]  # fmt: skip


class Browser:
    """One browser with one window."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        assert DRIVER is not None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.profile = tempfile.mkdtemp()
        self.driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.base = f"http://127.0.0.1:{port}"
        options = {"binary": CHROMIUM, "args": [*FLAGS, f"--user-data-dir={self.profile}"]}
        capabilities = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        try:
            self._wait()
            self.base += "/session/" + self._send("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})["sessionId"]
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        for _ in range(200):
            try:
                if self._send("GET", "/status")["ready"]:
                    return
            except (OSError, urllib.error.URLError):
                time.sleep(0.05)
        raise RuntimeError("chromedriver does not answer")

    def _send(self, verb: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"}, method=verb)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.loads(answer.read())["value"]
        except urllib.error.HTTPError as error:
            with error:
                raise RuntimeError(json.loads(error.read())["value"]["message"]) from None

    def open(
        self, path: Path, width: int = 1280, height: int = 900, dark: bool = False, touch: bool = False, scale: float = 1
    ) -> None:
        """Opens a file in a window of this size. ``scale`` is the number of pixels of a picture per pixel of the page."""
        screen = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": touch}
        self.command("Emulation.setDeviceMetricsOverride", screen)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.command("Emulation.setEmulatedMedia", {"features": scheme})
        self.logs()
        self._send("POST", "/url", {"url": path.resolve().as_uri()})
        self.settle()

    def settle(self) -> None:
        """Waits until two frames are drawn."""
        self.later("requestAnimationFrame(() => requestAnimationFrame(() => done()))")

    def later(self, script: str) -> Any:
        """Runs JavaScript and returns the value that it passes to ``done``."""
        return self._send("POST", "/execute/async", {"script": f"const done = arguments[0]; {script}", "args": []})

    def command(self, name: str, values: object) -> Any:
        return self._send("POST", "/goog/cdp/execute", {"cmd": name, "params": values})

    def run(self, script: str, *values: object) -> Any:
        """Runs JavaScript and returns its result."""
        return self._send("POST", "/execute/sync", {"script": script, "args": list(values)})

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def point(self, x: float, y: float) -> None:
        """Moves the mouse."""
        move = {"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y), "origin": "viewport"}
        self._send("POST", "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": [move]}]})
        self.settle()

    def press(self, *keys: str) -> None:
        strokes = [{"type": kind, "value": KEYS.get(key, key)} for key in keys for kind in ("keyDown", "keyUp")]
        self._send("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": strokes}]})
        self.settle()

    def click(self, selector: str) -> None:
        element = self._send("POST", "/element", {"using": "css selector", "value": selector})
        self._send("POST", f"/element/{element[ELEMENT]}/click", {})
        self.settle()

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._send("GET", "/screenshot")))

    def logs(self) -> tuple[list[str], list[str]]:
        """Console messages and requested URLs since the last call, without requests of the browser's own pages."""
        messages = [entry["message"] for entry in self._send("POST", "/se/log", {"type": "browser"})]
        events = [json.loads(entry["message"])["message"] for entry in self._send("POST", "/se/log", {"type": "performance"})]
        urls = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
        return messages, [url for url in urls if not url.startswith(("chrome://", "data:image/gif"))]

    def close(self) -> None:
        try:
            if "/session/" in self.base:
                self._send("DELETE", "")
        except (OSError, RuntimeError):
            pass
        self.driver.terminate()
        self.driver.wait(timeout=20)
        shutil.rmtree(self.profile, ignore_errors=True)
