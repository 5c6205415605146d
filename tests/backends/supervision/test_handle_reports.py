"""What a backend reports reaches the statistics and the traces of the requests."""

from __future__ import annotations

from backends.transport import wire
from kernel.observe.reporting.instance_memory import MemoryUsage
from tests.backends.supervision.played_worker import Bench, response, responses, run

TIMES = wire.StageTimes(10, 20, 40, 70)


class NotedTrace:
    def __init__(self) -> None:
        self.stamped: list[tuple[str, int]] = []

    def stamp(self, name: str, at_ns: int) -> None:
        self.stamped.append((name, at_ns))


def executed(batch: int, *, answered: bool = True) -> wire.Executed:
    return wire.Executed(batch, [response()] if answered else [], 1, 1, 2, 2)


def test_a_report_replaces_the_times_of_the_execution() -> None:
    async def scenario(bench: Bench) -> None:
        request = bench.submit()
        await bench.say(
            wire.Reported(1, [wire.RequestReport(1, TIMES)], [wire.BatchReport(1, TIMES)]),
            executed(1),
        )
        assert responses(request) == ["ok"]
        statistics = bench.model.statistics
        assert (statistics.success.count, statistics.execution_count) == (1, 1)
        assert (statistics.input_ns, statistics.infer_ns, statistics.output_ns) == (10, 20, 30)
        assert statistics.batches[1].infer_ns == 20
        bench.submit()
        await bench.say(executed(2))
        assert (statistics.success.count, statistics.infer_ns) == (2, 21)

    run(scenario)


def test_a_request_that_is_reported_after_its_batch_is_counted_anew() -> None:
    async def scenario(bench: Bench) -> None:
        request = bench.submit()
        statistics = bench.model.statistics
        await bench.say(executed(1, answered=False))
        assert (statistics.success.count, statistics.infer_ns) == (1, 1)
        await bench.say(
            wire.Reported(0, [wire.RequestReport(1, TIMES)], responses=[wire.ResponseReport(0, "success", 10, 20, 30)]),
            wire.Responded(1, True, response()),
        )
        assert responses(request) == ["ok"]
        assert (statistics.success.count, statistics.infer_ns) == (1, 20)
        assert statistics.responses["0"].success.count == 1
        await bench.say(wire.Reported(0, [wire.RequestReport(1, TIMES, False)]))  # too late
        assert statistics.fail.count == 0

    run(scenario, decoupled=True)


def test_activities_go_to_the_trace_of_their_request() -> None:
    async def scenario(bench: Bench) -> None:
        request, trace = bench.submit(), NotedTrace()
        request.trace = trace  # type: ignore[assignment]  # only `stamp` is used
        other = wire.Activity(9, "LOST", 1)
        await bench.say(wire.Reported(1, activities=[wire.Activity(1, "LOOKUP_START", 5), other]), executed(1))
        assert trace.stamped == [("LOOKUP_START", 5 + bench.session.clock_offset_ns)]

    run(scenario)


def test_the_memory_of_a_worker_is_known_until_it_ends() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.say(wire.MemoryUsed([wire.MemoryUse("GPU", 0, 64)]))
        memory = bench.model.statistics.memory
        assert memory.by_instance == {"m_0": (MemoryUsage("GPU", 0, 64),)}
        bench.worker.kill()
        assert memory.by_instance == {}
        assert memory.pids == {}

    run(scenario)


def test_a_report_that_no_worker_of_ours_sends_ends_the_worker() -> None:
    async def scenario(bench: Bench) -> None:
        bench.submit()
        await bench.say(wire.Reported(1, [wire.RequestReport(1, wire.StageTimes(4, 3, 2, 1))]))
        assert bench.lost

    run(scenario)
