"""One worker from its start to its end: first the handshake, as awaitable steps, then messages to its handle."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import TYPE_CHECKING, TypeVar

import msgspec

from backends.launch.launcher import KILL_WAIT_S, not_shown
from backends.launch.working import done_while_working
from backends.transport import wire
from backends.transport.channel import LoopChannel
from backends.transport.texts import shortened
from kernel.errors import ErrorCode, InternalError, Unavailable, file_error, worker_error
from kernel.repository.worker_needs import NO_NEEDS, WorkerNeeds

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Hashable, Iterable, Iterator

    from backends.launch.launcher import Announce, Launched, Launcher, Pending
    from backends.transport.outbox import Progress

logger = logging.getLogger(__name__)

_Expected = TypeVar("_Expected", bound=wire.Message)
_AboutModel = TypeVar("_AboutModel", wire.Complete, wire.AskGpu, wire.Load)

#: How long a worker that has not sent `Hello` may do nothing, in seconds. A new interpreter needs 0.2 s until then, and
#: minutes on a machine without memory or processors left.
HELLO_TIMEOUT_S = 30.0

#: How long responses of a stream may wait in the outbox of a worker that computes, in seconds.
OUTBOX_LOOK_S = 0.002

#: How long a worker that has closed its connection may take to end by itself, in seconds.
END_WAIT_S = 0.25

_LEVELS = {"INFO": logging.INFO, "WARNING": logging.WARNING, "ERROR": logging.ERROR, "VERBOSE": logging.DEBUG}


class WorkerSession:
    """A worker process and the connection to it.

    It handles the messages about the worker itself; `take_messages` says who handles the others. `on_lost` gets the
    cause of the worker's end, once, after all messages that the worker has sent.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._launched: Launched | None = None
        self._channel: LoopChannel | None = None
        self._response: asyncio.Future[wire.StartResponse] | None = None
        self._lost_cause: str | None = None
        self._protocol_error: str | None = None
        self._stopping = False
        #: What is left to do for the message that is being handled in pieces, None without one, and the messages that
        #: were read with it and came after it.
        self._pieces: Iterator[None] | None = None
        self._kept: Iterable[bytes] = ()
        #: Looks into the outbox; None while no stream responds. Whether a response has come since it was set.
        self._outbox_timer: asyncio.TimerHandle | None = None
        self._stream_moved = False
        #: How the process ended, None while it runs.
        self._end_cause: str | None = None
        #: How many batches the instance executes at the same time, once a model is loaded.
        self.concurrency = 1
        self.overlaps = False
        #: Whether the model has a health check.
        self.checks_health = False
        #: The most bytes that the worker's large outputs may take.
        self.arena_byte_size = 0
        #: Whether the worker runs on this machine, so that memory can be shared with it.
        self.local = True
        #: The worker's process, if it runs on this machine and has begun; else 0.
        self.pid = 0
        #: The worker's time plus this is the kernel's time, in nanoseconds.
        self.clock_offset_ns = 0
        #: Sends a message at the end of the event-loop iteration. After the worker's end it does nothing.
        self.send: Callable[[wire.ToWorker], None] = self._not_started
        #: Sends these messages now.
        self.flush: Callable[[], None] = lambda: None
        self.on_lost: Callable[[str], None] | None = None
        #: Takes the requests of the model to load and unload models, also while it is loaded itself.
        self.control: Callable[[wire.ControlModel | wire.ModelFile], None] = self._unexpected
        self._own_handlers: wire.Handlers = {
            **dict.fromkeys(wire.kinds_of(wire.StartResponse), self._responded),
            wire.ControlModel: lambda message: self.control(message),
            wire.ModelFile: lambda message: self.control(message),
            wire.OutboxCreated: self._attach_outbox,
            wire.Log: self._log,
        }
        self._handlers = self._own_handlers

    def take_messages(self, handlers: wire.Handlers) -> None:
        """Call these functions with messages of their classes from now on, and no former ones. A handler that raises
        ends the worker, and so does a message without one."""
        self._handlers = {**self._own_handlers, **handlers}

    def handle_in_pieces(self, pieces: Iterator[None]) -> None:
        """Handle the message that is being handled in pieces: each `next` is one, in an event-loop iteration.

        Later messages are handled after its end; meanwhile nothing is read. If the process ends meanwhile, the worker
        is lost after the last piece. An exception of `pieces` ends the worker, as one of a handler.
        """
        assert self._channel is not None
        next(pieces)
        self._pieces = pieces
        self._channel.pause()
        asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        pieces = self._pieces
        if pieces is not None:
            assert self._channel is not None
            self._channel.go_on(self._handle_piece)
            if self._pieces is pieces:
                asyncio.get_running_loop().call_soon(self._go_on)
            elif self._end_cause is not None:
                self._read_to_the_end(self._end_cause)

    def _handle_piece(self, _: list[bytes]) -> None:
        assert self._pieces is not None
        assert self._channel is not None
        try:
            if not next(self._pieces, True):  # a piece yields None
                return
        except BaseException:
            self._pieces, self._kept = None, ()
            raise
        self._pieces = None
        kept, self._kept = self._kept, ()
        self._channel.resume()
        self._received(kept)

    async def start(
        self,
        launcher: Launcher,
        *,
        helper: bool = False,
        needs: WorkerNeeds = NO_NEEDS,
        pending: Pending = not_shown,
    ) -> None:
        """Start the worker, or a helper, and wait for its `Hello`. Raises `ServingError`.

        `pending` gets a text if the start takes long.
        """
        self._response = asyncio.get_running_loop().create_future()
        try:
            self._launched = await launcher.launch(self._title, helper=helper, needs=needs, pending=pending)
        except OSError as error:
            raise file_error(f"a worker process could not be started: {error}", error) from error
        self._channel = LoopChannel(self._launched.socket, self._received, self._channel_closed)
        self.send, self.flush = self._channel.send, self._channel.flush
        self._launched.on_lost(self._process_lost)
        if not await done_while_working(self._response, lambda: self.work_mark, HELLO_TIMEOUT_S):
            self.kill()
            raise InternalError(f"the worker did not start: its process did nothing for {HELLO_TIMEOUT_S:.0f} s")
        hello = self._response.result()
        if isinstance(hello, wire.LoadFailed):  # it runs on an interpreter that cannot run a worker
            self.kill()
            raise worker_error(ErrorCode.UNAVAILABLE, f"the worker cannot run: {shortened(hello.text)}")
        if not isinstance(hello, wire.Hello) or hello.protocol != wire.PROTOCOL:
            self.kill()
            found = f"version {shortened(hello.protocol)}" if isinstance(hello, wire.Hello) else type(hello).__name__
            raise InternalError(
                f"the worker uses another protocol: it sent {found}, expected version {wire.PROTOCOL}. Kernel and "
                "workers need the same version of the server: was it upgraded while it runs?"
            )
        self.local = hello.local
        self.pid = hello.pid if hello.local else 0
        if not hello.local:
            self.clock_offset_ns = time.monotonic_ns() - hello.now_ns

    async def complete(self, message: wire.Complete) -> wire.Completed:
        """Return the completed configuration. Raises the worker's `ServingError`."""
        return await self._request(self._with_its_folder(message), wire.Completed)

    async def ask_gpu(self, message: wire.AskGpu) -> str:
        """Return why the backend cannot compute on a GPU; "" if it can. Raises the worker's `ServingError`."""
        return (await self._request(self._with_its_folder(message), wire.GpuObstacle)).obstacle

    async def load(self, message: wire.Load) -> int:
        """Load the model; returns the duration in nanoseconds. Raises the worker's `ServingError`."""
        self.arena_byte_size = message.arena_byte_size
        if self.host:  # a host policy is for the processors of this machine
            message = msgspec.structs.replace(message, cpus=())
        response = await self._request(self._with_its_folder(message), wire.Loaded)
        if response.concurrency < 1:
            raise self._broken(f"a concurrency of {response.concurrency}")
        self.concurrency = response.concurrency
        self.checks_health = response.checks_health
        self.overlaps = response.overlaps
        return response.load_ns

    def folder(self, path: str) -> str:
        assert self._launched is not None, "the worker was never started"
        return self._launched.folder(path)

    @property
    def host(self) -> str:
        """The name of the worker's host; "" for this machine."""
        return "" if self._launched is None else self._launched.host

    @property
    def unreachable(self) -> bool:
        """See `Launched`."""
        return self._launched is not None and self._launched.unreachable

    def _with_its_folder(self, message: _AboutModel) -> _AboutModel:
        """Return a message with the folder of the model as the worker finds it."""
        folder = self.folder(message.model_dir)
        return message if folder == message.model_dir else msgspec.structs.replace(message, model_dir=folder)

    def _not_started(self, message: wire.ToWorker) -> None:
        raise AssertionError(f"{type(message).__name__} was sent to a worker that was never started")

    async def written(self, byte_size: int) -> None:
        """Wait until at most `byte_size` bytes are unsent, or the connection has ended."""
        assert self._channel is not None
        await self._channel.written(byte_size)

    def send_with_fd(self, message: wire.ToWorker, fd: int) -> None:
        assert self._channel is not None
        self._channel.send_with_fd(message, fd)

    async def connect(self, announce: Announce) -> socket.socket:
        assert self._launched is not None, "the worker was never started"
        return await self._launched.connect(announce)

    def take_fd(self) -> int:
        assert self._channel is not None
        return self._channel.take_fd()

    def take_unsent(self) -> None:
        """Handle the messages in the outbox of a busy worker."""
        assert self._channel is not None
        if self._pieces is None:
            self._channel.take_unsent()

    def watch_outbox(self) -> None:
        """A response of a stream has come. While they come, look into the outbox: the model may have sent more, and
        compute now. A timer does it, because earlier messages may not be handled yet."""
        self._stream_moved = True
        if self._outbox_timer is None:
            self._look_later()

    def _look_later(self) -> None:
        self._stream_moved = False
        self._outbox_timer = asyncio.get_running_loop().call_later(OUTBOX_LOOK_S, self._look)

    def _look(self) -> None:
        self._outbox_timer = None
        if self._lost_cause is None:
            if self._stream_moved:
                self._look_later()
            self.take_unsent()

    # ---- the watchdog ------------------------------------------------------------------------

    def progress(self) -> Progress | None:
        """Return how far the worker is with its batches, or None if it does not say that."""
        return None if self._channel is None else self._channel.progress()

    @property
    def incomplete_since(self) -> int | None:
        return None if self._channel is None else self._channel.incomplete_since

    @property
    def stopped(self) -> bool:
        """Whether the worker's process is stopped by a signal."""
        return self._launched is not None and self._launched.stopped

    @property
    def work_mark(self) -> Hashable:
        return None if self._launched is None else self._launched.work_mark

    @property
    def lost(self) -> bool:
        """Whether the worker has ended."""
        return self._lost_cause is not None

    def write_stacks(self) -> None:
        if self._launched is not None:
            self._launched.write_stacks()

    def terminate(self) -> None:
        """Ask the worker to end, also while its model executes."""
        if self._launched is not None:
            self._launched.terminate()

    def drop(self, problem: str) -> None:
        """End the connection because of what the worker does, and kill the worker."""
        assert self._channel is not None
        self._channel.drop(problem)

    # ---- the end -----------------------------------------------------------------------------

    async def stop(self, grace_s: float) -> None:
        """Let the worker finalize its model and wait until it has ended. Kill it after `grace_s` seconds.

        With 0, and if a signal has stopped its process, it is killed at once.
        """
        if self._launched is None or self._lost_cause is not None:
            return
        self.on_lost = None
        self._stopping = True
        if grace_s and not self.stopped:
            self.send(wire.Stop())
        else:
            self.kill()
        await self._launched.stop(grace_s or KILL_WAIT_S)

    def kill(self) -> None:
        if self._launched is not None:
            self._launched.kill()

    # ---- messages ----------------------------------------------------------------------------

    async def _request(self, message: wire.ToWorker, expected: type[_Expected]) -> _Expected:
        """Send `message` and return the response. Raises the worker's `ServingError`."""
        if self._lost_cause is not None:
            raise Unavailable(f"the worker was lost ({self._lost_cause})")
        self._response = asyncio.get_running_loop().create_future()
        self.send(message)
        response = await self._response
        if isinstance(response, expected):
            return response
        if isinstance(response, wire.LoadFailed):
            try:
                error = worker_error(ErrorCode(response.code), shortened(response.text))
            except ValueError:
                raise self._broken(f"the error code '{response.code[:20]}'") from None
            raise error
        raise self._broken(f"{type(response).__name__}, expected {expected.__name__}")

    def _broken(self, found: str) -> InternalError:
        """Drop a worker that sent a wrong response, and return the error."""
        self.drop(f"it sent {found}")
        return InternalError(f"the worker was lost while the model was being loaded (it sent {found})")

    def _received(self, raw_messages: Iterable[bytes]) -> None:
        decode, handlers = wire.to_kernel_decoder.decode, self._handlers
        messages = iter(raw_messages)
        for raw in messages:
            message = decode(raw)
            handler = handlers.get(type(message))
            if handler is None:
                self._unexpected(message)
            else:
                handler(message)
                if self._pieces is not None:
                    self._kept = messages
                    return

    def _responded(self, message: wire.StartResponse) -> None:
        if self._response is None or self._response.done():
            self._unexpected(message)
        else:
            self._response.set_result(message)

    def _log(self, message: wire.Log) -> None:
        assert self._launched is not None
        self._launched.output.log(_LEVELS.get(message.level, logging.INFO), shortened(message.text))

    def _attach_outbox(self, _: wire.OutboxCreated) -> None:
        assert self._channel is not None
        fd = self._channel.take_fd()
        try:
            self._channel.attach_outbox(fd)
        finally:
            os.close(fd)

    def _unexpected(self, message: wire.Message) -> None:
        raise ValueError(f"unexpected message {type(message).__name__}")

    def _channel_closed(self, problem: str | None) -> None:
        """The connection has ended: kill the process, if it does not end itself. Without a `problem` it usually does,
        and then the cause is how it ended. One that was asked to end has finalized its model, and nobody asks how it
        ends."""
        self._protocol_error = problem
        if problem is None and not self._stopping:
            asyncio.get_running_loop().call_later(END_WAIT_S, self._kill_unconnected)
        else:
            self.kill()

    def _kill_unconnected(self) -> None:
        if self._lost_cause is None:
            self._protocol_error = "it had closed its connection"
            self.kill()

    def _process_lost(self, cause: str) -> None:
        self._end_cause = cause
        self._read_to_the_end(cause)

    def _read_to_the_end(self, cause: str) -> None:
        """Handle what the worker sent before its end, then lose it. `_go_on` comes back here after a message that is
        handled in pieces."""
        assert self._channel is not None
        self._channel.read_rest(lambda: self._pieces is None)
        if self._pieces is None:
            self._channel.take_unsent()
        if self._pieces is None:
            self._channel.close()
            self._lose(cause)

    def _lose(self, cause: str) -> None:
        assert self._channel is not None
        if self._protocol_error is not None:
            cause = f"{cause}; {self._protocol_error}"
        self._lost_cause = cause
        if self._response is not None and not self._response.done():
            self._response.set_exception(
                InternalError(f"the worker was lost while the model was being loaded ({cause})")
            )
            self._response.exception()  # read here, because the waiting code may be cancelled
        if self.on_lost is not None:
            self.on_lost(cause)
        self._channel.detach_outbox()
