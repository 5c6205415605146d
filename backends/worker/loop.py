"""The worker: receives messages, runs its one model instance, answers. One model, one thread, one loop."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from backends.base import ModelArguments, Timings
from backends.registry import backend_class
from backends.transport import wire
from backends.transport.outbox import SHARES_MEMORY
from backends.worker.affinity import run_on
from backends.worker.classification import read_labels
from backends.worker.held import HeldInputs
from backends.worker.inputs import InputReader
from backends.worker.mailbox import KernelGone, Mailbox
from backends.worker.memory import AttachedRegion, AttachedRegions, CopiedRegion
from backends.worker.metric_reporter import MetricReporter
from backends.worker.output_memory import ArenaOutputs, SentOutputs
from backends.worker.outputs import OutputWriter
from backends.worker.region_io import RegionIo
from backends.worker.respond import BatchResponder
from kernel.errors import ErrorCode, InternalError, ServingError
from shm.arena import read_only_fd

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.base import Backend
    from backends.metric_registry import MetricRegistry
    from backends.transport.channel import BlockingChannel
    from backends.worker.request import WorkerRequest
    from shm.arena import Arena

logger = logging.getLogger(__name__)

#: How long an answer may wait for others that leave with it, in nanoseconds.
KEEP_NS = 300_000


class Worker:
    """One model instance behind one channel. Implements `backends.base.Host`."""

    def __init__(self, channel: BlockingChannel, *, local: bool = True) -> None:
        """Without `local` no memory is shared with the kernel: tensors travel in messages and chunks."""
        self._channel = channel
        self._local = local
        self._send_lock = threading.Lock()
        #: When the oldest answer was kept back, 0 for none.
        self._kept_since_ns = 0
        self._regions = AttachedRegions()
        self._held = HeldInputs(self._send, self._copy_volatile_inputs)
        self._inputs = InputReader(self._regions, self._held)
        self._output_arena = ArenaOutputs(self._arena_created)
        self._outputs = OutputWriter(
            self._regions, self._inputs, self._output_arena if local else SentOutputs(self._send)
        )
        self._mailbox = Mailbox(channel, self._urgent)
        self._reporter = MetricReporter(self._send)
        self._answers = BatchResponder(self._outputs, self._held, self._send, lambda: self._mailbox)
        self._region_io = RegionIo(self._regions, self._outputs.memory, self._send)
        self._backend: Backend | None = None
        self._verbose = 0
        self._handlers: dict[type, Callable[..., None]] = {
            wire.Complete: self._complete,
            wire.Load: self._load,
            wire.Joined: lambda _: self._reporter.start(),
            wire.Attach: self._attach,
            wire.OwnArena: self._own_arena,
            wire.Transfer: self._transfer,
            wire.Chunk: self._chunk,
            wire.Detach: self._detach,
            wire.ReadSpan: self._region_io.read,
            wire.WriteSpan: self._region_io.write,
            wire.Execute: self._execute,
        }

    def run(self) -> None:
        """Serve until the kernel says stop or is gone."""
        self._send(wire.Hello(wire.PROTOCOL, os.getpid(), self._local, time.monotonic_ns()))
        if self._local and SHARES_MEMORY:
            self._channel.share_outbox()
        try:
            self._serve()
        except (KernelGone, BrokenPipeError, ConnectionResetError):
            return
        if self._backend is not None:
            self._backend.finalize()
            self._reporter.stop()

    def _serve(self) -> None:
        """Handle messages until one says stop. What is kept is sent before the worker waits for the next."""
        handlers, waiting = self._handlers, self._mailbox.waiting
        while True:
            if waiting:  # often, under load: a call less for each message
                message = waiting.popleft()
            else:
                self._held.let_go()
                if self._kept_since_ns:
                    self._flush()
                message = self._mailbox.next()
            if isinstance(message, wire.Stop):
                return
            handlers[type(message)](message)

    # ---- Host --------------------------------------------------------------------------------

    def log(self, level: str, text: str) -> None:
        """See `backends.base.Host`."""
        if level != "VERBOSE" or self._verbose:
            self._send(wire.Log(level, text))

    @property
    def metrics(self) -> MetricRegistry:
        """See `backends.base.Host`."""
        return self._reporter.registry

    # ---- messages ----------------------------------------------------------------------------

    def _send(self, message: wire.ToKernel) -> None:
        with self._send_lock:
            self._channel.send(message)

    def _flush(self) -> None:
        self._kept_since_ns = 0
        with self._send_lock:
            self._channel.flush()

    def _arena_created(self, arena: Arena) -> None:
        fd = read_only_fd(arena.region.fd)
        try:
            with self._send_lock:
                self._channel.send_with_fd(wire.ArenaCreated(arena.region.byte_size), fd)
        finally:
            os.close(fd)

    def _urgent(self, message: wire.ToWorker) -> None:
        match message:
            case wire.Cancel(requests=requests):
                self._answers.cancel(requests)
            case wire.Credit(request=number, count=count):
                self._answers.grant(number, count)
            case wire.FreeBlocks(offsets=offsets):
                self._outputs.memory.free(offsets)

    def _complete(self, message: wire.Complete) -> None:
        def complete() -> wire.ToKernel:
            arguments = ModelArguments(
                msgspec.json.decode(message.config, type=dict),
                Path(message.model_dir),
                message.version,
                backend_config=message.backend_config,
            )
            completed = self._backend_for(arguments).complete(arguments)
            return wire.Completed(msgspec.json.encode(completed).decode())

        self._send(self._tried(complete))

    def _load(self, message: wire.Load) -> None:
        def load() -> wire.ToKernel:
            started = time.monotonic_ns()
            arguments = ModelArguments(
                msgspec.json.decode(message.config, type=dict),
                Path(message.model_dir),
                message.version,
                message.instance_name,
                message.kind,
                message.device_id,
                message.backend_config,
            )
            if message.cpus:
                run_on(message.cpus)
            self._verbose = message.verbose
            self._inputs.model_name = arguments.model_name
            self._outputs.memory.byte_size = message.arena_byte_size
            self._outputs.batched = arguments.max_batch_size > 0
            self._outputs.labels = _labels(arguments)
            self._backend_for(arguments).load(arguments)
            # What the model and its libraries have made lives as long as the worker: no collection while
            # requests run is to walk it. Costs 9 ms with numpy and ONNX Runtime, 30,000 objects; 60 ms with
            # SciPy and scikit-learn, 100,000.
            gc.collect()
            gc.freeze()
            return wire.Loaded(time.monotonic_ns() - started)

        self._send(self._tried(load))

    def _tried(self, action: Callable[[], wire.ToKernel]) -> wire.ToKernel:
        """Return the answer of `action`, or why there is none: models raise whatever they like."""
        try:
            return action()
        except ServingError as error:
            return wire.LoadFailed(error.code.value, error.message)
        except Exception as error:
            logger.exception("the model could not be loaded")
            return wire.LoadFailed(ErrorCode.INTERNAL.value, f"{type(error).__name__}: {error}")

    def _backend_for(self, arguments: ModelArguments) -> Backend:
        if self._backend is None:
            self._backend = backend_class(str(arguments.config.get("backend", "")))(self)
        return self._backend

    def _attach(self, message: wire.Attach) -> None:
        fd = self._channel.take_fd()
        region = AttachedRegion(
            fd, message.byte_size, message.offset, writable=message.writable, volatile=message.volatile
        )
        self._regions.attach(message.number, region)

    def _own_arena(self, message: wire.OwnArena) -> None:
        # Mapped once more, and privately: other processes may read the outputs that the model gets as inputs here.
        arena = self._output_arena.arena
        assert arena is not None, "OwnArena before the arena was created"
        fd = os.dup(arena.region.fd)
        self._regions.attach(
            message.number, AttachedRegion(fd, arena.region.byte_size, 0, writable=False, volatile=False)
        )

    def _transfer(self, message: wire.Transfer) -> None:
        self._regions.attach(message.number, CopiedRegion(message.byte_size))

    def _chunk(self, message: wire.Chunk) -> None:
        region = self._regions.get(message.number)
        assert isinstance(region, CopiedRegion), f"region {message.number} is not transferred"
        region.write(message.offset, message.data)

    def _detach(self, message: wire.Detach) -> None:
        self._regions.detach(message.number)

    def _copy_volatile_inputs(self) -> None:
        self._inputs.copies_volatile = True
        self.log(
            "WARNING",
            "the model keeps an input that lies in a client's shared memory, which the client will write to: "
            "such inputs are copied from now on",
        )

    # ---- executing ---------------------------------------------------------------------------

    def _execute(self, message: wire.Execute) -> None:
        start_ns = time.monotonic_ns()
        timings = Timings(start_ns, start_ns, start_ns)
        requests = self._inputs.read(self._answers.open_batch(message.requests))
        if requests:
            self._run_backend(requests, timings)
        del requests  # which lead to the inputs, and whoever has them yet keeps them
        finals = self._answers.close_batch()
        # Threads that are still to answer need the interpreter more than this one needs the next message.
        self._mailbox.poll_ns = 0 if self._answers.live else message.poll_ns
        done_ns = time.monotonic_ns()
        executed = wire.Executed(message.batch, finals, start_ns, timings.inputs_ready_ns, timings.inferred_ns, done_ns)
        # It leaves when there is nothing left to do, or when what is kept has become old.
        with self._send_lock:
            self._channel.keep(executed)
        if not self._kept_since_ns:
            self._kept_since_ns = done_ns
        elif done_ns - self._kept_since_ns > KEEP_NS:
            self._flush()

    def _run_backend(self, requests: list[WorkerRequest], timings: Timings) -> None:
        assert self._backend is not None, "Execute before Load"
        failure: ServingError | None = None
        try:
            self._backend.execute(requests, timings)
        except KernelGone:
            raise
        except ServingError as error:
            failure = error.with_traceback(None)  # which leads to the inputs
        except Exception as error:
            logger.exception("the model failed")
            failure = InternalError(f"{type(error).__name__}: {error}")
        else:
            if self._backend.responds_later:
                return
        for request in requests:
            if not request.finished:
                request.fail(failure or InternalError("the backend did not answer the request"))


def _labels(arguments: ModelArguments) -> dict[str, list[str]]:
    """Return the labels of the outputs that have a label file, which lies in the model's folder."""
    return {
        output["name"]: read_labels(arguments.model_dir / output["label_filename"])
        for output in arguments.config.get("output", [])
        if output.get("label_filename")
    }
