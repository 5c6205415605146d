"""Calls of other models from a model's code; the other models are played by the test."""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from backends.worker.model_calls import CallRequest, CallResponse
from kernel.errors import InvalidArgument, NotFound, RequestCancelled
from shm.tensor import Tensor
from tests.backends.recorded_calls import array_of

if TYPE_CHECKING:
    from tests.backends.python.conftest import Lab

CALL = """
    def call(inputs=(), **more):
        return pb_utils.InferenceRequest(
            model_name="callee", requested_output_names=["OUT"], inputs=list(inputs), **more
        )

    def numbers(*values):
        return pb_utils.Tensor("N", np.array(values, np.int32))

"""


def model(execute: str, **more: str) -> str:
    """Return the source of a model with helpers for calls; `execute` is the body of the method."""
    lines = "\n".join(f"            {line}" for line in execute.strip("\n").splitlines())
    before = more.get("before", "")
    kind = more.get("kind", "def")
    return f"{CALL}{before}\n    class TritonPythonModel:\n        {kind} execute(self, requests):\n{lines}\n"


def responses(*values: int, last_empty: bool = False) -> list[CallResponse]:
    """Return the responses of a stream, each with one number."""
    made = [
        CallResponse([Tensor("OUT", "INT32", [1], memoryview(bytearray(np.int32(value).tobytes())))])
        for value in values
    ]
    if last_empty:
        return [*made, CallResponse(final=True, empty=True)]
    made[-1].final = True
    return made


# ---- what is sent -------------------------------------------------------------------------------


def test_a_call_has_the_fields_of_the_request(lab: Lab) -> None:
    lab.load(
        model(
            """
            call(
                [numbers(1, 2)], request_id="r", correlation_id=7, model_version=3, flags=3, timeout=9,
                preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0),
                parameters={"a": 1}, trace=requests[0].trace(),
            ).exec()
            return [text("done")]
            """
        )
    )
    request = lab.request()
    lab.execute(request)
    (sent,) = lab.recorded_calls.started
    assert (sent.model_name, sent.model_version, sent.outputs) == ("callee", "3", ("OUT",))
    assert (sent.id, sent.correlation_id, sent.flags, sent.timeout_us) == ("r", 7, 3, 9)
    assert (sent.parameters, sent.streaming, sent.priority) == ({"a": 1}, False, 0)
    assert sent.trace_parent == request.ref.number
    (value,) = sent.inputs
    assert (value.name, value.datatype, array_of(value).tolist()) == ("N", "INT32", [1, 2])


def test_without_a_version_the_newest_is_called(lab: Lab) -> None:
    lab.load(model("call().exec()\nreturn [text(1)]"))
    lab.text()
    assert lab.recorded_calls.started[0].model_version == ""


def test_a_received_request_goes_to_the_model_itself(lab: Lab) -> None:
    lab.load(model("requests[0].exec()\nreturn [text(1)]"))
    lab.text()
    sent = lab.recorded_calls.started[0]
    assert (sent.model_name, sent.model_version) == ("lab", "1")


def test_an_input_of_the_caller_is_passed_on_as_it_is(lab: Lab) -> None:
    lab.load(model("call(requests[0].inputs()).exec()\nreturn [text(1)]"))
    lab.run({"IN": np.arange(3.0)})
    assert array_of(lab.recorded_calls.started[0].inputs[0]).tolist() == [0, 1, 2]


def test_an_input_that_the_model_has_changed_goes_on_changed(lab: Lab) -> None:
    lab.load(model("requests[0].inputs()[0].as_numpy()[0] = 7\ncall(requests[0].inputs()).exec()\nreturn [text(1)]"))
    lab.run({"IN": np.arange(3.0)})
    assert array_of(lab.recorded_calls.started[0].inputs[0]).tolist() == [7, 1, 2]


def test_exec_refuses_what_is_neither_true_nor_false(lab: Lab) -> None:
    lab.load(
        model(
            """
            try:
                call().exec(decoupled=None)
            except TypeError as error:
                return [text(str(error).splitlines()[0])]
            """
        )
    )
    assert "incompatible function arguments" in lab.text()


# ---- one response -------------------------------------------------------------------------------


def test_the_outputs_of_the_other_model_are_tensors(lab: Lab) -> None:
    lab.load(
        model(
            """
            response = call([numbers(1, 2)]).exec()
            found = response.output_tensors()[0]
            values = found.as_numpy()
            values += 1
            return [text([response.has_error(), found.name(), found.as_numpy().tolist(), response.parameters()])]
            """
        )
    )
    assert lab.text() == """[False, 'N', [2, 3], '{"answer": 42}']"""


def test_an_error_of_the_other_model_keeps_its_code(lab: Lab) -> None:
    lab.recorded_calls.respond = lambda _: [CallResponse(error=NotFound("not there"), final=True)]
    lab.load(
        model(
            """
            response = call().exec()
            return [text([response.has_error(), response.error().code().name, response.error().message()])]
            """
        )
    )
    assert lab.text() == "[True, 'NOT_FOUND', 'not there']"


def test_a_call_that_cannot_be_sent_has_the_error_in_its_response(lab: Lab) -> None:
    lab.recorded_calls.start_error = NotFound("no memory")
    lab.load(
        model(
            """
            streamed = list(call().exec(decoupled=True))
            return [text([call().exec().error().message(), len(streamed), streamed[0].error().message()])]
            """
        )
    )
    assert lab.text() == "['no memory', 1, 'no memory']"


def test_an_end_that_comes_alone_is_waited_for(lab: Lab) -> None:
    lab.recorded_calls.respond = lambda _: responses(5, last_empty=True)
    lab.load(model("return [text(call().exec().output_tensors()[0].as_numpy())]"))
    assert lab.text() == "[5]"
    (call,) = lab.recorded_calls.open
    assert not call.responses


def test_an_end_without_a_response_is_an_error(lab: Lab) -> None:
    lab.recorded_calls.respond = lambda _: [CallResponse(final=True, empty=True)]
    lab.load(model("return [text(call().exec().error().message())]"))
    assert lab.text() == "Unexpected empty response."


@pytest.mark.parametrize("method", ["initialize", "finalize"])
def test_models_call_others_only_while_they_execute(lab: Lab, method: str) -> None:
    arguments = ", args" if method == "initialize" else ""
    lab.write(
        CALL
        + f"""
    class TritonPythonModel:
        def {method}(self{arguments}):
            try:
                call().exec()
            except pb_utils.TritonModelException as error:
                pb_utils.Logger.log_error(str(error))
    """
    )
    lab.backend.load(lab.arguments())
    lab.backend.finalize()
    assert next(line for level, line in lab.logged if level == "ERROR").endswith(
        "BLS is only supported during the 'execute' function."
    )
    assert not lab.recorded_calls.started


# ---- streams ------------------------------------------------------------------------------------


@pytest.mark.parametrize("last_empty", [False, True])
def test_a_stream_has_each_response(lab: Lab, last_empty: bool) -> None:
    lab.recorded_calls.respond = lambda _: responses(1, 2, 3, last_empty=last_empty)
    lab.load(
        model(
            """
            stream = call().exec(decoupled=True)
            once = [[t.as_numpy().tolist() for t in response.output_tensors()] for response in stream]
            again = len(list(stream))
            return [text([once, again])]
            """
        )
    )
    end: list[list[int]] = [[]] if last_empty else []
    assert lab.text() == str([[[[1]], [[2]], [[3]], *end], 3 + last_empty])
    assert lab.recorded_calls.started[0].streaming


def test_a_long_stream_is_iterated_only_once(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.python.calls.MAX_KEPT_BYTE_SIZE", 8)
    lab.recorded_calls.respond = lambda _: responses(1, 2, 3)
    lab.load(
        model(
            """
            stream = call().exec(decoupled=True)
            count = len(list(stream))
            try:
                list(stream)
            except pb_utils.TritonModelException as error:
                return [text([count, str(error)])]
            """
        )
    )
    assert lab.text() == "[3, 'the responses have more than 8 bytes together, and can be iterated only once']"


def test_a_stream_that_is_dropped_goes_on_without_the_model(lab: Lab) -> None:
    discarded = threading.Event()
    lab.recorded_calls.respond = lambda _: responses(1, 2)[:1]
    lab.recorded_calls.on_discard = discarded.set
    lab.load(model("next(call().exec(decoupled=True))\nreturn [text(1)]"))
    lab.text()
    gc.collect()
    assert discarded.wait(60)
    assert lab.recorded_calls.discarded == [1]


def test_a_stream_that_is_dropped_before_the_first_request_goes_on_without_the_model(lab: Lab) -> None:
    discarded = threading.Event()
    lab.recorded_calls.respond = lambda _: responses(1, 2)[:1]
    lab.recorded_calls.on_discard = discarded.set
    lab.load(
        f"""{CALL}
    class TritonPythonModel:
        def is_ready(self):
            return next(call().exec(decoupled=True)) is not None
        """
    )
    problems: list[str] = []
    lab.backend.check_health(problems.append)
    gc.collect()
    assert problems == [""]
    assert discarded.wait(60)
    assert lab.recorded_calls.discarded == [1]


def test_a_stream_can_be_cancelled(lab: Lab) -> None:
    lab.recorded_calls.respond = lambda _: responses(1, 2)[:1]

    def cancelled() -> None:
        lab.recorded_calls.deliver(lab.recorded_calls.open[0], CallResponse(error=RequestCancelled("gone"), final=True))

    lab.recorded_calls.on_cancel = cancelled
    lab.load(
        model(
            """
            stream = call().exec(decoupled=True)
            next(stream)
            stream.cancel()
            last = next(stream)
            stream.cancel()
            return [text([last.error().code().name, last.error().message(), len(list(stream))])]
            """
        )
    )
    assert lab.text() == "['CANCELLED', 'gone', 2]"
    assert lab.recorded_calls.cancelled == [1]


# ---- coroutines ---------------------------------------------------------------------------------


def test_a_coroutine_awaits_several_calls_at_the_same_time(lab: Lab) -> None:
    def respond(request: CallRequest) -> list[CallResponse]:
        calls = lab.recorded_calls
        if len(calls.started) == 3:  # all are sent before the first response

            def deliver() -> None:
                for number, call in enumerate(list(calls.open)):
                    calls.deliver(call, responses(number)[0])

            threading.Thread(target=deliver).start()
        return []

    lab.recorded_calls.respond = respond
    lab.load(
        model(
            """
            found = await asyncio.gather(*(call().async_exec() for _ in range(3)))
            return [text([int(each.output_tensors()[0].as_numpy()[0]) for each in found])]
            """,
            before="    import asyncio\n",
            kind="async def",
        )
    )
    request = lab.request()
    lab.execute(request)
    assert bytes(lab.response(request).outputs["OUT"][0]).decode() == "[0, 1, 2]"
    assert all(sent.parents == [request.ref.number] and sent.blocking for sent in lab.recorded_calls.started)


def test_a_coroutine_iterates_a_stream(lab: Lab) -> None:
    lab.recorded_calls.respond = lambda _: responses(1, 2, last_empty=True)
    lab.load(
        model(
            """
            stream = await call().async_exec(decoupled=True)
            sizes = [len(each.output_tensors()) async for each in stream]
            again = [len(each.output_tensors()) async for each in stream]
            return [text([sizes, again])]
            """,
            kind="async def",
        )
    )
    assert lab.text() == "[[1, 1, 0], [1, 1, 0]]"


def test_a_coroutine_gets_a_stream_with_its_first_response(lab: Lab) -> None:
    def respond(request: CallRequest) -> list[CallResponse]:
        if request.id == "second":
            lab.recorded_calls.deliver(lab.recorded_calls.open[0], responses(1, 2)[0])
            lab.recorded_calls.deliver(lab.recorded_calls.open[0], responses(2)[0])
        return []

    lab.recorded_calls.respond = respond
    lab.load(
        model(
            """
            first = asyncio.ensure_future(call().async_exec(decoupled=True))
            for _ in range(5):
                await asyncio.sleep(0)
            came_early = first.done()
            second = asyncio.ensure_future(call(request_id="second").async_exec(decoupled=True))
            numbers = [each.output_tensors()[0].as_numpy().tolist() for each in await first]
            second.cancel()
            return [text([came_early, numbers])]
            """,
            before="    import asyncio\n",
            kind="async def",
        )
    )
    assert lab.text() == "[False, [[1], [2]]]"


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_task_that_is_cancelled_cancels_its_call(lab: Lab, decoupled: bool) -> None:
    lab.recorded_calls.respond = lambda _: []
    lab.load(
        model(
            f"""
            task = asyncio.ensure_future(call().async_exec(decoupled={decoupled}))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                return [text("cancelled")]
            """,
            before="    import asyncio\n",
            kind="async def",
        )
    )
    assert lab.text() == "cancelled"
    assert lab.recorded_calls.cancelled == lab.recorded_calls.discarded == [1]


def test_async_exec_needs_an_event_loop(lab: Lab) -> None:
    lab.load(
        model(
            """
            try:
                call().async_exec()
            except RuntimeError as error:
                return [text(error)]
            """
        )
    )
    assert lab.text() == "no running event loop"


#: Calls a function of the server in `initialize`, and shows what it returned or raised.
MODEL = """
    class TritonPythonModel:
        def initialize(self, args):
            try:
                self.found = pb_utils.{call}
            except (pb_utils.TritonModelException, TypeError) as error:
                self.found = str(error).splitlines()[0]

        def execute(self, requests):
            return [text(self.found)]
"""


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        ("load_model('m')", {"action": "load", "config": None, "files": None}),
        ("load_model('m', '{}')", {"action": "load", "config": "{}"}),
        ("load_model('m', files={'file:1/m': b'x'})", {"action": "load", "files": {"file:1/m": b"x"}}),
        ("load_model(model_name='m', config='{}', files={})", {"action": "load", "files": {}}),
        ("unload_model('m')", {"action": "unload", "unload_dependents": False}),
        ("unload_model('m', unload_dependents=True)", {"action": "unload", "unload_dependents": True}),
        ("unload_model('m', 5)", {"action": "unload", "unload_dependents": True}),
        ("is_model_ready('m')", {"action": "ready", "version": ""}),
        ("load_model(b'm', b'{}')", {"action": "load", "config": "{}"}),
        ("unload_model(b'm')", {"action": "unload", "unload_dependents": False}),
        ("is_model_ready(b'm', b'3')", {"action": "ready", "version": "3"}),
        ("is_model_ready('m', '3')", {"action": "ready", "version": "3"}),
    ],
)
def test_a_model_controls_models_while_it_is_loaded(lab: Lab, call: str, wanted: dict[str, object]) -> None:
    lab.recorded_calls.ready = True
    lab.load(MODEL.format(call=call))
    assert lab.text() == str(True if "ready" in call else None)
    (found,) = lab.recorded_calls.controlled
    assert found["model_name"] == "m"
    assert {name: found[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("load_model('m')", "Failed to load model"),
        ("unload_model('m')", "Failed to unload model"),
        ("is_model_ready('m', 'x')", "Failed to check model readiness"),
    ],
)
def test_an_error_of_the_server_has_the_text_of_triton(lab: Lab, call: str, text: str) -> None:
    lab.recorded_calls.control_error = InvalidArgument("not this one")
    lab.load(MODEL.format(call=call))
    assert lab.text() == f"{text}: Failed to process the request for model 'lab_0_0', message: not this one"


@pytest.mark.parametrize(
    "call",
    [
        "load_model(5)",
        "load_model('m', 5)",
        "load_model('m', files={'file:x': 'text'})",
        "load_model('m', files={5: b'x'})",
        "unload_model(None)",
        "unload_model('m', None)",
        "unload_model('m', 'yes')",
        "is_model_ready('m', 1)",
    ],
)
def test_arguments_of_wrong_types_are_refused(lab: Lab, call: str) -> None:
    lab.load(MODEL.format(call=call))
    assert "incompatible function arguments" in lab.text()
    assert not lab.recorded_calls.controlled


def test_files_must_be_a_dictionary(lab: Lab) -> None:
    lab.load(MODEL.format(call="load_model('m', files=[])"))
    assert lab.text() == "failed to parse `files` when loading model: not a dictionary"
