"""Returns from `execute` what the client asks for, right or wrong."""

import sys

import numpy as np
import triton_python_backend_utils as pb_utils


def response(name="OUT", array=None):
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, np.ones(1, np.float32) if array is None else array)])


def raising(error):
    raise error


HOW = {
    "right": lambda: [response()],
    "none": lambda: None,
    "number": lambda: 5,
    "text": lambda: "x",
    "tuple": lambda: (response(),),
    "response": lambda: response(),
    "generator": lambda: (each for each in [response()]),
    "no responses": list,
    "two responses": lambda: [response(), response()],
    "list of a number": lambda: [5],
    "list of a text": lambda: ["x"],
    "list of a tensor": lambda: [pb_utils.Tensor("OUT", np.ones(1, np.float32))],
    "list of none": lambda: [None],
    "no outputs": lambda: [pb_utils.InferenceResponse([])],
    "other output": lambda: [response("OTHER")],
    "two of one output": lambda: [
        pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.full(1, value, np.float32)) for value in (1, 2)])
    ],
    "other datatype": lambda: [response(array=np.ones(1, np.float64))],
    "other shape": lambda: [response(array=np.ones((2, 3), np.float32))],
    "strings": lambda: [response(array=np.array([b"x"], object))],
    "error": lambda: [pb_utils.InferenceResponse(error=pb_utils.TritonError("asked for"))],
    "error with outputs": lambda: [
        pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUT", np.ones(1, np.float32))],
            pb_utils.TritonError("asked for", pb_utils.TritonError.NOT_FOUND),
        )
    ],
    "raise": lambda: raising(ValueError("asked for")),
    "raise model exception": lambda: raising(pb_utils.TritonModelException("asked for")),
    "raise without text": lambda: raising(ValueError()),
    "raise of two lines": lambda: raising(ValueError("one\ntwo")),
    "exit": lambda: sys.exit(3),
    "interrupt": lambda: raising(KeyboardInterrupt()),
    "class": lambda: [pb_utils.InferenceResponse],
}


class TritonPythonModel:
    def execute(self, requests):
        how = pb_utils.get_input_tensor_by_name(requests[0], "HOW").as_numpy()[0].decode()
        return HOW[how]()
