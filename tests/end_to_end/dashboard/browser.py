"""Drives a headless Chromium by its DevTools protocol, for tests of pages."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import aiohttp

if TYPE_CHECKING:
    from types import TracebackType

#: Names under which distributions have it.
_NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")

_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio",
    "--remote-debugging-port=0", "--renderer-process-limit=1",
)  # fmt: skip

#: How long the browser may take to start, and a condition to come true, in seconds.
START_S = 60.0
WAIT_S = 60.0


def find_chromium() -> str | None:
    """Return the path of a Chromium; None if there is none."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser with one page."""

    def __init__(self, path: str) -> None:
        self._path = path
        #: What the page has written to its console as an error, and what it could not load.
        self.complaints: list[str] = []
        self._last_id = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session = ""

    async def __aenter__(self) -> Self:
        self._stack = contextlib.AsyncExitStack()
        try:
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
            process = await asyncio.create_subprocess_exec(
                self._path, *_FLAGS, f"--user-data-dir={folder}", "about:blank",
                stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
            self._stack.push_async_callback(_end, process)
            port_file = folder / "DevToolsActivePort"
            async with asyncio.timeout(START_S):
                while not (port_file.exists() and port_file.read_text().count("\n")):  # noqa: ASYNC110 - a file
                    await asyncio.sleep(0.05)
            port, path = port_file.read_text().splitlines()
            client = await self._stack.enter_async_context(aiohttp.ClientSession())
            url = f"ws://127.0.0.1:{port}{path}"
            self._socket = await self._stack.enter_async_context(client.ws_connect(url, max_msg_size=0))
            tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
            reader = tasks.create_task(self._read())
            self._stack.callback(reader.cancel)
            target = (await self.call("Target.createTarget", url="about:blank"))["targetId"]
            self._session = (await self.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                await self.call(f"{domain}.enable")
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": arguments}
        if self._session:
            message["sessionId"] = self._session
        self._waiting[self._last_id] = waiting = asyncio.get_running_loop().create_future()
        await self._socket.send_str(json.dumps(message))
        async with asyncio.timeout(WAIT_S):
            result = await waiting
        assert "error" not in result, f"{method}: {result['error']}"
        return dict(result["result"])

    async def _read(self) -> None:
        async for message in self._socket:
            value = json.loads(message.data)
            if "id" in value:
                waiting = self._waiting.pop(value["id"], None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(value)
            else:
                self._note(value["method"], value["params"])

    def _note(self, event: str, values: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            details = values["exceptionDetails"]
            self.complaints.append(str(details.get("exception", {}).get("description", details["text"])))
        elif event == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{values['entry']['text']} {values['entry'].get('url', '')}")
        elif event == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
            self.complaints.append(str([each.get("value") for each in values["args"]]))

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)

    async def value(self, expression: str) -> Any:
        """Return the value of an expression in the page, awaited if it is a promise."""
        result = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait until an expression in the page is true, and return its value.

        While a page is being replaced by the next one, an expression has no value: that counts as not true.
        """
        found: Any = None
        failure = ""
        try:
            async with asyncio.timeout(WAIT_S):
                while not found:
                    try:
                        found = await self.value(f"((found) => (found instanceof Node ? true : found))({expression})")
                    except AssertionError as error:
                        failure = str(error)
                    await asyncio.sleep(0 if found else 0.1)
        except TimeoutError:
            text = await self.value("document.body.innerText")
            raise AssertionError(
                f"not true in {WAIT_S:.0f} s: {expression}\n{failure}\n{self.complaints}\n{text}"
            ) from None
        return found

    async def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27}
        text = {"text": "\r"} if key == "Enter" else {}
        arguments: dict[str, Any] = {
            "key": key, "code": key, "windowsVirtualKeyCode": codes[key], "modifiers": 8 if shift else 0,
        }  # fmt: skip
        await self.call("Input.dispatchKeyEvent", type="keyDown", **arguments, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **arguments)

    async def picture(self, path: Path, *, width: int, height: int, dark: bool = False, whole: bool = False) -> None:
        """Write a PNG of the page."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        await asyncio.sleep(0.3)
        found = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(10):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
