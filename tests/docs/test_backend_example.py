"""docs/backends.md, followed: files and packages that are not ours add backends, and models use them."""

from __future__ import annotations

import ast
import json
import os
import re
import urllib.request
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.http

from backends.registry import BUILT_IN, known_backends
from bench.server import ServerProcess, wait_for
from kernel.embedding import EmbeddedServer
from shm.cuda import BINDINGS_VARIABLE
from tests.docs.documents import ROOT, code_blocks, code_spans, document, section, table
from tests.docs.packages import install
from tests.kernel.records.collector import Collector

if TYPE_CHECKING:
    from pathlib import Path

PAGE = document("docs/backends.md")
[CONFIG] = code_blocks(PAGE, "pbtxt")


def python(heading: str) -> str:
    [block] = code_blocks(section(PAGE, heading), "python")
    return block.text


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_model(folder: Path, name: str, config: str, **files: str) -> None:
    (folder / "models" / name / "1").mkdir(parents=True)
    write(folder / "models" / name / "config.pbtxt", config)
    for file, text in files.items():
        write(folder / "models" / name / f"{file}.py", text)


def served(server: ServerProcess, model: str) -> tuple[dict[str, Any], str]:
    """Send three requests to a model, one with two rows. Return its statistics and the metrics page."""
    for rows in (1, 1, 2):
        tensor = {"name": "IN", "datatype": "FP32", "shape": [rows, 2], "data": [[1, 2]] * rows}
        body = json.dumps({"inputs": [tensor]}).encode()
        with urllib.request.urlopen(f"http://{server.url}/v2/models/{model}/infer", body) as response:
            [output] = json.load(response)["outputs"]
        assert output["data"] == [2.5, 5] * rows
    with urllib.request.urlopen(f"http://{server.url}/v2/models/{model}/stats") as response:
        [statistics] = json.load(response)["model_stats"]
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics") as response:
        return statistics, response.read().decode()


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], str]]:
    """Return the statistics and the metrics of both examples."""
    folder = tmp_path_factory.mktemp("backends")
    write_model(folder, "quiet", CONFIG.text, backend=python("A backend without reports"))
    write_model(folder, "loud", CONFIG.text, backend=python("A backend that reports everything"))
    with ServerProcess(folder / "models") as server:
        return {name: served(server, name) for name in ("quiet", "loud")}


def counts(statistics: dict[str, Any]) -> dict[str, int]:
    return {name: part["count"] for name, part in statistics["inference_stats"].items()}


@pytest.mark.parametrize("name", ["quiet", "loud"])
def test_requests_batches_queue_and_compute_are_shown_whatever_is_reported(
    shown: dict[str, tuple[dict[str, Any], str]], name: str
) -> None:
    statistics, page = shown[name]
    assert (statistics["inference_count"], statistics["execution_count"]) == (4, 3)
    found = counts(statistics)
    assert [found[each] for each in ("success", "fail", "queue", "compute_infer")] == [3, 0, 3, 3]
    inference = statistics["inference_stats"]
    assert inference["queue"]["ns"] > 0
    assert inference["compute_infer"]["ns"] > 0
    assert f'nv_inference_request_success{{model="{name}",version="1"}} 3' in page
    assert f'nv_inference_count{{model="{name}",version="1"}} 4' in page


def test_what_is_not_reported_is_measured_around_execute(shown: dict[str, tuple[dict[str, Any], str]]) -> None:
    statistics, page = shown["quiet"]
    assert [batch["batch_size"] for batch in statistics["batch_stats"]] == [1, 2]
    assert statistics["response_stats"] == {}
    assert statistics["memory_usage"] == []
    assert "instance_memory" not in statistics
    assert 'naiad_worker_memory_bytes{instance="quiet_0_0",model="quiet",version="1"}' in page or (
        'naiad_worker_memory_bytes{instance="quiet_0",model="quiet",version="1"}' in page
    )


def test_what_is_reported_is_shown_everywhere(shown: dict[str, tuple[dict[str, Any], str]]) -> None:
    statistics, page = shown["loud"]
    assert [batch["batch_size"] for batch in statistics["batch_stats"]] == [1]  # it says so: `len(requests)`
    responses = statistics["response_stats"]
    assert {key: part["success"]["count"] for key, part in responses.items()} == {"0": 3}
    assert statistics["inference_stats"]["compute_input"]["ns"] == 0  # start and ready are the same
    assert statistics["memory_usage"] == [{"type": "CPU", "id": 0, "byte_size": 4096}]
    [(instance, uses)] = statistics["instance_memory"].items()
    assert uses == statistics["memory_usage"]
    labels = f'device="0",instance="{instance}",kind="CPU",model="loud",version="1"'
    assert f"naiad_model_instance_memory_bytes{{{labels}}} 4096" in page


def test_activities_with_a_start_and_an_end_are_spans_in_that_of_the_execution(folder: Path) -> None:
    pytest.importorskip("opentelemetry.sdk")
    write_model(folder, "loud", CONFIG.text, backend=python("A backend that reports everything"))
    with Collector() as collector:
        settings = (
            "mode=opentelemetry", "level=TIMESTAMPS", "rate=1", f"opentelemetry,url={collector.url}",
            "opentelemetry,bsp_schedule_delay=50",
        )  # fmt: skip
        with ServerProcess(folder / "models", *(f"--trace-config={each}" for each in settings)) as server:
            served(server, "loud")
            spans = collector.wait(12)
    names = {span.id: span.name for span in spans}
    parents = [names[span.parent_id] for span in spans if span.name == "SCALE"]
    assert parents == ["compute"] * 3
    assert all(span.events == ["SCALE_START", "SCALE_END"] for span in spans if span.name == "SCALE")


def test_both_examples_are_short() -> None:
    for heading, limit in (("A backend without reports", 10), ("A backend that reports everything", 20)):
        lines = [line for line in python(heading).splitlines() if line and "import" not in line]
        assert len(lines) <= limit


def test_a_package_adds_a_backend_by_its_entry_point(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = folder / "packages"
    packages.mkdir()
    install(section(PAGE, "The seven steps"), packages)
    monkeypatch.syspath_prepend(packages)  # for the kernel's table of backends
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(packages))))  # for workers
    assert known_backends()["table"] == "table_backend:TableBackend"
    write_model(
        folder,
        "squares",
        """
        backend: "table"
        input [ { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] } ]
        output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
        parameters { key: "table" value { string_value: "squares" } }
        """,
    )
    with EmbeddedServer(folder / "models") as server:
        assert server.infer("squares", {"IN": np.array([3, 2], np.int32)})["OUT"].tolist() == [9, 4]


def test_the_example_on_a_gpu_copies_nothing_between_host_and_device(
    folder: Path, monkeypatch: pytest.MonkeyPatch, regions: Any
) -> None:
    monkeypatch.setenv(BINDINGS_VARIABLE, "tests.fake_cuda")
    write_model(folder, "copies", CONFIG.text.replace('"scale"', '"copies"') + "instance_group [ { kind: KIND_GPU } ]",
                backend=python("Tensors on a GPU"))  # fmt: skip
    with ServerProcess(folder / "models") as server:
        client = tritonclient.http.InferenceServerClient(server.url)
        memory = {name: regions.create_shared_memory_region(name, 16, 0) for name in ("in", "out")}
        for name, each in memory.items():
            client.register_cuda_shared_memory(name, regions.get_raw_handle(each), 0, 16)
        regions.set_shared_memory_region(memory["in"], [np.array([1, 2, 3, 4], np.float32)])
        given = tritonclient.http.InferInput("IN", [2, 2], "FP32")
        given.set_shared_memory("in", 16)
        wanted = tritonclient.http.InferRequestedOutput("OUT")
        wanted.set_shared_memory("out", 16)
        client.infer("copies", [given], outputs=[wanted])
        assert regions.get_contents_as_numpy(memory["out"], np.float32, [4]).tolist() == [1, 2, 3, 4]
        with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics") as response:
            page = response.read().decode()
        assert re.search(r'^naiad_copied_tensors_total{model="copies"[^}]*} 0$', page, re.MULTILINE), page
        client.close()


def test_a_folder_of_backends_has_files_and_python_based_backends(folder: Path) -> None:
    write(folder / "backends" / "table" / "backend.py", python("The seven steps"))
    write(folder / "backends" / "greeter" / "model.py", python("Python-based backends"))
    write_model(folder, "greets", 'backend: "greeter" parameters { key: "greeting" value { string_value: "Hello" } }')
    with ServerProcess(folder / "models", f"--backend-directory={folder / 'backends'}") as server:
        body = {"inputs": [{"name": "NAME", "datatype": "BYTES", "shape": [1], "data": ["you"]}]}
        with urllib.request.urlopen(
            f"http://{server.url}/v2/models/greets/infer", json.dumps(body).encode()
        ) as response:
            assert json.load(response)["outputs"][0]["data"] == ["Hello, you"]
        wait_for(lambda: str(folder / "backends" / "greeter" / "model.py") in "".join(server.log.split()))


def test_the_table_names_every_backend_that_is_built_in() -> None:
    introduction = PAGE.partition("\n## ")[0]
    assert {name for row in table(introduction) for name in code_spans(row[0])} == set(BUILT_IN)


def test_the_examples_in_the_tree_are_short() -> None:
    for path in sorted((ROOT / "backends" / "builtin").glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                assert (node.end_lineno or 0) - node.lineno < 80, f"{path.name}: {node.name}"
