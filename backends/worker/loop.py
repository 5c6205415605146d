"""The worker: receives messages, executes requests with its one model instance, responds. Its loop has one thread.

The file is long because it is the worker's state with a short method for each message that changes it.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from backends.base import ModelArguments, Timings
from backends.helper.tasks import RegionIo, TaskRunner
from backends.process_control import run_on
from backends.registry import backend_class
from backends.transport import wire
from backends.transport.framing import FrameTooLarge
from backends.transport.outbox import IN_MODEL, SHARES_MEMORY
from backends.transport.texts import shortened
from backends.worker.calls import WorkerCalls
from backends.worker.custom_metrics import MetricReporter
from backends.worker.forked_calls import ForkedChildren
from backends.worker.held_inputs import HeldInputs
from backends.worker.inputs import InputReader
from backends.worker.members import Members, not_shared
from backends.worker.memory import AttachedRegions
from backends.worker.message_reader import KernelGone, KernelMessageReader
from backends.worker.output_memory import ArenaOutputs, SentOutputs
from backends.worker.outputs import OutputWriter, labels_of
from backends.worker.overlapping_batches import OverlappingBatches
from backends.worker.pipelined_batches import SLOW_NS, PipelinedBatches, WorkerParts
from backends.worker.region_messages import RegionMessages
from backends.worker.reports import ReportCollector, send_inputs
from backends.worker.request import fail_unfinished, failure_of
from backends.worker.responder import BatchResponder
from backends.worker.sequence_batches import SequenceBatches
from kernel.errors import ErrorCode, InternalError, ServingError, failing_as
from kernel.machine import give_memory_back, keep_freed_memory
from kernel.observe.limited_log import LimitedLog
from shm.region import read_only_fd

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from backends.base import Backend
    from backends.transport.channel import BlockingChannel
    from backends.worker.custom_metrics import MetricRegistry
    from backends.worker.devices.device_batches import DeviceBatches
    from backends.worker.devices.instance_device import InstanceDevice
    from backends.worker.members import Turn
    from backends.worker.model_calls import ModelCalls
    from backends.worker.request import WorkerRequest
    from shm.arena import Arena

logger = logging.getLogger(__name__)

#: How long an executed batch may stay unsent, so that several are sent at once, in nanoseconds.
MAX_UNSENT_NS = 300_000

#: When a worker is idle and gives freed memory back, in seconds.
IDLE_S = 30.0


class Worker:
    """One model instance behind one channel. Implements `backends.base.Host`."""

    #: Whether the worker only rehearses, before others are forked (`backends/zygote/rehearsal.py`).
    rehearses = False

    def __init__(
        self, channel: BlockingChannel, *, local: bool = True, task_module: str = "", turn: Turn | None = None
    ) -> None:
        """Without `local` no memory is shared with the kernel: tensors are sent in messages and chunks.

        `task_module` is the module with the functions of tasks; only for a helper. `turn` is for one of several models
        of a process.
        """
        if not local:
            keep_freed_memory()
        self._channel = channel
        self._local = local
        self._turn = turn
        self._send_lock = threading.Lock()
        #: Which batch was begun last; the kernel reads it, see `backends.transport.outbox.Progress`.
        self._progress = channel.progress
        #: What `_progress` was when freed memory was given back the last time; -1 if it never was.
        self._given_back_after = -1
        #: When the oldest unsent batch was executed; 0 if none is unsent.
        self._unsent_since_ns = 0
        #: All messages but `Stop`, also those that any thread may read (`wire.Urgent`).
        self._handlers: wire.Handlers = {}
        self._regions = AttachedRegions()
        self._held = HeldInputs(self._send, self._copy_volatile_inputs)
        self._inputs = InputReader(self._regions, self._held)
        self._output_arena = ArenaOutputs(self._arena_created)
        self._outputs = OutputWriter(
            self._regions, self._inputs, self._output_arena if local else SentOutputs(self._send), self._held
        )
        self._reader = KernelMessageReader(channel, self._handlers, self._held.report_freed)
        self._reporter = MetricReporter(self._send, send_later=self._send_with_next)
        self._reports = ReportCollector(self._send, self.log)
        self._responder = BatchResponder(
            self._outputs, self._held, self._send, lambda: self._reader, self._reports,
            self._send_with_next, self._flush,
        )  # fmt: skip
        self._responder.before_response = self._reporter.report_with_response
        self._calls = WorkerCalls(
            self._send, lambda: self._reader, self._responder, self._outputs, self._regions, self._held
        )
        #: What the model uses: `_calls`, but in a process that it has forked.
        self._calls_of_model: ModelCalls = self._calls
        if turn is not None:
            self._calls.turn = (turn, self)
        self._region_io = RegionIo(self._regions, self._outputs.memory, self._send)
        # Only models change their inputs: helpers have none.
        self._memory = RegionMessages(channel, self._regions, self._output_arena, private_writes=not task_module)
        tasks = TaskRunner(self._regions, self._outputs.memory, self._send, task_module)
        self._members = Members(self._send, lambda channel, turn: Worker(channel, local=local, turn=turn))
        self._backend: Backend | None = None
        #: `Backend.executor`, once the model is loaded.
        self._execute_batch: Callable[[Sequence[WorkerRequest], Timings], None]
        self._device: InstanceDevice | None = None  # of an instance that is on a GPU
        #: None for a model without sequence batching.
        self._sequences: SequenceBatches | None = None
        self._pipeline: PipelinedBatches | DeviceBatches | None = None  # of a backend that pipelines
        self._on_device: DeviceBatches | None = None  # the same, of one whose batches overlap on a GPU
        self._verbose = 0
        self._failures = LimitedLog(logger)
        self._handlers |= self._all_handlers(tasks)

    def _all_handlers(self, tasks: TaskRunner) -> wire.Handlers:
        return {
            wire.Complete: self._complete,
            wire.AskGpu: self._ask_gpu,
            wire.Load: self._load,
            wire.Joined: self._joined,
            wire.ReadSpan: self._region_io.read,
            wire.WriteSpan: self._region_io.write,
            wire.RunTask: tasks.run,
            wire.TaskMemory: tasks.memory,
            wire.AddMember: lambda message: self._members.add(message, self._channel.take_fd),
            wire.Execute: self._execute,
            wire.CheckHealth: self._check_health,
            wire.Cancel: lambda message: self._responder.cancel(message.requests),
            wire.Credit: lambda message: self._responder.grant(message.request, message.count),
            wire.FreeBlocks: self._free_blocks,
            wire.Recall: self._give_back,
            wire.CallResponded: self._calls.responded,
            wire.CallOnHost: self._calls.on_host,
            wire.OnDeviceAgain: self._calls.on_device_again,
            wire.ModelControlled: self._calls.controlled,
            **self._memory.handlers,
        }

    def run(self) -> None:
        """Handle messages until the kernel sends `Stop` or is gone."""
        try:
            self._send(wire.Hello(wire.PROTOCOL, os.getpid(), self._local, time.monotonic_ns()))
            if self._local and SHARES_MEMORY:
                self._channel.share_outbox()
                self._progress = self._channel.progress
            if self._turn is None:
                self._channel.watch_idle(IDLE_S, self._idle)
                self._serve()
            else:
                self._serve_in_turn(self._turn)
        except (KernelGone, BrokenPipeError, ConnectionResetError):
            return
        if self._backend is not None:
            with contextlib.nullcontext() if self._turn is None else self._turn.of(self):
                self._backend.finalize()
            self._reporter.stop()

    def _serve(self) -> None:
        """Handle messages until `Stop`. Unsent messages are sent before the worker waits for the next one."""
        handlers, waiting = self._handlers, self._reader.waiting
        while True:
            if waiting:  # often, under load: saves a call for each message
                message = waiting.popleft()
            else:
                self._held.report_freed()
                if self._unsent_since_ns:
                    self._flush()
                message = self._reader.next()
            if isinstance(message, wire.Stop):
                return
            handlers[type(message)](message)

    def _idle(self) -> None:
        """The worker has waited for a while: give memory back, once after its last batch."""
        begun = self._progress[0]
        if begun != self._given_back_after:
            self._given_back_after = begun
            give_memory_back()

    def _serve_in_turn(self, turn: Turn) -> None:
        """As `_serve`, in a process of several models: each message has a turn, but not batches on a GPU, whose threads
        mostly wait. It does not poll: others compute."""
        handlers, waiting = self._handlers, self._reader.waiting
        while True:
            if not waiting:
                self._held.report_freed()
                if self._unsent_since_ns:
                    self._flush()
            message = self._reader.next()
            if isinstance(message, wire.Stop):
                return
            free = self._device is not None and type(message) is wire.Execute
            with contextlib.nullcontext() if free else turn.of(self):
                handlers[type(message)](message)
            self._reader.poll_ns = 0

    def close(self) -> None:
        """Free what the system would free with the process, for a process that continues."""
        if self._on_device is not None:
            self._on_device.close()
        if self._device is not None:
            self._device.close()
            if self._device.arenas is not None:
                self._device.arenas.close()
        self._regions.close()
        self._outputs.memory.close()
        self._channel.close()

    def enter_turn(self) -> None:
        if self._backend is not None:
            self._backend.enter_turn()

    def leave_turn(self) -> None:
        if self._backend is not None:
            self._backend.leave_turn()

    # ---- Host --------------------------------------------------------------------------------

    def log(self, level: str, text: str) -> None:
        if level != "VERBOSE" or self._verbose:
            self._send(wire.Log(level, shortened(text)))

    @property
    def metrics(self) -> MetricRegistry:
        return self._reporter.registry

    def report_memory(self, uses: Sequence[tuple[str, int, int]]) -> None:
        self._reports.memory(uses)

    @property
    def calls(self) -> ModelCalls:
        return self._calls_of_model

    def take_calls_of_children(self) -> None:
        """Make the calls of processes that the model forks from now on. Once, in the process of the worker."""
        ForkedChildren(self._calls, self._become_child)

    def _become_child(self, calls: ModelCalls) -> None:
        """In a process that the model has forked: its calls go through the worker. Locks may have been held."""
        self._calls_of_model = calls
        self._send_lock = threading.Lock()

    @property
    def device(self) -> InstanceDevice | None:
        return self._device

    # ---- messages ----------------------------------------------------------------------------

    def _send(self, message: wire.ToKernel) -> None:
        with self._send_lock:
            self._channel.send(message)

    def _send_with_next(self, message: wire.ToKernel) -> None:
        """Send a message together with the one that the caller sends next."""
        with self._send_lock:
            self._channel.send_later(message)

    def _flush(self) -> None:
        self._unsent_since_ns = 0
        with self._send_lock:
            self._channel.flush()

    def _arena_created(self, arena: Arena) -> None:
        fd = read_only_fd(arena.region.fd)
        try:
            with self._send_lock:
                self._channel.send_with_fd(wire.ArenaCreated(arena.region.byte_size), fd)
        finally:
            os.close(fd)

    def _free_blocks(self, message: wire.FreeBlocks) -> None:
        if message.arena == wire.OUTPUT_ARENA:
            self._outputs.memory.free(message.offsets)
        else:
            assert self._memory.device_arenas is not None, "blocks of an arena that was not created"
            self._memory.device_arenas.free(message.arena, message.offsets)

    def _ask_gpu(self, message: wire.AskGpu) -> None:
        def ask() -> wire.ToKernel:
            arguments = _arguments_before_load(message)
            return wire.GpuObstacle(self._backend_for(arguments).gpu_obstacle(arguments))

        self._send(self._tried(ask))

    def _complete(self, message: wire.Complete) -> None:
        def complete() -> wire.ToKernel:
            arguments = _arguments_before_load(message)
            backend = self._backend_for(arguments)
            if message.verify:
                backend.verify(arguments)
                return wire.Completed(message.config)
            completed = backend.complete(arguments)
            return wire.Completed(msgspec.json.encode(completed).decode(), backend.completed_by_model)

        try:
            self._send(self._tried(complete))
        except FrameTooLarge as error:
            self._send(wire.LoadFailed(ErrorCode.INTERNAL.value, f"the completed configuration is too long: {error}"))

    def _load(self, message: wire.Load) -> None:
        def load() -> wire.ToKernel:
            started = time.monotonic_ns()
            _check_protocol(message.protocol)
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
            self._inputs.model_name = self._calls.model_name = arguments.model_name
            self._outputs.memory.byte_size = message.arena_byte_size
            self._outputs.batched = arguments.max_batch_size > 0
            self._outputs.labels = labels_of(arguments)
            self._responder.single_response = not arguments.decoupled
            self._sequences = SequenceBatches.of_model(arguments)
            if self._sequences is not None:
                self._handlers[wire.EndSequence] = self._sequences.end
            if message.kind == "GPU":
                self._use_device(message)
            backend = self._backend_for(arguments)
            if self._device is not None:
                if self._turn is not None and not backend.shares_worker_on_gpu:
                    raise not_shared(arguments, " on GPUs")
                if not backend.opens_device_late:
                    self._device.select()
            backend.load(arguments)
            self._execute_batch = backend.executor
            if self._device is not None:
                self._tensors_on_device(self._device, backend)
                if backend.overlaps_on_device:
                    self._on_device = self._device_batches(self._device)
            if backend.concurrency > 1:
                self._handlers[wire.Execute] = self._overlapping(backend, arguments)
            elif backend.pipelines and self._turn is None and self._sequences is None:
                self._pipeline = PipelinedBatches(backend, self._parts())
            elif self._sequences is None and self._local:
                self._pipeline = self._on_device
            # Objects of the model and its libraries live as long as the worker: freeze them, so that no garbage
            # collection visits them while requests execute. Takes 9 ms with numpy and ONNX Runtime (30,000 objects),
            # 60 ms with SciPy and scikit-learn (100,000).
            if not self.rehearses:
                gc.collect()
                gc.freeze()
            overlaps = self._pipeline is not None and self._pipeline is self._on_device
            return wire.Loaded(time.monotonic_ns() - started, backend.concurrency, backend.checks_health, overlaps)

        self._send(self._tried(load))

    def _use_device(self, message: wire.Load) -> None:
        """Take the GPU of the instance. Raises `Unavailable`."""
        from backends.worker.devices.device_tensors import instance_device  # few servers have GPUs

        self._device = instance_device(message, self._regions)
        if self._turn is not None:
            self._device.poll_ns = 0  # other threads would wait for the interpreter's lock

    def _tensors_on_device(self, device: InstanceDevice, backend: Backend) -> None:
        from backends.worker.devices.device_tensors import DeviceTensors  # as above

        tensors = DeviceTensors(
            device,
            self._regions,
            self._held,
            self._outputs.memory,
            waits_at_once=not self._local or backend.concurrency > 1,
            announce=self._send if self._local else None,
            shares_arenas=self._turn is not None,
            count_memory=self._reports.own_memory,
        )
        self._outputs.on_device = tensors.outputs
        self._memory.device_arenas = tensors.arenas
        if backend.device_inputs:
            self._inputs.on_device = tensors.inputs.of_request
        if tensors.arenas is not None:
            self._calls.result_on_device = tensors.inputs.of_result

    def _joined(self, _: wire.Joined) -> None:
        self._reporter.start()
        self._reports.joined()

    def _tried(self, action: Callable[[], wire.ToKernel]) -> wire.ToKernel:
        """Return the response that `action` returns, or `LoadFailed` if it raises: models raise any exception."""
        try:
            with failing_as(_not_loaded, passes=ServingError):
                return action()
        except ServingError as error:
            return wire.LoadFailed(error.code.value, shortened(error.message))

    def _backend_for(self, arguments: ModelArguments) -> Backend:
        if self._backend is None:
            name = str(arguments.config.get("backend", ""))
            found = backend_class(name, arguments)
            if self._turn is not None and not found.shares_worker:
                raise not_shared(arguments)
            self._backend = found(self)
        return self._backend

    def _copy_volatile_inputs(self) -> None:
        self._inputs.copies_volatile = True
        self.log(
            "WARNING",
            "the model still uses an input in a client's shared memory after its response, and the client may "
            "write to it: such inputs are copied from now on",
        )

    def _check_health(self, message: wire.CheckHealth) -> None:
        assert self._backend is not None, "CheckHealth before Load"
        self._backend.check_health(lambda problem: self._send(wire.HealthChecked(message.check, shortened(problem))))

    # ---- executing ---------------------------------------------------------------------------

    def _give_back(self, _: wire.Recall) -> None:
        batches = self._reader.take_batches()
        self._responder.given_back(request.number for batch in batches for request in batch.requests)
        self._send(wire.Recalled([batch.batch for batch in batches]))

    def _execute(self, message: wire.Execute) -> None:
        pipeline = self._pipeline
        if pipeline is not None and pipeline.wanted:
            pipeline.serve(message)
            return
        start_ns = time.monotonic_ns()
        timings = Timings(start_ns, start_ns, start_ns)
        self._progress[0] = begun = message.batch << 1
        if self._sequences is None:
            requests = self._inputs.read(self._responder.open_batch(message.requests))
        else:
            requests = self._read_sequences(message, self._sequences)
        if message.tensors_traced:
            send_inputs(requests, self._send)
        if requests:
            self._progress[0] = begun | IN_MODEL
            self._run_backend(requests, timings)
            if timings.inferred_ns == timings.inputs_ready_ns:  # the backend has marked no end of the inference
                timings.inferred_ns = time.monotonic_ns()
        del requests  # they refer to the inputs: any reference that is left is the model's
        slow = False
        if self._device is not None and self._device.pending:
            self._device.synchronize()
            if self._on_device is not None:
                slow = self._on_device.ended_alone(timings)
        finals = self._responder.close_batch()
        # While other threads still have to respond, polling would only take the interpreter lock from them.
        self._reader.poll_ns = 0 if self._responder.live else message.poll_ns
        if pipeline is not None and (slow or timings.inferred_ns - timings.inputs_ready_ns > SLOW_NS):
            self._reader.poll()
            waiting = self._reader.waiting
            pipeline.wanted = bool(waiting) and type(waiting[0]) is wire.Execute
        self._report_executed(message, timings, finals)
        if pipeline is not None and pipeline.wanted:
            self._flush()

    def _report_executed(self, message: wire.Execute, timings: Timings, finals: list[wire.ResponseMessage]) -> None:
        """Report the end of a batch, with its responses."""
        self._reporter.report_with_response()
        if self._reports.pending or timings.executions is not None:
            self._reports.flush(message.batch, timings.executions or ())
        done_ns = time.monotonic_ns()
        executed = wire.Executed(
            message.batch, finals, timings.start_ns, timings.inputs_ready_ns, timings.inferred_ns, done_ns
        )
        if self._inputs.copies or self._outputs.copies or self._device is not None:
            self._count_copies(executed)
        # It is sent when there is nothing left to do, or when the oldest unsent batch is too old.
        try:
            with self._send_lock:
                self._channel.send_later(executed)
        except FrameTooLarge:
            self._responder.send_finals(message.requests, finals)
            executed.responses = []
            self._send(executed)
        if not self._unsent_since_ns:
            self._unsent_since_ns = done_ns
        elif done_ns - self._unsent_since_ns > MAX_UNSENT_NS:
            self._flush()

    def _report_at_once(self, message: wire.Execute, timings: Timings, finals: list[wire.ResponseMessage]) -> None:
        self._report_executed(message, timings, finals)
        self._flush()

    def _device_batches(self, device: InstanceDevice) -> DeviceBatches:
        from backends.worker.devices.device_batches import DeviceBatches  # few servers have GPUs

        return DeviceBatches(device, self._parts())

    def _parts(self) -> WorkerParts:
        return WorkerParts(
            self._channel, self._reader, self._inputs, self._responder, self._held, self._send, self._run_backend,
            self._report_at_once,
        )  # fmt: skip

    def _overlapping(self, backend: Backend, arguments: ModelArguments) -> Callable[[wire.Execute], None]:
        """Return the handler of batches for an instance that executes several at the same time."""
        batches = OverlappingBatches(
            backend, self._inputs, self._responder, self._send, self._count_copies, collects=not arguments.decoupled
        )

        def begin(message: wire.Execute) -> None:
            self._progress[0] = message.batch << 1 | IN_MODEL
            self._reader.poll_ns = 0  # polling would take the interpreter lock from the model
            batches.add(message, self._send_soon)

        return begin

    def _send_soon(self, message: wire.ToKernel) -> None:
        """Send a message together with others, before the main thread waits for the next one."""
        with self._send_lock:
            self._channel.send_later(message)
        if not self._unsent_since_ns:
            self._unsent_since_ns = time.monotonic_ns()

    def _read_sequences(self, message: wire.Execute, sequences: SequenceBatches) -> list[WorkerRequest]:
        """Return the rows of a batch of sequences, and leave only requests in `message`."""
        entries = message.requests
        message.requests = sequences.without_padding(entries)
        return sequences.rows(entries, self._inputs.read(self._responder.open_batch(message.requests)))

    def _count_copies(self, executed: wire.Executed) -> None:
        """Put the copies since the last batch into the message, also those that threads of the model have caused."""
        for counter in (self._inputs, self._outputs, self._device):
            if counter is None:
                continue
            executed.copies += counter.copies
            executed.copied_byte_size += counter.copied_byte_size
            counter.copies = counter.copied_byte_size = 0

    def _run_backend(self, requests: list[WorkerRequest], timings: Timings) -> None:
        assert self._backend is not None, "Execute before Load"
        failure: ServingError | None = None
        try:
            self._execute_batch(requests, timings)
        except KernelGone:
            raise
        except Exception as error:
            failure = failure_of(error, self._failures)
        else:
            if self._backend.responds_later:
                return
        fail_unfinished(requests, failure)


def _not_loaded(error: Exception) -> ServingError:
    logger.error("the model could not be loaded", exc_info=error)
    return InternalError(f"{type(error).__name__}: {error}")


def _check_protocol(protocol: str) -> None:
    """Refuse a kernel with other code. Raises `InternalError`."""
    if protocol and protocol != wire.PROTOCOL:
        raise InternalError(
            f"the kernel uses another protocol: it sent version {shortened(protocol)}, expected version "
            f"{wire.PROTOCOL}. Kernel and workers need the same version of the server"
        )


def _arguments_before_load(message: wire.Complete | wire.AskGpu) -> ModelArguments:
    _check_protocol(message.protocol)
    return ModelArguments(
        msgspec.json.decode(message.config, type=dict),
        Path(message.model_dir),
        message.version,
        backend_config=message.backend_config,
    )
