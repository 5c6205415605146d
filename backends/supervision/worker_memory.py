"""Memory that the kernel shares with one worker, as the kernel sees it: regions that the worker knows, inputs in
arenas that its model keeps, and outputs in the worker's own arena or in inputs.

`backends/supervision/handle.py` asks for it where a tensor is not in the message itself.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
from typing import TYPE_CHECKING

from backends.transport import wire
from kernel.loop.iteration_end import IterationEnd
from kernel.serving.response import OutputTensor
from shm.region import RegionKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from backends.supervision.session import WorkerSession
    from kernel.serving.model import Model
    from kernel.serving.request import InputTensor, Request, RequestedOutput
    from shm.region import Held, Region, Span


class WorkerMemory:
    """What one worker process and the kernel share. Every `ValueError` is for what no worker of ours sends."""

    def __init__(self, session: WorkerSession, model: Model) -> None:
        self._session = session
        self._model = model
        self._attached: set[int] = set()
        #: The worker's output arena, read-only; None before its first output, and when the worker is gone.
        self._arena: memoryview | None = None
        #: Blocks of it that were read in this loop turn.
        self._freed: list[int] = []
        #: What the model goes on using of inputs whose requests are answered, by request number.
        self._held: dict[int, list[Held]] = {}
        self._closed = False

    # ---- tensors of requests -----------------------------------------------------------------

    def input_ref(self, tensor: InputTensor, span: Span) -> wire.TensorRef:
        """Return the reference to an input that lies in `span`, whose region the worker knows then."""
        region = span.region
        foreign = self._attach(region)
        return wire.TensorRef(
            tensor.name, tensor.datatype, tensor.shape, None, region.number, span.offset, span.byte_size, foreign
        )

    def output_ref(self, output: RequestedOutput, span: Span) -> wire.OutputRef:
        """Return the reference to a place for an output, whose region the worker knows then."""
        region = span.region
        self._attach(region)
        return wire.OutputRef(output.name, 0, region.number, span.offset, span.byte_size)

    def _attach(self, region: Region) -> bool:
        """Make the worker know the region; returns whether it is a client's."""
        foreign = region.kind is not RegionKind.ARENA
        if region.number not in self._attached:
            self._attached.add(region.number)
            self._session.send_with_fd(wire.Attach(region.number, region.byte_size, region.offset, foreign), region.fd)
            region.on_closed(self._detach)
        return foreign

    def _detach(self, region: Region) -> None:
        if region.number in self._attached and not self._closed:
            self._attached.discard(region.number)
            self._session.send(wire.Detach(region.number))

    def hold(self, number: int, request: Request) -> None:
        """Take the blocks of a request's inputs over, which would be free again with its final answer."""
        if number in self._held:
            raise ValueError(f"inputs of request {number}, which were held before")
        held = self._held[number] = []
        for tensor in request.inputs:
            if tensor.span is not None and tensor.shared_memory is None:
                held.append(tensor.span.lease)
                tensor.span = None

    def free_held(self, numbers: Sequence[int]) -> None:
        """The model has done with inputs of these requests. Raises `ValueError`."""
        for number in numbers:
            held = self._held.pop(number, None)
            if held is None:
                raise ValueError(f"inputs freed of request {number}, which were not held")
            for lease in held:
                lease.release()

    # ---- tensors of responses ----------------------------------------------------------------

    def map_arena(self, byte_size: int) -> None:
        """Map the worker's output arena, whose file descriptor has come. Raises `ValueError`."""
        fd = self._session.take_fd()
        try:
            if byte_size > os.fstat(fd).st_size:
                raise ValueError(f"an arena of {byte_size} bytes that is smaller")
            self._arena = memoryview(mmap.mmap(fd, byte_size, prot=mmap.PROT_READ))
        finally:
            os.close(fd)

    def output(self, request: Request, ref: wire.TensorRef, used: OutputMemory) -> OutputTensor:
        """Return an output that lies in memory, and note in `used` what is needed for as long. Raises `ValueError`."""
        if ref.region != wire.OUTPUT_ARENA:
            for asked in request.outputs:
                if asked.name == ref.name and asked.shared_memory is not None:
                    return OutputTensor(ref.name, ref.datatype, ref.shape, None, asked.shared_memory)
            data = self._input_part(request, ref, used)
            return OutputTensor(ref.name, ref.datatype, ref.shape, data)
        if self._arena is None or min(ref.offset, ref.byte_size) < 0 or ref.offset + ref.byte_size > len(self._arena):
            raise ValueError(f"an output at {ref.offset}, outside of the worker's arena")
        used.blocks.append(ref.offset)
        data = self._arena[ref.offset : ref.offset + ref.byte_size]
        return OutputTensor(ref.name, ref.datatype, ref.shape, data)

    def _input_part(self, request: Request, ref: wire.TensorRef, used: OutputMemory) -> memoryview | bytes:
        """Return the bytes of an output that is a part of an input."""
        if request.finished:  # the server gave it up, and its inputs back; nobody reads this
            return b""
        arena = self._model.input_arena
        if arena is not None and ref.region == arena.region.number and ref.byte_size >= 0:
            for tensor in request.inputs:
                span = tensor.span
                if span is not None and tensor.shared_memory is None:
                    skip = ref.offset - span.offset
                    if 0 <= skip <= span.byte_size - ref.byte_size:
                        used.inputs.append(tensor)
                        return arena.view(ref.offset, ref.byte_size)
        raise ValueError(f"an output at {ref.offset} of region {ref.region}, outside of the request's inputs")

    def free_blocks(self, offsets: Sequence[int]) -> None:
        """Tell the worker, once per loop turn, which blocks were read."""
        if self._closed:
            return
        if not self._freed:
            IterationEnd.current().add_decision(self._send_freed)
        self._freed += offsets

    def _send_freed(self) -> None:
        offsets, self._freed = self._freed, []
        if offsets and not self._closed:
            self._session.send(wire.FreeBlocks(offsets))

    # ---- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """The worker is gone: give back what only it used."""
        self._closed = True
        self.free_held(list(self._held))
        if self._arena is not None:
            # Responses that front doors still hold keep the mapping; it goes with the last of them.
            with contextlib.suppress(BufferError):
                self._arena.release()
            self._arena = None


class OutputMemory:
    """What the outputs of one response lie in."""

    __slots__ = ("blocks", "inputs")

    def __init__(self) -> None:
        #: Offsets of blocks in the worker's arena.
        self.blocks: list[int] = []
        #: Inputs of the request that outputs are parts of.
        self.inputs: list[InputTensor] = []

    def release_with(self, memory: WorkerMemory, *, final: bool) -> Callable[[], None] | None:
        """Return what gives all of it back when the response was sent; None where there is nothing.

        Inputs are taken from their request, with whose final answer they would be free. Raises `ValueError`.
        """
        blocks = self.blocks
        if not self.inputs:
            return functools.partial(memory.free_blocks, blocks) if blocks else None
        if not final:
            raise ValueError("an input as an output of a response that is not the last")
        leases: list[Held] = []
        for tensor in self.inputs:
            if tensor.span is not None:  # one input may be several outputs
                leases.append(tensor.span.lease)
                tensor.span = None

        def release() -> None:
            for lease in leases:
                lease.release()
            if blocks:
                memory.free_blocks(blocks)

        return release
