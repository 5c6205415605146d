"""Servers of one XGBoost model, `trees`: what `python -m bench trees` compares.

Ours has its backend `fil`, MLServer its own runtime for XGBoost, KServe's SDK and Triton a class that calls xgboost.
Each computes a request with one thread.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from typing import TYPE_CHECKING

from bench.models import one_tensor, write_python_model
from bench.peers.peer import NotInstalled, PeerServer, ServedPeer, Service, Setup, v2_endpoints
from bench.peers.servers.kserve import LOGGING
from bench.peers.workloads import TREES, TREES_COLUMNS, V2_JSON, trees_model
from bench.server import ServerFailed, ServerProcess
from bench.triton import NUMPY, NotAvailable, packages, triton

if TYPE_CHECKING:
    from collections.abc import Iterator

_CONFIG = f"""backend: "fil"
max_batch_size: 1024
dynamic_batching {{}}
input [{{ name: "input__0" data_type: TYPE_FP32 dims: [ {TREES_COLUMNS} ] }}]
output [{{ name: "output__0" data_type: TYPE_FP32 dims: [ 1 ] }}]
parameters {{ key: "is_classifier" value {{ string_value: "false" }} }}
parameters {{ key: "model_type" value {{ string_value: "xgboost_json" }} }}
parameters {{ key: "cpu_nthread" value {{ string_value: "1" }} }}
"""

_TRITON_CONFIG = (
    "max_batch_size: 1024\ndynamic_batching {}\n"
    + one_tensor("input", "input__0", "TYPE_FP32", f"[{TREES_COLUMNS}]")
    + one_tensor("output", "output__0", "TYPE_FP32", "[1]")
)  # fmt: skip

#: A batch of requests is computed by one call, as ours is.
_TRITON_SOURCE = """import sys

sys.path.append("@PACKAGES@")

import numpy as np
import triton_python_backend_utils as pb_utils
import xgboost


class TritonPythonModel:
    def initialize(self, args):
        self.booster = xgboost.Booster(model_file="@MODEL@")
        self.booster.set_param({"nthread": 1})

    def execute(self, requests):
        rows = [pb_utils.get_input_tensor_by_name(each, "input__0").as_numpy() for each in requests]
        found = self.booster.inplace_predict(rows[0] if len(rows) == 1 else np.concatenate(rows)).reshape(-1, 1)
        responses, start = [], 0
        for each in rows:
            part = found[start : start + len(each)]
            start += len(each)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("output__0", part)]))
        return responses
"""

_KSERVE_SOURCE = """import xgboost
from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer
from kserve.utils.utils import generate_uuid


class Trees(Model):
    def __init__(self):
        super().__init__("trees")
        self.booster = xgboost.Booster(model_file="@MODEL@")
        self.booster.set_param({"nthread": 1})
        self.ready = True

    def __reduce__(self):  # several workers are spawned with copies of the model
        return Trees, ()

    async def predict(self, payload: InferRequest, headers=None, response_headers=None) -> InferResponse:
        found = self.booster.inplace_predict(payload.inputs[0].as_numpy())
        tensor = InferOutput("output__0", list(found.shape), "FP32")
        tensor.set_data_from_numpy(found, binary_data=False)
        return InferResponse(payload.id or generate_uuid(), self.name, [tensor])


if __name__ == "__main__":
    ModelServer(
        http_port=@HTTP@, grpc_port=@GRPC@, workers=@WORKERS@, event_loop="uvloop", enable_latency_logging=False
    ).start([Trees()])
"""

#: MLServer's runtime calls its output `predict`.
_MLSERVER_SOURCE = """import xgboost
from mlserver.types import InferenceRequest, InferenceResponse
from mlserver_xgboost import XGBoostModel


class Trees(XGBoostModel):
    async def load(self) -> bool:
        loaded = await super().load()
        self._model.set_params(n_jobs=1)
        return loaded

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        response = await super().predict(payload)
        response.outputs[0].name = "output__0"
        return response
"""


@contextlib.contextmanager
def serve_ours(setup: Setup) -> Iterator[ServedPeer]:
    version = setup.folder / TREES / "1"
    version.mkdir(parents=True)
    shutil.copyfile(trees_model(), version / "xgboost.json")
    group = f"instance_group [{{ count: {setup.workers} kind: KIND_CPU }}]\n"
    (version.parent / "config.pbtxt").write_text(_CONFIG + group)
    try:
        with ServerProcess(setup.folder) as server:
            yield ServedPeer(server.http_port, server.grpc_port, server.pid)
    except ServerFailed as error:
        raise NotInstalled(str(error).strip().rpartition("\n")[2]) from None


@contextlib.contextmanager
def serve_triton(setup: Setup) -> Iterator[ServedPeer]:
    try:
        found = packages("xgboost-cpu==3.2.0", NUMPY, "scipy<1.16")
        source = _TRITON_SOURCE.replace("@PACKAGES@", str(found)).replace("@MODEL@", str(trees_model()))
        repository = setup.folder / "models"
        write_python_model(repository / TREES, _TRITON_CONFIG, source, setup.workers)
        with triton(repository, setup.http_port, setup.grpc_port, setup.metrics_port) as pid:
            yield ServedPeer(setup.http_port, setup.grpc_port, pid)
    except NotAvailable as error:
        raise NotInstalled(str(error)) from None


def kserve_service(setup: Setup) -> Service:
    source = _KSERVE_SOURCE.replace("@MODEL@", str(trees_model())).replace("@WORKERS@", str(setup.workers))
    source = source.replace("@HTTP@", str(setup.http_port)).replace("@GRPC@", str(setup.grpc_port))
    command = ["python", "service.py", "--log_config_file=logging.yaml"]
    return Service({"service.py": source, "logging.yaml": LOGGING}, command, {"OMP_NUM_THREADS": "1"})


def mlserver_service(setup: Setup) -> Service:
    settings = {
        "debug": False, "host": "127.0.0.1", "http_port": setup.http_port, "grpc_port": setup.grpc_port,
        "metrics_endpoint": None, "parallel_workers": 0 if setup.workers == 1 else setup.workers,
        "gzip_enabled": False,
    }  # fmt: skip
    described = {"name": TREES, "implementation": "runtimes.Trees", "parameters": {"uri": str(trees_model())}}
    files = {
        "settings.json": json.dumps(settings),
        "runtimes.py": _MLSERVER_SOURCE,
        f"{TREES}/model-settings.json": json.dumps(described),
    }
    variables = {"PYTHONPATH": str(setup.folder), "OMP_NUM_THREADS": "1"}
    return Service(files, ["mlserver", "start", "."], variables)


_ENDPOINTS = v2_endpoints({TREES: V2_JSON})

OURS = PeerServer(
    name="naiad-trees",
    title="Naiad, fil",
    settings="backend fil with dynamic batching, cpu_nthread 1, instance_group count N",
    source="docs/trees.md",
    endpoints=_ENDPOINTS,
    serve=serve_ours,
)

TRITON = PeerServer(
    name="triton-trees",
    title="Triton, Python with xgboost",
    settings="2.51, a Python model that calls inplace_predict once for each batch, dynamic batching, count N",
    source="https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/python_backend/README.html",
    endpoints=_ENDPOINTS,
    serve=serve_triton,
)

KSERVE = PeerServer(
    name="kserve-trees",
    title="KServe SDK with xgboost",
    settings="a class whose predict calls inplace_predict, workers=N, event_loop=uvloop, no latency or access log",
    source="https://kserve.github.io/website/docs/reference/python-runtime-sdk/python-runtime-sdk-api",
    endpoints=_ENDPOINTS,
    requirements=("kserve", "xgboost-cpu", "numpy"),
    service=kserve_service,
)

MLSERVER = PeerServer(
    name="mlserver-trees",
    title="MLServer, its XGBoost runtime",
    settings="mlserver-xgboost with one thread, parallel_workers 0 or N; debug, metrics and gzip off;"
    " uvloop below 0.22",
    source="https://docs.seldon.ai/mlserver/runtimes/xgboost",
    endpoints=_ENDPOINTS,
    requirements=("mlserver>=1.7,<1.8", "mlserver-xgboost>=1.7,<1.8", "uvloop<0.22"),
    service=mlserver_service,
)

#: Ours first: the others are compared with it.
TREE_PEERS = [OURS, TRITON, KSERVE, MLSERVER]

#: Peer → how many times its requests per second ours are to be at least, and its p99 as a multiple of ours; 0 for none.
GOALS = {TRITON.name: (1.5, 0.0), KSERVE.name: (8.0, 5.0), MLSERVER.name: (8.0, 5.0)}
