from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from backends.python.failures import TritonModelException
from backends.python.responses import InferenceResponse, TritonError
from backends.python.tensors import Tensor
from kernel.errors import InternalError

if TYPE_CHECKING:
    from tests.backends.python.conftest import Lab

FINAL = "pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL"


def serve(lab: Lab, *statements: str, returned: str = "None", decoupled: bool = False) -> None:
    """Load a model whose `execute` gets the `sender` of its one request and runs the statements."""
    lines = ["def execute(self, requests):", "    sender = requests[0].get_response_sender()"]
    lines += [f"    {statement}" for statement in (*statements, f"return {returned}")]
    lab.load("\n".join(lines), decoupled=decoupled)


# ---- InferenceResponse and TritonError ------------------------------------------------------


def test_a_response_returns_its_constructor_arguments() -> None:
    tensor = Tensor("OUT", np.zeros(1))
    response = InferenceResponse([tensor], parameters={"b": True, "a": 1, "c": "x"})
    assert response.output_tensors() == [tensor]
    assert not response.has_error()
    assert response.error() is None
    assert response.parameters() == '{"b": true, "a": 1, "c": "x"}'
    assert InferenceResponse([]).parameters() == "{}"


def test_an_error_has_a_message_and_a_code() -> None:
    error = TritonError("text", TritonError.NOT_FOUND)
    assert (error.message(), error.code()) == ("text", TritonError.NOT_FOUND)
    assert TritonError("text").code() == TritonError.INTERNAL
    response = InferenceResponse(error=error)
    assert response.has_error()
    assert response.error() is error


def test_the_message_of_an_error_may_be_bytes() -> None:
    error = TritonError(b"gr\xc3\xbcn \xff")  # type: ignore[arg-type]
    assert error.message() == "grün \ufffd"


@pytest.mark.parametrize("arguments", [(5,), ([5],), ([], "error"), (None,)])
def test_a_response_with_wrong_arguments_is_refused(arguments: tuple[object, ...]) -> None:
    with pytest.raises(TypeError, match=r"^__init__\(\): incompatible constructor arguments"):
        InferenceResponse(*arguments)  # type: ignore[arg-type]


def test_an_error_with_wrong_arguments_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Invoked with: 'e', 'x'$"):
        TritonError("e", "x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"a": 1.5}, "Expect parameters values to have type bool/int/str, found type <class 'float'>"),
        ({5: 6}, "Expect parameters keys to have type str, found type <class 'int'>"),
        (5, "Expect dict, got <class 'int'>"),
    ],
)
def test_parameters_of_other_types_than_triton_s_are_refused(parameters: object, text: str) -> None:
    with pytest.raises(TritonModelException) as caught:
        InferenceResponse([], parameters=parameters)  # type: ignore[arg-type]
    assert str(caught.value) == text


def test_parameters_are_sent_with_the_response(lab: Lab) -> None:
    serve(lab, returned="[pb_utils.InferenceResponse([], parameters={'left': 3, 'kind': 'a'})]")
    assert lab.run().parameters == {"left": 3, "kind": "a"}


def test_an_error_takes_precedence_over_tensors(lab: Lab) -> None:
    tensor = "pb_utils.Tensor('OUT', np.zeros(1))"
    serve(lab, returned=f"[pb_utils.InferenceResponse([{tensor}], pb_utils.TritonError(''))]")
    response = lab.run()
    assert response.outputs == {}
    assert isinstance(response.error, InternalError)


# ---- sending in default mode ----------------------------------------------------------------


@pytest.mark.parametrize("returned", ["None", "[None]"])
def test_a_response_may_be_sent_instead_of_returned(lab: Lab, returned: str) -> None:
    serve(lab, f"sender.send(text('sent'), flags={FINAL})", returned=returned)
    assert lab.run().outputs["OUT"][0] == b"sent"


def test_the_final_flag_may_follow_the_response(lab: Lab) -> None:
    serve(lab, "sender.send(text('sent'))", f"sender.send(flags={FINAL})")
    request = lab.request()
    lab.execute(request)
    response, flag = lab.responses(request)
    assert response.outputs["OUT"][0] == b"sent"
    assert flag.empty


def test_a_response_may_be_returned_although_the_sender_exists(lab: Lab) -> None:
    serve(lab, returned="[text('returned')]")
    assert lab.run().outputs["OUT"][0] == b"returned"


def test_a_sender_that_is_created_after_the_returned_response_is_closed(lab: Lab) -> None:
    lab.load(f"""
        class TritonPythonModel:
            kept = None

            def execute(self, requests):
                kept, self.kept = self.kept, requests[0]
                if kept is None:
                    return [text("returned")]
                try:
                    kept.get_response_sender().send(text("late"), {FINAL})
                except pb_utils.TritonModelException as error:
                    return [text(error)]
    """)
    first = lab.request()
    lab.execute(first)
    assert lab.text() == "Unable to send response. Response sender has been closed."
    assert lab.response(first).outputs["OUT"][0] == b"returned"


def test_a_returned_response_after_a_sent_final_one_is_dropped(lab: Lab) -> None:
    serve(lab, f"sender.send(text('sent'), {FINAL})", returned="[text('returned')]")
    assert lab.run().outputs["OUT"][0] == b"sent"
    assert [level for level, _ in lab.logged] == ["WARNING"]


def test_a_returned_response_cannot_be_the_second_one(lab: Lab) -> None:
    serve(lab, "sender.send(text('sent'))", returned="[text('returned')]")
    request = lab.request()
    lab.execute(request)
    _, last = lab.responses(request)
    assert last.error.message == ("Unable to send response. Non-decoupled model cannot send more than one response.")


@pytest.mark.parametrize(
    ("statements", "decoupled", "text"),
    [
        (["send(flags=2)"], False, "Unable to send response. Unsupported flag provided."),
        (
            ["send()"],
            False,
            "Inference Response object must be provided when the response flags is set to zero.",
        ),
        (
            ["send(flags=1)"],
            False,
            ("Unable to send response. Non-decoupled model cannot send complete final before sending a response."),
        ),
        (
            ["send(text(1))", "send(text(2))"],
            False,
            "Unable to send response. Non-decoupled model cannot send more than one response.",
        ),
        (
            ["send(text(1), 1)", "send(flags=1)"],
            False,
            "Unable to send response. Response sender has been closed.",
        ),
        (
            ["send(flags=1)", "send(text(1))"],
            True,
            "Unable to send response. Response sender has been closed.",
        ),
    ],
)
def test_wrong_use_of_a_sender_raises_triton_s_text(
    lab: Lab, statements: list[str], decoupled: bool, text: str
) -> None:
    serve(lab, *(f"sender.{statement}" for statement in statements), decoupled=decoupled)
    with pytest.raises(InternalError) as caught:
        lab.execute(lab.request())
    assert caught.value.message.startswith(
        f"Failed to process the request(s) for model 'lab_0_0', message: TritonModelException: {text}\n\nAt:\n"
    )


def test_a_sender_sends_only_responses(lab: Lab) -> None:
    serve(lab, "sender.send(5, flags=1)")
    with pytest.raises(InternalError, match=r"TypeError: send\(\): incompatible function arguments"):
        lab.execute(lab.request())


# ---- sending in decoupled mode --------------------------------------------------------------


def test_an_error_may_come_between_responses(lab: Lab) -> None:
    error = "pb_utils.InferenceResponse(error=pb_utils.TritonError('e'))"
    serve(lab, f"sender.send({error})", f"sender.send(text(2), {FINAL})", decoupled=True)
    request = lab.request()
    lab.execute(request)
    first, last = lab.responses(request)
    assert (first.error.message, first.final) == ("e", False)
    assert last.outputs["OUT"][0] == b"2"


def test_a_thread_of_the_model_may_respond_later(lab: Lab) -> None:
    lab.load(
        """
        import threading

        class TritonPythonModel:
            def initialize(self, args):
                self.go = threading.Event()

            def execute(self, requests):
                if requests[0].request_id() == "go":
                    requests[0].get_response_sender().send(flags=1)
                    self.go.set()
                    return
                threading.Thread(target=self.later, args=(requests[0].get_response_sender(),)).start()

            def later(self, sender):
                self.go.wait()
                sender.send(text("later"), flags=1)
        """,
        decoupled=True,
    )
    later = lab.request()
    lab.execute(later)
    assert not later.finished
    lab.execute(lab.request(id="go"))
    assert lab.response(later).outputs["OUT"][0] == b"later"


def test_a_sender_of_a_failed_batch_is_closed(lab: Lab) -> None:
    lab.load(
        """
        class TritonPythonModel:
            kept = []

            def execute(self, requests):
                sender = requests[0].get_response_sender()
                if self.kept:
                    try:
                        self.kept[0].send(flags=1)
                    except pb_utils.TritonModelException as error:
                        sender.send(text(error), flags=1)
                    return
                self.kept.append(sender)
                1 / 0
        """,
        decoupled=True,
    )
    with pytest.raises(InternalError):
        lab.execute(lab.request())
    assert "Response sender has been closed" in lab.text()


def test_a_sender_shows_whether_the_request_is_cancelled(lab: Lab) -> None:
    serve(lab, returned="[text((sender.is_cancelled(), requests[0].is_cancelled()))]")
    assert lab.text() == "(False, False)"
    lab.cancelled = True
    assert lab.text() == "(True, True)"


def test_after_a_failed_send_the_request_is_still_open(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("no room")

    serve(lab, f"sender.send(text(1), {FINAL})")
    request = lab.request()
    monkeypatch.setattr(lab, "respond", refuse)
    with pytest.raises(InternalError, match="ValueError: no room"):
        lab.execute(request)
    assert not request.finished


def test_none_among_the_outputs_has_the_error_of_triton() -> None:
    with pytest.raises(TritonModelException, match="^Output tensor for inference response should not be empty"):
        InferenceResponse([None])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        InferenceResponse(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        InferenceResponse([], error=5)  # type: ignore[arg-type]


DROPPED = "Python model 'lab_0_0' dropped the request without sending a final response"


@pytest.mark.parametrize("returned", ["None", "[None]"])
@pytest.mark.parametrize("sender", ["pass", "requests[0].get_response_sender()"])
def test_a_request_without_response_that_the_model_does_not_keep_fails(lab: Lab, returned: str, sender: str) -> None:
    lab.load(f"""
        def execute(self, requests):
            {sender}
            return {returned}
    """)
    error = lab.run().error
    assert (type(error), error.message) == (InternalError, DROPPED)
    assert lab.logged == [("ERROR", DROPPED)]


def test_a_cancelled_request_that_the_model_drops_is_not_logged(lab: Lab) -> None:
    lab.load("""
        def execute(self, requests):
            return None
    """)
    lab.cancelled = True
    assert lab.run().error.message == DROPPED
    assert not lab.logged


def test_a_missing_final_flag_after_a_response_is_added(lab: Lab) -> None:
    lab.load("""
        def execute(self, requests):
            requests[0].get_response_sender().send(text("sent"))
    """)
    request = lab.request()
    lab.execute(request)
    response, flag = lab.responses(request)
    assert response.outputs["OUT"][0] == b"sent"
    assert flag.empty


def test_a_decoupled_request_without_final_flag_fails(lab: Lab) -> None:
    lab.load(
        """
        def execute(self, requests):
            requests[0].get_response_sender().send(text("first"))
        """,
        decoupled=True,
    )
    request = lab.request()
    lab.execute(request)
    first, last = lab.responses(request)
    assert first.error is None
    assert last.error.message == DROPPED


def test_a_kept_request_stays_open_until_it_is_dropped(lab: Lab) -> None:
    lab.load(
        """
        class TritonPythonModel:
            kept = None

            def execute(self, requests):
                self.kept = requests[0]
        """,
        decoupled=True,
    )
    first, second = lab.request(), lab.request()
    lab.execute(first)
    assert not first.finished
    lab.execute(second)
    assert lab.response(first).error.message == DROPPED
    assert not second.finished


def test_a_model_has_no_thread_for_this_before_its_first_request(lab: Lab) -> None:
    before = set(threading.enumerate())
    lab.load("""
        def execute(self, requests):
            return [text(1)]
    """)
    assert set(threading.enumerate()) <= before
    lab.run()
    lab.run()
    assert [thread.name for thread in set(threading.enumerate()) - before] == ["dropped requests"]
