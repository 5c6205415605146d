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

FAILED = "Failed to process the request(s) for model 'returns_0_0', message: "
DROPPED = "Python model 'returns_0_0' dropped the request without sending a final response"

#: What is different on purpose: the reason, and our error.
RETURNS_OTHERWISE = {
    "none": ("a request that the model drops is ended; Triton leaves it open", DROPPED),
    "generator": (
        "Triton takes a generator for a coroutine",
        FAILED + "Expected a list in the execute return, found type '<class 'generator'>'.",
    ),
    "class": (
        "classes of ours have another metaclass",
        FAILED
        + "Expected an 'InferenceResponse' object in the execute function return list, found type '<class 'type'>'.",
    ),
}

#: The one response of a model that has sent more: Triton sends both bodies one after the other.
ONE: Document = {
    "content-type": "application/json",
    "json": {
        "model_name": "senders",
        "model_version": "1",
        "outputs": [{"name": "OUT", "datatype": "INT32", "shape": [1], "data": [1]}],
    },
}
ONE_IN_STREAM: list[Document] = [
    {
        "infer_response": {
            "model_name": "senders_raises",
            "model_version": "1",
            "outputs": [{"name": "OUT", "datatype": "INT32", "shape": ["1"]}],
            "parameters": {"triton_final_response": {"bool_param": True}},
            "raw_output_contents": ["AQAAAA=="],
        }
    }
]


def case_of(how: str) -> Case:
    """What `execute` returns, over both protocols."""
    http, grpc = returned(how), returned_over_grpc(how)
    if how in RETURNS_OTHERWISE:
        reason, error = RETURNS_OTHERWISE[how]
        body = {"content-type": "text/plain", "json": {}}
        http = http.differs(reason, status="http 500", body=body, error=error)
        grpc = grpc.differs(reason, status="grpc INTERNAL", error=error)
    elif how == "two of one output":
        grpc = grpc.differs("Triton gives the shape of the second to the first", body=...)
    return Case(f"execute returns: {how}", http, grpc)


def sending_case(how: str) -> Case:
    """What a model that is not decoupled sends, over HTTP and in a stream."""
    unary, streamed = sent(how), sent_in_stream(how)
    if how in ("twice", "with error behind"):
        unary = unary.differs("the first response is the one that counts", status="http 200", body=ONE)
    return Case(f"a sender of a model that is not decoupled: {how}", unary, streamed)


def case_of_too_much(how: str, model: str) -> Case:
    """What a model sends after its final response."""
    unary, streamed = sent(how, model), sent_in_stream(how, model=model)
    if how == "raises":
        streamed = streamed.differs("Triton terminates", status="grpc OK", body=ONE_IN_STREAM)
    return Case(f"a sender of a model that is not decoupled: {how}", unary, streamed)


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
    *(case_of(how) for how in RETURNS),
    Case("execute returns what nobody asked for", returned("right", outputs=[{"name": "OUT"}]),
         returned("other output", outputs=[{"name": "OUT"}])),
    *(sending_case(how) for how in SENDS),
    *(case_of_too_much(how, model) for how, model in SENDS_TOO_MUCH.items()),
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
