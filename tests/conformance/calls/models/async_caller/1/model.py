"""Sends the calls that its input PLAN describes in JSON, and returns as JSON what came back."""

import asyncio
import json
import threading

import numpy as np
import triton_python_backend_utils as pb_utils

TYPES = {
    "BOOL": np.bool_, "INT8": np.int8, "INT16": np.int16, "INT32": np.int32, "INT64": np.int64, "UINT8": np.uint8,
    "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64, "FP16": np.float16, "FP32": np.float32,
    "FP64": np.float64,
}  # fmt: skip


def tensor_of(name, datatype, shape, data):
    if datatype == "BYTES":
        return pb_utils.Tensor(name, np.array([text.encode() for text in data], np.object_).reshape(shape))
    return pb_utils.Tensor(name, np.array(data, TYPES[datatype]).reshape(shape))


def request_of(call, received):
    given = {
        key: call[key] for key in ("request_id", "correlation_id", "flags", "timeout", "parameters") if key in call
    }
    if "version" in call:
        given["model_version"] = call["version"]
    if call.get("preferred") is not None:
        kinds = {"CPU": pb_utils.TRITONSERVER_MEMORY_CPU, "GPU": pb_utils.TRITONSERVER_MEMORY_GPU}
        given["preferred_memory"] = pb_utils.PreferredMemory(kinds[call["preferred"]], 0)
    if call.get("trace"):
        given["trace"] = received.trace()
    return pb_utils.InferenceRequest(
        model_name=call["model"],
        requested_output_names=call.get("outputs", []),
        inputs=[tensor_of(*each) for each in call.get("inputs", [])],
        **given,
    )


def shown(response, codes=False):
    found = {}
    if response.has_error():
        found["error"] = response.error().message()
        if codes:
            found["code"] = response.error().code().name
    for tensor in response.output_tensors():
        values = tensor.as_numpy()
        flat = values.flatten().tolist()
        flat = [value.decode() if isinstance(value, bytes) else value for value in flat]
        found.setdefault("outputs", {})[tensor.name()] = [str(values.dtype), list(values.shape), flat]
    parameters = response.parameters() if hasattr(response, "parameters") else ""
    if parameters and json.loads(parameters):
        found["parameters"] = json.loads(parameters)
    return found


def taken(call, responses):
    """Return the responses of a call that may have several."""
    found = [shown(response) for response in responses]
    if call.get("twice"):
        found.append("again")
        found += [shown(response) for response in responses]
    return found


def control(call):
    kind = call["control"]
    if kind == "ready":
        return pb_utils.is_model_ready(*call["arguments"])
    if kind == "unload":
        return pb_utils.unload_model(*call["arguments"])
    name, *more = call["arguments"]
    files = call.get("files")
    return pb_utils.load_model(
        name, *more, **({} if files is None else {"files": {k: v.encode() for k, v in files.items()}})
    )


def done(call, received):
    try:
        if "control" in call:
            return control(call)
        if call.get("decoupled"):
            return taken(call, request_of(call, received).exec(decoupled=True))
        return shown(request_of(call, received).exec(), "codes" in call)
    except Exception as error:
        return {"raised": f"{type(error).__name__}: {error}".split("\n")[0]}


async def done_async(call, received):
    try:
        if call.get("decoupled"):
            return taken(call, await request_of(call, received).async_exec(decoupled=True))
        return shown(await request_of(call, received).async_exec(), "codes" in call)
    except Exception as error:
        return {"raised": f"{type(error).__name__}: {error}".split("\n")[0]}


def in_threads(calls, received):
    found = [None] * len(calls)

    def run(index):
        found[index] = done(calls[index], received)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def response_of(found):
    text = json.dumps(found, sort_keys=True).encode()
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([text], np.object_))])


def plan_of(request):
    return json.loads(pb_utils.get_input_tensor_by_name(request, "PLAN").as_numpy()[0])


class TritonPythonModel:
    def initialize(self, args):
        self.asynchronous = args["model_name"].startswith("async")

    def execute(self, requests):
        if self.asynchronous:
            return self.execute_async(requests)
        responses = []
        for request in requests:
            plan = plan_of(request)
            if plan["how"] == "threads":
                responses.append(response_of(in_threads(plan["calls"], request)))
            else:
                responses.append(response_of([done(call, request) for call in plan["calls"]]))
        return responses

    async def execute_async(self, requests):
        responses = []
        for request in requests:
            plan = plan_of(request)
            if plan["how"] == "gather":
                found = await asyncio.gather(*(done_async(call, request) for call in plan["calls"]))
            else:
                found = [await done_async(call, request) for call in plan["calls"]]
            responses.append(response_of(found))
        return responses
