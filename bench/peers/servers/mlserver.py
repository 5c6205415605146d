"""MLServer of Seldon: KServe's v2 protocol over REST and gRPC, a pool of inference processes."""

from __future__ import annotations

import json

from bench.peers.peer import PeerServer, Service, Setup, v2_endpoints
from bench.peers.workloads import ADD_SUB, DIGITS, DIGITS_MODEL, GRPC, MEBIBYTE, V2_JSON

SOURCE = """import onnxruntime
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class AddSub(MLModel):
    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        a, b = (NumpyCodec.decode_input(each) for each in payload.inputs)
        outputs = [NumpyCodec.encode_output("OUTPUT0", a + b), NumpyCodec.encode_output("OUTPUT1", a - b)]
        return InferenceResponse(model_name=self.name, outputs=outputs)


class Digits(MLModel):
    async def load(self) -> bool:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession("@MODEL@", options, providers=["CPUExecutionProvider"])
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        image = NumpyCodec.decode_input(payload.inputs[0])
        (scores,) = self.session.run(["scores"], {"image": image})
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("scores", scores)])


class Identity(MLModel):
    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        array = NumpyCodec.decode_input(payload.inputs[0])
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("OUTPUT0", array)])
"""

CLASSES = {ADD_SUB: "AddSub", DIGITS: "Digits", MEBIBYTE: "Identity"}
#: Names, datatypes and shapes for the metadata, which perf_analyzer reads.
TENSORS = {
    ADD_SUB: ([("INPUT0", [16]), ("INPUT1", [16])], [("OUTPUT0", [16]), ("OUTPUT1", [16])]),
    DIGITS: ([("image", [-1, 8, 8])], [("scores", [-1, 10])]),
    MEBIBYTE: ([("INPUT0", [-1, -1])], [("OUTPUT0", [-1, -1])]),
}


def service(setup: Setup) -> Service:
    settings = {
        "debug": False, "host": "127.0.0.1", "http_port": setup.http_port, "grpc_port": setup.grpc_port,
        "metrics_endpoint": None, "parallel_workers": 0 if setup.workers == 1 else setup.workers,
        "gzip_enabled": False,
    }  # fmt: skip
    files = {"settings.json": json.dumps(settings), "runtimes.py": SOURCE.replace("@MODEL@", str(DIGITS_MODEL))}
    for model, name in CLASSES.items():
        inputs, outputs = (
            [{"name": tensor, "datatype": "FP32", "shape": shape} for tensor, shape in tensors]
            for tensors in TENSORS[model]
        )
        described = {"name": model, "implementation": f"runtimes.{name}", "inputs": inputs, "outputs": outputs}
        files[f"{model}/model-settings.json"] = json.dumps(described)
    return Service(files, ["mlserver", "start", "."], {"PYTHONPATH": str(setup.folder)})


PEER = PeerServer(
    name="mlserver",
    title="MLServer",
    settings="custom runtimes; one worker is parallel_workers 0 (no pool), more are parallel_workers N;"
    " debug, metrics and gzip off; 1 MiB over gRPC, raw; uvloop below 0.22, with which its pool does not start",
    source="https://docs.seldon.ai/mlserver/user-guide/parallel-inference, reference/settings",
    endpoints=v2_endpoints({ADD_SUB: V2_JSON, DIGITS: V2_JSON, MEBIBYTE: GRPC}),
    grpc=v2_endpoints({ADD_SUB: GRPC}),
    requirements=("mlserver", "uvloop<0.22", "onnxruntime", "numpy"),
    service=service,
)
