"""A real headless Chromium, driven through chromedriver over the WebDriver protocol.

The protocol is a few JSON calls, so there is no client library: Debian's `chromium` and
`chromium-driver` are all that is needed. What a test waits for is asked of the page itself until it
is so.
"""

from __future__ import annotations

import base64
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Final, Self

import httpx

from harness.bounds import HANG_S, until

OPTIONS: Final = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--hide-scrollbars", "--force-color-profile=srgb", "--disable-background-networking"),
)
ELEMENT: Final = "element-6066-11e4-a52e-4f735466cecf"
"""Fixed by the protocol: how an element is named."""
KEYS: Final = {
    "Enter": "\ue007",
    "Escape": "\ue00c",
    "Tab": "\ue004",
    "Shift": "\ue008",
    "Left": "\ue012",
    "Up": "\ue013",
    "Right": "\ue014",
    "Down": "\ue015",
}


def missing_programs() -> list[str]:
    """What a browser test needs and is not here."""
    return [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]


class Browser:
    """One window of one browser; a context manager."""

    def __init__(self, *, width: int = 1440, height: int = 1000) -> None:
        self._size = width, height

    def __enter__(self) -> Self:
        self._profile = tempfile.TemporaryDirectory(
            prefix="aqua-browser-", ignore_cleanup_errors=True
        )
        self._driver = subprocess.Popen(
            ["chromedriver", "--port=0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,  # For what a buffer holds already, `select` would wait in vain.
        )
        self._session = ""
        self._http = httpx.Client(timeout=HANG_S, trust_env=False)
        try:
            self._http.base_url = httpx.URL(f"http://127.0.0.1:{self._port()}")
            arguments = [*OPTIONS, f"--user-data-dir={self._profile.name}"]
            arguments.append("--window-size={},{}".format(*self._size))
            capabilities = {
                "goog:chromeOptions": {"args": arguments},
                "goog:loggingPrefs": {"browser": "ALL"},
            }
            answer = self._call("POST", "", {"capabilities": {"alwaysMatch": capabilities}})
            self._session = f"/{answer['sessionId']}"
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._call("DELETE", "")
        finally:
            self._end()

    def _end(self) -> None:
        self._http.close()
        self._driver.terminate()
        self._driver.wait(HANG_S)
        assert self._driver.stdout is not None
        self._driver.stdout.close()
        self._profile.cleanup()

    def _port(self) -> int:
        """Where the driver says that it listens."""
        assert self._driver.stdout is not None
        give_up_s = time.monotonic() + HANG_S
        while time.monotonic() < give_up_s:
            ready, _, _ = select.select([self._driver.stdout], [], [], HANG_S)
            line = self._driver.stdout.readline().decode() if ready else ""
            if "started successfully on port" in line:
                return int(line.rstrip().rstrip(".").rpartition(" ")[2])
        raise TimeoutError("chromedriver did not start")

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:  # noqa: ANN401 - whatever it answers
        answer = self._http.request(
            method, f"/session{self._session}{path}", json=body if method == "POST" else None
        )
        value = answer.json()["value"]
        assert answer.status_code == 200, value
        return value

    # --- What a person does ---------------------------------------------------------------

    def open(self, url: str) -> None:
        """Go to an address, and wait until it is loaded."""
        self._call("POST", "/url", {"url": url})

    def press(self, *keys: str) -> None:
        """Press keys one after the other: a name of `KEYS`, or text."""
        actions = []
        for key in keys:
            for sign in KEYS.get(key, key):
                actions += [{"type": "keyDown", "value": sign}, {"type": "keyUp", "value": sign}]
        self._call(
            "POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]}
        )

    def resize(self, width: int, height: int) -> None:
        """Make the window another size."""
        self._call("POST", "/window/rect", {"width": width, "height": height})

    # --- What a test asks -----------------------------------------------------------------

    def run(self, script: str, *arguments: object) -> Any:  # noqa: ANN401 - whatever it returns
        """The result of a function's body in the page."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def run_async(self, script: str, *arguments: object) -> Any:  # noqa: ANN401 - as above
        """The same, of one that calls its last argument with the result."""
        return self._call("POST", "/execute/async", {"script": script, "args": list(arguments)})

    def wait_for(self, condition: str, *arguments: object) -> Any:  # noqa: ANN401 - as above
        """Wait until an expression is true, and give its value."""
        return until(
            lambda: self.run(f"return {condition}", *arguments),
            lambda: f"{condition}\n{self.complaints()}",
        )

    def complaints(self) -> list[str]:
        """What the browser wrote to its console since the last time: errors, refusals."""
        return [entry["message"] for entry in self._call("POST", "/se/log", {"type": "browser"})]

    def devtools(self, command: str, **parameters: object) -> Any:  # noqa: ANN401 - as above
        """A command of Chromium's own protocol."""
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def prefer(self, scheme: str) -> None:
        """Prefer `dark` or `light`, as a system's setting does."""
        self.devtools(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )

    def screenshot(self, path: Path) -> None:
        """Write what is to be seen."""
        path.write_bytes(base64.b64decode(self._call("GET", "/screenshot")))


def sign_in(browser: Browser, token: str) -> None:
    """Give the console the token that it asks for."""
    browser.wait_for("document.getElementById('ask').open")
    browser.press(token, "Enter")
    browser.wait_for("document.getElementById('connection').dataset.state === 'live'")
