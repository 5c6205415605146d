"""Responds with a response sender, though it is not decoupled."""

import threading

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def response(value):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([value], np.int32))])


def twice(sender):
    sender.send(response(1))
    sender.send(response(2))


def with_error_behind(sender):
    sender.send(response(1))
    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("too late")))


def raises(sender):
    sender.send(response(1), FINAL)
    raise ValueError("after the response")


def later(sender):
    threading.Timer(0.05, lambda: sender.send(response(7), FINAL)).start()


def after_final(sender):
    sender.send(response(1), FINAL)
    sender.send(response(2), FINAL)


def final_twice(sender):
    sender.send(response(1), FINAL)
    sender.send(flags=FINAL)


HOW = {
    "with flag": lambda sender: sender.send(response(1), FINAL),
    "flag behind": lambda sender: [sender.send(response(1)), sender.send(flags=FINAL)],
    "error": lambda sender: sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("sent")), FINAL),
    "later": later,
    "twice": twice,
    "with error behind": with_error_behind,
    "raises": raises,
    "after final": after_final,
    "final twice": final_twice,
    "flag alone": lambda sender: sender.send(flags=FINAL),
}


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            how = pb_utils.get_input_tensor_by_name(request, "HOW").as_numpy()[0].decode()
            sent = how.removesuffix(", and returned")
            HOW[sent](request.get_response_sender())
        return [response(3)] if how != sent else None
