"""`naiad trace`: files of ours and of Triton, summarized and drawn."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from typing import TYPE_CHECKING, Any

import pytest

from kernel.errors import BadOption
from kernel.tools.trace import durations_of, perfetto, print_traces, read_traces, summarize, svg

if TYPE_CHECKING:
    from pathlib import Path

HTTP = {
    "HTTP_RECV_START": 0, "HTTP_RECV_END": 10, "REQUEST_START": 20, "QUEUE_START": 30, "COMPUTE_START": 50,
    "COMPUTE_INPUT_END": 60, "COMPUTE_OUTPUT_START": 90, "COMPUTE_END": 95, "INFER_RESPONSE_COMPLETE": 100,
    "REQUEST_END": 105, "HTTP_SEND_START": 110, "HTTP_SEND_END": 130,
}  # fmt: skip


def entries(id: int, events: dict[str, int], parent_id: int = 0, **more: object) -> list[dict[str, Any]]:
    """Return the objects of a trace, the description behind the first time, as servers write them."""
    described = {"id": id, "model_name": "m" if not parent_id else "step", "model_version": 1, **more}
    if parent_id:
        described["parent_id"] = parent_id
    times = [{"id": id, "timestamps": [{"name": name, "ns": ns * 1000}]} for name, ns in events.items()]
    return [times[0], described, *times[1:]]


def data(*traces: list[dict[str, Any]]) -> bytes:
    return json.dumps([entry for trace in traces for entry in trace]).encode()


def test_the_objects_of_a_trace_are_put_together_and_children_follow_their_parent() -> None:
    child = entries(2, {"REQUEST_START": 25, "REQUEST_END": 99}, 1)
    [root] = read_traces("f", data(child, entries(1, HTTP, request_id="r", error="no")))
    assert (root.id, root.title, root.request_id, root.error, root.protocol) == (1, "m:1", "r", "no", "HTTP")
    assert [(depth, trace.title) for depth, trace in root.walk()] == [(0, "m:1"), (1, "step:1")]
    assert root.events[0] == ("HTTP_RECV_START", 0)


def test_a_child_whose_parent_is_in_another_file_stands_alone() -> None:
    assert [trace.id for trace in read_traces("f", data(entries(2, {"REQUEST_START": 25}, 1)))] == [2]


@pytest.mark.parametrize(("wrong", "text"), [
    (b"[{", "'f' is not JSON: Input data was truncated"),
    (b'[{"id":1,"activity":"TENSOR_QUEUE_INPUT","tensor":{"data":""a""}}]', "Triton writes quotes in text tensors"),
    (b"{}", "'f' has no traces: expected a JSON list"),
    (b"[1]", "'f' has no traces: expected objects with an id"),
    (b'[{"id":3,"timestamps":[{"name":"x"}]}]', "'f' has an object that is not a trace, with id 3"),
])  # fmt: skip
def test_a_file_without_traces_is_refused_with_what_is_wrong(wrong: bytes, text: str) -> None:
    with pytest.raises(BadOption, match=text):
        read_traces("'f'", wrong)


def test_stages_are_those_of_tritons_summary() -> None:
    [trace] = read_traces("f", data(entries(1, HTTP)))
    assert {stage: ns // 1000 for stage, ns in durations_of(trace).items()} == {
        "request": 130, "receive": 10, "handler": 85, "handler overhead": 20, "queue": 20, "compute": 45,
        "compute input": 10, "compute infer": 30, "compute output": 5, "send": 20, "overhead": 15,
    }  # fmt: skip


def test_models_versions_and_protocols_are_apart() -> None:
    grpc = {name.replace("HTTP_RECV", "GRPC_WAITREAD").replace("HTTP", "GRPC"): ns for name, ns in HTTP.items()}
    child = entries(3, {"REQUEST_START": 25, "REQUEST_END": 99}, 1)
    found = summarize(read_traces("f", data(entries(1, HTTP, error="x"), entries(2, grpc), child)))
    assert [(each.model, each.protocol, each.count, each.failed) for each in found] == [
        ("m", "HTTP", 1, 1), ("m", "gRPC", 1, 0), ("step", "", 1, 0),
    ]  # fmt: skip
    request = found[1].stages[0]
    assert (request.stage, request.mean) == ("request", 120_000), "Triton begins to wait before the request comes"


def test_percentiles_are_durations_that_occurred() -> None:
    many = [entries(id, {"REQUEST_START": 0, "REQUEST_END": id}) for id in range(1, 101)]
    [stage, _] = summarize(read_traces("f", data(*many)))[0].stages
    assert (stage.p50, stage.p90, stage.p99, stage.max, stage.count) == (50_000, 90_000, 99_000, 100_000, 100)


def test_a_waterfall_is_wellformed_and_names_what_it_draws() -> None:
    child = entries(2, {"REQUEST_START": 25, "REQUEST_END": 99}, 1)
    picture = svg(read_traces("f", data(entries(1, HTTP, request_id="<r&>"), child)))
    root = ElementTree.fromstring(picture)
    texts = "".join(root.itertext())
    assert "request <r&>: 130 µs" in texts
    assert "compute infer: 30.0 µs" in texts
    assert "step:1" in texts


def test_perfetto_gets_a_process_for_each_request_and_a_thread_for_each_trace() -> None:
    child = entries(2, {"REQUEST_START": 25, "REQUEST_END": 99}, 1)
    events = perfetto(read_traces("f", data(entries(1, HTTP), child)))["traceEvents"]
    assert {(event["pid"], event.get("tid", 0)) for event in events} == {(1, 0), (1, 1), (1, 2)}
    [infer] = [event for event in events if event["name"] == "compute infer"]
    assert (infer["ts"], infer["dur"]) == (60, 30)


def test_tables_json_and_single_traces_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, picture, viewer = tmp_path / "t", tmp_path / "t.svg", tmp_path / "t.perfetto"
    tensor = {"id": 1, "activity": "TENSOR_QUEUE_INPUT",
              "tensor": {"name": "IN", "data": "1,2", "shape": "2", "dtype": "INT32", "note": "cut"}}  # fmt: skip
    path.write_bytes(data([*entries(1, HTTP, request_id="r"), tensor]))
    assert print_traces([path, path], as_json=False, each=True, svg_file=picture, perfetto_file=viewer) == 0
    printed = capsys.readouterr().out
    assert "trace 1: m:1 request r" in printed
    assert "TENSOR_QUEUE_INPUT IN: INT32 [2] 1,2 (cut)" in printed
    assert "m, version 1: 2 traces over HTTP" in printed
    assert "compute infer" in printed
    assert picture.read_text().startswith("<svg")
    assert json.loads(viewer.read_text())["traceEvents"]
    print_traces([path], as_json=True, each=True, svg_file=None, perfetto_file=None)
    document = json.loads(capsys.readouterr().out)
    assert document["models"][0]["stages"][0]["stage"] == "request"
    assert document["traces"][0]["tensors"][0]["name"] == "IN"


def test_files_that_are_missing_or_empty_end_the_command_with_a_line(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="^'/no/file' cannot be read: No such file or directory$"):
        print_traces([tmp_path / "/no/file"], as_json=False, each=False, svg_file=None, perfetto_file=None)
    empty = tmp_path / "empty"
    empty.write_text("[]")
    with pytest.raises(BadOption, match="^there are no traces in "):
        print_traces([empty], as_json=False, each=False, svg_file=None, perfetto_file=None)
