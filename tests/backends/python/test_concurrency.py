"""`async def execute` with `naiad.concurrency`: several batches are in execution on one instance."""

from __future__ import annotations

import gc
import queue
import threading
from typing import TYPE_CHECKING, Any

import pytest

from backends.python.backend import PythonBackend
from backends.transport import wire
from kernel.errors import BadConfig, InternalError
from tests.backends.worker.regions import arena_with
from tests.backends.worker.threaded_worker import LARGE, Bench, request

if TYPE_CHECKING:
    from collections.abc import Iterator

    from backends.worker.request import WorkerRequest
    from kernel.errors import ServingError
    from tests.backends.python.conftest import Lab

CONCURRENCY = {"naiad.concurrency": {"string_value": "4"}}

#: Responds to a request when the one called `open` comes.
WAITS = """
    import asyncio

    class TritonPythonModel:
        def initialize(self, args):
            self.opened = asyncio.Event()

        async def execute(self, requests):
            if requests[0].request_id() == "open":
                self.opened.set()
            await self.opened.wait()
            return [text(request.request_id()) for request in requests]
"""


def begin(lab: Lab, *requests: WorkerRequest) -> queue.SimpleQueue[ServingError | None]:
    """Begin with a batch; the result says that it has ended, and how."""
    ended: queue.SimpleQueue[ServingError | None] = queue.SimpleQueue()
    lab.backend.begin(list(requests), lab.timings, ended.put)
    return ended


def test_batches_wait_for_one_another_in_the_model(lab: Lab) -> None:
    lab.load(WAITS, parameters=CONCURRENCY, max_batch_size=4)
    assert lab.backend.concurrency == 4
    first, second, opening = lab.request(id="a"), lab.request(id="b"), lab.request(id="open")
    ended = [begin(lab, first, second), begin(lab, opening)]
    assert [each.get(timeout=60) for each in ended] == [None, None]
    assert [lab.response(each).outputs["OUT"][0] for each in (first, second, opening)] == [b"a", b"b", b"open"]


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero\n\nAt:\n"),
        ("raise asyncio.CancelledError", "CancelledError: <EMPTY MESSAGE>\n\nAt:\n"),
        ("raise SystemExit(1)", "SystemExit: 1\n\nAt:\n"),
        ("return []", "Number of InferenceResponse objects do not match"),
        ("return 5", "Expected a list in the execute return, found type '<class 'int'>'."),
    ],
)
def test_a_batch_that_fails_leaves_the_others_alone(lab: Lab, statement: str, reason: str) -> None:
    lab.load(
        f"""
        import asyncio

        class TritonPythonModel:
            async def execute(self, requests):
                if requests[0].request_id() == "bad":
                    {statement}
                return [text("fine")]
        """,
        parameters=CONCURRENCY,
    )
    bad, good = lab.request(id="bad"), lab.request()
    failed, fine = begin(lab, bad), begin(lab, good)
    failure = failed.get(timeout=60)
    assert isinstance(failure, InternalError)
    assert failure.message.startswith(f"Failed to process the request(s) for model 'lab_0_0', message: {reason}")
    kept = (failure.__traceback__, failure.__cause__, failure.__context__)
    assert kept == (None, None, None), "they refer to the inputs"
    assert ("ERROR", failure.message) in lab.logged
    assert fine.get(timeout=60) is None
    assert lab.response(good).outputs["OUT"][0] == b"fine"
    assert not bad.finished, "the worker ends it"


def test_too_many_rows_are_refused_before_the_model(lab: Lab) -> None:
    lab.load(WAITS, parameters=CONCURRENCY)
    failure = begin(lab, lab.request(), lab.request()).get(timeout=60)
    assert failure is not None
    assert failure.message == "batch size 2 for 'lab_0_0', max allowed is 0"


def test_a_decoupled_batch_ends_when_its_coroutine_does(lab: Lab) -> None:
    lab.load(
        """
        import asyncio

        class TritonPythonModel:
            def initialize(self, args):
                self.opened = asyncio.Event()

            async def execute(self, requests):
                sender = requests[0].get_response_sender()
                sender.send(text("first"))
                if requests[0].request_id() == "open":
                    self.opened.set()
                await self.opened.wait()
                sender.send(text("last"), flags=1)
        """,
        decoupled=True,
        parameters=CONCURRENCY,
    )
    waiting, opening = lab.request(), lab.request(id="open")
    first = begin(lab, waiting)
    assert first.empty()
    assert begin(lab, opening).get(timeout=60) is None
    assert first.get(timeout=60) is None
    assert [response.outputs["OUT"][0] for response in lab.responses(waiting)] == [b"first", b"last"]


@pytest.mark.parametrize("source", ["def execute(self, requests): return []", "pass"])
def test_a_model_without_async_execute_has_no_concurrency(lab: Lab, source: str) -> None:
    with pytest.raises(BadConfig) as caught:
        lab.load(source, parameters=CONCURRENCY)
    assert caught.value.message == (
        "model 'lab' has 4 as parameter 'naiad.concurrency', which is for models with `async def execute`; its "
        "`execute` is not an `async def`. Use more instances (instance_group.count)"
    )


def test_a_model_with_a_concurrency_of_one_is_the_usual_one(lab: Lab) -> None:
    lab.load("def execute(self, requests): return [text(1)]", parameters={"naiad.concurrency": {"string_value": "1"}})
    assert lab.backend.concurrency == 1


# ---- in a worker ----------------------------------------------------------------------------


@pytest.fixture
def worker(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Return a worker with a Python backend; `lab` writes the model."""
    monkeypatch.setattr(gc, "freeze", lambda: None)
    bench = Bench()
    monkeypatch.setattr("backends.worker.loop.backend_class", lambda name, arguments: PythonBackend)
    yield bench
    bench.leave()


def load(worker: Bench, lab: Lab, source: str, config: str = "") -> None:
    lab.write(source)
    worker.hello()
    config = (
        '{"name": "lab", "backend": "python", "output": [{"name": "OUT"}], '
        f'"parameters": {{"naiad.concurrency": {{"string_value": "4"}}}}{config}}}'
    )
    worker.send(wire.Load(config, str(lab.dir), 1, "lab_0", arena_byte_size=1 << 20))
    assert worker.next(wire.Loaded).concurrency == 4


def finals(worker: Bench, batches: int, responses: int = 0) -> list[Any]:
    """Return the messages until as many batches have ended and responses have come, but for `Started`."""
    seen: list[Any] = []
    while (
        sum(isinstance(message, wire.Executed) for message in seen) < batches
        or sum(isinstance(message, wire.Responded) for message in seen) < responses
    ):
        raw = worker.channel.receive()
        assert raw is not None
        seen += map(wire.to_kernel_decoder.decode, raw)
    return [message for message in seen if not isinstance(message, wire.Started)]


@pytest.mark.parametrize("statement", ["pass", "raise ValueError(array)"])
def test_nothing_refers_to_the_inputs_of_a_batch_that_has_ended(worker: Bench, lab: Lab, statement: str) -> None:
    load(
        worker,
        lab,
        f"""
class TritonPythonModel:
    async def execute(self, requests):
        array = tensor(requests[0], "IN")
        {statement}
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array[:1])])]
""",
    )
    with arena_with(LARGE) as (arena, span):
        worker.channel.send_with_fd(wire.Attach(7, 1 << 16), arena.region.fd)
        worker.send(wire.Execute(1, [request(1, span=span)]), wire.Execute(2, [request(2, span=span)]))
        messages = finals(worker, 2)
    assert not any(isinstance(message, wire.InputsHeld) for message in messages)
    assert sorted(message.batch for message in messages if isinstance(message, wire.Executed)) == [1, 2]
    worker.stop()


def test_a_model_that_keeps_an_input_is_noticed(worker: Bench, lab: Lab) -> None:
    load(
        worker,
        lab,
        """
kept = []

class TritonPythonModel:
    async def execute(self, requests):
        kept.append(tensor(requests[0], "IN"))
        return [text(1)]
""",
    )
    with arena_with(LARGE) as (arena, span):
        worker.channel.send_with_fd(wire.Attach(7, 1 << 16), arena.region.fd)
        worker.send(wire.Execute(1, [request(1, span=span)]))
        held, _ = finals(worker, 1)
    assert held == wire.InputsHeld([1])
    worker.leave()


def test_a_stream_that_is_ahead_of_its_client_does_not_hold_up_the_others(worker: Bench, lab: Lab) -> None:
    load(
        worker,
        lab,
        """
import asyncio

class TritonPythonModel:
    async def execute(self, requests):
        sender = requests[0].get_response_sender()
        for number in range(200 if requests[0].request_id() == "long" else 1):
            sender.send(text(number))
            await asyncio.sleep(0)
        sender.send(flags=1)
""",
        ', "model_transaction_policy": {"decoupled": true}',
    )
    long = wire.RequestMessage(1, [], id="long")
    worker.send(wire.Execute(1, [long]), wire.Execute(2, [wire.RequestMessage(2, [])]))
    messages = finals(worker, 1, wire.CREDIT_WINDOW + 2)
    assert [m.batch for m in messages if isinstance(m, wire.Executed)] == [2]
    counts = [sum(m.request == number for m in messages if isinstance(m, wire.Responded)) for number in (1, 2)]
    assert counts == [wire.CREDIT_WINDOW, 2]
    worker.send(wire.Credit(1, 200))
    rest = finals(worker, 1)
    assert rest[-1].batch == 1
    assert sum(isinstance(m, wire.Responded) for m in rest) == 201 - wire.CREDIT_WINDOW
    worker.stop()


def test_a_stream_whose_client_has_gone_goes_on(worker: Bench, lab: Lab) -> None:
    load(
        worker,
        lab,
        """
import asyncio

class TritonPythonModel:
    async def execute(self, requests):
        sender = requests[0].get_response_sender()
        while not sender.is_cancelled():
            sender.send(text(0))
            await asyncio.sleep(0)
        sender.send(flags=1)
""",
        ', "model_transaction_policy": {"decoupled": true}',
    )
    worker.send(wire.Execute(1, [wire.RequestMessage(1, [])]))
    worker.next(wire.Started)
    for _ in range(wire.CREDIT_WINDOW):
        worker.next(wire.Responded)
    worker.send(wire.Cancel([1]))
    last = finals(worker, 1)[-2]
    assert (last.final, last.response) == (True, None)
    worker.stop()


def test_a_coroutine_that_never_awaits_waits_in_send_after_a_while(worker: Bench, lab: Lab) -> None:
    load(
        worker,
        lab,
        """
class TritonPythonModel:
    async def execute(self, requests):
        sender = requests[0].get_response_sender()
        for number in range(2000):
            sender.send(text(number))
        sender.send(flags=1)
""",
        ', "model_transaction_policy": {"decoupled": true}',
    )
    worker.send(wire.Execute(1, [wire.RequestMessage(1, [])]))
    worker.next(wire.Started)
    most = 17 * wire.CREDIT_WINDOW
    for _ in range(most):
        worker.next(wire.Responded)
    reads = threading.Thread(target=finals, args=(worker, 1))
    reads.start()
    worker.send(wire.Credit(1, 2000))
    reads.join(60)
    assert not reads.is_alive()
    worker.stop()
