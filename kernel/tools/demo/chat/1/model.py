"""A chat model: it has no language model in it, so it says what it was asked. Put yours into `generate`."""

import asyncio
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        for request in requests:  # one at a time comes here; others run meanwhile, while this one awaits
            await self.respond(request)

    async def respond(self, request):
        sender = request.get_response_sender()
        asked = json.loads(pb_utils.get_input_tensor_by_name(request, "openai_request").as_numpy()[0])
        prompt = asked["messages"][-1]["content"] if "messages" in asked else asked["prompt"]
        words, limit = self.generate(prompt), asked.get("max_tokens", 1000)
        for number, word in enumerate(words[:limit], 1):
            if request.is_cancelled():  # the client has gone, or a stop word has come
                break
            outputs = {"text_output": word, "num_input_tokens": len(str(prompt).split()), "num_output_tokens": 1}
            if number == min(limit, len(words)):
                outputs["finish_reason"] = "stop" if number == len(words) else "length"
            sender.send(pb_utils.InferenceResponse([tensor(name, value) for name, value in outputs.items()]))
            await asyncio.sleep(0.03)  # a language model thinks for about as long
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def generate(self, prompt):
        """Return the pieces of the response, one for each token."""
        return [f"{word} " for word in f"You said: {prompt}".split()] + ["That is all I know."]


def tensor(name, value):
    return pb_utils.Tensor(name, np.array([value], np.int32 if isinstance(value, int) else np.object_))
