"""The tensor type: a datatype, a shape, and the place of the bytes. Inputs, outputs and messages all use it.

The bytes have the raw form of the protocols: little-endian, row-major; a 4-byte length precedes each BYTES element.
They are inline in `data`, or in a span of a region under a lease. Schedulers and the kernel never read them.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import msgspec

from shm.lease import Lease, RegionNumber

if TYPE_CHECKING:
    from collections.abc import Callable

    #: Buffers that hold tensor bytes.
    Buffer = bytes | bytearray | memoryview

    from shm.arrays import Array
else:
    # msgspec decodes a field of one bytes type only: decoders make `bytes`.
    Buffer = bytes


#: `shm.arrays.to_array`, once it is imported.
_array_maker: list[Callable[..., Any]] = []


def import_arrays() -> None:
    """Import what `Tensor.as_numpy` needs. Workers do it before they have a model, which may have a module `shm`."""
    if not _array_maker:
        from shm.arrays import to_array

        _array_maker.append(to_array)


class Span(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """`byte_size` bytes that begin `offset` bytes after the start of the region of `lease`.

    The tensor that has the span owns the lease. A message carries only the number of the region.
    """

    lease: Lease
    offset: int
    byte_size: int

    @property
    def of_client(self) -> ClientSpan | None:
        """The span as a client names it; None if the region is not a client's."""
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
    """The tensor called `name`. Exactly one of `data`, `span` and `client_span` is set; in a backend it is `data`.

    `datatype` is a name of the protocol, such as FP32. `shape` includes the batch dimension. A front door sets
    `client_span` where a client named its own region; `Kernel.submit` replaces it by `span`. The holder of the tensor
    releases the lease of its span.
    """

    name: str
    datatype: str
    shape: list[int]
    data: Buffer | None = None
    span: Span | None = None
    client_span: ClientSpan | None = None

    @property
    def byte_size(self) -> int:
        """The size in bytes, in the raw form of the protocols."""
        if self.data is not None:
            return len(self.data)
        place = self.span or self.client_span
        return place.byte_size if place is not None else 0

    @property
    def region_of_client(self) -> ClientSpan | None:
        """The span in a client's region; None if the tensor is in no client's region."""
        return self.client_span if self.span is None else self.span.of_client

    def as_numpy(self) -> Array:
        """Return an array over `data`, read-only where `data` is; for BYTES a new object array.

        Only for workers: the kernel does not import numpy. BF16, which numpy lacks, raises KeyError.
        """
        import_arrays()
        assert self.data is not None, f"tensor '{self.name}' has no bytes in this process"
        array: Array = _array_maker[0](self.datatype, self.shape, self.data)
        return array

    def raw(self) -> Buffer:
        """Return the inline bytes, or a view of the arena that has them.

        The view is valid until the lease is released. Not for bytes in a client's region.
        """
        if self.data is not None:
            return self.data
        assert self.span is not None, f"tensor '{self.name}' has no bytes in this process"
        return self.span.lease.region.view(self.span.offset, self.span.byte_size)

    def response_bytes(self) -> Buffer | None:
        """Return the bytes that the response carries; None if they were written to the client's region."""
        if self.data is not None:
            return self.data
        if self.span is None:
            return None if self.client_span is not None else self.raw()
        return None if self.span.lease.region.of_client else self.raw()

    def release(self) -> None:
        """Release the lease of the span, if there is one."""
        if self.span is not None:
            self.span.lease.release()


class RequestedOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A destination of an output that a request asks for by name.

    By default the response carries the tensor. With `classification` above 0 it carries that number of best classes in
    place of the tensor. With a span of a client's region (`client_span` until it is leased) the worker writes the
    tensor there. A request names an output once for each destination.
    """

    name: str
    classification: int = 0
    span: Span | None = None
    client_span: ClientSpan | None = None
    #: For classes: the labels, and whether the tensor has a batch dimension, where these are not the model's own: the
    #: output is one of an ensemble.
    labels: list[str] | None = None
    batched: bool | None = None
    #: Whether the output may stay on a device: all who read it can do so there. Only without a span and classes.
    on_device: bool = False

    @property
    def region_of_client(self) -> ClientSpan | None:
        """The span in a client's region to write the output to; None if the response carries the output."""
        return self.client_span if self.span is None else self.span.of_client


#: Messages name the same few regions again and again, and nothing of a `RegionNumber` changes.
_region_number = functools.lru_cache(maxsize=1024)(RegionNumber)


def encode_lease(value: Any) -> int:
    """The `enc_hook` of messages: encodes a lease as the number of its region."""
    if isinstance(value, Lease):
        return value.region_number
    raise NotImplementedError(f"a message cannot contain a {type(value).__name__}")


def decode_lease(kind: type, value: Any) -> RegionNumber:
    """The `dec_hook` of messages: the inverse of `encode_lease`. Raises ValueError for anything but a number."""
    if kind is not Lease or type(value) is not int:
        raise ValueError(f"{value!r} is not the number of a region")
    return _region_number(value)
