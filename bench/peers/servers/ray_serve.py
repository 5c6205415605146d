"""Ray Serve: a proxy, and replicas as actors of a Ray cluster of one node."""

from __future__ import annotations

from bench.peers.peer import PeerServer, Service, Setup, plain_endpoints
from bench.peers.workloads import ADD_SUB, DIGITS, DIGITS_MODEL, MEBIBYTE, PLAIN_JSON, RAW

SOURCE = """import numpy as np
import onnxruntime
import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response


@serve.deployment(num_replicas=@WORKERS@, max_ongoing_requests=1000, ray_actor_options={"num_cpus": 1})
class AddSub:
    async def __call__(self, request: Request):
        data = await request.json()
        a, b = np.array(data["INPUT0"], np.float32), np.array(data["INPUT1"], np.float32)
        return {"OUTPUT0": (a + b).tolist(), "OUTPUT1": (a - b).tolist()}


@serve.deployment(num_replicas=@WORKERS@, max_ongoing_requests=1000, ray_actor_options={"num_cpus": 1})
class Digits:
    def __init__(self):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession("@MODEL@", options, providers=["CPUExecutionProvider"])

    async def __call__(self, request: Request):
        data = await request.json()
        (scores,) = self.session.run(["scores"], {"image": np.array(data["image"], np.float32)})
        return {"scores": scores.tolist()}


@serve.deployment(num_replicas=@WORKERS@, max_ongoing_requests=1000, ray_actor_options={"num_cpus": 1})
class Identity:
    async def __call__(self, request: Request):
        array = np.frombuffer(await request.body(), np.float32)
        return Response(array.tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    ray.init(
        address="local", num_cpus=3 * @WORKERS@, include_dashboard=False, _node_ip_address="127.0.0.1",
        _temp_dir="@FOLDER@", log_to_driver=False, object_store_memory=200_000_000,
    )
    serve.start(http_options={"host": "127.0.0.1", "port": @PORT@}, logging_config={"enable_access_log": False})
    serve.run(AddSub.bind(), name="add_sub", route_prefix="/add_sub")
    serve.run(Digits.bind(), name="digits", route_prefix="/digits")
    serve.run(Identity.bind(), name="identity", route_prefix="/identity", blocking=True)
"""

#: HAProxy as the front door, which comes with ray[serve], and all flags for throughput.
ENVIRONMENT = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def service(setup: Setup) -> Service:
    source = SOURCE.replace("@MODEL@", str(DIGITS_MODEL)).replace("@WORKERS@", str(setup.workers))
    source = source.replace("@PORT@", str(setup.http_port)).replace("@FOLDER@", str(setup.folder / "ray"))
    return Service({"service.py": source}, ["python", "service.py"], ENVIRONMENT)


PEER = PeerServer(
    name="ray",
    title="Ray Serve",
    settings="num_replicas=N, max_ongoing_requests=1000, async methods, RAY_SERVE_THROUGHPUT_OPTIMIZED=1, HAProxy as"
    " the front door, no access log, no dashboard",
    source="https://docs.ray.io/en/latest/serve/advanced-guides/performance.html",
    endpoints=plain_endpoints({ADD_SUB: PLAIN_JSON, DIGITS: PLAIN_JSON, MEBIBYTE: RAW}),
    requirements=("ray[serve]", "onnxruntime", "numpy"),
    service=service,
)
