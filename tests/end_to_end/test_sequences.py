"""Sequences with real workers and clients: NVIDIA's sequence example, both strategies, and what happens when things
break."""

from __future__ import annotations

import os
import queue
import signal
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from bench.server import ServerProcess, wait_for
from tests.end_to_end.sequence_models import DIRECT, OLDEST, Client, accumulate, config

if TYPE_CHECKING:
    from tests.end_to_end.conftest import WriteModel


both = pytest.mark.parametrize("strategy", [DIRECT, OLDEST], ids=["direct", "oldest"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server with the model under both strategies and with string ids."""
    root = tmp_path_factory.mktemp("models")
    for name, text in {
        "direct": config(DIRECT),
        "oldest": config(OLDEST),
        "two": config(DIRECT, count=2),
        "strings": config(OLDEST, corrid="TYPE_STRING"),
        "impatient": config(DIRECT, idle_us=2_000_000),
    }.items():
        folder = root / name / "1"
        folder.mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(f'backend: "python"\n{text}')
        (folder / "model.py").write_text(
            "import numpy as np\nimport triton_python_backend_utils as pb_utils\n" + accumulate()
        )
    with ServerProcess(root) as process:
        yield process


def names(strategy: str) -> str:
    return strategy.split()[0]


# ---- the sums of many sequences -------------------------------------------------------------


@both
def test_a_sequence_accumulates_and_sees_its_controls(server: ServerProcess, strategy: str) -> None:
    client = Client(server, names(strategy), 3_000_000_007)
    assert client.send(1, start=True) == 1
    assert (client.info["start"], client.info["end"], client.info["flags"]) == (1, 0.0, 1)
    assert client.info["corrid"] == 3_000_000_007
    assert client.send(2) == 3
    assert (client.info["start"], client.info["end"], client.info["flags"]) == (0, 0.0, 0)
    assert client.send(3, end=True) == 6
    assert (client.info["start"], client.info["end"], client.info["flags"]) == (0, 1.0, 2)
    assert client.send(4) is None
    assert (client.status, client.error) == (
        400,
        f"inference request for sequence 3000000007 to model '{names(strategy)}' must specify the START flag on the "
        "first request of the sequence",
    )


@both
def test_two_streams_of_the_grpc_client_interleave(server: ServerProcess, strategy: str) -> None:
    """As NVIDIA's simple_grpc_sequence_stream_infer_client does."""
    values = [11, 7, 5, 3, 2, 0, 1]
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    client = triton_grpc.InferenceServerClient(server.grpc_url)
    client.start_stream(lambda result, error: results.put((result, error)))
    for index, value in enumerate(values):
        for sequence, sign in ((1001, 1), (1002, 2)):
            given = triton_grpc.InferInput("IN", [1, 1], "INT32")
            given.set_data_from_numpy(np.array([[value * sign]], np.int32))
            client.async_stream_infer(
                names(strategy),
                [given],
                request_id=f"{sequence}_{index}",
                sequence_id=sequence,
                sequence_start=index == 0,
                sequence_end=index == len(values) - 1,
            )
    sums: dict[str, list[int]] = {"1001": [], "1002": []}
    for _ in range(2 * len(values)):
        result, error = results.get(timeout=60)
        assert error is None, error
        sums[result.get_response().id.split("_")[0]].append(int(result.as_numpy("OUT").item()))
    client.stop_stream()
    client.close()
    expected = np.cumsum(values)
    assert sums == {"1001": expected.tolist(), "1002": (2 * expected).tolist()}


def test_the_http_client_sends_string_ids(server: ServerProcess) -> None:
    client = triton_http.InferenceServerClient(server.url)
    total = 0
    for index in range(3):
        given = triton_http.InferInput("IN", [1, 1], "INT32")
        given.set_data_from_numpy(np.array([[index + 1]], np.int32))
        result = client.infer(
            "strings", [given], sequence_id="seq-a", sequence_start=index == 0, sequence_end=index == 2
        )
        total += index + 1
        assert result.as_numpy("OUT").item() == total
        assert b'"corrid": "seq-a"' in result.as_numpy("INFO").item()
    client.close()


def test_a_text_is_an_id_where_the_model_gets_a_number(server: ServerProcess) -> None:
    client, other = Client(server, "direct", "text"), Client(server, "direct", "other")
    assert (client.send(1, start=True), other.send(5, start=True), client.send(2, end=True)) == (1, 5, 3)
    assert client.info["corrid"] != other.info["corrid"]
    assert other.send(1, end=True) == 6


def test_a_number_is_an_id_where_the_model_gets_a_text(server: ServerProcess) -> None:
    client = Client(server, "strings", 5)
    assert (client.send(1, start=True), client.send(2, end=True)) == (1, 3)
    assert client.info["corrid"] == "5"


@pytest.mark.parametrize("model", ["direct", "oldest", "two"])
def test_more_sequences_than_slots_all_get_their_sums(server: ServerProcess, model: str) -> None:
    wrong: list[Any] = []

    def run(sequence: int) -> None:
        client = Client(server, model, sequence)
        pids = set()
        total = 0
        for step in range(12):
            total += sequence
            found = client.send(sequence, start=step == 0, end=step == 11)
            pids.add(client.info.get("pid"))
            if found != total:
                wrong.append((sequence, step, found, client.error))
        if len(pids) != 1:
            wrong.append((sequence, "instances", pids))

    threads = [threading.Thread(target=run, args=(sequence,)) for sequence in range(101, 115)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
        assert not thread.is_alive(), "a request hangs"
    assert not wrong


def test_direct_gives_each_sequence_its_row_and_pads_the_others(server: ServerProcess) -> None:
    first, second = Client(server, "direct", 1), Client(server, "direct", 2)
    assert first.send(1, start=True) == 1
    assert second.send(1, start=True) == 1
    assert second.info["ready"] == [False, True]
    assert first.send(1, end=True) == 2
    assert first.info["ready"] == [True]
    assert second.send(5, end=True) == 6
    assert second.info["ready"] == [False, True]


def test_oldest_has_no_padding(server: ServerProcess) -> None:
    first, second = Client(server, "oldest", 1), Client(server, "oldest", 2)
    first.send(1, start=True)
    second.send(1, start=True)
    assert second.info["ready"] == [True]
    first.send(1, end=True)
    second.send(1, end=True)
    assert second.info["ready"] == [True]


def test_an_idle_sequence_ends(server: ServerProcess) -> None:
    client = Client(server, "impatient", 9)
    assert client.send(-2200, start=True) == 0, "an execution that takes longer than the idle time ends nothing"
    assert client.send(4) == 4
    wait_for(lambda: _gauge(server, "naiad_live_sequences", "impatient") == 0)
    assert client.send(1) is None
    assert "must specify the START flag" in client.error


# ---- things that break ----------------------------------------------------------------------


@both
def test_a_killed_worker_ends_its_sequences_and_new_ones_begin(write_model: WriteModel, strategy: str) -> None:
    with ServerProcess(write_model("m", config(strategy, count=2), accumulate())) as server:
        lost, kept = Client(server, "m", 1), Client(server, "m", 2)
        assert lost.send(1, start=True) == 1
        assert kept.send(1, start=True) == 1
        assert lost.info["pid"] != kept.info["pid"]
        failed: list[str] = []

        def send_slowly() -> None:
            other = Client(server, "m", 1)
            other.send(-50_000)  # until its worker is killed
            failed.append(other.error)

        threads = [threading.Thread(target=send_slowly) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_for(lambda: _gauge(server, "nv_inference_pending_request_count", "m") == 2)  # and one is executing
        os.kill(lost.info["pid"], signal.SIGKILL)
        for thread in threads:
            thread.join(60)
        assert len(failed) == 3
        assert all("was lost" in text for text in failed), failed
        assert lost.send(1) is None
        assert "must specify the START flag" in lost.error
        assert kept.send(1) == 2
        assert lost.send(5, start=True) == 5
        assert lost.send(5, end=True) == 10
        assert kept.send(1, end=True) == 3


def _gauge(server: ServerProcess, family: str, model: str) -> int:
    _, page = server.get("/metrics", server.metrics_port)
    [line] = [line for line in page.splitlines() if line.startswith(family) and f'model="{model}"' in line]
    return int(float(line.rsplit(" ", 1)[1]))
