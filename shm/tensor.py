"""The one tensor type: a datatype, a shape, and the place of the bytes. Inputs, outputs and messages share it.

The bytes are in the wire's raw form: little-endian, row-major; BYTES elements behind 4-byte lengths. They lie inline
in `data`, or in a span of a region under a lease. Schedulers and the router never look inside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from shm.lease import Lease, RegionNumber

if TYPE_CHECKING:
    #: Buffers that hold tensor bytes.
    Buffer = bytes | bytearray | memoryview

    from shm.arrays import Array
else:
    # A message can bring only one type of bytes, so this is what decoders make of `Buffer`.
    Buffer = bytes


class Span(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """`byte_size` bytes, `offset` bytes behind the start of the region that `lease` is of.

    The lease belongs to the tensor whose span this is. In a message only the number of the region travels.
    """

    lease: Lease
    offset: int
    byte_size: int

    @property
    def of_client(self) -> ClientSpan | None:
        """The span as a client names it, None in a region that no client registered."""
        region = self.lease.region
        return ClientSpan(region.name, self.byte_size, self.offset) if region.of_client else None

    def shared(self) -> Span:
        """Return the same span with a lease for another holder."""
        return Span(self.lease.share(), self.offset, self.byte_size)

    def holds(self, offset: int, byte_size: int) -> bool:
        """Whether `byte_size` bytes at `offset` of the region lie within the span."""
        return byte_size >= 0 and 0 <= offset - self.offset <= self.byte_size - byte_size


class ClientSpan(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A span of a region as a client names it, before the kernel leases the region."""

    name: str
    byte_size: int
    offset: int = 0


class Tensor(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A tensor. Exactly one of `data`, `span` and `client_span` is set.

    `shape` includes the batch dimension. A front door sets `client_span` where a client named a region of its own;
    `Kernel.submit` replaces it by `span`. Whoever holds the tensor releases the lease of its span.
    """

    name: str
    datatype: str
    shape: list[int]
    data: Buffer | None = None
    span: Span | None = None
    client_span: ClientSpan | None = None

    @property
    def byte_size(self) -> int:
        if self.data is not None:
            return len(self.data)
        place = self.span or self.client_span
        return place.byte_size if place is not None else 0

    @property
    def region_of_client(self) -> ClientSpan | None:
        """Where the tensor lies in a region of a client, None where it does not."""
        return self.client_span if self.span is None else self.span.of_client

    def as_numpy(self) -> Array:
        """Return the tensor as an array over `data`, a new object array for BYTES; read-only where the bytes are.

        For workers: nothing in the kernel imports numpy. BF16, which numpy lacks, raises KeyError.
        """
        from shm.arrays import to_array

        assert self.data is not None, f"tensor '{self.name}' has no bytes here"
        return to_array(self.datatype, self.shape, self.data)

    def raw(self) -> Buffer:
        """Return the bytes: inline ones, or a view of an arena that this process has mapped.

        The view is valid until the lease is released. Bytes in a region of a client cannot be read this way.
        """
        if self.data is not None:
            return self.data
        assert self.span is not None, f"tensor '{self.name}' has no bytes here"
        return self.span.lease.region.view(self.span.offset, self.span.byte_size)

    def response_bytes(self) -> Buffer | None:
        """Return the bytes of an output for its client, None where they were written to the client's region."""
        if self.data is not None:
            return self.data
        return self.raw() if self.region_of_client is None else None

    def release(self) -> None:
        """End the lease of the span, if there is one."""
        if self.span is not None:
            self.span.lease.release()


class RequestedOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A destination of an output that a request asks for by name.

    Without more the tensor itself is wanted in the response. `classification` above 0 asks for that many best classes
    in place of the tensor. With a span of a client's region (`client_span` until it is leased) the worker writes the
    tensor there. An output that has several destinations is named several times.
    """

    name: str
    classification: int = 0
    span: Span | None = None
    client_span: ClientSpan | None = None

    @property
    def region_of_client(self) -> ClientSpan | None:
        """Where in a region of a client the output is wanted, None where it is wanted in the response."""
        return self.client_span if self.span is None else self.span.of_client


def encode_lease(value: Any) -> int:
    """The `enc_hook` of messages: a lease travels as the number of its region."""
    if isinstance(value, Lease):
        return value.region_number
    raise NotImplementedError(f"no message has a {type(value).__name__}")


def decode_lease(kind: type, value: Any) -> RegionNumber:
    """The `dec_hook` of messages: the inverse of `encode_lease`. Raises ValueError for anything but a number."""
    if kind is not Lease or type(value) is not int:
        raise ValueError(f"{value!r} is not the number of a region")
    return RegionNumber(value)
