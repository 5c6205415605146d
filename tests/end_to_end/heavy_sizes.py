"""How large the bodies of each heavy row are in the tests: as small as shows that a row would hold the kernel up.

The sizes were found with the last commit that decoded all messages on the event loop.
"""

from __future__ import annotations

from bench.heavy.attack import MIB

#: For most rows: work that takes far more than 50 ms, and every limit of bytes for one part of a request.
USUAL_BYTE_SIZE = 2 * MIB

#: Rows that are decoded faster.
LARGER = {
    "grpc 4 million empty strings, 8 MiB", "grpc contents in parts of 100", "grpc empty parameters",
    "grpc empty raw contents", "grpc empty strings for FP32", "grpc four attackers, floats", "grpc fp32_contents",
    "grpc fp32_contents, one by one", "grpc int_contents in packs of one", "grpc int_contents, 16 MiB",
    "grpc raw contents", "grpc short strings", "grpc stream: empty strings", "http a dim of many digits",
    "http a wrong float at the end", "http binary in, JSON out", "http binary in, JSON out, gzip", "http chunked",
    "http cut short", "http floats", "http floats for INT32", "http generate: chunked", "http generate: floats",
    "http gzip of floats", "http ints", "http load: members", "http no JSON", "http one string",
}  # fmt: skip
LARGEST = {
    "grpc bool_contents of ten bytes each", "grpc int_contents for BYTES", "grpc model name again and again",
    "grpc negative int_contents", "grpc no protobuf at the end", "grpc unknown fields", "grpc unknown groups",
    "grpc unknown numbers", "http Expect: 100-continue", "http JSON of the whole length",
    "http binary UINT8, JSON out", "http bools", "http long floats",
}  # fmt: skip

#: The server's budget; rows that exceed it are so large that they also exceed what it keeps of freed memory.
BUDGET_BYTE_SIZE, EXCEEDING_BYTE_SIZE = 72 * MIB, 34 * MIB

#: Rows that pass too where the event loop decodes everything: nothing of them is decoded, or nothing that takes long.
#: `python -m bench heavy` measures them with bodies of full size.
LEFT_OUT = {
    "grpc 20 half-sent, load", "grpc NoSuchRpc: a message", "grpc RepositoryModelLoad: a file",
    "grpc RepositoryModelLoad: long name", "grpc contents in parts of 1", "grpc gzip in gzip", "grpc gzip of zeros",
    "grpc long datatype", "grpc long id without UTF-8", "grpc nested groups", "grpc no protobuf",
    "grpc no such model", "grpc one string", "grpc one unknown field", "grpc raw empty strings", "grpc raw floats",
    "grpc stream: 100,000 small messages", "grpc stream: no protobuf", "grpc stream: no such model",
    "grpc stream: ten messages", "grpc ten calls at once", "http 20 half-sent, JSON", "http 20 half-sent, load",
    "http 30 unread responses", "http a route without a body", "http binary empty strings",
    "http binary in and out, deflate", "http binary in and out, gzip", "http binary strings cut short",
    "http cuda unregister: deep", "http cuda unregister: long member", "http cuda unregister: members",
    "http cuda unregister: objects", "http deep lists as data", "http deep member of no meaning",
    "http deep objects as data", "http deep parameter", "http four attackers, floats", "http generate: deep",
    "http generate: gzip", "http generate: long member", "http generate_stream: deep",
    "http generate_stream: long member", "http gzip in gzip", "http gzip, then zeros", "http load: a configuration",
    "http load: a file", "http load: deep", "http load: long member", "http long datatype", "http long exponents",
    "http long header value", "http members of no meaning", "http no such model", "http no such route",
    "http one fraction of many digits", "http one string of escapes", "http raw request",
    "http system unregister: deep", "http system unregister: long member", "http system unregister: members",
    "http system unregister: objects", "http the same member again", "http white space",
}  # fmt: skip


def byte_size(name: str, *, exceeds_budget: bool) -> int:
    """Return the size of the bodies of a row."""
    if exceeds_budget:
        return EXCEEDING_BYTE_SIZE
    return 16 * MIB if name in LARGEST else 8 * MIB if name in LARGER else USUAL_BYTE_SIZE
