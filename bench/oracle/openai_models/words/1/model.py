"""A language model in the manner of NVIDIA's backend for vLLM, with words for tokens.

What it says follows from the prompt and the seed, or is random. It ends by itself after nine words. It calls the first
tool of a prompt, writes an object for a schema, and says its words about the result of a tool.
"""

import json
import random

import numpy as np
import triton_python_backend_utils as pb_utils

WORDS = [
    "apple",
    "bridge",
    "cloud",
    "door",
    "engine",
    "forest",
    "garden",
    "house",
    "island",
    "jungle",
    "kettle",
    "ladder",
    "mirror",
    "needle",
    "orange",
    "paper",
    "queen",
    "river",
    "stone",
    "table",
    "under",
    "valley",
    "water",
    "yellow",
    "zebra",
    "amber",
    "bottle",
    "candle",
    "drum",
    "eagle",
    "feather",
    "grape",
    "hammer",
    "iron",
]

#: A text has this number of words if nothing ends it before.
LENGTH = 9

#: Whatever the question of Triton's tests about the weather may be, these are its arguments.
ARGUMENTS = {"city": "Dallas", "state": "TX", "unit": "fahrenheit", "num_days": 5}


def flag(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return tensor is not None and bool(tensor.as_numpy()[0])


def text_of(request, name, default=""):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return default if tensor is None else tensor.as_numpy()[0].decode()


def object_for(schema):
    """Return an object, or a list with one, with the members that a schema requires."""
    if schema.get("type") == "array":
        return [object_for(schema["items"])]
    if "anyOf" in schema:
        return object_for(schema["anyOf"][0])
    found = {}
    for name in schema.get("required", schema.get("properties", {})):
        member = schema["properties"][name]
        if "properties" in member:
            found[name] = object_for(member)
        else:
            found[name] = member.get("const", member.get("enum", [None])[0] if "enum" in member else None)
            found[name] = ARGUMENTS.get(name, found[name])
    return found


def tokens_of(prompt, parameters):
    """Return the tokens of the text, and why it ends."""
    if "structured_outputs" in parameters:
        form = json.loads(parameters["structured_outputs"])
        schema = form.get("json", {})
        text = json.dumps(object_for(json.loads(schema) if isinstance(schema, str) else schema))
        return [text[at : at + 5] for at in range(0, len(text), 5)], "stop"
    if '"get_current_weather"' in prompt and "ipython" not in prompt:
        call = {"name": "get_current_weather", "parameters": {**ARGUMENTS}}
        del call["parameters"]["num_days"]
        text = json.dumps(call)
        return [text[at : at + 5] for at in range(0, len(text), 5)], "stop"
    if parameters.get("temperature") == 0 or "seed" in parameters:
        chosen = random.Random(f"{prompt} {parameters.get('seed')}")
    else:
        chosen = random.Random()
    count = min(parameters.get("max_tokens", 16), LENGTH)
    words = [" " + chosen.choice(WORDS) for _ in range(count)]
    if count > 4:
        words[4] = " is"
    return words, "length" if count < LENGTH else "stop"


def logprobs_of(tokens, count):
    """Return a list with one object for each token: the chosen one first, then the next likely ones."""
    found = []
    for token in tokens:
        others = [" " + word for word in WORDS if " " + word != token][: max(count - 1, 0)]
        found.append(
            {
                str(1000 + number): {"logprob": -0.25 - number, "rank": number + 1, "decoded_token": each}
                for number, each in enumerate([token, *others])
            }
        )
    return json.dumps(found).encode()


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            prompt = text_of(request, "text_input")
            parameters = json.loads(text_of(request, "sampling_parameters", "{}"))
            tokens, reason = tokens_of(prompt, parameters)
            pieces = [[token] for token in tokens] or [[]]
            if not flag(request, "stream"):
                pieces = [tokens]
            sender = request.get_response_sender()
            for number, piece in enumerate(pieces, 1):
                last = number == len(pieces)
                outputs = self.outputs(request, prompt, piece, reason if last else "None", parameters)
                final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0
                sender.send(pb_utils.InferenceResponse(outputs), flags=final)

    def outputs(self, request, prompt, piece, reason, parameters):
        outputs = [pb_utils.Tensor("text_output", np.array(["".join(piece).encode()], np.object_))]
        if flag(request, "return_finish_reason"):
            outputs.append(pb_utils.Tensor("finish_reason", np.array([reason.encode()], np.object_)))
        if flag(request, "return_logprobs"):
            encoded = logprobs_of(piece, parameters.get("logprobs", 0))
            outputs.append(pb_utils.Tensor("logprobs", np.array([encoded], np.object_)))
        if flag(request, "return_num_input_tokens"):
            outputs.append(pb_utils.Tensor("num_input_tokens", np.array([len(prompt.split())], np.uint32)))
        if flag(request, "return_num_output_tokens"):
            outputs.append(pb_utils.Tensor("num_output_tokens", np.array([len(piece)], np.uint32)))
        return outputs
