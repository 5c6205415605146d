"""Python models in a temporary model repository, and requests for them.

Writes Python models that tests load in their own process.
"""

from __future__ import annotations

import itertools
import queue
import sys
import textwrap
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import pytest

from backends.base import ModelArguments
from backends.python.backend import PythonBackend
from backends.transport import wire
from backends.worker.request import WorkerRequest
from shm.arrays import datatype_of, to_bytes
from shm.tensor import RequestedOutput, Tensor
from tests.backends.recorded_host import RecordedHost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from backends.worker.request import OutputValue
    from kernel.errors import ServingError
    from shm.arrays import Array

IMPORTS = """\
import json

import numpy as np
import triton_python_backend_utils as pb_utils


def tensor(request, name):
    found = pb_utils.get_input_tensor_by_name(request, name)
    return None if found is None else found.as_numpy()


def text(value):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([str(value).encode()], object))])


"""


class RecordedResponse(msgspec.Struct):
    """One response to a request."""

    outputs: dict[str, Any] = {}
    datatypes: dict[str, str] = {}
    parameters: dict[str, Any] = {}
    error: Any = None
    final: bool = False
    #: The response is only a final flag.
    empty: bool = False


class Lab(RecordedHost):
    """Writes and loads models, creates requests and records their responses. Implements `Responder` and `Host`."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.dir = root / "lab"
        self.cancelled = False
        self.backend = PythonBackend(self)
        self._numbers = itertools.count()
        self._responses: dict[int, queue.SimpleQueue[RecordedResponse]] = {}

    # ---- models ------------------------------------------------------------------------------

    def write(self, source: str, name: str = "1/model.py", *, imports: bool = True) -> Path:
        """Write a file of the model: the usual imports, and `source` without its indentation."""
        path = self.dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((IMPORTS if imports else "") + textwrap.dedent(source))
        return path

    def arguments(self, **config: Any) -> ModelArguments:
        config.setdefault("name", "lab")
        config.setdefault("output", [{"name": "OUT"}])
        return ModelArguments(config, self.dir, 1, instance_name="lab_0_0")

    def load(self, source: str, *, decoupled: bool = False, **config: Any) -> PythonBackend:
        """Load a model from the source of its class, or of only its `execute`."""
        source = textwrap.dedent(source)
        if "class TritonPythonModel" not in source:
            source = "class TritonPythonModel:\n" + textwrap.indent(source, "    ")
        self.write(source)
        if decoupled:
            config["model_transaction_policy"] = {"decoupled": True}
        self.backend.load(self.arguments(**config))
        return self.backend

    # ---- requests ----------------------------------------------------------------------------

    def view(self, name: str, array: Array, *, volatile: bool = False, inline: bool = False) -> Tensor:
        """Return an input in an arena; with `inline` in a message, with `volatile` in a client's memory."""
        datatype = datatype_of(array)
        assert datatype is not None
        raw = bytes(to_bytes(array))
        data = raw if inline else memoryview(raw) if volatile else memoryview(bytearray(raw))
        return Tensor(name, datatype, list(array.shape), data)

    def request(
        self,
        inputs: dict[str, Array] | Sequence[Tensor] = (),
        *,
        outputs: Sequence[str] = (),
        **more: Any,
    ) -> WorkerRequest:
        by_name = inputs.items() if isinstance(inputs, dict) else ()
        views = [self.view(name, array) for name, array in by_name] or list(cast("Sequence[Tensor]", inputs))
        number = next(self._numbers)
        self._responses[number] = queue.SimpleQueue()
        ref = wire.RequestMessage(number, [], [RequestedOutput(name) for name in outputs], **more)
        return WorkerRequest(ref, views, self)

    def execute(self, *requests: WorkerRequest) -> None:
        self.backend.execute(requests, self.timings)

    def responses(self, request: WorkerRequest) -> list[RecordedResponse]:
        """Wait for the request's final response and return all responses."""
        responses = [self._responses[request.ref.number].get(timeout=60)]
        while not responses[-1].final:
            responses.append(self._responses[request.ref.number].get(timeout=60))
        return responses

    def response(self, request: WorkerRequest) -> RecordedResponse:
        """Wait for the request's final response, which must be its only one, and return it."""
        (response,) = self.responses(request)
        return response

    def run(self, inputs: dict[str, Array] | Sequence[Tensor] = (), **more: Any) -> RecordedResponse:
        """Execute one request and return its only response."""
        request = self.request(inputs, **more)
        self.execute(request)
        return self.response(request)

    def text(self, **more: Any) -> str:
        """Execute a request without inputs and return the text in its output `OUT`."""
        response = self.run(**more)
        assert response.error is None, response.error
        return str(response.outputs["OUT"][0].decode())

    # ---- Responder ---------------------------------------------------------------------------

    def reserve(self, request: WorkerRequest, name: str, datatype: str, shape: Sequence[int]) -> Array | None:
        return None

    def respond(
        self,
        request: WorkerRequest,
        outputs: Sequence[OutputValue],
        parameters: Mapping[str, str | int | bool],
        final: bool,
    ) -> None:
        arrays = {output.name: np.array(output.array) for output in outputs}
        datatypes = {output.name: output.datatype for output in outputs}
        self._add(request, RecordedResponse(arrays, datatypes, dict(parameters), final=final))

    def fail(self, request: WorkerRequest, error: ServingError, final: bool) -> None:
        self._add(request, RecordedResponse(error=error, final=final))

    def finish(self, request: WorkerRequest) -> None:
        self._add(request, RecordedResponse(final=True, empty=True))

    def is_cancelled(self, request: WorkerRequest) -> bool:
        return self.cancelled

    def _add(self, request: WorkerRequest, response: RecordedResponse) -> None:
        assert not request.finished, "a response after the final one"
        request.finished = response.final
        self._responses[request.ref.number].put(response)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    path, arguments, modules = list(sys.path), sys.argv, set(sys.modules)
    lab = Lab(tmp_path)
    yield lab
    lab.backend.finalize()
    sys.path[:], sys.argv = path, arguments
    for name in set(sys.modules) - modules:
        # Only modules of the model: some installed packages cannot be imported twice.
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")) or name == "1":
            del sys.modules[name]


if TYPE_CHECKING:
    WriteModel = Callable[..., Path]

MODEL_CONFIG = """
backend: "python"
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""

MODEL_IMPORTS = "import numpy as np\nimport triton_python_backend_utils as pb_utils\n\n\n"


@pytest.fixture
def write_model(tmp_path: Path) -> WriteModel:
    """Return a function that writes a model from the methods of its class, and returns its folder."""

    def write(methods: str, config: str = MODEL_CONFIG, name: str = "lab", version: int = 1) -> Path:
        folder = tmp_path / name
        (folder / str(version)).mkdir(parents=True, exist_ok=True)
        (folder / "config.pbtxt").write_text(config)
        body = textwrap.indent(textwrap.dedent(methods), "    ")
        (folder / str(version) / "model.py").write_text(f"{MODEL_IMPORTS}class TritonPythonModel:\n{body}\n")
        return folder

    return write
