"""Requests for tests of backends, without a worker. The responses are recorded."""

from __future__ import annotations

import importlib.util
import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest

from backends.transport import wire
from backends.worker.request import WorkerRequest
from shm.arrays import NUMPY_TYPES, datatype_of, to_bytes
from shm.tensor import RequestedOutput, Tensor
from tests.backends.hosts.ray_cluster import ray_cluster
from tests.backends.recorded_host import RecordedHost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from backends.worker.request import OutputValue
    from kernel.errors import ServingError
    from shm.arrays import Array


class Lab(RecordedHost):
    """Creates requests and records their responses. Implements `Responder` for the requests and `Host` for backends."""

    def __init__(self) -> None:
        super().__init__()
        #: Whether outputs other than BYTES have a destination.
        self.reserves = False
        #: The names of the outputs that were written to their destination.
        self.in_place: list[str] = []
        self._numbers = itertools.count()
        self._outputs: dict[int, dict[str, Array]] = {}
        self._datatypes: dict[int, dict[str, str]] = {}
        self._errors: dict[int, ServingError] = {}

    def request(
        self,
        inputs: Mapping[str, Array],
        *,
        outputs: Sequence[str] = (),
        bf16: Sequence[str] = (),
        volatile: bool = False,
    ) -> WorkerRequest:
        views = []
        for name, array in inputs.items():
            datatype = "BF16" if name in bf16 else datatype_of(array)
            assert datatype is not None
            data = memoryview(to_bytes(array))
            views.append(Tensor(name, datatype, list(array.shape), data.toreadonly() if volatile else data))
        refs = [RequestedOutput(name) for name in outputs]
        return WorkerRequest(wire.RequestMessage(next(self._numbers), [], refs), views, self)

    def outputs(self, request: WorkerRequest) -> dict[str, Array]:
        """Return the outputs of the last response without an error."""
        assert request.finished
        return self._outputs[request.ref.number]

    def datatypes(self, request: WorkerRequest) -> dict[str, str]:
        return self._datatypes[request.ref.number]

    def error(self, request: WorkerRequest) -> ServingError:
        assert request.finished
        return self._errors[request.ref.number]

    # ---- Responder ---------------------------------------------------------------------------

    def reserve(self, request: WorkerRequest, name: str, datatype: str, shape: Sequence[int]) -> Array | None:
        if not self.reserves or datatype == "BYTES" or not request.wants(name):
            return None
        dtype = NUMPY_TYPES["UINT16" if datatype == "BF16" else datatype]
        destination = np.zeros(tuple(shape), dtype)
        request.reserved[name] = (destination, Tensor(name, datatype, list(shape)))
        return destination

    def respond(
        self,
        request: WorkerRequest,
        outputs: Sequence[OutputValue],
        parameters: Mapping[str, str | int | bool],
        final: bool,
    ) -> None:
        assert not request.finished
        number = request.ref.number
        self._outputs[number] = {}
        self._datatypes[number] = {output.name: output.datatype for output in outputs}
        for output in outputs:
            destination, _ = request.reserved.get(output.name, (None, None))
            if destination is output.array:
                self.in_place.append(output.name)
            # Memory of a session or a batch may be reused after the response.
            self._outputs[number][output.name] = output.array.copy()
        request.finished = final

    def fail(self, request: WorkerRequest, error: ServingError, final: bool) -> None:
        assert not request.finished
        self._errors[request.ref.number] = error
        request.finished = final

    def finish(self, request: WorkerRequest) -> None:
        request.finished = True

    def is_cancelled(self, request: WorkerRequest) -> bool:
        return False


@pytest.fixture
def lab() -> Lab:
    return Lab()


@pytest.fixture(scope="session")
def new_lab() -> Callable[[], Lab]:
    """Return a function that creates a lab, for tests that need a new one for each example."""
    return Lab


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """Start a cluster of Ray for all tests that use it; yields its address. The environment names it meanwhile."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: `make test-ray` has it")
    with ray_cluster() as variables, pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield variables["RAY_ADDRESS"]
