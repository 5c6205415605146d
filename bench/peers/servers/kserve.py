"""KServe's Python SDK: its own model server, without Kubernetes."""

from __future__ import annotations

from bench.peers.peer import PeerServer, Service, Setup, v2_endpoints
from bench.peers.workloads import ADD_SUB, DIGITS, DIGITS_MODEL, GRPC, MEBIBYTE, V2_JSON

SOURCE = """import onnxruntime
from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer
from kserve.utils.utils import generate_uuid


def respond(name, request, arrays):
    outputs = []
    for output, array in arrays.items():
        tensor = InferOutput(output, list(array.shape), "FP32")
        tensor.set_data_from_numpy(array, binary_data=request.from_grpc or bool(request.use_binary_outputs))
        outputs.append(tensor)
    return InferResponse(
        request.id or generate_uuid(), name, outputs, use_binary_outputs=bool(request.use_binary_outputs)
    )


class AddSub(Model):
    def __init__(self):
        super().__init__("add_sub")
        self.ready = True

    async def get_input_types(self):
        return [{"name": name, "datatype": "FP32", "shape": [16]} for name in ("INPUT0", "INPUT1")]

    async def get_output_types(self):
        return [{"name": name, "datatype": "FP32", "shape": [16]} for name in ("OUTPUT0", "OUTPUT1")]

    async def predict(self, payload: InferRequest, headers=None, response_headers=None) -> InferResponse:
        a, b = (each.as_numpy() for each in payload.inputs)
        return respond(self.name, payload, {"OUTPUT0": a + b, "OUTPUT1": a - b})


class Digits(Model):
    def __init__(self):
        super().__init__("digits")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession("@MODEL@", options, providers=["CPUExecutionProvider"])
        self.ready = True

    def __reduce__(self):  # several workers are spawned with copies of the models, and sessions cannot be copied
        return Digits, ()

    async def predict(self, payload: InferRequest, headers=None, response_headers=None) -> InferResponse:
        (scores,) = self.session.run(["scores"], {"image": payload.inputs[0].as_numpy()})
        return respond(self.name, payload, {"scores": scores})


class Identity(Model):
    def __init__(self):
        super().__init__("identity")
        self.ready = True

    async def predict(self, payload: InferRequest, headers=None, response_headers=None) -> InferResponse:
        return respond(self.name, payload, {"OUTPUT0": payload.inputs[0].as_numpy()})


if __name__ == "__main__":
    ModelServer(
        http_port=@HTTP@, grpc_port=@GRPC@, workers=@WORKERS@, event_loop="uvloop", enable_latency_logging=False
    ).start([AddSub(), Digits(), Identity()])
"""

#: uvicorn's lines about each request are at the level INFO.
LOGGING = """version: 1
disable_existing_loggers: false
root: {level: WARNING}
loggers:
  uvicorn.access: {level: WARNING, handlers: [], propagate: false}
  kserve: {level: WARNING}
  kserve.trace: {level: WARNING}
"""


def service(setup: Setup) -> Service:
    source = SOURCE.replace("@MODEL@", str(DIGITS_MODEL)).replace("@WORKERS@", str(setup.workers))
    source = source.replace("@HTTP@", str(setup.http_port)).replace("@GRPC@", str(setup.grpc_port))
    command = ["python", "service.py", "--log_config_file=logging.yaml"]
    return Service({"service.py": source, "logging.yaml": LOGGING}, command)


PEER = PeerServer(
    name="kserve",
    title="KServe SDK",
    settings="workers=N (uvicorn processes; gRPC has one), async predict, event_loop=uvloop, no latency or access log;"
    " 1 MiB over gRPC (binary tensors over HTTP become lists: 126 ms). It listens on all addresses: it has no setting",
    source="https://kserve.github.io/website/docs/reference/python-runtime-sdk/python-runtime-sdk-api",
    endpoints=v2_endpoints({ADD_SUB: V2_JSON, DIGITS: V2_JSON, MEBIBYTE: GRPC}),
    grpc=v2_endpoints({ADD_SUB: GRPC}),
    requirements=("kserve", "onnxruntime", "numpy"),
    service=service,
)
