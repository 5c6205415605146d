"""What `execute` may return and send, and what it may not; what a model sees of its request."""

from __future__ import annotations

from typing import Any

from bench.oracle.steps import Case, Document, Step, bytes_tensor, infer, rpc, stream, tensor

RETURNS = (
    "right", "none", "number", "text", "tuple", "response", "generator", "no responses", "two responses",
    "list of a number", "list of a text", "list of a tensor", "no outputs", "other output", "two of one output",
    "other datatype", "other shape", "strings", "error", "error with outputs", "raise", "raise model exception",
    "raise without text", "raise of two lines", "exit", "class",
)  # fmt: skip

SENDS = ("with flag", "flag behind", "error", "later", "twice", "with error behind")

#: What keeps Triton from responding to this request or to the next: each has a model of its own.
SENDS_TOO_MUCH = {
    "raises": "senders_raises",
    "after final": "senders_after_final",
    "final twice": "senders_final_twice",
    "with flag, and returned": "senders_returned",
}

HANGS = "Triton does not respond, and the model is lost"


def returned(how: str, **more: Any) -> Step:
    return infer("returns", {"inputs": [tensor("HOW", "BYTES", [1], [how])], **more})


def returned_over_grpc(how: str) -> Step:
    return rpc("ModelInfer", _request("returns"), [bytes_tensor(how.encode())])


def _request(model: str) -> Document:
    return {"model_name": model, "inputs": [tensor("HOW", "BYTES", [1])]}


def sent(how: str, model: str = "senders") -> Step:
    return infer(model, {"inputs": [tensor("HOW", "BYTES", [1], [how])]})


def sent_in_stream(*hows: str, model: str = "senders") -> Step:
    return stream([_request(model) for _ in hows], [[bytes_tensor(how.encode())] for how in hows])


def seen(header: Document | None = None, *, text: list[str] | None = None, **more: Any) -> Step:
    inputs = [tensor("IN", "FP32", [1, 2], [1, 2.5])]
    if text is not None:
        inputs.append(tensor("TEXT", "BYTES", [1, len(text)], text))
    return infer("checks", {"inputs": inputs, **(header or {}), **more})


CASES = [
    *(Case(f"execute returns: {how}", returned(how), returned_over_grpc(how)) for how in RETURNS),
    Case("execute returns what nobody asked for", returned("right", outputs=[{"name": "OUT"}]),
         returned("other output", outputs=[{"name": "OUT"}])),
    *(Case(f"a sender of a model that is not decoupled: {how}", sent(how), sent_in_stream(how)) for how in SENDS),
    *(Case(f"a sender of a model that is not decoupled: {how}", sent(how, model), sent_in_stream(how, model=model))
      for how, model in SENDS_TOO_MUCH.items()),
    Case("senders of several requests of a stream", sent_in_stream("with flag", "twice", "flag behind")),
    Case(
        "what a model sees of a request",
        seen(),
        seen(id="seven"),
        seen(outputs=[{"name": "TOLD"}]),
        seen(outputs=[{"name": "TOLD"}, {"name": "OUT"}]),
        seen(parameters={"timeout": 1000000, "a": 1, "b": "x", "c": True, "d": -5}),
        seen(parameters={"sequence_id": 5, "sequence_start": True}),
        seen(parameters={"sequence_id": 5, "sequence_end": True}),
        seen(parameters={"priority": 3}),
        seen(text=["a", "", "\u00fc\u4e16"]),
        seen(text=[]),
    ),
]  # fmt: skip
