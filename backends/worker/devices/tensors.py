"""Tensors in memory of a device: what backends read and write there, without copies on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shm.datatypes import DATATYPES, element_count

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shm.arrays import Array


class DeviceArray:
    """Elements in memory of a device, in C order. It has the names of a NumPy array that scattering needs."""

    __slots__ = ("address", "datatype", "device_id", "owner", "shape")

    #: Tells it from NumPy's arrays without a look at the class.
    dtype = None

    def __init__(self, address: int, datatype: str, shape: Sequence[int], device_id: int, owner: object = None) -> None:
        """`datatype` is the protocol's name. `owner` keeps the memory: it is referred to as long as this is."""
        #: The address of the first element.
        self.address = address
        #: The name of the datatype in the protocol.
        self.datatype = datatype
        #: The shape, as a tuple.
        self.shape = tuple(shape)
        #: The number of the GPU.
        self.device_id = device_id
        #: What keeps the memory.
        self.owner = owner

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return element_count(self.shape) * DATATYPES[self.datatype].byte_size

    #: The size in bytes, by the name that tensors have for it.
    byte_size = nbytes

    def reshape(self, *shape: Any) -> DeviceArray:
        """Return the same elements in another shape, which may have one -1. Raises ValueError."""
        wanted = list(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        count = element_count(self.shape)
        if wanted.count(-1) == 1:
            rest = element_count([size for size in wanted if size != -1])
            wanted[wanted.index(-1)] = count // rest if rest else 0
        if element_count(wanted) != count or min(wanted, default=0) < 0:
            raise ValueError(f"cannot reshape a tensor of shape {list(self.shape)} into {wanted}")
        return DeviceArray(self.address, self.datatype, wanted, self.device_id, self.owner)

    def __getitem__(self, rows: slice) -> DeviceArray:
        """Return some of the rows, which follow one another."""
        start, stop, step = rows.indices(self.shape[0])
        if step != 1:
            raise ValueError("rows of a tensor on a device must follow one another")
        row = element_count(self.shape[1:]) * DATATYPES[self.datatype].byte_size
        shape = (max(0, stop - start), *self.shape[1:])
        return DeviceArray(self.address + start * row, self.datatype, shape, self.device_id, self.owner)


class DeviceInput:
    """An input in a client's region on a device. It stands in `WorkerRequest.inputs` in place of a `Tensor`.

    The memory stays open as long as this or its `array` exists. The client may change it after the final response.
    """

    __slots__ = ("_copy", "_read", "array", "name")

    def __init__(self, name: str, array: DeviceArray, read: Callable[[], memoryview]) -> None:
        """`read` returns a copy on the host."""
        self.name = name
        self.array = array
        self._read = read
        self._copy: memoryview | None = None

    @property
    def datatype(self) -> str:
        """The name of the datatype in the protocol, such as FP32."""
        return self.array.datatype

    @property
    def shape(self) -> list[int]:
        """The shape, with the batch dimension if the model batches. It can be set, to one with as many elements."""
        return list(self.array.shape)

    @shape.setter
    def shape(self, shape: Sequence[int]) -> None:
        self.array = self.array.reshape(shape)

    @property
    def address(self) -> int:
        """The address of the first element on the device."""
        return self.array.address

    @property
    def byte_size(self) -> int:
        """The size in bytes."""
        return self.array.nbytes

    @property
    def device_id(self) -> int:
        """The number of the GPU."""
        return self.array.device_id

    @property
    def data(self) -> memoryview:
        """The bytes, on the host: copied when they are first asked for. Raises `ServingError`."""
        if self._copy is None:
            self._copy = self._read()
        return self._copy

    def raw(self) -> memoryview:
        """Return `data`."""
        return self.data

    def as_numpy(self) -> Array:
        """Return an array over `data`."""
        from shm.arrays import to_array  # of numpy, as in `Tensor.as_numpy`

        return to_array("UINT16" if self.datatype == "BF16" else self.datatype, self.shape, self.data)
