"""Headless Chromium, driven through chromedriver's HTTP interface (W3C WebDriver)."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
WHY_NOT = (
    None
    if CHROMIUM and DRIVER
    else ("no Chromium here: apt-get install -y chromium chromium-driver")
)
# once: an opener reads the certificates of all authorities
_WITHOUT_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1400,1000",
)


class Browser:
    """One window. `profile`: a fresh directory."""

    def __init__(self, profile: Path):
        port = None
        while port is None:  # the port that it chooses may be taken by then: it ends
            self._driver = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True)
            port = next(
                (
                    found[1]
                    for line in self._driver.stdout
                    if (found := re.search(r"successfully on port (\d+)", line))
                ),
                None,
            )
        self._base = f"http://127.0.0.1:{port}/session"
        options = {"binary": CHROMIUM, "args": [*_FLAGS, f"--user-data-dir={profile}"]}
        opened = self._call(
            "POST",
            "",
            capabilities={
                "alwaysMatch": {
                    "goog:chromeOptions": options,
                    "goog:loggingPrefs": {"browser": "ALL"},
                }
            },
        )
        self._base += f"/{opened['sessionId']}"

    def close(self) -> None:
        self._call("DELETE", "")
        self._driver.terminate()
        self._driver.wait()

    def open(self, page: Path) -> None:
        self._call("POST", "/url", url=page.absolute().as_uri())

    def run(self, script: str, *arguments: Any) -> Any:
        """What `script` returns; a result must be JSON."""
        return self._call("POST", "/execute/sync", script=script, args=list(arguments))

    def console(self) -> list[str]:
        """Messages since the last call."""
        return [entry["message"] for entry in self._call("POST", "/se/log", type="browser")]

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self._call("POST", "/goog/cdp/execute", cmd=command, params=parameters)

    def screenshot(self, to: Path) -> None:
        """The whole page."""
        found = self.devtools("Page.captureScreenshot", captureBeyondViewport=True)
        to.write_bytes(base64.b64decode(found["data"]))

    def _call(self, method: str, path: str, **body: Any) -> Any:
        data = json.dumps(body).encode() if method == "POST" else None
        request = urllib.request.Request(
            self._base + path, data, method=method, headers={"Content-Type": "application/json"}
        )
        with _WITHOUT_PROXY.open(request, timeout=1200) as answer:
            return json.load(answer)["value"]
