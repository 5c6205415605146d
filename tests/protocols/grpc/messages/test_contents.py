import struct

import pytest

from kernel.errors import InvalidArgument
from protocols.grpc.generated.grpc_service_pb2 import InferTensorContents as Contents
from protocols.grpc.messages.contents import pack_contents


@pytest.mark.parametrize(
    ("contents", "datatype", "raw"),
    [
        (Contents(bool_contents=[True, False]), "BOOL", b"\1\0"),
        (Contents(int_contents=[300, -1]), "INT8", struct.pack("<2b", 44, -1)),
        (Contents(int_contents=[70000, -2]), "INT16", struct.pack("<2h", 4464, -2)),
        (Contents(int_contents=[70000, -2]), "INT32", struct.pack("<2i", 70000, -2)),
        (Contents(int64_contents=[-3, 2**62]), "INT64", struct.pack("<2q", -3, 2**62)),
        (Contents(uint_contents=[300, 1]), "UINT8", struct.pack("<2B", 44, 1)),
        (Contents(uint_contents=[70000, 1]), "UINT16", struct.pack("<2H", 4464, 1)),
        (Contents(uint_contents=[2**32 - 1]), "UINT32", struct.pack("<I", 2**32 - 1)),
        (Contents(uint64_contents=[2**64 - 1]), "UINT64", struct.pack("<Q", 2**64 - 1)),
        (Contents(fp32_contents=[1.5, float("inf")]), "FP32", struct.pack("<2f", 1.5, float("inf"))),
        (Contents(fp64_contents=[0.1]), "FP64", struct.pack("<d", 0.1)),
        (Contents(bytes_contents=[b"ab", b""]), "BYTES", b"\2\0\0\0ab\0\0\0\0"),
        (Contents(), "FP32", b""),
        (Contents(), "<invalid>", b""),
    ],
)
def test_elements_become_the_raw_bytes_of_their_datatype(contents: Contents, datatype: str, raw: bytes) -> None:
    assert pack_contents(contents, datatype, "IN", "m") == raw


@pytest.mark.parametrize(
    ("contents", "datatype", "named"),
    [
        (Contents(int_contents=[1]), "FP32", "INT32"),
        (Contents(uint_contents=[1]), "INT8", "UINT32"),
        (Contents(fp64_contents=[1]), "FP32", "FP64"),
        (Contents(fp32_contents=[1]), "FP16", "FP32"),
        (Contents(bool_contents=[True]), "UINT8", "BOOL"),
        (Contents(bytes_contents=[b"a"]), "INT64", "BYTES"),
        (Contents(int_contents=[1], fp32_contents=[1]), "FP32", "INT32"),
        (Contents(fp32_contents=[1]), "<invalid>", "FP32"),
    ],
)
def test_a_field_that_does_not_fit_the_datatype_is_refused(contents: Contents, datatype: str, named: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        pack_contents(contents, datatype, "IN", "m")
    assert caught.value.message == (
        f"unexpected explicit tensor data for input tensor 'IN' for model 'm' of type '{named}', expected "
        f"datatype '{datatype}'"
    )


def test_a_second_field_is_refused() -> None:
    contents = Contents(int_contents=[1], fp32_contents=[1])
    with pytest.raises(InvalidArgument) as caught:
        pack_contents(contents, "INT32", "IN", "m")
    assert caught.value.message == (
        "unexpected explicit tensor data for input tensor 'IN' for model 'm', binary data was already supplied."
    )
