"""docs/metrics.md against the page of a server that has everything: each family is on both, and has values."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import urllib.request
from typing import TYPE_CHECKING

import trustme

from bench.server import ServerProcess, wait_for
from kernel.options import CHAT_DEMO_REPOSITORY
from tests.backends.hosts.agent_process import AgentProcess
from tests.docs.documents import code_spans, document, section, table
from tests.end_to_end.echo_model import infer

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from tests.end_to_end.conftest import WriteModel

CONFIG = """
max_batch_size: 4
input [{ name: "IN" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [1] }]
response_cache { enable: true }
version_policy { all { } }
parameters { key: "naiad.autoscale" value { string_value: "min=1,max=2" } }
"""

ECHO = """
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([
            pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(request, "IN").as_numpy())
        ]) for request in requests]
"""

#: Reports the memory that it uses; nothing else of ours does on a machine without a GPU.
REPORTING = """
from backends.base import Backend
from backends.worker.request import OutputValue


class ReportingBackend(Backend):
    def load(self, arguments):
        self.host.report_memory([("CPU", 0, 4096), ("GPU", 1, 8192)])

    def execute(self, requests, timings):
        for request in requests:
            request.respond([OutputValue("OUT", "INT32", request.inputs[0].as_numpy())])
"""
REPORTING_CONFIG = """
backend: "reporting"
input [{ name: "IN" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [1] }]
"""

#: Its worker is on another host.
FAR_CONFIG = (
    REPORTING_CONFIG.replace("reporting", "identity")
    + """
parameters { key: "naiad.launcher" value { string_value: "agent" } }
"""
)

FLAGS = (
    "--metrics-config=histogram_latencies=true", "--metrics-config=summary_latencies=true",
    "--model-control-mode=poll", "--repository-poll-secs=1", "--cache-config=local,size=1048576",
    "--trace-config=level=TIMESTAMPS", "--trace-config=rate=1", "--openai-port=0", "--front-door-processes=1",
    "--launcher=local,agent",
)  # fmt: skip


def documented() -> dict[str, str]:
    """Return the kinds of the families in the document, by their names; those of GPUs need one."""
    page = document("docs/metrics.md")
    titles = re.findall(r"^## (.*[Ff]amil.*)$", page, re.MULTILINE)
    rows = [row for title in titles for row in table(section(page, title))]
    return {code_spans(name)[0]: kind for name, kind, _ in rows if not re.match(r"`((nv|naiad)_gpu_|nv_energy_)", name)}


def without_values(page: str) -> set[str]:
    """Return the families of a page that have no sample."""
    samples = re.findall(r"^([\w:]+)(?:\{.*\})? ", page, re.MULTILINE)
    families = re.findall(r"^# TYPE (\S+) ", page, re.MULTILINE)
    return {name for name in families if not any(sample.startswith(name) for sample in samples)}


def test_a_server_that_has_everything_shows_every_documented_family_and_no_other(
    write_model: WriteModel, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    write_model("echo", CONFIG, ECHO)
    (tmp_path / "echo" / "2").mkdir()
    (tmp_path / "echo" / "2" / "model.py").write_text((tmp_path / "echo" / "1" / "model.py").read_text())
    shutil.copytree(CHAT_DEMO_REPOSITORY / "chat", tmp_path / "chat")
    (tmp_path / "echo" / "traffic.toml").write_text('weights = { 1 = 1 }\nshadow = { to = "2" }\nfeedback = { }\n')
    reporting = tmp_path / "reporting"
    (reporting / "1").mkdir(parents=True)
    (reporting / "config.pbtxt").write_text(REPORTING_CONFIG)
    (reporting / "backend.py").write_text(REPORTING)
    (tmp_path / "far" / "1").mkdir(parents=True)
    (tmp_path / "far" / "config.pbtxt").write_text(FAR_CONFIG)
    file = tmp_path / "traces.json"
    certificate = trustme.CA().issue_cert("127.0.0.1")
    certificate.private_key_and_cert_chain_pem.write_to_path(pem := tmp_path / "certificate.pem")
    secure = ("--grpc-use-ssl=true", f"--grpc-server-cert={pem}", f"--grpc-server-key={pem}")
    with (
        AgentProcess(tmp_path_factory.mktemp("agent")) as agent,
        ServerProcess(
            tmp_path, *FLAGS, *secure, f"--agents={agent.address}", f"--trace-config=triton,file={file}"
        ) as server,
    ):

        def page() -> str:
            return server.get("/metrics", server.metrics_port)[1]

        for _ in range(2):  # the second one finds the response of the first
            assert infer(server, 1, 7) == 200
        body = {"id": "a", "inputs": [{"name": "IN", "shape": [1, 1], "datatype": "INT32", "data": [8]}]}
        for path, document in (("infer", body), ("feedback", {"id": "a", "reward": 1}), ("rollout", {"to": 2})):
            if path == "rollout":
                wait_for(lambda: "naiad_traffic_shadow_distance{" in page())
            url = f"http://{server.url}/v2/models/echo/{path}"
            with urllib.request.urlopen(url, json.dumps(document).encode()) as response:
                assert response.status == 200

        asked = {"model": "chat", "messages": [{"role": "user", "content": "hello"}]}
        url = f"http://127.0.0.1:{server.openai_port}/v1/chat/completions"
        with urllib.request.urlopen(url, json.dumps(asked).encode()) as response:
            said = json.load(response)

        wait_for(
            lambda: 'kind="GPU"' in page() and bool(re.search("^naiad_repository_last_poll", page(), re.MULTILINE))
        )
        with contextlib.suppress(TimeoutError):  # which have none is said below
            wait_for(lambda: not without_values(page()))
        shown = page()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", shown, re.MULTILINE))
    assert kinds == documented()
    assert without_values(shown) == set()
    assert 'naiad_model_instance_memory_bytes{device="1",instance="reporting_0",kind="GPU"' in shown
    assert re.search(r'nv_cache_num_hits_per_model\{model="echo",version="1"\} 1$', shown, re.MULTILINE)
    for name, count in (("prompt", "prompt_tokens"), ("generation", "completion_tokens")):
        assert f'vllm:{name}_tokens_total{{model="chat",version="1"}} {said["usage"][count]}\n' in shown
    assert 'vllm:time_to_first_token_seconds_count{model="chat",version="1"} 1\n' in shown
