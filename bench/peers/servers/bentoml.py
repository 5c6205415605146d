"""BentoML: services as classes, one process per worker."""

from __future__ import annotations

from bench.peers.peer import PeerServer, Service, Setup, plain_endpoints
from bench.peers.workloads import ADD_SUB, DIGITS, DIGITS_MODEL, MEBIBYTE, PLAIN_JSON, RAW

SOURCE = """from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import bentoml
import numpy as np
import onnxruntime
from bentoml.validators import ContentType, DType


@bentoml.service(workers=@WORKERS@, logging={"access": {"enabled": False}}, metrics={"enabled": False})
class Models:
    def __init__(self) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession("@MODEL@", options, providers=["CPUExecutionProvider"])

    @bentoml.api(route="/add_sub")
    async def add_sub(
        self, INPUT0: Annotated[np.ndarray, DType("float32")], INPUT1: Annotated[np.ndarray, DType("float32")]
    ) -> dict[str, list[float]]:
        return {"OUTPUT0": (INPUT0 + INPUT1).tolist(), "OUTPUT1": (INPUT0 - INPUT1).tolist()}

    @bentoml.api(route="/digits")
    async def digits(self, image: Annotated[np.ndarray, DType("float32")]) -> dict[str, list[list[float]]]:
        (scores,) = self.session.run(["scores"], {"image": image})
        return {"scores": scores.tolist()}

    @bentoml.api(route="/identity")
    async def identity(
        self, tensor: Annotated[Path, ContentType("application/octet-stream")], /
    ) -> Annotated[bytes, ContentType("application/octet-stream")]:
        return np.fromfile(tensor, np.float32).tobytes()
"""


def service(setup: Setup) -> Service:
    source = SOURCE.replace("@MODEL@", str(DIGITS_MODEL)).replace("@WORKERS@", str(setup.workers))
    command = ["bentoml", "serve", "service:Models", "--host=127.0.0.1", f"--port={setup.http_port}"]
    environment = {"BENTOML_DO_NOT_TRACK": "True", "BENTOML_HOME": str(setup.folder / "home")}
    return Service({"service.py": source}, command, environment)


PEER = PeerServer(
    name="bentoml",
    title="BentoML",
    settings="workers=N, async endpoints, no access log, no metrics, no batching; arrays as JSON, 1 MiB as a file",
    source="https://docs.bentoml.com/en/latest/build-with-bentoml/parallelize-requests.html, iotypes.html",
    endpoints=plain_endpoints({ADD_SUB: PLAIN_JSON, DIGITS: PLAIN_JSON, MEBIBYTE: RAW}),
    requirements=("bentoml", "onnxruntime", "numpy"),
    service=service,
)
