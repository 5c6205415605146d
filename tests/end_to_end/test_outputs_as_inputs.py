"""An output of one model is the input of another where it lies: no byte of it is copied in the kernel."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kernel.serving.request import Request
from shm.tensor import Tensor
from tests.end_to_end.server_threads import FutureSink, server_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from pathlib import Path
    from typing import Any

    from kernel.embedding.server import ServerThread
    from kernel.serving.kernel import Kernel
    from kernel.serving.response import Response

VALUES = np.arange(300_000, dtype=np.float32)

CONFIG = """
backend: "python"
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
"""

#: Adds one to its input in place, as Triton's models may, and returns the sum of what it then has.
IN_PLACE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            given += 1
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", given[:4].copy())]))
        return responses
"""

DOUBLE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() * 2)]
            )
            for request in requests
        ]
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerThread]:
    for name, code in (("double", DOUBLE), ("in_place", IN_PLACE)):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(CONFIG)
        (tmp_path / name / "1" / "model.py").write_text(code)
    with server_thread(tmp_path, model_control_mode="explicit", load_model="*") as thread:
        yield thread


def on_loop(server: ServerThread, work: Callable[[Kernel], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(60):
            await work(server.kernel)
            server.kernel.check()

    server.run(run)


async def infer(kernel: Kernel, model: str, tensor: Tensor) -> Response:
    sink = FutureSink()
    kernel.submit(Request(model, [tensor], sink))
    response = await sink.response
    assert response.error is None, response.error
    return response


def passed_on(response: Response) -> Tensor:
    """Return the output of a response as the input of another request, which has a lease of its own."""
    assert response.outputs is not None
    (output,) = response.outputs
    assert output.data is None
    assert output.span is not None
    return Tensor("IN", output.datatype, output.shape, None, output.span.shared())


def elements(response: Response) -> list[float]:
    assert response.outputs is not None
    (output,) = response.outputs
    return list(np.frombuffer(output.raw(), np.float32))


def test_an_output_is_the_next_model_s_input_and_no_byte_is_copied_in_the_kernel(
    server: ServerThread, reads: list[int]
) -> None:
    async def work(kernel: Kernel) -> None:
        first = await infer(kernel, "double", Tensor("IN", "FP32", [len(VALUES)], memoryview(VALUES.tobytes())))
        assert reads == [VALUES.nbytes], "the client's bytes go to the arena once"
        reads.clear()
        second_input = passed_on(first)
        assert second_input.span is not None
        arena = second_input.span.lease.region
        first.release()
        second = await infer(kernel, "double", second_input)
        assert reads == []
        assert arena.lease_count > 0, "the second response lies in the same worker's arena"
        assert elements(second)[:3] == [0.0, 4.0, 8.0]
        second.release()
        assert arena.lease_count == 0

    on_loop(server, work)


def test_consumers_of_an_output_may_change_it_and_see_no_change_of_one_another(server: ServerThread) -> None:
    async def work(kernel: Kernel) -> None:
        produced = await infer(kernel, "double", Tensor("IN", "FP32", [len(VALUES)], memoryview(VALUES.tobytes())))
        for _ in range(3):
            changed = await infer(kernel, "in_place", passed_on(produced))
            assert elements(changed) == [1.0, 3.0, 5.0, 7.0]
            changed.release()
        together = await asyncio.gather(*(infer(kernel, "in_place", passed_on(produced)) for _ in range(4)))
        for response in together:
            assert elements(response) == [1.0, 3.0, 5.0, 7.0]
            response.release()
        assert elements(produced)[:4] == [0.0, 2.0, 4.0, 6.0]
        produced.release()

    on_loop(server, work)


def test_the_blocks_of_a_worker_that_is_gone_stay_readable(server: ServerThread) -> None:
    async def work(kernel: Kernel) -> None:
        produced = await infer(kernel, "double", Tensor("IN", "FP32", [len(VALUES)], memoryview(VALUES.tobytes())))
        gone = asyncio.get_running_loop().create_future()
        assert produced.outputs is not None
        (output,) = produced.outputs
        assert output.span is not None
        arena = output.span.lease.region
        arena.on_closed(lambda _: gone.set_result(None))
        # The worker of the version that was unloaded has ended when the model is loaded again.
        await kernel.repository.unload("double")
        await kernel.repository.load("double")
        changed = await infer(kernel, "in_place", passed_on(produced))
        assert elements(changed) == [1.0, 3.0, 5.0, 7.0]
        changed.release()
        assert not arena.closed
        produced.release()
        await gone

    on_loop(server, work)
