"""What a running server tells Prometheus: options, a model's own settings, and workers that die."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from bench.server import ServerProcess, wait_for
from tests.end_to_end.echo_model import CONFIG, ECHO, infer

if TYPE_CHECKING:
    from tests.end_to_end.conftest import WriteModel


def samples(server: ServerProcess) -> dict[str, float]:
    """Return the values of the page by name, with what sets apart the samples of one model.

    The parser gives every counter the name that it would have in OpenMetrics, with `_total`.
    """
    _, text = server.get("/metrics", server.metrics_port)
    return {
        ":".join([sample.name, *(sample.labels[key] for key in ("reason", "le", "quantile") if key in sample.labels)])
        : sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }  # fmt: skip


def test_metrics_of_a_server_whose_worker_dies(write_model: WriteModel) -> None:
    flags = ("--metrics-config=histogram_latencies=true", "--metrics-config=summary_latencies=true")
    with ServerProcess(write_model("echo", CONFIG, ECHO), *flags) as server:
        assert [infer(server, rows, 1) for rows in (1, 3)] == [200, 200]
        assert infer(server, 1, -1) == 503
        wait_for(lambda: samples(server)["naiad_worker_restarts_total"] == 1)
        found = samples(server)
        _, text = server.get("/metrics", server.metrics_port)
        log = server.log
    assert 'nv_inference_count{_team="core",model="echo",version="1"} 4\n' in text
    for name, value in (
        ("nv_inference_request_success_total", 2),
        ("nv_inference_exec_count_total", 2),
        ("nv_inference_request_failure_total:BACKEND", 1),
        ("nv_inference_request_failure_total:REJECTED", 0),
        ("naiad_inference_batch_size_bucket:1", 1),
        ("naiad_inference_batch_size_sum", 4),
        ("naiad_inference_request_duration_seconds_count", 2),
        ("nv_inference_first_response_histogram_ms_bucket:60000", 2),
        ("nv_inference_request_summary_us_count", 2),
        ("nv_inference_pending_request_count", 0),
        ("naiad_inference_in_flight_requests", 0),
        ("naiad_worker_lost_total", 1),
        ("naiad_model_instance_count", 1),
    ):
        assert found[name] == value, name
    assert "nv_inference_first_response_histogram_ms_bucket:2.5" in found
    assert found["nv_inference_request_summary_us:0.99"] > 0
    assert found["nv_model_load_duration_secs"] > 0
    assert "Metric family 'nv_other' in 'metric_identifier' is not a customizable metric in Triton core." in log
