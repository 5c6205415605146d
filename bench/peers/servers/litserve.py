"""LitServe: FastAPI processes in front of worker processes."""

from __future__ import annotations

from bench.peers.peer import PeerServer, Service, Setup, plain_endpoints
from bench.peers.workloads import ADD_SUB, BASE64_JSON, DIGITS, DIGITS_MODEL, MEBIBYTE, PLAIN_JSON

SOURCE = """import base64

import litserve as ls
import numpy as np
import onnxruntime


class AddSub(ls.LitAPI):
    def setup(self, device):
        pass

    def decode_request(self, request):
        return np.array(request["INPUT0"], np.float32), np.array(request["INPUT1"], np.float32)

    def predict(self, x):
        return x[0] + x[1], x[0] - x[1]

    def encode_response(self, output):
        return {"OUTPUT0": output[0].tolist(), "OUTPUT1": output[1].tolist()}


class Digits(ls.LitAPI):
    def setup(self, device):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession("@MODEL@", options, providers=["CPUExecutionProvider"])

    def decode_request(self, request):
        return np.array(request["image"], np.float32)

    def predict(self, x):
        return self.session.run(["scores"], {"image": x})[0]

    def encode_response(self, output):
        return {"scores": output.tolist()}


class Identity(ls.LitAPI):
    def setup(self, device):
        pass

    def decode_request(self, request):
        return np.frombuffer(base64.b64decode(request["INPUT0"]), np.float32)

    def predict(self, x):
        return x

    def encode_response(self, output):
        return {"OUTPUT0": base64.b64encode(output.tobytes()).decode()}


if __name__ == "__main__":
    apis = [AddSub(api_path="/add_sub"), Digits(api_path="/digits"), Identity(api_path="/identity")]
    server = ls.LitServer(apis, accelerator="cpu", workers_per_device=@WORKERS@)
    server.run(
        host="127.0.0.1", port=@PORT@, num_api_servers=@WORKERS@, log_level="warning", access_log=False,
        generate_client_file=False,
    )
"""


def service(setup: Setup) -> Service:
    source = SOURCE.replace("@MODEL@", str(DIGITS_MODEL)).replace("@WORKERS@", str(setup.workers))
    return Service({"service.py": source.replace("@PORT@", str(setup.http_port))}, ["python", "service.py"])


PEER = PeerServer(
    name="litserve",
    title="LitServe",
    settings="workers_per_device and num_api_servers are the number of workers, no batching, no access log; 1 MiB as"
    " base64 in JSON; not fast_queue=True, which 0.2.19 ignores (its issue 751)",
    source="https://lightning.ai/docs/litserve/api-reference/litserver",
    endpoints=plain_endpoints({ADD_SUB: PLAIN_JSON, DIGITS: PLAIN_JSON, MEBIBYTE: BASE64_JSON}),
    requirements=("litserve", "onnxruntime", "numpy"),
    service=service,
)
