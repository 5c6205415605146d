"""mosec: a front door in Rust, workers in Python."""

from __future__ import annotations

from bench.peers.peer import PeerServer, Service, Setup, plain_endpoints
from bench.peers.workloads import ADD_SUB, DIGITS, DIGITS_MODEL, MEBIBYTE, MSGPACK, PLAIN_JSON

SOURCE = """import numpy as np
import onnxruntime
from mosec import Runtime, Server, Worker
from mosec.mixin import MsgpackMixin

WORKERS = @WORKERS@


class AddSub(Worker):
    def forward(self, data):
        a, b = np.array(data["INPUT0"], np.float32), np.array(data["INPUT1"], np.float32)
        return {"OUTPUT0": (a + b).tolist(), "OUTPUT1": (a - b).tolist()}


class Digits(Worker):
    def __init__(self):
        super().__init__()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession("@MODEL@", options, providers=["CPUExecutionProvider"])

    def forward(self, data):
        (scores,) = self.session.run(["scores"], {"image": np.array(data["image"], np.float32)})
        return {"scores": scores.tolist()}


class Identity(MsgpackMixin, Worker):
    def forward(self, data):
        return {"OUTPUT0": np.frombuffer(data["INPUT0"], np.float32).tobytes()}


if __name__ == "__main__":
    server = Server()
    server.register_runtime({
        "/add_sub": [Runtime(AddSub, num=WORKERS)],
        "/digits": [Runtime(Digits, num=WORKERS)],
        "/identity": [Runtime(Identity, num=WORKERS)],
    })
    server.run()
"""


def service(setup: Setup) -> Service:
    source = SOURCE.replace("@MODEL@", str(DIGITS_MODEL)).replace("@WORKERS@", str(setup.workers))
    command = ["python", "service.py", "--address=127.0.0.1", f"--port={setup.http_port}", "--log-level=warning"]
    return Service({"service.py": source}, command)


PEER = PeerServer(
    name="mosec",
    title="mosec",
    settings="num workers for each model, no batching (a batch waits longer than these models take); JSON, and msgpack"
    " for 1 MiB",
    source="https://mosecorg.github.io/mosec/ (Performance tuning), reference/arguments.html",
    endpoints=plain_endpoints({ADD_SUB: PLAIN_JSON, DIGITS: PLAIN_JSON, MEBIBYTE: MSGPACK}),
    requirements=("mosec", "msgpack", "onnxruntime", "numpy"),
    service=service,
)
