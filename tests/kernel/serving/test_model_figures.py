from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.config.spec import ModelSpec, TensorSpec
from kernel.observe.execution_reports import MemoryUsage
from kernel.observe.statistics import Duration, ResponseStatistics
from kernel.serving.batch import Batch
from kernel.serving.model import Model
from kernel.serving.model_figures import figures_of, model_metadata, model_report
from kernel.serving.request import Request
from kernel.testing import FakeClock, RecordingSink, model_spec
from schedulers.direct import direct
from tests.kernel.observe.times import times_until

if TYPE_CHECKING:
    from typing import Any


@pytest.fixture
def model() -> Model:
    return Model(model_spec("m", max_batch_size=8), ModelConfig(), 3, direct, FakeClock())


def as_json(model: Model) -> Any:
    return msgspec.json.decode(msgspec.json.encode(model_report(figures_of(model))))


def test_a_report_has_all_sections_before_the_first_request(model: Model) -> None:
    report = as_json(model)
    nothing = {"count": 0, "ns": 0}
    durations = (
        "success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss",
    )  # fmt: skip
    assert list(report.items()) == [
        ("name", "m"),
        ("version", "3"),
        ("last_inference", 0),
        ("inference_count", 0),
        ("execution_count", 0),
        ("inference_stats", dict.fromkeys(durations, nothing)),
        ("response_stats", {}),
        ("batch_stats", []),
        ("memory_usage", []),
    ]
    assert tuple(report["inference_stats"]) == durations


def test_queue_and_compute_counts_equal_the_count_of_successes(model: Model) -> None:
    request = Request("m", [], RecordingSink())
    request.received_ns, request.queue_start_ns, request.batch_size = 100, 200, 4
    for _ in range(2):
        times = times_until(1000, input_ns=1, infer_ns=2, output_ns=3)
        model.statistics.record_execution(Batch([request]), times, 1000, 5_000_000)
    report = as_json(model)
    assert report["inference_count"] == 8
    assert report["inference_stats"]["success"] == {"count": 2, "ns": 1800}
    assert report["inference_stats"]["queue"] == {"count": 2, "ns": 2 * (800 - 6)}
    assert report["inference_stats"]["compute_output"] == {"count": 2, "ns": 6}
    assert report["batch_stats"] == [
        {
            "batch_size": 4,
            "compute_input": {"count": 2, "ns": 2},
            "compute_infer": {"count": 2, "ns": 4},
            "compute_output": {"count": 2, "ns": 6},
        }
    ]


def test_responses_from_a_cache_do_not_count_as_computed(model: Model) -> None:
    model.statistics.success = Duration(5, 50)
    model.statistics.cache_hit = Duration(2, 20)
    stats = as_json(model)["inference_stats"]
    assert [stats[part]["count"] for part in ("success", "queue", "compute_infer", "cache_hit")] == [5, 5, 3, 2]


def test_batch_statistics_are_sorted_by_batch_size(model: Model) -> None:
    for rows in (3, 1, 2):
        request = Request("m", [], RecordingSink())
        request.batch_size = rows
        model.statistics.record_execution(Batch([request]), times_until(10), 10, 5_000_000)
    assert [batch["batch_size"] for batch in as_json(model)["batch_stats"]] == [1, 2, 3]


def test_statistics_from_a_backend_have_tritons_keys(model: Model) -> None:
    parts = [Duration(count, 10 * count) for count in range(1, 7)]
    model.statistics.responses["0"] = ResponseStatistics(*parts)
    model.statistics.memory.report("m_0", [MemoryUsage("GPU", 1, 4096)])
    report = as_json(model)
    assert list(report["response_stats"]["0"].items()) == [
        (name, {"count": count, "ns": 10 * count})
        for count, name in enumerate(
            ("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel"), 1
        )
    ]
    assert report["memory_usage"] == [{"type": "GPU", "id": 1, "byte_size": 4096}]
    assert report["instance_memory"] == {"m_0": [{"type": "GPU", "id": 1, "byte_size": 4096}]}


def spec(platform: str = "") -> ModelSpec:
    return ModelSpec(
        name="m",
        platform=platform,
        backend="python",
        max_batch_size=4,
        inputs={"IN": TensorSpec("IN", "FP32", (6,), (-1, 6), reshape=(2, 3))},
        outputs={"OUT": TensorSpec("OUT", "INT64", (-1,), (-1, -1))},
    )


def test_the_json_is_triton_s() -> None:
    assert msgspec.json.encode(model_metadata(spec(), [1, 3])) == (
        b'{"name":"m","versions":["1","3"],"platform":"python",'
        b'"inputs":[{"name":"IN","datatype":"FP32","shape":[-1,6]}],'
        b'"outputs":[{"name":"OUT","datatype":"INT64","shape":[-1,-1]}]}'
    )


def test_the_platform_comes_before_the_backend() -> None:
    assert model_metadata(spec("onnxruntime_onnx"), []).platform == "onnxruntime_onnx"
