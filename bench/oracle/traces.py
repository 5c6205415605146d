"""Traces of the same requests, of our server and of a real Triton: trees with names of activities, and tensors.

`python -m bench.oracle.traces` compares both, with `--record` it writes what `tests/conformance/test_traces.py` reads.
Times are not compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.oracle.servers import SUITE
from bench.server import ServerProcess, free_ports
from bench.triton import NotAvailable, triton
from kernel.tools.trace import ReadTrace, read_traces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

RECORDED = SUITE / "traces/recorded.json"
_MODELS = SUITE / "ensembles/models"
#: Models of other suites: their folders.
_MORE = ("models/fail", *(f"calls/models/{name}" for name in ("caller", "async_caller", "add_sub", "count", "twice")))
_NAMES = ("double", "chain", "triple", "versions", "maybe", "branches", "stream", "streams",
          *(Path(path).name for path in _MORE))  # fmt: skip


def _calls(*calls: dict[str, Any], how: str = "sync") -> dict[str, list[Any]]:
    """Return the input of `caller` and `async_caller`, which make these calls."""
    return {"PLAN": [json.dumps({"how": how, "calls": calls})]}


_ADD = {"model": "add_sub", "inputs": [[name, "FP32", [4], [1, 2, 3, 4]] for name in ("INPUT0", "INPUT1")]}
_TWICE = {"model": "twice", "inputs": [["A", "FP32", [4], [1, 2, 3, 4]]]}
_TRACED = {"trace": True}

#: Id of a request → model, inputs by name, and whether the request is sent on a stream.
REQUESTS: dict[str, tuple[str, dict[str, list[Any]], bool]] = {
    "plain": ("double", {"IN": [[1, 2]]}, False),
    "plain-stream": ("double", {"IN": [[1, 2]]}, True),
    "text": ("fail", {"KIND": ["hello, you"]}, False),
    "error": ("double", {"IN": [[-1, 2]]}, False),
    "raises": ("double", {"IN": [[1001, 2]]}, False),
    "ensemble": ("chain", {"A": [[1, 2]]}, False),
    "fan-out": ("branches", {"A": [1, 2]}, False),
    "ensemble-error": ("chain", {"A": [[300, 2]]}, False),
    "responses": ("stream", {"COUNT": [3]}, True),
    "no-response": ("stream", {"COUNT": [0]}, True),
    "ensemble-responses": ("streams", {"COUNT": [2]}, True),
    "call": ("caller", _calls(_ADD | _TRACED | {"request_id": "inner"}), False),
    "call-without-trace": ("caller", _calls(_ADD), False),
    "calls-in-turn": ("caller", _calls(_ADD | _TRACED, _ADD, _TWICE | _TRACED), False),
    "calls-in-threads": ("caller", _calls(_ADD | _TRACED, _TWICE | _TRACED, how="threads"), False),
    "calls-awaited": ("async_caller", _calls(_ADD | _TRACED, _TWICE | _TRACED, how="gather"), False),
    "call-error": (
        "caller",
        _calls({"model": "fail", "inputs": [["KIND", "BYTES", [1], ["not_found"]]]} | _TRACED),
        False,
    ),
    "call-of-no-model": ("caller", _calls({"model": "no_such_model", "inputs": _ADD["inputs"]} | _TRACED), False),
    "call-responses": (
        "caller",
        _calls({"model": "count", "inputs": [["N", "INT32", [1], [2]]], "decoupled": True} | _TRACED),
        False,
    ),
    "call-of-a-call": (
        "caller",
        _calls({"model": "async_caller", "inputs": [["PLAN", "BYTES", [1], _calls(_ADD | _TRACED)["PLAN"]]]} | _TRACED),
        False,
    ),
    "call-on-a-stream": ("caller", _calls(_ADD | _TRACED), True),
    "refused": ("double", {"IN": [1, 2, 3]}, False),
}

#: Trees by protocol and id.
Trees = dict[str, Any]


def flags(file: Path) -> list[str]:
    """Return the flags of both servers: each trace of a client has a file of its own, which is complete at once."""
    return [
        "--model-control-mode=explicit", *(f"--load-model={name}" for name in _NAMES),
        "--trace-config=rate=1", "--trace-config=level=TIMESTAMPS", "--trace-config=level=TENSORS",
        f"--trace-config=triton,file={file}", "--trace-config=triton,log-frequency=1",
    ]  # fmt: skip


def tree(trace: ReadTrace) -> dict[str, Any]:
    """Return what is compared of a trace. Children that ran at the same time have an order of their own.

    The JSON that models with calls take and return is not: `tests/conformance/test_calls.py` compares it.
    """
    keys = ("name", "shape", "dtype") if "caller" in trace.title else ("name", "data", "shape", "dtype")
    return {
        "model": trace.title,
        "request_id": trace.request_id,
        "activities": sorted(name for name, _ in trace.events),
        "tensors": sorted([activity, *(str(tensor[key]) for key in keys)] for activity, tensor in trace.tensors),
        "children": sorted((tree(child) for child in trace.children), key=json.dumps),
    }


def trees_in(files: Iterable[Path]) -> Trees:
    """Return the trees in the trace files of one server. Triton writes the quotes of text tensors unescaped.

    A called model may say when it has ended after its caller has responded: then its trace is in a later file.
    """
    entries: list[Any] = []
    for file in files:
        data = file.read_text()
        repaired = re.sub(r'"data":"(.*?)","shape":', lambda found: f'"data":{_escaped(found[1])},"shape":', data)
        entries += json.loads(repaired)
    traces = read_traces("the trace files", json.dumps(entries).encode())
    return {f"{trace.protocol} {trace.request_id or trace.title}": tree(trace) for trace in traces}


def _escaped(text: str) -> str:
    with contextlib.suppress(ValueError):
        json.loads(f'"{text}"')
        return f'"{text}"'
    return json.dumps(text.replace('\\"', '"'))


def ask_all(http_port: int, grpc_port: int) -> None:
    """Send all requests, one after the other, over both protocols."""
    import tritonclient.grpc
    import tritonclient.http
    from tritonclient.utils import InferenceServerException

    for module, port in ((tritonclient.http, http_port), (tritonclient.grpc, grpc_port)):
        with module.InferenceServerClient(f"127.0.0.1:{port}") as client:
            for id, (model, arrays, streaming) in REQUESTS.items():
                inputs = []
                for name, value in arrays.items():
                    text = isinstance(value[0], str)
                    array = np.array(value, np.object_ if text else np.int32)
                    inputs.append(module.InferInput(name, list(array.shape), "BYTES" if text else "INT32"))
                    inputs[-1].set_data_from_numpy(array)
                with contextlib.suppress(InferenceServerException):
                    if not streaming:
                        client.infer(model, inputs, request_id=id)
                    elif module is tritonclient.grpc:
                        client.start_stream(lambda result, error: None)
                        client.async_stream_infer(model, inputs, request_id=id)
                        client.stop_stream()


@contextlib.contextmanager
def _folder() -> Iterator[tuple[Path, Path]]:
    with tempfile.TemporaryDirectory() as folder:
        models = Path(shutil.copytree(_MODELS, Path(folder, "models")))
        for path in _MORE:
            shutil.copytree(SUITE / path, models / Path(path).name)
        yield models, Path(folder, "traces.json")


def ours() -> Trees:
    """Return the trees of our server."""
    with _folder() as (models, file):
        with ServerProcess(models, *flags(file)) as server:
            ask_all(server.http_port, server.grpc_port)
        return trees_in(file.parent.glob("traces.json.*"))


def theirs() -> Trees:
    """Return the trees of a real Triton. Raises `NotAvailable`."""
    with _folder() as (models, file):
        http_port, grpc_port, metrics_port = free_ports(3)
        with triton(models, http_port, grpc_port, metrics_port, *flags(file)):
            ask_all(http_port, grpc_port)
            time.sleep(1)  # it writes after it has responded
        return trees_in(file.parent.glob("traces.json.*"))


def differences(found: Trees, wanted: Trees) -> list[str]:
    """Return the differences between two servers, a text for each request."""
    return [
        f"{key}:\n  ours   {json.dumps(found.get(key))}\n  triton {json.dumps(wanted.get(key))}"
        for key in sorted({*found, *wanted})
        if found.get(key) != wanted.get(key)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="record Triton's traces")
    record: bool = parser.parse_args().record
    ask: Callable[[], Trees] = theirs
    try:
        wanted = ask()
    except NotAvailable as error:
        sys.exit(f"error: {error}")
    if record:
        RECORDED.write_text(json.dumps(wanted, indent=1, sort_keys=True) + "\n")
        return 0
    found = differences(ours(), wanted)
    print("\n".join(found) or "all trees are the same")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
