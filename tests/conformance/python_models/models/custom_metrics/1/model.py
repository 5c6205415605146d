"""Counts the seconds of preprocessing that it is given, and shows them in metrics of its own."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        kinds = pb_utils.MetricFamily
        self.seconds_family = kinds("case_preprocess_seconds", "Time of preprocessing", kinds.COUNTER)
        self.last_family = kinds(name="case_last_seconds", description="Time of the last request", kind=kinds.GAUGE)
        labels = {"model": args["model_name"], "version": args["model_version"]}
        self.seconds = self.seconds_family.Metric(labels=labels)
        self.last = self.last_family.Metric(labels=labels)

    def execute(self, requests):
        responses = []
        for request in requests:
            seconds = float(pb_utils.get_input_tensor_by_name(request, "SECONDS").as_numpy()[0])
            self.seconds.increment(seconds)
            self.last.set(seconds)
            pb_utils.Logger.log_info(f"preprocessed for {seconds} s")
            values = np.array([self.seconds.value(), self.last.value()])
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("VALUES", values)]))
        return responses
