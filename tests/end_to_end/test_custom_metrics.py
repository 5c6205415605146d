"""Metrics that Python models define: on the page of a running server, over instances, restarts and unloads."""

from __future__ import annotations

import http.client
import json
import threading
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from bench.server import ServerProcess, wait_for

if TYPE_CHECKING:
    from tests.end_to_end.conftest import WriteModel

CONFIG = """
input [{ name: "IN" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [1] }]
instance_group [{ kind: KIND_CPU count: %d }]
"""

#: Every instance counts what it executes, and shows what it was given last; -1 ends its worker.
COUNTING = """
import os, threading

class TritonPythonModel:
    def initialize(self, args):
        kind = pb_utils.MetricFamily
        self.requests = pb_utils.MetricFamily("app_requests", "requests\\nof the app", kind.COUNTER)
        self.level = pb_utils.MetricFamily("app_level", "what came last", kind.GAUGE)
        self.sizes = pb_utils.MetricFamily("app_sizes", "sizes", kind.HISTOGRAM)
        self.user = self.requests.Metric(labels={"user": '"a"} 1\\napp_forged 1'})
        self.last = self.level.Metric()
        self.size = self.sizes.Metric(labels={"unit": "rows"}, buckets=[1, 10])

    def execute(self, requests):
        responses = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            if value[0] == -1:
                os._exit(7)
            self.user.increment(2)
            self.last.set(float(value[0]))
            self.size.observe(int(value[0]))
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)]))
        return responses
"""

#: Uses a name of the other model with another kind.
CLASHING = """
class TritonPythonModel:
    def initialize(self, args):
        self.family = pb_utils.MetricFamily("app_requests", "no", pb_utils.MetricFamily.GAUGE)
        self.other = self.family.Metric()
        self.own = pb_utils.MetricFamily("zebra", "stripes", pb_utils.MetricFamily.GAUGE)
        self.stripes = self.own.Metric()
        self.stripes.set(7)

    def execute(self, requests):
        return []
"""


def post(server: ServerProcess, path: str, body: str = "") -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    connection.request("POST", path, body)
    status = connection.getresponse().status
    connection.close()
    return status


def infer(server: ServerProcess, value: int) -> int:
    tensor = {"name": "IN", "datatype": "INT32", "shape": [1], "data": [value]}
    return post(server, "/v2/models/counting/infer", json.dumps({"inputs": [tensor]}))


def page(server: ServerProcess) -> str:
    return server.get("/metrics", server.metrics_port)[1]


def samples(server: ServerProcess) -> dict[str, float]:
    """Return the values of models' own metrics by name, with the bound of a bucket."""
    return {
        ":".join([sample.name, *([sample.labels["le"]] if "le" in sample.labels else [])]): sample.value
        for family in text_string_to_metric_families(page(server))
        for sample in family.samples
        if not sample.name.startswith(("nv_", "naiad_"))
    }


def test_metrics_of_a_model_with_instances_of_which_one_dies(write_model: WriteModel) -> None:
    with ServerProcess(write_model("counting", CONFIG % 2, COUNTING)) as server:
        # Before the first request, as soon as both instances have joined.
        wait_for(lambda: samples(server).get("app_sizes_bucket:+Inf") == 0)
        callers = [threading.Thread(target=infer, args=(server, 5)) for _ in range(8)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        wait_for(lambda: samples(server)["app_sizes_count"] == 8)
        found = samples(server)
        assert found == {
            "app_requests_total": 16,
            "app_level": 5,
            "app_sizes_count": 8,
            "app_sizes_sum": 40,
            "app_sizes_bucket:1": 0,
            "app_sizes_bucket:10": 8,
            "app_sizes_bucket:+Inf": 8,
        }
        text = page(server)
        assert text.count("# HELP app_requests requests\\nof the app\n# TYPE app_requests counter\n") == 1
        assert 'app_requests{user="\\"a\\"} 1\\napp_forged 1"} 16\n' in text

        assert infer(server, -1) == 503
        wait_for(lambda: 'naiad_worker_restarts_total{model="counting",version="1"} 1\n' in page(server))
        assert infer(server, 1) == 200
        wait_for(lambda: samples(server)["app_requests_total"] == 18)
        assert samples(server)["app_sizes_bucket:1"] == 1


def test_metrics_of_a_model_go_with_it(write_model: WriteModel) -> None:
    write_model("counting", CONFIG % 1, COUNTING)
    repository = write_model("other", CONFIG % 1, CLASHING)
    flags = ("--model-control-mode=explicit", "--load-model=*")
    with ServerProcess(repository, *flags) as server:
        wait_for(lambda: samples(server).get("zebra") == 7)
        wait_for(lambda: "# TYPE app_requests counter" in page(server))
        assert post(server, "/v2/repository/models/counting/unload") == 200
        wait_for(lambda: "# TYPE app_requests gauge" in page(server))
        assert samples(server) == {"app_requests": 0, "zebra": 7}
        server.wait_for_log("metric family 'app_requests' of model 'other' is left out")
        log = server.log
    assert (
        log.count("metric family 'app_requests' of model 'other' is left out: 'app_requests' of model 'counting'") == 1
    )


def test_a_scrape_after_a_response_shows_what_the_request_has_changed(write_model: WriteModel) -> None:
    repository = write_model("counting", CONFIG % 1, COUNTING)
    with ServerProcess(repository) as server:
        for number in range(1, 21):
            assert infer(server, number) == 200
            found = samples(server)
            assert (found["app_requests_total"], found["app_level"]) == (2.0 * number, float(number))
