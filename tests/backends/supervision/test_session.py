"""A worker that misbehaves is dropped: what it sends is never trusted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time

import pytest

from backends.supervision.session import END_WAIT_S, WorkerSession
from backends.transport import wire
from backends.transport.framing import frame
from backends.transport.outbox import BYTE_SIZE, Outbox
from backends.transport.texts import MAX_TEXT_BYTES
from kernel.errors import InternalError, InvalidArgument, Unavailable, WorkerLost
from kernel.testing import RecordingSink
from tests.backends.supervision.played_worker import (
    Bench,
    FakeWorker,
    output_block,
    request_with_large_input,
    responses,
    run,
    settle,
)


def test_answers_that_were_sent_before_the_death_count() -> None:
    async def scenario(bench: Bench) -> None:
        request = bench.submit()
        await settle()
        bench.worker.channel.send(wire.Executed(1, [wire.ResponseMessage()]))
        bench.worker.die("exit code 1")
        assert bench.lost == ["exit code 1"]
        assert responses(request) == ["ok"]

    run(scenario)


def test_a_worker_that_dies_fails_what_it_executes_and_nothing_else() -> None:
    async def scenario(bench: Bench) -> None:
        running, waiting = bench.submit(), bench.submit()
        await settle()
        bench.worker.die("killed by signal 11 (SIGSEGV)")
        assert responses(running) == ["WorkerLost"]
        assert responses(waiting) == []
        assert isinstance(running.sink, RecordingSink)
        error = running.sink.errors[0]
        assert isinstance(error, WorkerLost)
        assert "m_0" in error.message
        assert "SIGSEGV" in error.message

    run(scenario)


def test_a_worker_that_is_to_end_has_answered_everything_before() -> None:
    async def scenario(bench: Bench) -> None:
        request = bench.submit()
        bench.model.instances.set_apart(bench.handle)
        drained = asyncio.ensure_future(bench.handle.drain())
        await settle()
        assert not drained.done()
        bench.worker.channel.send(wire.Responded(1, True, wire.ResponseMessage()))
        await settle()
        assert responses(request) == ["ok"]
        assert not drained.done(), "the batch goes on"
        bench.worker.channel.send(wire.Executed(1))
        await drained
        await bench.handle.drain()
        bench.handle.stopped()

    run(scenario)


def test_nobody_waits_for_a_worker_that_is_lost() -> None:
    async def scenario(bench: Bench) -> None:
        request = bench.submit()
        bench.model.instances.set_apart(bench.handle)
        drained = asyncio.ensure_future(bench.handle.drain())
        await settle()
        bench.worker.die("exit code 1")
        await drained
        assert responses(request) == ["WorkerLost"]

    run(scenario)


@pytest.mark.parametrize(("others", "poll_ns"), [(0, 50_000), (1, 50_000), (2, 0)])
def test_a_worker_may_poll_while_few_requests_are_in_flight(others: int, poll_ns: int) -> None:
    async def scenario(bench: Bench) -> None:
        bench.polling.in_flight = others
        bench.submit()
        await settle()
        [execute] = await bench.received()
        assert isinstance(execute, wire.Execute)
        assert execute.poll_ns == poll_ns
        bench.worker.channel.send(wire.Executed(1, [wire.ResponseMessage()]))
        await settle()
        assert bench.polling.in_flight == others
        bench.polling.in_flight = 0

    run(scenario)


@pytest.mark.parametrize(
    ("said", "second"), [(wire.InputsHeld([3]), []), (wire.Responded(3, True, wire.ResponseMessage()), ["ok"])]
)
def test_what_is_said_of_a_request_out_of_turn_harms_no_other(said: wire.ToKernel, second: list[str]) -> None:
    async def scenario(bench: Bench) -> None:
        first = bench.submit()
        await settle()
        bench.worker.channel.send(wire.Executed(1, [wire.ResponseMessage()]))  # so fast that two more are given at once
        await settle()
        requests = [request_with_large_input(bench) for _ in range(2)]  # numbers 2 and 3
        await settle()
        bench.worker.channel.send(said)
        await settle()
        bench.worker.die("exit code 1")
        assert [responses(request) for request in (first, *requests)] == [["ok"], ["WorkerLost"], second]
        assert all(tensor.span is not None for tensor in requests[1].inputs), "it can be given to another worker"

    run(scenario)


HOSTILE = [
    b"\xff\xff\xff\xff",
    frame(b"\xc1 no msgpack"),
    frame(wire.encoder.encode(["NoSuchMessage", 1])),
    frame(wire.encoder.encode(wire.Executed(99))),
    frame(wire.encoder.encode(wire.Responded(99, True))),
    frame(wire.encoder.encode(wire.InputsHeld([99]))),
    frame(wire.encoder.encode(wire.InputsHeld([1, 1]))),
    frame(wire.encoder.encode(wire.InputsFreed([1]))),
    frame(wire.encoder.encode(wire.Loaded(1))),
    frame(wire.encoder.encode(wire.MetricsChanged(changes=[wire.MetricChange(1, 1.0)]))),
    frame(wire.encoder.encode(wire.MetricsChanged([wire.MetricFamilyRef("nv_inference_count", "", "counter")]))),
    frame(wire.encoder.encode(wire.Stop())),
    frame(wire.encoder.encode(wire.Responded(1, True, wire.ResponseMessage(error_code="no such code")))),
    frame(wire.encoder.encode(wire.Responded(1, True, wire.ResponseMessage([output_block("OUT", 0, 4)])))),
    frame(wire.encoder.encode(wire.Responded(1, True, wire.ResponseMessage([], {}, "internal", "x" * 65537)))),
    frame(wire.encoder.encode(wire.OutboxCreated())),
    frame(b"\x91" * 5000),
]


@pytest.mark.parametrize("data", HOSTILE)
def test_a_worker_that_sends_garbage_is_dropped_as_if_it_had_crashed(data: bytes) -> None:
    async def scenario(bench: Bench) -> None:
        request = bench.submit()
        await settle()
        bench.worker.raw(data)
        await settle()
        assert len(bench.lost) == 1
        assert responses(request) == ["WorkerLost"]

    run(scenario)


@pytest.mark.parametrize("ends", [True, False])
def test_a_worker_that_closes_its_connection_may_end_by_itself(ends: bool) -> None:
    async def scenario(bench: Bench) -> None:
        bench.worker.channel.close()
        await settle()
        assert not bench.lost
        if ends:
            bench.worker.die("exit code 1")
        await asyncio.sleep(2 * END_WAIT_S)
        cause = "exit code 1" if ends else "killed by signal 9 (SIGKILL); it had closed its connection"
        assert bench.lost == [cause]

    run(scenario)


def test_a_process_that_is_stopped_is_killed_without_waiting_for_it() -> None:
    async def scenario(bench: Bench) -> None:
        bench.worker.is_stopped = True
        ends: list[str] = []
        bench.worker.on_lost(ends.append)
        await bench.session.stop(3600)
        assert ends == ["killed by signal 9 (SIGKILL)"]

    run(scenario)


@pytest.mark.parametrize("sealed", [False, True])
def test_a_second_outbox_or_one_that_could_be_shortened_ends_the_worker(sealed: bool) -> None:
    async def scenario(bench: Bench) -> None:
        outboxes = [Outbox(), Outbox()]
        fds = [outbox.fd for outbox in outboxes] if sealed else [os.memfd_create("test")]
        for fd in fds:
            os.ftruncate(fd, BYTE_SIZE)
            bench.worker.channel.send_with_fd(wire.OutboxCreated(), fd)
        await settle()
        assert ("a second outbox" if sealed else "a memfd with seals 0x1") in bench.lost[0]
        for fd in {*fds, *(outbox.fd for outbox in outboxes)}:
            os.close(fd)

    run(scenario)


def test_metrics_of_the_model_arrive_and_end_with_the_worker() -> None:
    async def scenario(bench: Bench) -> None:
        families = [wire.MetricFamilyRef("count", "", "counter"), wire.MetricFamilyRef("level", "", "gauge")]
        created = [wire.MetricSeriesRef(1, "count"), wire.MetricSeriesRef(2, "level")]
        changes = [wire.MetricChange(1, 2.0), wire.MetricChange(2, 3.0, True)]
        bench.worker.channel.send(wire.MetricsChanged(families, created, changes))
        await settle()
        custom = bench.model.statistics.custom

        def shown() -> dict[str, float]:
            return {name: one.value for (name, _), family in custom.families.items() for one in family.series.values()}

        assert shown() == {"count": 2.0, "level": 3.0}
        bench.worker.die("exit code 1")
        assert shown() == {"count": 2.0}

    run(scenario)


def test_a_line_that_a_worker_logs_is_cut_by_the_kernel_too(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.say(wire.Log("WARNING", "x" * 100_000))

    run(scenario)
    [line] = caplog.messages
    assert len(line) < MAX_TEXT_BYTES + 100
    assert line.startswith("m_0: xxx")
    assert line.endswith("(cut: the whole text has 100000 characters)")


def test_an_interpreter_that_cannot_run_a_worker_says_why() -> None:
    async def main() -> None:
        worker, session = FakeWorker(), WorkerSession("m")
        worker.channel.send(wire.LoadFailed("unavailable", "it has Python 3.8"))
        with pytest.raises(Unavailable, match="the worker cannot run: it has Python 3.8"):
            await session.start(worker)
        await session.stop(0)

    asyncio.run(main())


def test_a_worker_of_another_protocol_is_refused() -> None:
    async def main() -> None:
        worker, session = FakeWorker(), WorkerSession("m")
        worker.channel.send(wire.Hello("13 of 0.0.9", 1))
        with pytest.raises(InternalError, match=r"another protocol: it sent version 13 of 0\.0\.9, expected"):
            await session.start(worker)

    asyncio.run(main())


def test_a_worker_lost_while_it_loads_is_the_loads_error() -> None:
    async def main() -> None:
        worker, session = FakeWorker(), WorkerSession("m")
        worker.channel.send(wire.Hello(wire.PROTOCOL, 1))
        await session.start(worker)
        loading = asyncio.create_task(session.load(wire.Load("{}", "", 1, "m")))
        await asyncio.sleep(0)
        worker.die("exit code 3")
        with pytest.raises(InternalError, match="exit code 3"):
            await loading
        with contextlib.suppress(OSError):
            worker.channel.close()

    asyncio.run(main())


@pytest.mark.parametrize("local", [True, False])
def test_the_clock_of_a_worker_on_another_machine_is_known_by_its_difference(local: bool) -> None:
    async def main() -> None:
        worker, session = FakeWorker(), WorkerSession("m")
        before_ns = time.monotonic_ns()
        worker.channel.send(wire.Hello(wire.PROTOCOL, 1, local, 1000))
        await session.start(worker)
        assert session.local is local
        if local:
            assert session.clock_offset_ns == 0
        else:
            assert before_ns - 1000 <= session.clock_offset_ns <= time.monotonic_ns() - 1000
        worker.kill()

    asyncio.run(main())


def test_a_loaded_worker_says_how_many_batches_it_executes_at_the_same_time() -> None:
    async def main() -> None:
        worker, session = FakeWorker(), WorkerSession("m")
        worker.channel.send(wire.Hello(wire.PROTOCOL, 1))
        await session.start(worker)
        assert session.concurrency == 1
        worker.channel.send(wire.Loaded(7, 4))
        assert await session.load(wire.Load("{}", "", 1, "m")) == 7
        assert session.concurrency == 4
        worker.kill()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("sent", "found"),
    [
        (wire.Completed("{}"), "Completed, expected Loaded"),
        (wire.Loaded(5, 0), "a concurrency of 0"),
        (wire.Loaded(5, -1), "a concurrency of -1"),
        (wire.LoadFailed("no such code", ""), "the error code 'no such code'"),
    ],
)
def test_a_worker_with_a_wrong_response_to_a_load_is_dropped(sent: wire.ToKernel, found: str) -> None:
    async def main() -> None:
        worker, session = FakeWorker(), WorkerSession("m")
        worker.channel.send(wire.Hello(wire.PROTOCOL, 1))
        await session.start(worker)
        worker.channel.send(sent)
        with pytest.raises(InternalError) as caught:
            await session.load(wire.Load("{}", "", 1, "m"))
        assert caught.value.message == f"the worker was lost while the model was being loaded (it sent {found})"
        with pytest.raises(Unavailable, match="it sent"):
            await session.load(wire.Load("{}", "", 1, "m"))

    asyncio.run(main())


def test_a_load_that_failed_raises_the_workers_error() -> None:
    async def main() -> None:
        worker, session = FakeWorker(), WorkerSession("m")
        worker.channel.send(wire.Hello(wire.PROTOCOL, 1))
        await session.start(worker)
        worker.channel.send(wire.LoadFailed("invalid_arg", "the model wants more"))
        with pytest.raises(InvalidArgument, match="^the model wants more$"):
            await session.load(wire.Load("{}", "", 1, "m"))
        worker.kill()
        with pytest.raises(Unavailable, match="the worker was lost"):
            await session.load(wire.Load("{}", "", 1, "m"))

    asyncio.run(main())
