"""A real Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import connect
from websockets.sync.connection import Connection

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MISSING = "no Chromium is installed (apt-get install chromium)"
PATIENCE = 60.0


class Page:
    """One tab; what it complains about (errors of scripts, refusals of the security policy) is in `complaints`."""

    def __init__(self, socket: Connection) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self.complaints: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The browser's answer."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=PATIENCE))
            if message.get("id") == number:
                assert "error" not in message, message
                return dict(message["result"])
            if message.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(str(message["params"]["exceptionDetails"]))
            elif message.get("method") == "Log.entryAdded":
                self.complaints.append(str(message["params"]["entry"]["text"]))

    def run(self, script: str) -> Any:
        """The value of a script's expression; a promise is awaited."""
        done = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def open(self, address: str) -> None:
        self.run("window.left = true")
        self.send("Page.navigate", url=address)
        self.until("!window.left && document.readyState === 'complete'")

    def until(self, condition: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < deadline, (
                f"{condition} did not come true on {self.run('document.body.innerText')}"
            )
            time.sleep(0.05)

    def click(self, element: str) -> None:
        """Press the mouse where the element is that a script's expression gives."""
        self.run(f"({element}).scrollIntoView({{block: 'center'}})")
        point = self.run(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])(({element}).getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=point[0], y=point[1], button="left", clickCount=1)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": key} if len(key) == 1 and kind == "keyDown" else {}
            self.send("Input.dispatchKeyEvent", type=kind, key=key, **text)

    def look(self, *, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        """The size of the window, and the colours that its user prefers."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])


@contextmanager
def opened(folder: Path) -> Iterator[Page]:
    """An empty tab of a browser that keeps its files in `folder`."""
    assert CHROMIUM is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0"]
    command = [CHROMIUM, *flags, "--remote-allow-origins=*", f"--user-data-dir={folder}", "about:blank"]
    browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        ready, deadline = folder / "DevToolsActivePort", time.monotonic() + PATIENCE
        while not (ready.exists() and ready.read_text().count("\n")):
            assert time.monotonic() < deadline, "Chromium does not start"
            time.sleep(0.05)
        port = ready.read_text().splitlines()[0]
        (page,) = (tab for tab in httpx.get(f"http://127.0.0.1:{port}/json/list").json() if tab["type"] == "page")
        with connect(page["webSocketDebuggerUrl"], max_size=None) as socket:
            yield Page(socket)
    finally:
        browser.kill()
        browser.wait()
