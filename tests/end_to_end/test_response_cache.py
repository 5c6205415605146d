"""Whole servers with a response cache: every way a tensor travels, and what a cache must never do."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.request
import uuid
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException, shared_memory

from bench.server import ServerFailed, ServerProcess, free_ports, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.end_to_end.conftest import WriteModel

CONFIG = """
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }, { name: "SHAPE" data_type: TYPE_STRING dims: [1] }]
instance_group [{ kind: KIND_CPU }]
"""

#: Each execution has another result, so that a response shows whether it was executed.
COUNTS = """
class TritonPythonModel:
    def initialize(self, args):
        self.executions = 0
    def execute(self, requests):
        responses = []
        for request in requests:
            self.executions += 1
            array = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            if array[0] < 0:
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("negative")))
                continue
            out = pb_utils.Tensor("OUT", array + np.float32(self.executions))
            text = pb_utils.Tensor("SHAPE", np.array([request.parameters()], dtype=object))
            responses.append(pb_utils.InferenceResponse([out, text]))
        return responses
"""


def write_cached(write_model: WriteModel) -> Path:
    write_model("counts", CONFIG, COUNTS)
    return write_model("cached", CONFIG + "response_cache { enable: true }", COUNTS)


class Client:
    """A client of either protocol."""

    def __init__(self, protocol: str, server: ServerProcess) -> None:
        self.module: Any = tritonclient.http if protocol == "http" else tritonclient.grpc
        self._url = server.url if protocol == "http" else server.grpc_url
        self.client = self.module.InferenceServerClient(self._url)

    def tensor(self, values: Any, region: str = "") -> Any:
        array = np.asarray(values, np.float32)
        given = self.module.InferInput("IN", list(array.shape), "FP32")
        if region:
            given.set_shared_memory(region, array.nbytes)
        else:
            given.set_data_from_numpy(array)
        return given

    def infer(self, values: Any, model: str = "cached", **more: Any) -> Any:
        return self.client.infer(model, [self.tensor(values)], **more)

    def out(self, values: Any, **more: Any) -> list[float]:
        found: list[float] = self.infer(values, **more).as_numpy("OUT")[:3].tolist()
        return found


def statistics(server: ServerProcess, model: str = "cached") -> dict[str, int]:
    """Return the counts of a model's statistics."""
    with urllib.request.urlopen(f"http://{server.url}/v2/models/{model}/stats") as response:
        [found] = json.load(response)["model_stats"]
    counts = {name: each["count"] for name, each in found["inference_stats"].items()}
    return {**counts, "inferences": found["inference_count"], "executions": found["execution_count"]}


def metrics(server: ServerProcess) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics") as response:
        lines = response.read().decode().splitlines()
    return {name: float(value) for name, _, value in (each.rpartition(" ") for each in lines) if name[:1] != "#"}


@pytest.fixture(params=["http", "grpc"])
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_equal_requests_are_executed_once_and_counted_as_tritons(protocol: str, write_model: WriteModel) -> None:
    with ServerProcess(write_cached(write_model), "--cache-config=local,size=1048576") as server:
        client = Client(protocol, server)
        for _ in range(3):
            assert client.out([1, 2]) == [2, 3]
        assert client.out([5, 6]) == [7, 8]
        counts = statistics(server)
        # As a real Triton 2.51 counts: hits are successes and in the queue's count, and nothing else.
        assert (counts["success"], counts["queue"], counts["compute_infer"]) == (4, 4, 2)
        assert (counts["cache_hit"], counts["cache_miss"]) == (2, 2)
        assert (counts["inferences"], counts["executions"]) == (2, 2)
        page = metrics(server)
        assert page['nv_cache_num_hits_per_model{model="cached",version="1"}'] == 2
        assert page['nv_cache_num_misses_per_model{model="cached",version="1"}'] == 2
        assert 'nv_cache_num_hits_per_model{model="counts",version="1"}' not in page
        assert (page["nv_cache_num_entries"], page["nv_cache_num_lookups"]) == (2, 4)
        assert [client.out([1, 2], model="counts") for _ in range(2)] == [[2, 3], [3, 4]]


def test_requests_that_a_model_can_tell_apart_are_apart(protocol: str, write_model: WriteModel) -> None:
    """Triton's key has only the bytes of inputs: there, each of these gets the first response."""
    with ServerProcess(write_cached(write_model), "--cache-config=local,size=1048576") as server:
        client = Client(protocol, server)
        output = client.module.InferRequestedOutput("OUT")
        classes = client.module.InferRequestedOutput("OUT", class_count=1)
        assert client.out([1, 2]) == [2, 3]
        assert client.out([1, 2], parameters={"a": 1}) == [3, 4]
        assert client.out([1, 2], parameters={"a": 2}) == [4, 5]
        only = client.infer([1, 2], outputs=[output])
        assert (only.as_numpy("OUT").tolist(), only.as_numpy("SHAPE")) == ([5, 6], None)
        assert client.infer([1, 2], outputs=[classes]).as_numpy("OUT").tolist() == [b"7.000000:1"]
        for parameters in ({}, {"a": 1}, {"a": 2}):
            found = client.infer([1, 2], parameters=parameters or None)
            assert found.as_numpy("OUT").tolist() == [2 + parameters.get("a", 0), 3 + parameters.get("a", 0)]
        assert client.infer([1, 2], outputs=[classes]).as_numpy("OUT").tolist() == [b"7.000000:1"]
        assert client.infer([1, 2], outputs=[output]).as_numpy("SHAPE") is None


def test_errors_are_not_cached(protocol: str, write_model: WriteModel) -> None:
    with ServerProcess(write_cached(write_model), "--cache-config=local,size=1048576") as server:
        client = Client(protocol, server)
        for _ in range(3):
            with pytest.raises(InferenceServerException, match="negative"):
                client.infer([-1.0])
        counts = statistics(server)
        assert (counts["executions"], counts["cache_hit"], counts["cache_miss"], counts["fail"]) == (3, 0, 3, 3)


@pytest.mark.parametrize("shared", ["true", "false"])
def test_large_tensors_are_cached(protocol: str, shared: str, write_model: WriteModel) -> None:
    """Above 64 KiB a helper hashes inputs; above 4 KiB outputs are given from the cache's own memory."""
    flags = ("--cache-config=local,size=50000000", f"--worker-shared-memory={shared}")
    with ServerProcess(write_cached(write_model), *flags) as server:
        client = Client(protocol, server)
        for number, size in enumerate((2_000, 100_000, 3_000_000), 1):
            values = np.arange(size, dtype=np.float32)
            first = client.infer(values).as_numpy("OUT")
            wait_for_entries(server, 2 * number - 1)
            for _ in range(2):
                assert np.array_equal(client.infer(values).as_numpy("OUT"), first)
            values[-1] += 1
            assert not np.array_equal(client.infer(values).as_numpy("OUT"), first)
            wait_for_entries(server, 2 * number)
        counts = statistics(server)
        assert (counts["cache_hit"], counts["cache_miss"], counts["executions"]) == (6, 6, 6)


def wait_for_entries(server: ServerProcess, count: int) -> None:
    """Wait until the cache has `count` entries: large responses are stored in the background."""
    wait_for(lambda: metrics(server)["nv_cache_num_entries"] >= count)


@pytest.fixture
def region() -> Iterator[tuple[str, Any]]:
    name = f"naiad_test_{uuid.uuid4().hex}"
    handle = shared_memory.create_shared_memory_region(name, f"/{name}", 1 << 20)
    yield name, handle
    shared_memory.destroy_shared_memory_region(handle)


@pytest.mark.parametrize("shared", ["true", "false"])
@pytest.mark.parametrize("size", [4, 100_000])
def test_tensors_in_regions_of_clients_are_cached(
    protocol: str, size: int, shared: str, write_model: WriteModel, region: tuple[str, Any]
) -> None:
    name, handle = region
    flags = ("--cache-config=local,size=10000000", f"--worker-shared-memory={shared}")
    with ServerProcess(write_cached(write_model), *flags) as server:
        client = Client(protocol, server)
        client.client.register_system_shared_memory(name, f"/{name}", 1 << 20)
        values = np.arange(size, dtype=np.float32)
        output = client.module.InferRequestedOutput("OUT")
        output.set_shared_memory(name, 400_000, 500_000)

        def ask(given: Any) -> Any:
            shared_memory.set_shared_memory_region(handle, [np.zeros(size, np.float32)], offset=500_000)
            client.client.infer("cached", [given], outputs=[output])
            return shared_memory.get_contents_as_numpy(handle, np.float32, [size], offset=500_000).copy()

        shared_memory.set_shared_memory_region(handle, [values])
        in_region = client.tensor(values, name)
        for given in (in_region, in_region, client.tensor(values), in_region):
            assert np.array_equal(ask(given), values + 1)
            wait_for_entries(server, 1)
        counts = statistics(server)
        assert (counts["executions"], counts["cache_hit"]) == (1, 3)
        shared_memory.set_shared_memory_region(handle, [values + 10])
        assert np.array_equal(ask(in_region), values + 12)
        client.client.unregister_system_shared_memory(name)


def test_a_model_that_is_loaded_again_starts_without_entries(write_model: WriteModel) -> None:
    flags = ("--cache-config=local,size=1048576", "--model-control-mode=explicit", "--load-model=*")
    folder = write_cached(write_model)
    with ServerProcess(folder, *flags) as server:
        client = Client("http", server)
        assert [client.out([1]) for _ in range(2)] == [[2], [2]]
        source = folder / "cached" / "1" / "model.py"
        source.write_text(source.read_text().replace("array + ", "array * 10 + "))
        client.client.load_model("cached")
        assert client.out([1]) == [11]


def test_streams_and_generate_use_the_cache(write_model: WriteModel) -> None:
    with ServerProcess(write_cached(write_model), "--cache-config=local,size=1048576") as server:
        client = Client("grpc", server)
        assert client.out([1]) == [2]
        found: list[Any] = []
        with client.client as grpc:
            grpc.start_stream(lambda result, error: found.append(error or result.as_numpy("OUT").tolist()))
            for _ in range(3):
                grpc.async_stream_infer("cached", [client.tensor([1])])
            grpc.stop_stream()
        assert found == [[2], [2], [2]]
        body = json.dumps({"IN": [1.0]}).encode()
        with urllib.request.urlopen(f"http://{server.url}/v2/models/cached/generate", body) as response:
            assert json.load(response)["OUT"] == 2
        assert statistics(server)["cache_hit"] == 4


# ---- settings ----------------------------------------------------------------------------------------


def test_a_cached_model_on_a_server_without_cache_is_executed_and_the_log_says_so(write_model: WriteModel) -> None:
    with ServerProcess(write_cached(write_model)) as server:
        client = Client("http", server)
        assert [client.out([1]) for _ in range(2)] == [[2], [3]]
        server.wait_for_log("response_cache (the server is started without --cache-config) has no effect")
        assert not any(name.startswith("nv_cache") for name in metrics(server))


def test_the_old_flag_makes_a_local_cache(write_model: WriteModel) -> None:
    with ServerProcess(write_cached(write_model), "--response-cache-byte-size=1048576") as server:
        client = Client("http", server)
        assert [client.out([1]) for _ in range(2)] == [[2], [2]]
        server.wait_for_log("'--response-cache-byte-size' has been deprecated!")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--cache-config=local,size=x"], "--cache-config=local needs a size in bytes"),
        (
            ["--cache-config=local,size=1", "--cache-config=redis,host=a"],
            "found multiple cache configurations, but only a single cache is currently supported",
        ),
        (["--cache-config=nothing,a=b"], "unable to find cache 'nothing'; caches are local, redis"),
        (["--cache-config=local,size=2000000", "--memory-byte-size=2000000"], "is more than half of the 2000000 bytes"),
    ],
)
def test_wrong_settings_end_the_start(flags: list[str], text: str, write_model: WriteModel) -> None:
    with pytest.raises(ServerFailed, match=re.escape(text)):
        ServerProcess(write_cached(write_model), *flags).start()


# ---- Redis -------------------------------------------------------------------------------------------


@pytest.fixture
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    if shutil.which("redis-server") is None:
        pytest.skip("there is no redis-server on this machine (Debian: apt-get install redis-server)")
    made = RedisProcess(tmp_path_factory.mktemp("redis"))
    made.start()
    yield made
    made.stop()


class RedisProcess:
    """A real redis-server on a free port, with a password."""

    password = "secret=,word"

    def __init__(self, folder: Path) -> None:
        [self.port] = free_ports(1)
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        settings = {"port": self.port, "bind": "127.0.0.1", "save": '""', "requirepass": self.password}
        (self._folder / "redis.conf").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
        with open(self._folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                ["redis-server", str(self._folder / "redis.conf")], stdout=log, stderr=log, cwd=self._folder
            )
        wait_for(lambda: b"Ready to accept connections" in (self._folder / "log").read_bytes())

    def stop(self) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait()
        (self._folder / "log").write_bytes(b"")

    def flags(self, tmp_path: Path) -> list[str]:
        secret = tmp_path / "password"
        secret.write_text(self.password + "\n")
        return [
            "--cache-config=redis,host=127.0.0.1", f"--cache-config=redis,port={self.port}",
            f"--cache-config=redis,password=@{secret}", "--cache-config=redis,socket_timeout=5000",
        ]  # fmt: skip


def hits_after(client: Client, server: ServerProcess, values: list[float]) -> int:
    """Repeat a request until it is a hit, and return how many hits there are then."""
    before = statistics(server)["cache_hit"]

    def is_hit() -> bool:
        client.infer(values)
        return statistics(server)["cache_hit"] > before

    wait_for(is_hit)
    return statistics(server)["cache_hit"]


def test_two_servers_share_what_is_in_redis(
    write_model: WriteModel, redis: RedisProcess, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, flags = write_cached(write_model), redis.flags(tmp_path_factory.mktemp("secret"))
    with ServerProcess(folder, *flags) as one, ServerProcess(folder, *flags) as other:
        first = Client("http", one)
        hits_after(first, one, [1, 2])
        kept = first.out([1, 2])
        second = Client("grpc", other)
        assert second.out([1, 2]) == kept
        counts = statistics(other)
        assert (counts["cache_hit"], counts["cache_miss"], counts["executions"]) == (1, 0, 0)
        assert second.out([1, 2, 3]) != kept
        large = np.arange(100_000, dtype=np.float32)
        hits_after(first, one, large.tolist())
        assert np.array_equal(second.infer(large).as_numpy("OUT"), first.infer(large).as_numpy("OUT"))


def test_a_redis_that_is_down_costs_misses_and_comes_back(
    write_model: WriteModel, redis: RedisProcess, tmp_path_factory: pytest.TempPathFactory
) -> None:
    flags = redis.flags(tmp_path_factory.mktemp("secret"))
    with ServerProcess(write_cached(write_model), *flags) as server:
        client = Client("http", server)
        hits_after(client, server, [1])
        redis.stop()
        begun = time.monotonic()
        values = [client.out([1])[0] for _ in range(50)]
        assert len(set(values)) == 50, "every request was executed"
        assert time.monotonic() - begun < 60, "50 requests do not wait 5 s each"
        server.wait_for_log("failed several times in a row")
        assert re.search(r"Redis at 127\.0\.0\.1:\d+ failed several times in a row", server.log)
        assert metrics(server)["naiad_cache_failures_total"] >= 5
        redis.start()
        hits_after(client, server, [1])
        server.wait_for_log("responds again")
        assert re.search(r"Redis at 127\.0\.0\.1:\d+ responds again", server.log)


def test_a_wrong_password_costs_misses_and_is_in_the_log(write_model: WriteModel, redis: RedisProcess) -> None:
    flags = ["--cache-config=redis,host=127.0.0.1", f"--cache-config=redis,port={redis.port}"]
    with ServerProcess(write_cached(write_model), *flags) as server:
        client = Client("http", server)
        assert len({client.out([1])[0] for _ in range(10)}) == 10
        server.wait_for_log(
            "failed several times in a row; for some seconds it is not asked, and every lookup is a miss: Auth"
        )
