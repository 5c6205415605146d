"""Checks that a Treelite checkpoint is whole. Pure.

Treelite trusts the lengths in a checkpoint: from a damaged one it reads for hours, or past the end. The layout is that
of Treelite's model specification, serialization version 4: numbers, and arrays with their length in front.
"""

from __future__ import annotations

import struct

from kernel.errors import InvalidArgument

#: Struct formats of numbers by their letter; `T` is the type of thresholds, `L` that of leaf values.
_HEADER_ARRAYS = ("i", "i", "i", "i")  # num_class, leaf_vector_shape, target_id, class_id
_TREE_ARRAYS = "biiiBLTbBLQQIQQQBdBdB"
_SIZES = {"b": 1, "B": 1, "i": 4, "I": 4, "Q": 8, "d": 8, "f": 4}
_FLOATS = {2: "f", 3: "d"}


class _CheckpointReader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def number(self, kind: str) -> int:
        size = _SIZES[kind]
        if self.left < size:
            raise InvalidArgument("the checkpoint ends too early")
        (value,) = struct.unpack_from(f"<{kind}", self._data, self._at)
        self._at += size
        return int(value)

    def array(self, kind: str) -> None:
        byte_size = self.number("Q") * _SIZES[kind]
        if self.left < byte_size:
            raise InvalidArgument("the checkpoint ends too early, or a length in it is wrong")
        self._at += byte_size

    def optional_fields(self) -> None:
        if self.number("i"):
            raise InvalidArgument("the checkpoint has fields of a later version")


def check_checkpoint(data: bytes) -> None:
    """Raise `InvalidArgument` if `data` is not a whole checkpoint. Versions before 4 are left to Treelite."""
    reader = _CheckpointReader(data)
    major = reader.number("i")
    reader.number("i")
    reader.number("i")
    if major != 4:
        return
    threshold, leaf = reader.number("B"), reader.number("B")
    if threshold not in _FLOATS or leaf not in _FLOATS:
        raise InvalidArgument("the checkpoint has an unknown type of numbers")
    tree_count = reader.number("Q")
    for kind in "iBBi":  # num_feature, task_type, average_tree_output, num_target
        reader.number(kind)
    for kind in _HEADER_ARRAYS:
        reader.array(kind)
    reader.array("B")  # postprocessor
    reader.number("i")  # sigmoid_alpha, of which only the size counts
    reader.number("i")  # ratio_c
    reader.array("d")  # base_scores
    reader.array("B")  # attributes
    reader.optional_fields()
    kinds = [{"T": _FLOATS[threshold], "L": _FLOATS[leaf]}.get(kind, kind) for kind in _TREE_ARRAYS]
    for _ in range(tree_count):  # each has at least its numbers, so that a wrong count ends soon
        reader.number("i")  # num_nodes
        reader.number("B")  # has_categorical_split
        for kind in kinds:
            reader.array(kind)
        reader.optional_fields()
        reader.optional_fields()
    if reader.left:
        raise InvalidArgument(f"the checkpoint has {reader.left} bytes too many")
