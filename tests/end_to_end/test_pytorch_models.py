"""PyTorch models in a whole server (`make test-torch`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import tritonclient.http
from tritonclient.utils import InferenceServerException

from bench.server import ServerProcess
from tests.end_to_end.repeated_loads import load_two_hundred_times

if TYPE_CHECKING:
    from collections.abc import Iterator

torch: Any = pytest.importorskip("torch", reason="needs PyTorch: make test-torch")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

CONFIG = """
backend: "pytorch"
max_batch_size: 8
input [{ name: "INPUT__0" data_type: TYPE_FP32 dims: [4] }, { name: "INPUT__1" data_type: TYPE_FP32 dims: [4] }]
output [{ name: "OUTPUT__0" data_type: TYPE_FP32 dims: [4] }, { name: "OUTPUT__1" data_type: TYPE_FP32 dims: [4] }]
dynamic_batching { max_queue_delay_microseconds: 2000 }
"""


class AddSub(torch.nn.Module):  # type: ignore[misc]  # torch is not installed where mypy runs
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a + b, a - b


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    models = tmp_path_factory.mktemp("models")
    for name in ("scripted", "exported", "broken"):
        (models / name / "1").mkdir(parents=True)
        (models / name / "config.pbtxt").write_text(CONFIG)
    torch.jit.script(AddSub()).save(str(models / "scripted/1/model.pt"))
    rows = torch.export.Dim("rows")
    example = (torch.ones(2, 4), torch.ones(2, 4))
    program = torch.export.export(AddSub(), example, dynamic_shapes=({0: rows}, {0: rows}))
    torch.export.save(program, models / "exported/1/model.pt2")
    torch.save({}, models / "broken/1/model.pt")
    flags = ("--model-control-mode=explicit", "--load-model=*", "--exit-on-error=false", "--strict-readiness=false")
    with ServerProcess(models, *flags) as running:
        yield running


def floats(*shape: int) -> Any:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def check_answers(server: ServerProcess, model: str, count: int = 1) -> None:
    """Send `count` requests at once, and compare all responses."""
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http_port}", concurrency=4) as client:
        inputs = []
        for index, array in enumerate((floats(3, 4) * 2, floats(3, 4))):
            inputs.append(tritonclient.http.InferInput(f"INPUT__{index}", [3, 4], "FP32"))
            inputs[-1].set_data_from_numpy(array)
        pending = [client.async_infer(model, inputs) for _ in range(count)]
        for found in (each.get_result() for each in pending):
            assert np.array_equal(found.as_numpy("OUTPUT__0"), floats(3, 4) * 3)
            assert np.array_equal(found.as_numpy("OUTPUT__1"), floats(3, 4))


@pytest.mark.parametrize("model", ["scripted", "exported"])
def test_clients_get_what_the_model_computes(server: ServerProcess, model: str) -> None:
    check_answers(server, model, 8)


@pytest.mark.parametrize("model", ["scripted", "exported"])
def test_a_worker_that_is_killed_is_forked_again_and_computes(server: ServerProcess, model: str) -> None:
    check_answers(server, model)
    for _ in range(2):
        [worker] = [psutil.Process(pid) for pid in server.workers(model)]
        assert any(word.startswith("--mark=") for word in worker.cmdline()), "it is a fork"
        worker.kill()
        worker.wait(30)
        check_answers(server, model)


@pytest.mark.parametrize("model", ["scripted", "exported"])
def test_two_hundred_loads_leave_nothing(server: ServerProcess, model: str) -> None:
    load_two_hundred_times(server, model)
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http_port}") as client:
        client.load_model(model)
    check_answers(server, model)


def test_a_pickle_fails_to_load_with_what_to_write_instead(server: ServerProcess) -> None:
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http_port}") as client:
        (entry,) = [each for each in client.get_model_repository_index() if each["name"] == "broken"]
        assert entry["state"] == "UNAVAILABLE"
        assert "'model.pt' was written by torch.save" in entry["reason"]
        with pytest.raises(InferenceServerException):
            client.get_model_metadata("broken")
