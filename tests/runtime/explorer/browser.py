"""Headless Chromium driven through a pair of pipes, in the words of its DevTools protocol.

https://chromedevtools.github.io/devtools-protocol/: messages are JSON ended by a zero byte, on descriptors 3 and 4.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.planner.laws.test_browser import _CHROMIUM, _FLAGS


class Tab:
    """One tab: addresses are opened, keys pressed, expressions evaluated. Errors of the console are kept."""

    def __init__(self, writing: int, reading: int) -> None:
        self._writing, self._reading = writing, reading
        self._received = bytearray()
        self._number, self._session = 0, ""
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """The result of a method."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                return answer["result"]
            self._keep_errors(answer)

    def _next(self) -> Any:
        while b"\0" not in self._received:
            part = os.read(self._reading, 2**20)
            assert part, "the browser has ended"
            self._received += part
        line, _, rest = bytes(self._received).partition(b"\0")
        self._received = bytearray(rest)
        return json.loads(line)

    def _keep_errors(self, event: Any) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(event["params"]["exceptionDetails"])[:500])
        entry = event.get("params", {}).get("entry", {})
        if event.get("method") == "Log.entryAdded" and entry.get("level") == "error":
            self.errors.append(f"{entry['text']} {entry.get('url', '')}")

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression, awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 60.0) -> None:
        """Waits until an expression is true."""
        end = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({condition})"):
            assert time.monotonic() < end, f"never true: {condition}; {self.evaluate('document.body.innerText')[:2000]}"
            time.sleep(0.05)

    def press(self, key: str, text: str = "") -> None:
        """Presses a key and lets it go."""
        code = {"Tab": 9, "Enter": 13, "ArrowDown": 40, "Backspace": 8}.get(key, 0)
        down = {"text": text} if text else {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code, **down)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)

    def type(self, text: str) -> None:
        """Types in the field that has the focus, in place of what it has."""
        self.evaluate("document.activeElement.select()")
        self.call("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """Presses the left button of the mouse on an element, where it is on the screen."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        box = self.evaluate(f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().toJSON()")
        place = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def resize(self, width: int, height: int = 900) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]))


@contextmanager
def browser(profile: Path) -> Iterator[Tab]:
    """A browser with its own profile, and a tab in it."""
    assert _CHROMIUM is not None
    to_browser, writing = os.pipe()
    reading, from_browser = os.pipe()
    command = [_CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe"]
    script = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
    process = subprocess.Popen(
        ["bash", "-c", script, "browser", *command],
        pass_fds=(to_browser, from_browser),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Tab(writing, reading)
    finally:
        process.terminate()
        process.wait(20)
        os.close(writing)
        os.close(reading)
