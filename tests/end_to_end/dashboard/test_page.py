"""The page at / in a real browser: it shows what happens on a whole server, and sends requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bench.server import ServerProcess
from kernel.options import CHAT_DEMO_REPOSITORY, DEMO_REPOSITORY
from tests.end_to_end.dashboard.browser import Browser, find_chromium

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from tests.end_to_end.conftest import WriteModel

pytestmark = [
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed (apt-get install chromium)"),
    pytest.mark.timeout(180),
]

#: Fails for negative numbers, with a text that must not become HTML.
_STRICT = """
class TritonPythonModel:
    def initialize(self, args):
        print("<b>bold</b> weights loaded")

    def execute(self, requests):
        found = []
        for request in requests:
            values = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            if values[0] < 0:
                error = pb_utils.TritonError("negative <img src=x onerror=alert(1)>")
                found.append(pb_utils.InferenceResponse(error=error))
            else:
                found.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", values)]))
        return found
"""

#: Says how many bytes it was sent.
_SIZE = """
class TritonPythonModel:
    def execute(self, requests):
        found = []
        for request in requests:
            data = pb_utils.get_input_tensor_by_name(request, "FILE").as_numpy()
            text = np.array([b"%d bytes" % len(data[0])], dtype=object)
            found.append(pb_utils.InferenceResponse([pb_utils.Tensor("SIZE", text)]))
        return found
"""

#: Checks pages for accessibility: `npm install --no-save axe-core` in this checkout.
_AXE = Path(__file__).parents[3] / "node_modules" / "axe-core" / "axe.min.js"

#: Returns the text of an element, "" if there is none.
_TEXT = "(document.querySelector({!r})?.innerText ?? '')"


@pytest.fixture
def repository(write_model: WriteModel) -> Path:
    vector = 'name: "{}" data_type: TYPE_FP32 dims: [ 2 ]'
    io = f"input [ {{ {vector.format('IN')} }} ] output [ {{ {vector.format('OUT')} }} ]"
    write_model("strict", io, _STRICT)
    text = 'name: "{}" data_type: TYPE_STRING dims: [ 1 ]'
    io = f"input [ {{ {text.format('FILE')} }} ] output [ {{ {text.format('SIZE')} }} ]"
    folder = write_model("size", io, _SIZE)
    shutil.copytree(DEMO_REPOSITORY / "digits", folder / "digits")
    shutil.copytree(DEMO_REPOSITORY / "count", folder / "count")
    shutil.copytree(CHAT_DEMO_REPOSITORY / "chat", folder / "chat")
    return folder


@pytest.fixture
def server(repository: Path) -> Iterator[ServerProcess]:
    with ServerProcess(repository, "--model-control-mode=explicit", "--load-model=*", "--openai-port=0") as server:
        yield server


def look(server: ServerProcess, test: Callable[[Browser], Awaitable[None]], address: str = "/") -> None:
    """Run `test` with the page open; it must have nothing to complain about."""

    async def run() -> None:
        path = find_chromium()
        assert path is not None
        async with Browser(path) as browser:
            await browser.open(f"http://{server.url}{address}")
            await browser.until("document.querySelectorAll('#models-body tr').length >= 4")
            await test(browser)
            assert browser.complaints == []

    asyncio.run(run())


def infer(server: ServerProcess, model: str, body: Any) -> None:
    request = urllib.request.Request(f"http://{server.url}/v2/models/{model}/infer", json.dumps(body).encode())
    with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(request) as response:
        response.read()


def row(model: str) -> str:
    """Return an expression: the text of a model's row."""
    found = f"[...document.querySelectorAll('#models-body tr')].find(r => r.innerText.startsWith('{model}'))"
    return f"({found}?.innerText ?? '')"


def model_button(model: str) -> str:
    """Return an expression: the button with a model's name."""
    return f"[...document.querySelectorAll('#models-body button')].find(b => b.innerText == '{model}')"


def test_figures_move_and_failed_requests_show_up_as_text(server: ServerProcess) -> None:
    async def test(browser: Browser) -> None:
        await browser.until("document.getElementById('server-state').innerText == 'ready'")
        number = json.loads(json.dumps({"name": "IN", "shape": [2], "datatype": "FP32", "data": [-1.0, 2.0]}))
        for _ in range(5):
            await asyncio.to_thread(infer, server, "strict", {"id": "bad one", "inputs": [number]})
        await browser.until(f"{_TEXT.format('#tiles')}.match(/Errors.s\\s+0\\.[1-9]/)")
        await browser.until(f"{row('strict')}.includes('5')")
        await browser.value(f"{model_button('strict')}.click()")
        failed = await browser.until(_TEXT.format("#failed .error"))
        assert "negative <img src=x onerror=alert(1)>" in failed
        assert "bad one on strict_0" in " ".join((await browser.value(_TEXT.format("#failed"))).split())
        assert (
            await browser.value("document.querySelectorAll('#failed svg.waterfall rect.stage-inference').length") == 1
        )
        await browser.until(f"{_TEXT.format('#log')}.includes('<b>bold</b> weights loaded')")
        assert await browser.value("document.querySelectorAll('#log b, #failed img').length") == 0

    look(server, test)


def test_a_digit_is_classified_through_the_form(server: ServerProcess) -> None:
    digit = json.loads((DEMO_REPOSITORY / "digit.json").read_text())["inputs"][0]["data"]

    async def test(browser: Browser) -> None:
        await browser.until("document.querySelector('#example textarea')")
        values = json.dumps(json.dumps(digit))
        await browser.value(f"document.querySelector('#example textarea').value = {values}")
        await browser.value("document.querySelector('#example .classes').value = 1")
        await browser.value("document.querySelector('#example button[type=submit]').click()")
        response = await browser.until(_TEXT.format("#response pre"))
        assert response.endswith(':6:six"]'), response
        assert "executed by digits_0" in await browser.value(_TEXT.format("#response"))

    look(server, test, "/dashboard#model=digits&version=1")


def test_a_file_is_sent_to_a_model_that_takes_bytes(server: ServerProcess) -> None:
    async def test(browser: Browser) -> None:
        await browser.until("document.querySelector('#example input[type=file]')")
        await browser.value("""(() => {
            const files = new DataTransfer();
            files.items.add(new File([new Uint8Array(70000)], 'sound.wav'));
            const drop = new DragEvent('drop', { dataTransfer: files, bubbles: true, cancelable: true });
            document.querySelector('#example fieldset').dispatchEvent(drop);
        })()""")
        await browser.until(f"{_TEXT.format('#example fieldset')}.includes('sound.wav, 68 KiB')")
        await browser.value("document.querySelector('#example button[type=submit]').click()")
        assert await browser.until(_TEXT.format("#response pre")) == '["70000 bytes"]'

    look(server, test, "/#model=size&version=1")


def test_a_model_that_streams_shows_each_response(server: ServerProcess) -> None:
    async def test(browser: Browser) -> None:
        await browser.until("document.querySelector('#example textarea')")
        await browser.value("document.querySelector('#example textarea').value = '3'")
        await browser.value("document.querySelector('#example button[type=submit]').click()")
        await browser.until(f"{_TEXT.format('#response')}.includes('3 responses in')")
        assert '"number":3' in await browser.value(_TEXT.format("#response pre"))

    look(server, test, "/#model=count&version=1")


def test_a_killed_worker_shows_up_and_its_instance_comes_back(server: ServerProcess) -> None:
    async def test(browser: Browser) -> None:
        process = f"{_TEXT.format('#instances td:nth-child(4)')}"
        pid = int(await browser.until(f"{process}.match(/^[0-9]+$/)?.[0]"))
        os.kill(pid, signal.SIGKILL)
        await browser.until(f"{_TEXT.format('#instances td:nth-child(7)')} == '1'")
        await browser.until(f"{process}.match(/^[0-9]+$/) && {process} != '{pid}'")
        await browser.until(f"{_TEXT.format('#tiles')}.includes('1 restart')")
        await browser.until(f"{_TEXT.format('#log')}.includes('was lost')")

    look(server, test, "/#model=strict&version=1")


def test_models_are_unloaded_and_loaded_with_the_keyboard(server: ServerProcess) -> None:
    async def test(browser: Browser) -> None:
        await browser.value("window.confirm = () => true")
        # From the table to the model, and from its title to its buttons.
        await browser.value(f"{model_button('size')}.focus()")
        await browser.press("Enter")
        await browser.until("document.activeElement.id == 'detail-title'")
        await browser.until("!document.getElementById('unload').hidden")
        await browser.press("Tab")
        await browser.press("Tab")
        assert await browser.value("document.activeElement.id") == "unload"
        await browser.press("Enter")
        await browser.until(f"{row('size')}.includes('UNAVAILABLE')")
        await browser.press("Tab", shift=True)
        assert await browser.value("document.activeElement.id") == "load"
        await browser.press("Enter")
        await browser.until(f"{row('size')}.includes('READY')")

    look(server, test)


def test_who_may_not_change_the_server_sees_no_buttons(repository: Path) -> None:
    flags = ("--model-control-mode=explicit", "--load-model=*", "--admin-access=key", "--admin-key=a-key")
    with ServerProcess(repository, *flags) as server:

        async def test(browser: Browser) -> None:
            await browser.until(
                "!document.getElementById('detail').hidden && document.querySelector('#example textarea')"
            )
            hidden = "['load', 'unload', 'settings-section', 'log'].every(id => document.getElementById(id).hidden)"
            assert await browser.value(hidden)
            await browser.value("document.getElementById('keys-open').click()")
            assert await browser.value("document.getElementById('key-header').value") == "admin-key"
            await browser.value("document.getElementById('key-value').value = 'a-key'")
            await browser.value("document.getElementById('keys-form').requestSubmit()")
            await browser.until("!document.getElementById('unload').hidden")
            await browser.until("!document.getElementById('settings-section').hidden")

        look(server, test, "/#model=digits&version=1")


def test_front_doors_in_processes_of_their_own_are_shown_and_their_restarts(repository: Path) -> None:
    with ServerProcess(repository, "--front-door-processes=2") as server:

        async def test(browser: Browser) -> None:
            states = "[...document.querySelectorAll('#doors .state')].map(each => each.innerText).join()"
            await browser.until(f"{states} == 'ready,ready'")
            process = "document.querySelector('#doors tr td:nth-child(5)').innerText"
            pid = await browser.value(process)
            os.kill(int(pid), signal.SIGKILL)
            await browser.until(f"{_TEXT.format('#doors-hint')}.includes('1 restart')")
            await browser.until(f"{states} == 'ready,ready' && {process} != '{pid}'")

        look(server, test)


def test_a_server_without_front_door_processes_has_no_table_of_them(server: ServerProcess) -> None:
    async def test(browser: Browser) -> None:
        await browser.until("document.getElementById('server-state').innerText == 'ready'")
        assert await browser.value("document.getElementById('doors-section').hidden")

    look(server, test)


def test_every_control_has_a_name_and_nothing_overflows_on_a_small_screen(server: ServerProcess) -> None:
    async def test(browser: Browser) -> None:
        await browser.until("document.querySelector('#example textarea')")
        await browser.call(
            "Emulation.setDeviceMetricsOverride", width=420, height=800, deviceScaleFactor=1, mobile=True
        )
        await browser.until("document.documentElement.scrollWidth <= 420")
        tree = (await browser.call("Accessibility.getFullAXTree"))["nodes"]
        roles = {"button", "textbox", "searchbox", "checkbox", "spinbutton", "combobox", "link", "table", "region"}
        nameless = [
            node["role"]["value"]
            for node in tree
            if not node["ignored"] and node["role"]["value"] in roles and not node.get("name", {}).get("value")
        ]
        assert [role for role in nameless if role != "table"] == []

    look(server, test, "/#model=digits&version=1")


def test_a_phone_shows_name_version_state_and_rate_also_beside_a_model_that_is_not_ready(
    repository: Path, write_model: WriteModel
) -> None:
    write_model("broken", 'input [{ name: "IN" data_type: TYPE_FP32 dims: [ 2 ] }]', "raise RuntimeError('no weights')")

    async def test(browser: Browser) -> None:
        await browser.call(
            "Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=1, mobile=True
        )
        await browser.until(f"{row('broken')}.includes('UNAVAILABLE')")
        head = "[...document.querySelectorAll('#models thead th')].find(h => h.innerText.startsWith('Requests/s'))"
        await browser.until(f"0 < {head}.getBoundingClientRect().right && {head}.getBoundingClientRect().right <= 390")

    with ServerProcess(repository, "--exit-on-error=false") as server:
        look(server, test)


#: The numbers of version 4 are others for the input 4.
_VERSIONS = """
class TritonPythonModel:
    def initialize(self, args):
        self.version = args["model_version"]

    def execute(self, requests):
        found = []
        for request in requests:
            values = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().copy()
            if self.version == "4":
                values += 0.002 if values[0] == 4 else 1e-6
            found.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", values)]))
        return found
"""


def test_traffic_between_versions_is_shown_with_a_rollout_a_shadow_and_rewards(
    repository: Path, write_model: WriteModel
) -> None:
    vector = 'name: "{}" data_type: TYPE_FP32 dims: [ 2 ]'
    io = f"input [ {{ {vector.format('IN')} }} ] output [ {{ {vector.format('OUT')} }} ] version_policy {{ all {{ }} }}"
    write_model("versions", io, _VERSIONS)
    folder = repository / "versions"
    (folder / "1").rename(folder / "3")
    shutil.copytree(folder / "3", folder / "4")
    (folder / "traffic.toml").write_text("labels = { stable = 3 }\nweights = { stable = 1 }\nfeedback = { }")

    def post(server: ServerProcess, path: str, body: Any) -> None:
        request = urllib.request.Request(f"http://{server.url}/v2/models/versions/{path}", json.dumps(body).encode())
        urllib.request.urlopen(request).close()

    def send(server: ServerProcess) -> None:
        post(server, "rollout", {"to": 4, "steps": [20, 50, 100], "guards": ["errors", "outputs"], "differences": 50})
        for number in range(120):
            tensor = {"name": "IN", "shape": [2], "datatype": "FP32", "data": [number % 20, 1]}
            infer(server, "versions", {"id": str(number), "inputs": [tensor]})
            post(server, "feedback", {"id": str(number), "reward": number % 3})

    async def test(browser: Browser) -> None:
        await asyncio.to_thread(send, serving)
        await browser.until(f"{_TEXT.format('#traffic')}.match(/[1-9]\\d* different/)")
        for part in (
            "Rollout of version 4 in place of 3", "at step 1 of 3 (20 %)", "canary version 4", "20 %", "Shadow: canary",
            "values", "Rewards", "inconclusive",
        ):  # fmt: skip
            await browser.until(f"{_TEXT.format('#traffic')}.includes({json.dumps(part)})")
        await browser.until("document.querySelector('.track-fill.second').getBoundingClientRect().width > 0")
        for pixels in (1280, 390):
            await browser.call(
                "Emulation.setDeviceMetricsOverride", width=pixels, height=900, deviceScaleFactor=1, mobile=False
            )
            await browser.until(f"document.documentElement.scrollWidth <= {pixels}")
        await browser.value(f"{model_button('digits')}.click()")
        await browser.until("document.getElementById('traffic-card').hidden")

    with ServerProcess(repository) as serving:
        look(serving, test, "/#model=versions&version=4")


@pytest.mark.skipif(not _AXE.exists(), reason="axe-core is not installed (npm install --no-save axe-core)")
@pytest.mark.parametrize(("dark", "width"), [(False, 1400), (True, 1400), (False, 400), (True, 400)])
def test_the_page_breaks_no_rule_of_accessibility(server: ServerProcess, dark: bool, width: int) -> None:
    number = {"name": "IN", "shape": [2], "datatype": "FP32", "data": [-1.0, 2.0]}
    infer(server, "strict", {"id": "bad one", "inputs": [number]})

    async def test(browser: Browser) -> None:
        await browser.until("document.querySelector('#failed .error') && document.querySelector('#example textarea')")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await browser.call("Emulation.setEmulatedMedia", features=[scheme])
        await browser.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        await browser.value(f"{_AXE.read_text()}; 0")
        found = await browser.value("""axe.run(document, { resultTypes: ['violations'] }).then(({ violations }) =>
            violations.map(({ id, nodes }) => `${id}: ${nodes.map((node) => node.html).join(' ')}`))""")
        assert found == []

    look(server, test, "/#model=strict&version=1")


async def say(browser: Browser, text: str) -> None:
    """Send a message in the chat box, when the last one has its whole response: before, the box takes none."""
    await browser.until("!document.querySelector('#chat button.main').disabled")
    await browser.value(
        f"(document.querySelector('#chat textarea').value = {json.dumps(text)}, "
        "document.querySelector('#chat button.main').click())"
    )


def test_a_chat_model_has_a_chat_box_and_others_have_none(server: ServerProcess) -> None:
    async def test(browser: Browser) -> None:
        await browser.value(f"{model_button('count')}.click()")
        await browser.until("document.querySelector('#example button.main')")
        assert await browser.value("document.getElementById('chat-card').hidden")
        await browser.value(f"{model_button('chat')}.click()")
        await browser.until("!document.getElementById('chat-card').hidden")
        await say(browser, "<b>hello</b> there")
        said = "document.getElementById('chat-said').innerText"
        await browser.until(f"{said}.includes('You said: <b>hello</b> there That is all I know.')")
        await browser.until(f"{_TEXT.format('#chat')}.includes('5 tokens, ')")
        assert await browser.value("document.querySelectorAll('#chat-said b').length") == 0
        await say(browser, "word " * 1000)
        await browser.until(f"{said}.includes('You said: word')")
        await browser.value("document.querySelectorAll('#chat .bar button')[1].click()")
        await browser.until(f"{_TEXT.format('#chat')}.includes('stopped')")
        await say(browser, "again")
        await browser.until(f"{said}.includes('You said: again')")

    look(server, test)


def test_what_a_model_has_generated_is_shown(server: ServerProcess) -> None:
    body = {"model": "chat", "messages": [{"role": "user", "content": "hello"}]}

    def ask() -> None:
        url = f"http://127.0.0.1:{server.openai_port}/v1/chat/completions"
        with urllib.request.urlopen(url, json.dumps(body).encode()) as response:
            response.read()

    async def test(browser: Browser) -> None:
        await browser.until("document.querySelector('#chat button.main')")
        assert await browser.value("document.getElementById('detail-language').hidden")
        await asyncio.to_thread(ask)
        await browser.until("!document.getElementById('detail-language').hidden")
        figures = "tokens generated 4 tokens of prompts 1 clients that left early 0"  # once all of it was generated
        await browser.until(f"{_TEXT.format('#language')}.split(/\\s+/).join(' ').includes({json.dumps(figures)})")
        await browser.until("document.querySelectorAll('#chart-tokens svg, #chart-first svg').length == 2")

    look(server, test, "/#model=chat&version=1")
