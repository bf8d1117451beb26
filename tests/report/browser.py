"""A headless Chromium, spoken to over its debugging pipe: what a page does when it is really looked at."""

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path


NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_browser() -> str | None:
    """The browser to use, or `None` where there is none."""
    return os.environ.get("CHROME_PATH") or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """
    One page of a headless Chromium.

    Args:
        directory (`Path`):
            Where the browser may keep its files.
    """

    def __init__(self, directory: Path):
        read_here, write_there = os.pipe()
        read_there, write_here = os.pipe()

        def connect():
            # The browser reads commands from 3 and writes to 4.
            read, write = os.dup(read_there), os.dup(write_there)
            os.dup2(read, 3)
            os.dup2(write, 4)

        self._process = subprocess.Popen(
            [
                find_browser(),
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--hide-scrollbars",
                f"--user-data-dir={directory}",
                "--remote-debugging-pipe",
                "about:blank",
            ],
            preexec_fn=connect,
            close_fds=False,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_there)
        os.close(write_there)
        self._out, self._in = os.fdopen(write_here, "wb"), os.fdopen(read_here, "rb")
        self._number = 0
        self._session = None
        self._rest = b""
        #: What the browser has told of, as `(method, params)`.
        self.events: list[tuple[str, dict]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def _receive(self) -> dict:
        while b"\0" not in self._rest:
            chunk = self._in.read1(1 << 16)
            assert chunk, "the browser has ended"
            self._rest += chunk
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def send(self, method: str, **params) -> dict:
        """Send a command, and wait for its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            if "method" in answer:
                self.events.append((answer["method"], answer["params"]))

    def open(self, path: Path, width: int = 1200, dark: bool = False) -> None:
        """Show a file in a window of so many pixels, and wait until it is there."""
        self.events.clear()
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.send("Emulation.setEmulatedMedia", features=scheme)
        self.send("Page.navigate", url=path.as_uri())
        while not any(method == "Page.loadEventFired" for method, _ in self.events):
            answer = self._receive()
            self.events.append((answer.get("method"), answer.get("params")))

    def evaluate(self, expression: str):
        """The value of an expression in the page."""
        return self.send("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def screenshot(self) -> bytes:
        """The whole page as PNG."""
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        return base64.b64decode(data)

    def close(self) -> None:
        """End the browser."""
        self._process.kill()
        self._process.wait()
        self._out.close()
        self._in.close()
