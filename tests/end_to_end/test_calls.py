"""Models that call other models, in a whole server.

One file for what calls do while all processes live; `test_calls_lost.py` has the rest. Most lines are models.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from shm.region import Region
from tests.end_to_end.calling_models import CALLER, DECOUPLED, DOUBLE, Models, until, value_of

if TYPE_CHECKING:
    from pathlib import Path

    from kernel.serving.response import Response

MIB16 = 16 << 20

#: Adds one to what the model before it in the chain returns.
LINK = """
class TritonPythonModel:
    def initialize(self, args):
        self.next = int(args["model_name"][1:]) - 1

    def execute(self, requests):
        found = []
        for request in requests:
            response = call("double" if self.next < 0 else f"c{self.next}", given(request)).exec()
            assert not response.has_error(), response.error().message()
            found.append(out(response.output_tensors()[0].as_numpy() + 1))
        return found
"""


@pytest.fixture
def models(tmp_path: Path) -> Models:
    found = Models(tmp_path)
    found.add("double", DOUBLE)
    return found


def test_calls_ten_models_deep(models: Models) -> None:
    for number in range(10):
        models.add(f"c{number}", LINK)
    with models.served() as server:

        async def run() -> None:
            assert await server.numbers("c9", 1, 2) == [12, 14]
            large = np.arange(50_000, dtype=np.float32)
            assert np.array_equal(await server.ask("c9", large), large * 2 + 10)

        server.run(run)


WIDE = """
class TritonPythonModel:
    async def execute(self, requests):
        found = []
        for request in requests:
            count = int(given(request).as_numpy()[0])
            tensors = [pb_utils.Tensor("IN", np.full(2000, n, np.float32)) for n in range(count)]
            responses = await asyncio.gather(*(call("double", tensor).async_exec() for tensor in tensors))
            errors = [response.error().message() for response in responses if response.has_error()]
            assert not errors, errors[0]
            found.append(out([sum(r.output_tensors()[0].as_numpy()[0] for r in responses)]))
        return found
"""

THREADS = """
from concurrent.futures import ThreadPoolExecutor


class TritonPythonModel:
    def execute(self, requests):
        found = []
        for request in requests:
            count = int(given(request).as_numpy()[0])
            with ThreadPoolExecutor(20) as pool:
                responses = list(
                    pool.map(
                        lambda n: call("double", pb_utils.Tensor("IN", np.full(2000, n, np.float32))).exec(),
                        range(count),
                    )
                )
            found.append(out([sum(r.output_tensors()[0].as_numpy()[0] for r in responses)]))
        return found
"""


@pytest.mark.slow_loop("a thousand calls come in one event-loop iteration")
@pytest.mark.parametrize("source", [WIDE, THREADS], ids=["coroutines", "threads"])
@pytest.mark.parametrize("flags", [{}, {"worker_shared_memory": False}], ids=["shared memory", "copies"])
def test_a_thousand_calls_at_the_same_time(models: Models, source: str, flags: dict[str, bool]) -> None:
    models.add("wide", source)
    with models.served(**flags) as server:

        async def run() -> None:
            assert await server.numbers("wide", 1000) == [999 * 1000]

        server.run(run)


@pytest.mark.slow_loop("16 MiB are copied and compared on the loop, by the test")
def test_a_call_with_16_mib_copies_nothing_in_the_kernel(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    models.add("caller", CALLER)
    touched: list[int] = []
    view = Region.view

    def counted(region: Region, offset: int, byte_size: int) -> memoryview:
        touched.append(byte_size)
        return view(region, offset, byte_size)

    with models.served() as server:
        monkeypatch.setattr(Region, "view", counted)
        array = np.arange(MIB16 // 4, dtype=np.float32)

        async def run() -> None:
            placer = server.kernel._inputs
            for _ in range(3):
                touched.clear()
                copies = placer.copies
                _, sink = server.submit("caller", array)
                await sink.final
                assert touched == [MIB16], "the client's bytes go to the arena, once"
                assert placer.copies == copies + 1
                assert np.array_equal(value_of(sink.responses[0]), array * 2)
            # The caller copies what it returns; the input of the call and its result are used where they are.
            counted_by = server.kernel.resolve("caller").statistics
            assert (counted_by.copied_tensors, counted_by.copied_byte_size) == (3, 3 * MIB16)

        server.run(run)


CHANGES = """
class TritonPythonModel:
    def execute(self, requests):
        found = []
        for request in requests:
            tensor = given(request)
            before = tensor.as_numpy().copy()
            response = call("in_place", tensor).exec()
            result = response.output_tensors()[0].as_numpy()
            assert np.array_equal(tensor.as_numpy(), before), "the called model has changed the caller's input"
            result += 1
            again = call("double", pb_utils.Tensor("IN", result)).exec().output_tensors()[0].as_numpy()
            assert np.array_equal(again, result * 2), "the next model does not see what this one has changed"
            found.append(out(result))
        return found
"""

IN_PLACE = """
class TritonPythonModel:
    def execute(self, requests):
        found = []
        for request in requests:
            array = given(request).as_numpy()
            array += 1
            found.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]))
        return found
"""


@pytest.mark.parametrize("flags", [{}, {"worker_shared_memory": False}], ids=["shared memory", "copies"])
@pytest.mark.parametrize("size", [4, 100_000])
def test_no_model_sees_what_another_one_changes(models: Models, flags: dict[str, bool], size: int) -> None:
    models.add("in_place", IN_PLACE)
    models.add("changes", CHANGES)
    with models.served(**flags) as server:

        async def run() -> None:
            array = np.arange(size, dtype=np.float32)
            for _ in range(3):
                assert np.array_equal(await server.ask("changes", array), array + 2)

        server.run(run)


#: Changes its input in place, unless it is the one that calls.
TWINS = """
class TritonPythonModel:
    def execute(self, requests):
        found = []
        for request in requests:
            array = given(request).as_numpy()
            if array[0] == 0:
                before = array.copy()
                array[0] = 5
                response = call("twins", pb_utils.Tensor("IN", array)).exec()
                assert array[0] == 5 and array[1] == before[1], "an instance has changed the input of another one"
                found.append(passed(response))
            else:
                array += 1
                found.append(out(array))
        return found
"""


def test_an_instance_that_calls_its_own_model_keeps_its_input(models: Models) -> None:
    models.add("twins", TWINS, instances=2)
    with models.served() as server:

        async def run() -> None:
            wanted = np.arange(50_000, dtype=np.float32) + 1
            wanted[0] = 6
            assert np.array_equal(await server.ask("twins", np.arange(50_000, dtype=np.float32)), wanted)

        server.run(run)


ITSELF = """
class TritonPythonModel:
    def execute(self, requests):
        return [passed(call("itself", given(request)).exec()) for request in requests]
"""

IN_A_THREAD = """
from concurrent.futures import ThreadPoolExecutor


class TritonPythonModel:
    def execute(self, requests):
        with ThreadPoolExecutor(1) as pool:
            return [passed(pool.submit(call("itself", given(request)).exec).result()) for request in requests]
"""

AWAITED = """
class TritonPythonModel:
    async def execute(self, requests):
        return [passed(await call("itself", given(request)).async_exec()) for request in requests]
"""


@pytest.mark.parametrize("source", [ITSELF, IN_A_THREAD, AWAITED], ids=["exec", "thread", "async_exec"])
def test_a_model_that_calls_itself_with_one_instance_gets_an_error_within_a_second(models: Models, source: str) -> None:
    models.add("itself", source)
    with models.served() as server:

        async def run() -> None:
            times_s: list[float] = []
            while len(times_s) < 2 or (min(times_s) > 1.5 and len(times_s) < 8):  # the machine may be busy
                begun = time.monotonic()
                found = await server.numbers("itself", 1)
                assert "waits, itself or through calls of other models" in str(found)
                times_s.append(time.monotonic() - begun)
            assert min(times_s) <= 1.5

        server.run(run)


STREAM = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(int(given(request).as_numpy()[0])):
                sender.send(out(np.full(3000, number)))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None
"""

SUM = """
class TritonPythonModel:
    def execute(self, requests):
        found = []
        for request in requests:
            stream = call("stream", given(request)).exec(decoupled=True)
            found.append(out([sum(t.as_numpy()[0] for r in stream for t in r.output_tensors())]))
        return found
"""

ASYNC_SUM = """
class TritonPythonModel:
    async def execute(self, requests):
        found = []
        for request in requests:
            stream = await call("stream", given(request)).async_exec(decoupled=True)
            found.append(out([sum([t.as_numpy()[0] async for r in stream for t in r.output_tensors()])]))
        return found
"""


@pytest.mark.parametrize("source", [SUM, ASYNC_SUM], ids=["exec", "async_exec"])
def test_a_stream_of_more_responses_than_may_wait(models: Models, source: str) -> None:
    models.add("stream", STREAM, DECOUPLED)
    models.add("sum", source)
    with models.served() as server:

        async def run() -> None:
            for count in (0, 1, 63, 64, 65, 500):
                assert await server.numbers("sum", count) == [count * (count - 1) / 2]

        server.run(run)


def test_a_stream_whose_reader_is_slow_waits_for_it(models: Models) -> None:
    """The stream is passed on to a client that does not take responses."""
    models.add("stream", STREAM, DECOUPLED)
    models.add(
        "passes",
        """
        class TritonPythonModel:
            def execute(self, requests):
                for request in requests:
                    sender = request.get_response_sender()
                    for response in call("stream", given(request)).exec(decoupled=True):
                        if response.output_tensors():
                            sender.send(response)
                    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        """,
        DECOUPLED,
    )
    with models.served() as server:

        async def run() -> None:
            request, sink = server.submit("passes", np.array([1000.0]), streaming=True)
            await until(lambda: len(sink.responses) >= 64)
            made = server.kernel.resolve("stream")
            (call,) = made.live.instance_of
            await until(lambda: call.response_count >= 64)
            sent = call.response_count
            assert sent <= 200, "the model is far ahead of the client"

            def take(response: Response) -> None:
                request.consumed()

            sink.on_response = take
            request.consumed(len(sink.responses))
            await sink.final
            assert [value_of(r)[0] for r in sink.responses[:-1]] == list(range(1000))

        server.run(run)


def test_a_stream_that_nobody_reads_any_more_ends(models: Models) -> None:
    models.add("stream", STREAM, DECOUPLED)
    models.add(
        "drops",
        """
        class TritonPythonModel:
            def execute(self, requests):
                for request in requests:
                    stream = call("stream", given(request)).exec(decoupled=True)
                    next(stream)
                    del stream
                return [out([1]) for _ in requests]
        """,
    )
    with models.served() as server:

        async def run() -> None:
            assert await server.numbers("drops", 1000) == [1]
            await until(lambda: not server.kernel.resolve("stream").in_flight)

        server.run(run)


WAITS = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            end = time.monotonic() + 20
            while time.monotonic() < end and not request.is_cancelled():
                time.sleep(0.005)
        code = pb_utils.TritonError.CANCELLED
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError("noticed", code)) for _ in requests]
"""


def test_a_call_is_cancelled_with_the_request_that_it_is_for(models: Models) -> None:
    models.add("waits", WAITS)
    models.add("asks", CALLER.replace("double", "waits"))
    with models.served() as server:

        async def run() -> None:
            request, sink = server.submit("asks", np.zeros(2))
            await until(lambda: server.kernel.resolve("waits").in_flight)
            request.cancel()
            await sink.final
            assert sink.responses[0].error is not None
            assert sink.responses[0].error.message == "noticed"

        server.run(run)


def test_a_call_of_a_batch_goes_on_until_all_its_requests_are_cancelled(models: Models) -> None:
    models.add("waits", WAITS)
    models.add(
        "batched",
        """
        class TritonPythonModel:
            def execute(self, requests):
                response = call("waits", pb_utils.Tensor("IN", np.zeros(2, np.float32))).exec()
                return [pb_utils.InferenceResponse(error=response.error()) for _ in requests]
        """,
        "max_batch_size: 4 dynamic_batching { max_queue_delay_microseconds: 5000000 preferred_batch_size: [ 2 ] }",
    )
    with models.served() as server:

        async def run() -> None:
            first, one = server.submit("batched", np.zeros((1, 2)))
            second, other = server.submit("batched", np.zeros((1, 2)))
            waits = server.kernel.resolve("waits")
            await until(lambda: waits.in_flight)
            (call,) = waits.live.instance_of
            first.cancel()
            assert not call.cancelled
            second.cancel()
            assert call.cancelled
            await one.final
            await other.final

        server.run(run)


def test_a_model_calls_from_a_thread_when_it_executes_nothing(models: Models) -> None:
    models.add(
        "background",
        """
        class TritonPythonModel:
            def initialize(self, args):
                self.found, self.go = [], threading.Event()
                threading.Thread(target=self.run, daemon=True).start()

            def run(self):
                self.go.wait()
                time.sleep(0.05)
                tensor = pb_utils.Tensor("IN", np.ones(5000, np.float32))
                self.found.append(call("double", tensor).exec().output_tensors()[0].as_numpy()[0])

            def execute(self, requests):
                self.go.set()
                return [out([len(self.found), *self.found]) for _ in requests]
        """,
    )
    with models.served() as server:

        async def run() -> None:
            found = await server.numbers("background", 1)
            while found == [0]:
                found = await server.numbers("background", 1)
            assert found == [1, 2]

        server.run(run)


KEEPS = """
class TritonPythonModel:
    def initialize(self, args):
        self.kept = []

    def execute(self, requests):
        found = []
        for request in requests:
            response = call("double", given(request)).exec()
            self.kept.append(response.output_tensors()[0].as_numpy())
            found.append(out([sum(float(each[0]) for each in self.kept)]))
            if given(request).as_numpy()[0] < 0:
                self.kept.clear()
        return found
"""


def test_a_model_keeps_results_as_long_as_it_wants(models: Models) -> None:
    models.add("keeps", KEEPS)
    with models.served() as server:

        async def run() -> None:
            for number in range(1, 30):
                found = await server.ask("keeps", np.full(5000, number, np.float32))
                assert not isinstance(found, str)
                assert found.tolist() == [number * (number + 1)]
            held = server.memory()
            assert 29 in held.values(), held
            await server.ask("keeps", np.full(5000, -1, np.float32))

        server.run(run)


@pytest.mark.slow_loop("a client that asks and waits, many times")
def test_many_calls_in_a_row_leave_nothing(models: Models) -> None:
    """One execution makes 3,000 calls, and reports how much memory its process has before and after them."""
    models.add(
        "many",
        """
        def resident():
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * 4096


        class TritonPythonModel:
            def execute(self, requests):
                small = pb_utils.Tensor("IN", np.ones(4, np.float32))
                large = pb_utils.Tensor("IN", np.ones(20_000, np.float32))
                sizes = []
                for number in range(3000):
                    response = call("double", large if number % 3 == 0 else small).exec()
                    assert response.output_tensors()[0].as_numpy()[0] == 2
                    if number in (500, 2999):
                        sizes.append(resident())
                return [out([(sizes[1] - sizes[0]) / 2**20]) for _ in requests]
        """,
    )
    with models.served() as server:

        async def run() -> None:
            found = await server.ask("many", np.zeros(1))
            assert not isinstance(found, str), found
            assert found[0] < 4, "the worker has grown"

        server.run(run)


SHARED = 'parameters { key: "naiad.worker" value { string_value: "one" } }\n'


@pytest.mark.parametrize(
    "source",
    [
        CALLER,
        CALLER.replace("def execute", "async def execute")
        .replace("(call(", "(await call(")
        .replace(".exec", ".async_exec"),
    ],
    ids=["exec", "async_exec"],
)
def test_models_of_one_process_call_each_other(tmp_path: Path, source: str) -> None:
    models = Models(tmp_path)
    models.add("double", DOUBLE, SHARED)
    models.add("caller", source, SHARED)
    with models.served() as server:

        async def run() -> None:
            for size in (4, 50_000):
                array = np.arange(size, dtype=np.float32)
                for _ in range(3):
                    assert np.array_equal(await server.ask("caller", array), array * 2)

        server.run(run)
