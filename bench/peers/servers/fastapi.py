"""FastAPI with ONNX Runtime on uvicorn: the server that people write by hand."""

from __future__ import annotations

from bench.peers.peer import PeerServer, Service, Setup, plain_endpoints
from bench.peers.workloads import ADD_SUB, DIGITS, DIGITS_MODEL, MEBIBYTE, PLAIN_JSON, RAW

SOURCE = """import numpy as np
import onnxruntime
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
session = onnxruntime.InferenceSession("@MODEL@", options, providers=["CPUExecutionProvider"])
app = FastAPI()


class TwoVectors(BaseModel):
    INPUT0: list[float]
    INPUT1: list[float]


class SumAndDifference(BaseModel):
    OUTPUT0: list[float]
    OUTPUT1: list[float]


class Images(BaseModel):
    image: list[list[list[float]]]


class Scores(BaseModel):
    scores: list[list[float]]


@app.post("/add_sub")
async def add_sub(vectors: TwoVectors) -> SumAndDifference:
    a, b = np.array(vectors.INPUT0, np.float32), np.array(vectors.INPUT1, np.float32)
    return SumAndDifference(OUTPUT0=(a + b).tolist(), OUTPUT1=(a - b).tolist())


@app.post("/digits")
async def digits(images: Images) -> Scores:
    (scores,) = session.run(["scores"], {"image": np.array(images.image, np.float32)})
    return Scores(scores=scores.tolist())


@app.post("/identity")
async def identity(request: Request) -> Response:
    array = np.frombuffer(await request.body(), np.float32)
    return Response(array.tobytes(), media_type="application/octet-stream")
"""


def service(setup: Setup) -> Service:
    command = [
        "uvicorn", "service:app", "--host=127.0.0.1", f"--port={setup.http_port}", f"--workers={setup.workers}",
        "--loop=uvloop", "--http=httptools", "--no-access-log", "--log-level=warning",
    ]  # fmt: skip
    return Service({"service.py": SOURCE.replace("@MODEL@", str(DIGITS_MODEL))}, command)


PEER = PeerServer(
    name="fastapi",
    title="FastAPI, uvicorn",
    settings="async endpoints with models of pydantic in and out, one process per worker, uvloop, httptools, no access"
    " log; 1 MiB as bytes",
    source="https://fastapi.tiangolo.com/deployment/server-workers/, https://www.uvicorn.org/settings/",
    endpoints=plain_endpoints({ADD_SUB: PLAIN_JSON, DIGITS: PLAIN_JSON, MEBIBYTE: RAW}),
    requirements=("fastapi", "uvicorn[standard]", "onnxruntime", "numpy"),
    service=service,
)
