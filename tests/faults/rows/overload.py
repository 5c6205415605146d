"""Ten times as many requests as a model can serve: S11."""

from __future__ import annotations

import time

from bench.machine import memory_of
from bench.models import ADD_SUB, PYTHON_MODELS, write_python_model
from bench.server import ServerProcess
from tests.faults.health import watched
from tests.faults.open_loop import OpenLoad, OpenSpec, run_apart
from tests.faults.row import Finding, Settings, at_most, percentile

#: One execution, and how many wait at most.
EXECUTION_S, QUEUE = 0.010, 8
RATE = 1000.0
#: Requests with a connection of their own, after the others.
SHORT = 2000
MIB = 1 << 20

CONFIG = PYTHON_MODELS["add_sub"][0] + f"dynamic_batching {{ default_queue_policy {{ max_queue_size: {QUEUE} }} }}\n"
SLOW = ADD_SUB.replace("        responses = []", f"        time.sleep({EXECUTION_S})\n        responses = []")


def overload(settings: Settings) -> Finding:
    """S11: open loop, 1,000 requests a second over both protocols for a model that serves 100."""
    seconds = settings.count(5, 60)
    repository = settings.repository()
    write_python_model(repository / "slow", CONFIG, SLOW)
    with ServerProcess(repository) as server, watched(server) as health:
        spec = OpenSpec(server.http_port, server.grpc_port, "slow", 110.0, 3.0)
        peak = run_apart(spec).successes / spec.seconds
        run_apart(OpenSpec(server.http_port, server.grpc_port, "slow", RATE, 1.0))  # buffers grow once
        run_apart(OpenSpec(server.http_port, server.grpc_port, "slow", RATE, 0.5, short=True))
        health.counted()
        memory = memory_of(server.pid).private
        kept = run_apart(OpenSpec(server.http_port, server.grpc_port, "slow", RATE, seconds))
        waited = health.counted()
        short = run_apart(OpenSpec(server.http_port, server.grpc_port, "slow", RATE, SHORT / RATE, short=True))
        began = time.monotonic()
        while run_apart(OpenSpec(server.http_port, server.grpc_port, "slow", 40.0, 0.1)).refusals:
            pass
        recovered_s = time.monotonic() - began
        grown = memory_of(server.pid).private - memory
    return _judge(peak, kept, short, waited.p99_ms, recovered_s, grown)


def _judge(peak: float, kept: OpenLoad, short: OpenLoad, health_ms: float, recovered_s: float, grown: int) -> Finding:
    goodput = kept.successes / kept.seconds / peak
    refused_ms = percentile(kept.refusal_ms, 0.99)
    wrong = [f"goodput is {goodput:.0%} of the peak"] if goodput < 0.9 else []
    wrong += at_most("p99 of refusals", refused_ms, 10, " ms")
    wrong += at_most("health p99", health_ms, 20, " ms")
    wrong += at_most("growth", grown / MIB, 16, " MiB")
    wrong += at_most("recovery", recovered_s, 1.5, " s")  # with the start of the process that measures it
    for load in (kept, short):
        wrong += [f"{load.others} responses of another kind: {load.texts}"] if load.others else []
        wrong += [f"{load.unanswered} requests have no response"] if load.unanswered else []
    unhinted = kept.refusals - kept.hinted
    wrong += [f"{unhinted} refusals do not say when to come again"] if unhinted else []
    figure = (
        f"{kept.sent:,} requests in {kept.seconds:.0f} s: goodput {goodput:.0%} of the peak ({peak:.0f}/s), "
        f"{kept.refusals:,} refused, p99 {refused_ms:.1f} ms; health p99 {health_ms:.1f} ms; private memory "
        f"{grown / MIB:+.1f} MiB; served again within {recovered_s:.1f} s; {short.sent:,} short connections: "
        f"{short.successes} served, {short.refusals:,} refused, {short.others + short.unanswered} else"
    )
    return Finding(figure, wrong, [*kept.texts, *short.texts])
