"""`python -m bench micro`: what the parts of a request cost, one by one, in one process."""

from __future__ import annotations

import itertools
import timeit
from typing import TYPE_CHECKING

import msgspec

from backends.transport import wire
from backends.transport.framing import MAX_KERNEL_FRAME, FrameReader, frame
from bench import inside
from kernel.cache.local import LocalCache
from kernel.cache.lookup import CacheAccess
from kernel.config.fair_queuing import FairQueuing
from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.config.spec import DynamicBatching, EnsembleSpec, SequenceBatching
from kernel.observe.execution_reports import ExecutionTimes
from kernel.observe.metrics_config import MetricsConfig
from kernel.observe.statistics import ModelStatistics
from kernel.serving.batch import Batch
from kernel.serving.events import Submitted
from kernel.serving.helper_tasks import NoHelpers
from kernel.serving.model import Model
from kernel.serving.model_figures import figures_of
from kernel.serving.request import Request
from kernel.serving.request_key import describe, digest
from kernel.serving.sequence_model import SequenceInstances
from kernel.serving.validation import validate
from kernel.testing import FakeClock, Lab, RecordingSink, model_spec
from protocols.http.metrics.model_families import render_models
from schedulers.direct import direct
from schedulers.dynamic import dynamic
from schedulers.ratelimit import GatedInstance, InstanceNeeds, RateLimiter, Resource
from schedulers.sequence import sequence
from schedulers.testing import KernelLab, spec_of, step
from shm.blocks import BlockAllocator
from shm.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.serving.response import Response

REPEATS = 5


def run() -> None:
    """Print microseconds per operation: the best of several repeats, as the documentation of `timeit` advises."""
    for name, operation in operations().items():
        timer = timeit.Timer(operation)
        count, _ = timer.autorange()
        best = min(timer.repeat(REPEATS, count)) / count
        print(f"{name:44} {best * 1e6:8.2f} us")
    for name, microseconds in inside.measure().items():
        print(f"{name:44} {microseconds:8.2f} us")


def operations() -> dict[str, Callable[[], object]]:
    """Return the operations that are measured, by name."""
    execute = wire.Execute(2, [wire.RequestMessage(1, [Tensor("IN", "FP32", [16], bytes(64))] * 2)])
    executed = wire.Executed(2, [wire.ResponseMessage([Tensor("OUT", "FP32", [16], bytes(64))] * 2)])
    encoded, encoded_executed = wire.encoder.encode(execute), wire.encoder.encode(executed)
    reader, framed = FrameReader(MAX_KERNEL_FRAME), frame(encoded)
    allocator = BlockAllocator(1 << 34)
    return {
        "worker message: encode Execute": lambda: wire.encoder.encode(execute),
        "worker message: decode Execute": lambda: wire.to_worker_decoder.decode(encoded),
        "worker message: decode Executed": lambda: wire.to_kernel_decoder.decode(encoded_executed),
        "framing: one frame": lambda: reader.feed(framed),
        "arena: allocate and free 1 MiB": lambda: allocator.free(allocator.take(1 << 20) or 0),
        "request: check against the configuration": _validation(),
        "statistics: record an execution": _recording(MetricsConfig()),
        "statistics: record it with summaries": _recording(MetricsConfig(True, True, True)),
        "metrics: a page with 100 models": _scrape(100),
        "scheduler: direct, submit to response": _scheduling(direct, 0),
        "scheduler: dynamic, submit to response": _scheduling(dynamic, 8),
        "scheduler: direct, submit to dispatch": _step(None),
        "scheduler: dynamic, submit to dispatch": _step(DynamicBatching()),
        "scheduler: the same, clients get shares": _step(DynamicBatching(), FairQueuing(parameter="client")),
        "scheduler: sequence, direct, to dispatch": _sequence_step(4, oldest=False),
        "scheduler: sequence, oldest, to dispatch": _sequence_step(4, oldest=True),
        "scheduler: the same, 10,000 live sequences": _sequence_step(10_000, oldest=True),
        "ensemble: a request with one step": _ensemble(1),
        "ensemble: a request with four steps": _ensemble(4),
        "response cache: a hit": _cache_hit(64),
        "response cache: a hit, 64 KiB in and out": _cache_hit(64 << 10),
        "response cache: store 1 MiB": _cache_store(1 << 20),
        "rate limiter: ask, start and end": _limiting(),
    }


def _validation() -> Callable[[], object]:
    spec = model_spec(dims=(16,))
    request = Request("model", [Tensor("IN", "FP32", [16], bytes(64))], RecordingSink())
    return lambda: validate(request, spec)


def _recording(metrics: MetricsConfig) -> Callable[[], object]:
    statistics = ModelStatistics()
    statistics.configure(metrics, ModelConfig())
    batch = Batch([Request("model", [], RecordingSink())])
    times = ExecutionTimes(0, 1_000, 100_000, 1_000)
    return lambda: statistics.record_execution(batch, times, 250_000, 1)


def _scrape(count: int) -> Callable[[], object]:
    spec, config = model_spec(max_batch_size=8), MetricsConfig()
    models = [Model(spec, ModelConfig(), version, direct, FakeClock()) for version in range(count)]
    return lambda: "\n".join(render_models([figures_of(each) for each in models], config, 0)).encode()


def _cache_hit(byte_size: int) -> Callable[[], object]:
    clock = FakeClock()
    model = Model(model_spec(dims=(-1,)), ModelConfig(), 1, direct, clock)
    cache = LocalCache(1 << 24)
    CacheAccess(
        model, cache, lambda: b"salt", helpers=NoHelpers(), regions=NoHelpers(),  # type: ignore[arg-type]  # not used
        start=NotImplemented, clock=clock,
    )  # fmt: skip
    given = Tensor("IN", "FP32", [byte_size // 4], bytes(byte_size))

    def request() -> Request:
        return Request("model", [given], _DroppingSink())

    first = request()
    cache.insert(digest(describe(first, b"salt"), [given.raw()]), [given], None, dict)
    return lambda: model.submit(request())


class _DroppingSink:
    """Releases every response."""

    peer = ""

    def header(self, name: str) -> str:
        return ""

    def send(self, response: Response) -> None:
        response.release()


def _cache_store(byte_size: int) -> Callable[[], object]:
    cache, keys = LocalCache(1 << 26), itertools.count()
    output = Tensor("OUT", "UINT8", [byte_size], bytes(byte_size))
    return lambda: cache.insert(next(keys).to_bytes(32), [output], None, dict)


def _limiting() -> Callable[[], object]:
    limiter, needs = RateLimiter(), InstanceNeeds({Resource("R"): 1})
    limiter.register("model", [needs])
    instance = GatedInstance(None, None, needs, 0)  # type: ignore[arg-type]  # it never waits

    def once() -> None:
        limiter.may_start(instance)
        limiter.started(instance)
        limiter.ended(instance)
        limiter.wake_waiting()

    return once


def _scheduling(schedule: object, max_batch_size: int) -> Callable[[], object]:
    batching = DynamicBatching() if max_batch_size else None
    lab = Lab(model_spec(max_batch_size=max_batch_size, dynamic_batching=batching), schedule)  # type: ignore[arg-type]  # a scheduler

    def once() -> None:
        lab.inbox.post(Submitted(lab.request("")))
        lab.clock.end_iteration()
        lab.finish()

    return once


def _step(batching: DynamicBatching | None, fair: FairQueuing | None = None) -> Callable[[], object]:
    """Return what queues a request and dispatches it: the two steps of the scheduler, and the records of the kernel."""
    spec = msgspec.structs.replace(model_spec(max_batch_size=8, dynamic_batching=batching), fair=fair)
    lab = Lab(spec, direct if batching is None else dynamic)
    request, [instance] = lab.request(""), lab.workers
    submitted = Submitted(request)
    post, end_iteration = lab.inbox.post, lab.clock.end_iteration
    batches, recorded, live = instance.batches, instance.record.batches, lab.live

    def once() -> None:
        post(submitted)
        end_iteration()
        batches.clear()
        recorded.clear()
        request.dispatched = False
        live.instance_of[request], live.queued = None, 1

    return once


def _ensemble(count: int) -> Callable[[], object]:
    """A request through an ensemble of `count` steps in a chain: what each step adds is the cost of one."""
    lab = KernelLab()
    lab.add(spec_of("model", "IN", "OUT"))
    tensors = ["A", *(f"t{number}" for number in range(1, count)), "Z"]
    steps = tuple(step("model", {"IN": source}, {"OUT": target}) for source, target in itertools.pairwise(tensors))
    lab.add(spec_of("ensemble", "A", "Z", ensemble=EnsembleSpec(steps)))

    def once() -> None:
        lab.submit("ensemble", "A")
        while lab.calls:
            lab.calls[0].respond()

    return once


def _sequence_step(live: int, *, oldest: bool) -> Callable[[], object]:
    """Return what queues and dispatches a request of the next of `live` sequences, and frees it of its last batch."""
    batching = SequenceBatching(oldest=oldest, slot_count=live, max_idle_ns=1 << 62)
    lab = Lab(model_spec(max_batch_size=8, sequence_batching=batching), sequence)
    requests = []
    for number in range(1, live + 1):
        requests.append(lab.submit_to_sequence(number, start=True))
        lab.clock.end_iteration()
        _take_back(lab, requests[-1])
    following = itertools.cycle([(request, Submitted(request)) for request in requests])
    post, end_iteration, record = lab.inbox.post, lab.clock.end_iteration, lab.live

    def once() -> None:
        request, submitted = next(following)
        record.instance_of[request], record.queued = None, 1
        post(submitted)
        end_iteration()
        _take_back(lab, request)

    return once


def _take_back(lab: Lab, request: Request) -> None:
    """End the batch of a request without a response, so that the request can be submitted again."""
    [instance] = lab.workers
    assert isinstance(lab.instances, SequenceInstances)
    lab.instances.finished.append((instance.batches.popleft(), lab.clock.time_ns))
    instance.record.batches.clear()
    request.dispatched = False
    del lab.live.instance_of[request]
