"""A headless Chromium, driven through a pipe by the DevTools protocol."""

import contextlib
import json
import os
import pathlib
import select
import shutil
import subprocess
import time

PATH = shutil.which("chromium") or shutil.which("google-chrome")
SECONDS = 120.0


class Browser:
    """One open page."""

    def __init__(self, reader, writer):
        """Opens an empty page in the browser behind the two ends of its pipes."""
        self._reader, self._writer = reader, writer
        self._count, self._left, self._session = 0, b"", None
        self.events = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        """The result of a method of the protocol."""
        self._count += 1
        sent = {"id": self._count, "method": method, "params": params}
        if self._session:
            sent["sessionId"] = self._session
        os.write(self._writer, json.dumps(sent).encode() + b"\0")
        while True:
            message = self._message()
            if message.get("id") == self._count:
                assert "error" not in message, (method, message)
                return message["result"]
            self.events.append(message)

    def open(self, path, width):
        """Loads a file into a window of this width; `events` are those of the load."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.events = []
        self.call("Page.navigate", url=pathlib.Path(path).as_uri())
        while not self.named("Page.loadEventFired"):
            self.events.append(self._message())

    def value(self, expression):
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def named(self, method):
        """The parameters of the events of this name since the page was opened."""
        return [x["params"] for x in self.events if x.get("method") == method]

    def _message(self):
        end = time.monotonic() + SECONDS
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._reader], [], [], end - time.monotonic())
            assert ready, "the browser does not answer"
            self._left += os.read(self._reader, 1 << 16)
        text, _, self._left = self._left.partition(b"\0")
        return json.loads(text)


@contextlib.contextmanager
def opened(folder):
    """A browser with its profile in an empty folder."""
    to_browser, commands = os.pipe()
    answers, from_browser = os.pipe()
    command = [PATH, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += ["--remote-debugging-pipe", f"--user-data-dir={folder}"]
    shell = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
    process = subprocess.Popen(
        ["bash", "-c", shell, "bash", *command],
        pass_fds=(to_browser, from_browser),
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Browser(answers, commands)
    finally:
        process.kill()
        process.wait()
        os.close(commands)
        os.close(answers)
