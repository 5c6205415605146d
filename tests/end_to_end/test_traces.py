"""Traces of a whole server: files and collectors, both protocols, ensembles, explanations, and what must not fail."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from bench.server import ServerProcess, wait_for
from kernel.tools.trace import ReadTrace, read_traces
from tests.end_to_end.traced_models import AROUND, CALLER, CALLS, PLUS_ONE, TENSORS, flags, infer, names, ways
from tests.kernel.records.collector import Collector

if TYPE_CHECKING:
    from pathlib import Path

    from tests.end_to_end.conftest import WriteModel

COMPUTE = ["COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]
HTTP = ["HTTP_RECV_START", "HTTP_RECV_END", "REQUEST_START", "QUEUE_START", *COMPUTE, "INFER_RESPONSE_COMPLETE",
        "REQUEST_END", "HTTP_SEND_START", "HTTP_SEND_END"]  # fmt: skip


TWICE = """
platform: "ensemble"
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
ensemble_scheduling { step [
  { model_name: "plus_one" model_version: -1
    input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "mid" } },
  { model_name: "plus_one" model_version: -1
    input_map { key: "IN" value: "mid" } output_map { key: "OUT" value: "OUT" } }
] }
"""


@pytest.fixture
def models(write_model: WriteModel, tmp_path: Path) -> Path:
    write_model("plus_one", TENSORS, PLUS_ONE)
    write_model("calls", TENSORS, CALLS)
    for name, config in (("twice", TWICE), ("around", AROUND)):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(config)
    return tmp_path


def change(server: ServerProcess, settings: dict[str, Any], model: str = "") -> dict[str, Any]:
    path = f"/v2/models/{model}/trace/setting" if model else "/v2/trace/setting"
    request = urllib.request.Request(f"http://{server.url}{path}", json.dumps(settings).encode(), method="POST")
    with urllib.request.urlopen(request) as response:
        found: dict[str, Any] = json.load(response)
        return found


def shown(server: ServerProcess) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(server.get("/v2/trace/setting")[1])
    return found


def read(path: Path) -> list[ReadTrace]:
    return read_traces("the file", path.read_bytes())


def ids(path: Path) -> list[str]:
    """Return the ids of the requests in a file, which is JSON at any time; none while it does not exist."""
    return [trace.request_id for trace in read(path)] if path.exists() else []


def metric(server: ServerProcess, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", server.get("/metrics", server.metrics_port)[1], re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_requests_over_both_protocols_are_traced_to_a_file_with_their_tensors(models: Path, tmp_path: Path) -> None:
    grpc = pytest.importorskip("tritonclient.grpc")
    file = tmp_path / "traces.json"
    large = np.arange(5000, dtype=np.float32)
    with ServerProcess(models, *flags("rate=1", "level=TIMESTAMPS", "level=TENSORS", f"triton,file={file}")) as server:
        assert infer(server, "plus_one", [1, 2.5], "http")[0] == 200
        with grpc.InferenceServerClient(server.grpc_url) as client:
            tensor = grpc.InferInput("IN", [5000], "FP32")
            tensor.set_data_from_numpy(large)
            assert client.infer("plus_one", [tensor], request_id="grpc").as_numpy("OUT")[7] == 8
        wait_for(lambda: ids(file) == ["http", "grpc"])
        assert metric(server, "naiad_traces_total") == 2
    over_http, over_grpc = read(file)
    assert names(over_http) == HTTP
    assert names(over_grpc) == [
        name.replace("HTTP_RECV", "GRPC_WAITREAD").replace("HTTP_SEND", "GRPC_SEND") for name in HTTP
    ]
    assert [(activity, each["name"], each["data"], each["shape"]) for activity, each in over_http.tensors] == [
        ("TENSOR_QUEUE_INPUT", "IN", "1,2.5", "2"), ("TENSOR_BACKEND_OUTPUT", "OUT", "2,3.5", "2"),
    ]  # fmt: skip
    [(_, given), (_, made)] = over_grpc.tensors
    assert (given["data"][:8], made["data"][:8]) == ("0,1,2,3,", "1,2,3,4,")
    assert given["note"] == "the first 1024 elements of 20000 bytes"


def test_the_steps_of_an_ensemble_are_its_children_and_errors_are_traced(models: Path, tmp_path: Path) -> None:
    file = tmp_path / "traces.json"
    with ServerProcess(models, *flags("rate=1", "level=TIMESTAMPS", f"triton,file={file}")) as server:
        assert infer(server, "twice", [1], "good")[0] == 200
        assert infer(server, "twice", [-2], "bad")[0] == 500
    good, bad = read(file)
    assert [name for name in names(good) if name in COMPUTE] == []
    assert [(child.title, names(child)) for child in good.children] == [
        ("plus_one:1", ["REQUEST_START", "QUEUE_START", *COMPUTE, "REQUEST_END"])
    ] * 2
    assert [child.error for child in bad.children] == ["", "minus one"]
    assert "minus one" in bad.error
    assert names(bad)[-1] == "HTTP_SEND_END"


@pytest.mark.parametrize("ends", ["call", "connection"])
def test_a_request_whose_client_has_gone_is_traced_to_its_end(models: Path, tmp_path: Path, ends: str) -> None:
    grpc = pytest.importorskip("tritonclient.grpc")
    errors = pytest.importorskip("tritonclient.utils")
    file = tmp_path / "traces.json"
    with ServerProcess(models, *flags("rate=1", "level=TIMESTAMPS", f"triton,file={file}")) as server:
        client = grpc.InferenceServerClient(server.grpc_url)
        tensor = grpc.InferInput("IN", [1], "FP32")
        tensor.set_data_from_numpy(np.array([-5], np.float32))
        if ends == "call":
            assert client.is_server_live()  # it is connected
            with pytest.raises(errors.InferenceServerException, match="Deadline Exceeded"):
                client.infer("plus_one", [tensor], request_id="gone", client_timeout=2)
        else:
            client.async_infer("plus_one", [tensor], callback=lambda result, error: None, request_id="gone")
            wait_for(lambda: metric(server, 'naiad_inference_in_flight_requests{model="plus_one",version="1"}') == 1)
            client.close()
        wait_for(lambda: ids(file) == ["gone"])
        assert {"REQUEST_END", "GRPC_SEND_END", "COMPUTE_END"} <= set(names(read(file)[0]))
        client.close()


def test_settings_take_effect_with_the_next_request_and_counts_go_down(models: Path, tmp_path: Path) -> None:
    file = tmp_path / "traces.json"
    with ServerProcess(models, *flags("rate=1", f"triton,file={file}")) as server:
        infer(server, "plus_one", [1], "off")
        assert change(server, {"trace_level": ["TIMESTAMPS"], "trace_count": "2"})["trace_count"] == "2"
        change(server, {"trace_level": ["OFF"]}, "twice")
        infer(server, "plus_one", [1], "first")
        infer(server, "twice", [1], "left out")
        assert change(server, {})["trace_count"] == "1"
        infer(server, "plus_one", [1], "second")
        infer(server, "plus_one", [1], "too many")
        # Triton 2.51 shows the same: nothing is traced any more because the count is 0, and the level stays.
        used_up = shown(server)
        assert (used_up["trace_count"], used_up["trace_level"]) == ("0", ["TIMESTAMPS"])
        assert change(server, {"trace_count": None, "log_frequency": "1"})["trace_count"] == "-1"
        infer(server, "plus_one", [1], "third")
        infer(server, "plus_one", [1], "fourth")
    assert ids(tmp_path / "traces.json.0") == ["first", "second"]
    assert ids(tmp_path / "traces.json.1") == ["third"]
    assert ids(tmp_path / "traces.json.2") == ["fourth"]
    assert not file.exists()


def test_a_file_that_cannot_be_written_ends_tracing_and_not_serving(models: Path, tmp_path: Path) -> None:
    folder = tmp_path / "later"
    with ServerProcess(models, *flags("rate=1", "level=TIMESTAMPS", f"triton,file={folder}/t")) as server:
        assert infer(server, "plus_one", [1], "lost")[0] == 200
        wait_for(lambda: "tracing stops until its settings are changed" in server.log)
        assert (shown(server)["trace_count"], shown(server)["trace_level"]) == ("0", ["TIMESTAMPS"])
        assert infer(server, "plus_one", [1], "not traced")[0] == 200
        assert metric(server, "naiad_traces_lost_total") == 1
        folder.mkdir()
        change(server, {"trace_rate": "1"})
        assert infer(server, "plus_one", [1], "written")[0] == 200
        wait_for(lambda: ids(folder / "t") == ["written"])


def test_a_killed_server_leaves_complete_json(models: Path, tmp_path: Path) -> None:
    file = tmp_path / "traces.json"
    with ServerProcess(models, *flags("rate=1", "level=TIMESTAMPS", f"triton,file={file}")) as server:
        for number in range(20):
            infer(server, "plus_one", [1], str(number))
        wait_for(lambda: bool(ids(file)))
        server.stop(0)
    assert ids(file) == [str(number) for number in range(len(ids(file)))]


def test_the_trace_of_a_client_goes_on_through_an_ensemble_to_a_model(models: Path) -> None:
    pytest.importorskip("opentelemetry.sdk")
    with Collector() as collector, ServerProcess(
        models, *flags("rate=0", "level=TIMESTAMPS", "mode=opentelemetry", f"opentelemetry,url={collector.url}",
                       "opentelemetry,bsp_schedule_delay=50", "opentelemetry,resource=service.name=shop")
    ) as server:  # fmt: skip
        assert infer(server, "plus_one", [1], "not recorded by its client")[0] == 200
        assert infer(server, "twice", [1], traceparent=CALLER, tracestate="a=b")[0] == 200
        spans = collector.wait(6)
        direct = infer(server, "plus_one", [1], traceparent=CALLER)[1]["parameters"]["context"]
        assert json.loads(direct)["traceparent"].startswith(CALLER[:36])
        collector.wait(9)
    assert {span.trace_id for span in spans} == {CALLER[3:35]}
    assert {span.resource["service.name"] for span in spans} == {"shop"}
    inner = "plus_one < twice < InferRequest"
    assert sorted(ways(spans[:6])) == sorted(
        (way, CALLER[36:52]) for way in ["InferRequest", "twice < InferRequest", *[inner, f"compute < {inner}"] * 2]
    )


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_trace_of_a_client_goes_on_to_a_model_that_a_model_in_an_ensemble_calls(
    models: Path, protocol: str
) -> None:
    pytest.importorskip("opentelemetry.sdk")
    with Collector() as collector, ServerProcess(
        models, *flags("rate=0", "level=TIMESTAMPS", "mode=opentelemetry", f"opentelemetry,url={collector.url}",
                       "opentelemetry,bsp_schedule_delay=50")
    ) as server:  # fmt: skip
        if protocol == "http":
            assert infer(server, "around", [1], traceparent=CALLER)[1]["outputs"][0]["data"] == [3]
        else:
            grpc = pytest.importorskip("tritonclient.grpc")
            with grpc.InferenceServerClient(server.grpc_url) as client:
                tensor = grpc.InferInput("IN", [1], "FP32")
                tensor.set_data_from_numpy(np.ones(1, np.float32))
                response = client.infer("around", [tensor], headers={"traceparent": CALLER})
                assert response.as_numpy("OUT").tolist() == [3]
        spans = collector.wait(6)
    assert {span.trace_id for span in spans} == {CALLER[3:35]}
    outer, around = "around < InferRequest", "calls < around < InferRequest"
    assert sorted(way for way, _ in ways(spans)) == sorted(
        ["InferRequest", outer, around, f"compute < {around}", f"plus_one < {around}",
         f"compute < plus_one < {around}"]
    )  # fmt: skip
    assert {ends for _, ends in ways(spans)} == {CALLER[36:52]}
    by_name = {span.name: span for span in spans if span.name != "compute"}
    assert by_name["calls"].attributes["triton.trace_parent_id"] == by_name["around"].attributes["triton.trace_id"]
    assert by_name["plus_one"].attributes["triton.trace_parent_id"] == by_name["calls"].attributes["triton.trace_id"]


def test_calls_between_models_are_children_where_the_trace_is_passed_on(models: Path, tmp_path: Path) -> None:
    file = tmp_path / "traces.json"
    with ServerProcess(models, *flags("rate=1", "level=TIMESTAMPS", f"triton,file={file}")) as server:
        assert infer(server, "calls", [1], "good")[1]["outputs"][0]["data"] == [3]
        assert infer(server, "calls", [-1], "bad")[0] == 500
    good, bad = read(file)
    assert [(child.title, child.request_id, names(child)) for child in good.children] == [
        ("plus_one:1", "traced", ["REQUEST_START", "QUEUE_START", *COMPUTE, "REQUEST_END"])
    ]
    assert [(child.title, child.error) for child in bad.children] == [("plus_one:1", "minus one")]
    assert bad.error


def test_a_collector_that_is_down_costs_only_the_spans(models: Path) -> None:
    pytest.importorskip("opentelemetry.sdk")
    with Collector(status=400) as collector, ServerProcess(
        models, *flags("rate=1", "level=TIMESTAMPS", "mode=opentelemetry", f"opentelemetry,url={collector.url}",
                       "opentelemetry,bsp_schedule_delay=50")
    ) as server:  # fmt: skip
        assert infer(server, "plus_one", [1])[0] == 200
        wait_for(lambda: metric(server, "naiad_traces_lost_total") == 1)
        wait_for(lambda: f"the collector at '{collector.url}' did not take them" in server.log)
        assert infer(server, "plus_one", [1])[0] == 200


def test_clients_can_ask_how_their_request_travelled(models: Path) -> None:
    grpc = pytest.importorskip("tritonclient.grpc")
    with ServerProcess(models) as server:
        for _ in range(2):  # the second one is recognised by its JSON
            parameters = infer(server, "plus_one", [1], X_Naiad_Explain="1")[1]["parameters"]
            assert parameters["naiad_instance"] == "plus_one_0"
            assert parameters["naiad_batch_closed_by"] == "alone"
            assert parameters["naiad_total_ns"] >= parameters["naiad_compute_infer_ns"] > 0
        assert infer(server, "plus_one", [1])[1]["parameters"] == {"context": ""}
        assert infer(server, "twice", [1], X_Naiad_Explain="1")[1]["parameters"]["naiad_compute_infer_ns"] > 0
        with grpc.InferenceServerClient(server.grpc_url) as client:
            tensor = grpc.InferInput("IN", [1], "FP32")
            tensor.set_data_from_numpy(np.ones(1, np.float32))
            for _ in range(2):
                response = client.infer("plus_one", [tensor], parameters={"naiad_explain": True}).get_response()
                assert response.parameters["naiad_batch_size"].int64_param == 1
                assert "naiad_explain" not in response.parameters
