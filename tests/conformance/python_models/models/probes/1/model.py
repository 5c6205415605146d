"""Calls the function of this module that the client names, and responds with what it returns or raises.

There is one function for each use of `triton_python_backend_utils`, right or wrong. One file, because Triton loads a
model from one, and the functions are a table.
"""

import json
import re

import numpy as np
import triton_python_backend_utils as pb_utils

ARGS = {}
REQUEST = {"model_name": "m", "requested_output_names": ["OUT"], "inputs": []}


def given(array=None):
    return pb_utils.Tensor("X", np.arange(3, dtype=np.int32) if array is None else array)


def made(**changes):
    return pb_utils.InferenceRequest(**{**REQUEST, **changes})


def missing(of, names):
    """Return the names that `of` does not have."""
    return [name for name in names.split() if not hasattr(of, name)]


# ---- names ---------------------------------------------------------------------------------------


def names_of_tensor(request):
    return missing(pb_utils.Tensor, "as_numpy from_dlpack is_cpu name shape to_dlpack triton_dtype")


def names_of_request(request):
    names = "async_exec correlation_id exec flags get_response_sender inputs is_cancelled parameters request_id"
    more = " requested_output_names set_flags set_release_flags timeout trace"
    return missing(pb_utils.InferenceRequest, names + more)


def names_of_response(request):
    return missing(pb_utils.InferenceResponse, "error has_error output_tensors")


def names_of_sender(request):
    return missing(request.get_response_sender(), "is_cancelled send")


def names_of_error(request):
    return missing(
        pb_utils.TritonError,
        "ALREADY_EXISTS CANCELLED INTERNAL INVALID_ARG NOT_FOUND UNAVAILABLE UNKNOWN UNSUPPORTED code message",
    )


def names_of_metrics(request):
    family = pb_utils.MetricFamily("probe_names", "d", pb_utils.MetricFamily.COUNTER)
    return [missing(family, "COUNTER GAUGE HISTOGRAM Metric"), missing(family.Metric(), "increment observe set value")]


def names_of_logger(request):
    return missing(pb_utils.Logger, "ERROR INFO LogLevel VERBOSE WARNING log log_error log_info log_verbose log_warn")


def names_of_config(request):
    return missing(
        pb_utils.ModelConfig,
        "add_input add_output as_dict set_dynamic_batching set_max_batch_size set_model_transaction_policy",
    )


def constants(request):
    return sorted(f"{name} {getattr(pb_utils, name)}" for name in dir(pb_utils) if name.startswith("TRITONSERVER"))


# ---- tensors -------------------------------------------------------------------------------------


def tensor(request):
    made = given()
    return [made.name(), made.shape(), made.is_cpu(), made.as_numpy(), made.__dlpack_device__()]


def tensor_of_each_type(request):
    kinds = [
        "bool",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "float32",
        "float64",
        "object",
    ]
    return [[given(np.zeros(1, kind)).as_numpy().dtype.name] for kind in kinds]


def tensor_shares_its_array(request):
    array = np.zeros(3)
    tensor = given(array)
    array[1] = 7
    return [tensor.as_numpy(), tensor.as_numpy() is array]


def tensor_of_a_column(request):
    return given(np.arange(6).reshape(2, 3)[:, 1]).as_numpy()


def tensor_in_fortran_order(request):
    array = given(np.asfortranarray(np.arange(6).reshape(2, 3))).as_numpy()
    return [array, array.flags.c_contiguous]


def tensor_without_elements(request):
    return [given(np.zeros((0, 3))).shape(), given(np.zeros((0, 3))).as_numpy()]


def tensor_without_dimensions(request):
    return [given(np.array(5.0)).shape(), given(np.array(5.0)).as_numpy()]


def tensor_of_byte_strings(request):
    made = given(np.array([b"ab", b"c"], "S2"))
    return [made.as_numpy()]


def tensor_of_objects(request):
    made = given(np.array([b"ab", "c", 5, None], object))
    return [made.as_numpy()]


def tensor_of_text(request):
    return given(np.array(["a"])).triton_dtype()


def tensor_of_complex(request):
    return given(np.zeros(1, complex)).triton_dtype()


def tensor_of_dates(request):
    return given(np.zeros(1, "datetime64[s]")).triton_dtype()


def tensor_big_endian(request):
    return given(np.arange(2, dtype=">i4")).as_numpy()


def tensor_empty_name(request):
    return pb_utils.Tensor("", np.zeros(1))


def tensor_no_name(request):
    return pb_utils.Tensor(None, np.zeros(1))


def tensor_number_as_name(request):
    return pb_utils.Tensor(5, np.zeros(1))


def tensor_no_array(request):
    return pb_utils.Tensor("X", None)


def tensor_of_a_list(request):
    return pb_utils.Tensor("X", [1, 2])


def tensor_without_arguments(request):
    return pb_utils.Tensor()


def tensor_with_keywords(request):
    return pb_utils.Tensor(name="X", numpy_array=np.zeros(1))


def dlpack_from_numpy(request):
    made = pb_utils.Tensor.from_dlpack("X", np.arange(3.0))
    return [made.name(), made.shape(), made.as_numpy()]


def dlpack_there_and_back(request):
    made = pb_utils.Tensor.from_dlpack("Y", given().to_dlpack())
    return [made.name(), made.shape(), made.as_numpy()]


def dlpack_by_numpy(request):
    return np.from_dlpack(given())


def dlpack_twice(request):
    capsule = given().to_dlpack()
    pb_utils.Tensor.from_dlpack("Y", capsule)
    return pb_utils.Tensor.from_dlpack("Z", capsule)


def dlpack_of_strings(request):
    return given(np.array([b"a"], object)).to_dlpack()


def dlpack_empty_name(request):
    return pb_utils.Tensor.from_dlpack("", np.zeros(1))


def dlpack_of_a_number(request):
    return pb_utils.Tensor.from_dlpack("X", 5)


def dlpack_of_none(request):
    return pb_utils.Tensor.from_dlpack("X", None)


def dlpack_of_a_column(request):
    return pb_utils.Tensor.from_dlpack("X", np.arange(6).reshape(2, 3)[:, 1])


def dlpack_of_complex(request):
    return pb_utils.Tensor.from_dlpack("X", np.zeros(1, complex))


def bf16_input(request):
    tensor = pb_utils.get_input_tensor_by_name(request, "OTHER")
    return [tensor.name(), tensor.shape(), tensor.is_cpu()]


def bf16_as_numpy(request):
    return pb_utils.get_input_tensor_by_name(request, "OTHER").as_numpy()


# ---- the request of the client -------------------------------------------------------------------


def request_properties(request):
    return [
        request.request_id(),
        request.correlation_id(),
        request.flags(),
        request.timeout(),
        request.parameters(),
        request.requested_output_names(),
        request.is_cancelled(),
        request.trace().get_context(),
        [tensor.name() for tensor in request.inputs()],
    ]


def request_types(request):
    return [
        type(request.inputs()).__name__,
        type(request.requested_output_names()).__name__,
        type(request.parameters()).__name__,
        type(request.trace()).__name__,
    ]


def request_same_inputs(request):
    return request.inputs()[0] is request.inputs()[0]


def request_set_flags(request):
    request.set_flags(3)
    return request.flags()


def request_set_flags_none(request):
    return request.set_flags(None)


def request_release_nothing(request):
    return request.set_release_flags(0)


def request_release_unknown(request):
    return request.set_release_flags(7)


def request_release_none(request):
    return request.set_release_flags(None)


def request_missing_input(request):
    return pb_utils.get_input_tensor_by_name(request, "NONE")


def request_input_of_none(request):
    return pb_utils.get_input_tensor_by_name(None, "X")


# ---- requests that a model makes -----------------------------------------------------------------


def made_request(request):
    own = made(request_id="1", correlation_id=5, flags=1, timeout=7, inputs=[given()], parameters={"a": 1, "b": "x"})
    return [
        own.request_id(),
        own.correlation_id(),
        own.flags(),
        own.timeout(),
        own.parameters(),
        own.requested_output_names(),
        [tensor.name() for tensor in own.inputs()],
        own.is_cancelled(),
    ]


def made_without_arguments(request):
    return pb_utils.InferenceRequest()


def made_with_positions(request):
    return pb_utils.InferenceRequest("1", 5, [], ["OUT"], "m").request_id()


def made_unknown_argument(request):
    return made(unknown=1)


def made_none_as_id(request):
    return made(request_id=None)


def made_none_as_correlation_id(request):
    return made(correlation_id=None)


def made_float_as_correlation_id(request):
    return made(correlation_id=1.5)


def made_text_as_correlation_id(request):
    return made(correlation_id="abc").correlation_id()


def made_negative_correlation_id(request):
    return made(correlation_id=-1)


def made_none_as_inputs(request):
    return made(inputs=None)


def made_none_in_inputs(request):
    return made(inputs=[None], request_id="7")


def made_number_in_inputs(request):
    return made(inputs=[5])


def made_tuple_of_inputs(request):
    return len(made(inputs=(given(),)).inputs())


def made_none_as_names(request):
    return made(requested_output_names=None)


def made_none_in_names(request):
    return made(requested_output_names=[None])


def made_empty_name_in_names(request):
    return made(requested_output_names=[""]).requested_output_names()


def made_none_as_model(request):
    return made(model_name=None)


def made_none_as_version(request):
    return made(model_version=None)


def made_text_as_version(request):
    return made(model_version="1")


def made_none_as_flags(request):
    return made(flags=None)


def made_none_as_timeout(request):
    return made(timeout=None)


def made_negative_timeout(request):
    return made(timeout=-1)


def made_none_as_memory(request):
    return made(preferred_memory=None).request_id()


def made_memory(request):
    memory = pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0)
    return made(preferred_memory=memory).request_id()


def made_none_as_trace(request):
    return made(trace=None).request_id()


def made_trace(request):
    return made(trace=request.trace()).request_id()


def made_none_as_parameters(request):
    return made(parameters=None).parameters()


def made_list_as_parameters(request):
    return made(parameters=[1])


def made_float_in_parameters(request):
    return made(parameters={"a": 1.5})


def made_none_in_parameters(request):
    return made(parameters={"a": None})


def made_number_as_key(request):
    return made(parameters={1: "a"})


def made_bool_in_parameters(request):
    return made(parameters={"a": True}).parameters()


def made_sender(request):
    return made().get_response_sender()


def memory_of_none(request):
    return pb_utils.PreferredMemory(None)


def memory_of_a_number(request):
    return pb_utils.PreferredMemory(1)


def memory_without_arguments(request):
    return pb_utils.PreferredMemory()


def trace_made(request):
    return pb_utils.InferenceTrace()


# ---- responses -----------------------------------------------------------------------------------


def response(request):
    own = pb_utils.InferenceResponse([given()])
    return [[tensor.name() for tensor in own.output_tensors()], own.has_error(), own.error()]


def response_without_arguments(request):
    own = pb_utils.InferenceResponse()
    return [own.output_tensors(), own.has_error(), own.error()]


def response_with_error(request):
    own = pb_utils.InferenceResponse([], pb_utils.TritonError("broken"))
    return [own.has_error(), own.error().message(), own.error().code()]


def response_of_none(request):
    return pb_utils.InferenceResponse(None)


def response_none_as_output(request):
    return pb_utils.InferenceResponse([None])


def response_number_as_output(request):
    return pb_utils.InferenceResponse([5])


def response_text_as_error(request):
    return pb_utils.InferenceResponse([], "broken")


def response_none_as_error(request):
    return pb_utils.InferenceResponse([], None).has_error()


def response_output_by_name(request):
    own = pb_utils.InferenceResponse([given()])
    return [pb_utils.get_output_tensor_by_name(own, "X").name(), pb_utils.get_output_tensor_by_name(own, "Y")]


def response_output_of_none(request):
    return pb_utils.get_output_tensor_by_name(None, "X")


def error_codes(request):
    names = [
        "UNKNOWN",
        "INTERNAL",
        "NOT_FOUND",
        "INVALID_ARG",
        "UNAVAILABLE",
        "UNSUPPORTED",
        "ALREADY_EXISTS",
        "CANCELLED",
    ]
    return [[name, int(getattr(pb_utils.TritonError, name))] for name in names]


def error_default_code(request):
    return pb_utils.TritonError("broken").code()


def error_with_code(request):
    error = pb_utils.TritonError("broken", pb_utils.TritonError.NOT_FOUND)
    return [error.message(), error.code(), str(error.code()), error.code() == pb_utils.TritonError.NOT_FOUND]


def error_by_keywords(request):
    return pb_utils.TritonError(message="broken", code=pb_utils.TritonError.CANCELLED).message()


def error_of_none(request):
    return pb_utils.TritonError(None)


def error_without_arguments(request):
    return pb_utils.TritonError()


def error_number_as_code(request):
    return pb_utils.TritonError("broken", 2)


def error_none_as_code(request):
    return pb_utils.TritonError("broken", None)


def exception(request):
    raise pb_utils.TritonModelException("broken")


def exception_bases(request):
    return [base.__name__ for base in pb_utils.TritonModelException.__mro__]


# ---- senders -------------------------------------------------------------------------------------


def sender_wrong_flags(request):
    return request.get_response_sender().send(pb_utils.InferenceResponse([]), flags=2)


def sender_text_as_flags(request):
    return request.get_response_sender().send(pb_utils.InferenceResponse([]), flags="1")


def sender_nothing(request):
    return request.get_response_sender().send()


def sender_none(request):
    return request.get_response_sender().send(None, 0)


def sender_final_first(request):
    return request.get_response_sender().send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def sender_text(request):
    return request.get_response_sender().send("text")


def sender_is_same(request):
    return request.get_response_sender() is request.get_response_sender()


def sender_cancelled(request):
    return request.get_response_sender().is_cancelled()


# ---- logs ----------------------------------------------------------------------------------------


def log(request):
    logger = pb_utils.Logger
    return [
        logger.log("text"),
        logger.log("text", logger.ERROR),
        logger.log_info("text"),
        logger.log_warn("text"),
        logger.log_error("text"),
        logger.log_verbose("text"),
    ]


def log_levels(request):
    return [
        repr(level)
        for level in (pb_utils.Logger.INFO, pb_utils.Logger.WARNING, pb_utils.Logger.ERROR, pb_utils.Logger.VERBOSE)
    ]


def log_none(request):
    return pb_utils.Logger.log(None)


def log_number(request):
    return pb_utils.Logger.log_info(5)


def log_number_as_level(request):
    return pb_utils.Logger.log("text", 1)


def log_nothing(request):
    return pb_utils.Logger.log_warn()


# ---- metrics -------------------------------------------------------------------------------------


def family(name, kind):
    return pb_utils.MetricFamily(name=name, description="d", kind=kind)


def metric_counter(request):
    metrics = family("probe_counter", pb_utils.MetricFamily.COUNTER)
    counter = metrics.Metric(labels={"a": "b"})
    counter.increment(2.5)
    counter.increment(1)
    return counter.value()


def metric_counter_negative(request):
    metrics = family("probe_counter", pb_utils.MetricFamily.COUNTER)
    return metrics.Metric(labels={"a": "n"}).increment(-1)


def metric_counter_set(request):
    metrics = family("probe_counter", pb_utils.MetricFamily.COUNTER)
    return metrics.Metric(labels={"a": "s"}).set(1)


def metric_counter_observe(request):
    metrics = family("probe_counter", pb_utils.MetricFamily.COUNTER)
    return metrics.Metric(labels={"a": "o"}).observe(1)


def metric_gauge(request):
    metrics = family("probe_gauge", pb_utils.MetricFamily.GAUGE)
    gauge = metrics.Metric()
    gauge.set(5)
    gauge.increment(-2)
    return gauge.value()


def metric_gauge_observe(request):
    metrics = family("probe_gauge", pb_utils.MetricFamily.GAUGE)
    return metrics.Metric().observe(1)


def metric_histogram(request):
    metrics = family("probe_histogram", pb_utils.MetricFamily.HISTOGRAM)
    return metrics.Metric(buckets=[1.0, 2.0]).observe(1.5)


def metric_histogram_value(request):
    metrics = family("probe_histogram", pb_utils.MetricFamily.HISTOGRAM)
    return metrics.Metric(buckets=[1.0, 2.0]).value()


def metric_histogram_set(request):
    metrics = family("probe_histogram", pb_utils.MetricFamily.HISTOGRAM)
    return metrics.Metric(buckets=[1.0, 2.0]).set(1)


def metric_histogram_increment(request):
    metrics = family("probe_histogram", pb_utils.MetricFamily.HISTOGRAM)
    return metrics.Metric(buckets=[1.0, 2.0]).increment(1)


def metric_histogram_without_buckets(request):
    metrics = family("probe_histogram", pb_utils.MetricFamily.HISTOGRAM)
    return metrics.Metric()


def metric_histogram_buckets_descend(request):
    metrics = family("probe_histogram", pb_utils.MetricFamily.HISTOGRAM)
    return metrics.Metric(labels={"a": "d"}, buckets=[2.0, 1.0])


def metric_histogram_text_as_bucket(request):
    metrics = family("probe_histogram", pb_utils.MetricFamily.HISTOGRAM)
    return metrics.Metric(labels={"a": "t"}, buckets=["1"])


def metric_histogram_no_list(request):
    metrics = family("probe_histogram", pb_utils.MetricFamily.HISTOGRAM)
    return metrics.Metric(labels={"a": "l"}, buckets=(1, 2))


def metric_counter_with_buckets(request):
    metrics = family("probe_counter", pb_utils.MetricFamily.COUNTER)
    return metrics.Metric(labels={"a": "b2"}, buckets=[1.0])


def metric_labels_list(request):
    return family("probe_counter", pb_utils.MetricFamily.COUNTER).Metric(labels=["a"])


def metric_labels_number(request):
    return family("probe_counter", pb_utils.MetricFamily.COUNTER).Metric(labels={"a": 1})


def metric_increment_text(request):
    metrics = family("probe_counter", pb_utils.MetricFamily.COUNTER)
    return metrics.Metric(labels={"a": "x"}).increment("1")


def metric_increment_none(request):
    metrics = family("probe_counter", pb_utils.MetricFamily.COUNTER)
    return metrics.Metric(labels={"a": "x"}).increment(None)


def metric_family_deleted(request):
    metric = family("probe_deleted", pb_utils.MetricFamily.GAUGE).Metric()
    return metric.set(1)


def metric_same_labels(request):
    metrics = family("probe_same", pb_utils.MetricFamily.COUNTER)
    first = metrics.Metric(labels={"a": "b"})
    first.increment(1)
    return metrics.Metric(labels={"a": "b"}).value()


def metric_family_other_kind(request):
    first = family("probe_kinds", pb_utils.MetricFamily.COUNTER)
    return [first is not None, family("probe_kinds", pb_utils.MetricFamily.GAUGE)]


def metric_family_none(request):
    return pb_utils.MetricFamily(None, "d", pb_utils.MetricFamily.GAUGE)


def metric_family_number_as_kind(request):
    return pb_utils.MetricFamily("probe_x", "d", 1)


def metric_family_without_arguments(request):
    return pb_utils.MetricFamily()


def metric_kinds(request):
    return [
        repr(kind)
        for kind in (pb_utils.MetricFamily.COUNTER, pb_utils.MetricFamily.GAUGE, pb_utils.MetricFamily.HISTOGRAM)
    ]


# ---- functions -----------------------------------------------------------------------------------


def types_by_number(request):
    return [getattr(pb_utils.triton_to_numpy_type(number), "__name__", "none").rstrip("_") for number in range(-1, 16)]


def types_by_name(request):
    names = [
        "BOOL",
        "UINT8",
        "UINT16",
        "UINT32",
        "UINT64",
        "INT8",
        "INT16",
        "INT32",
        "INT64",
        "FP16",
        "FP32",
        "FP64",
        "STRING",
    ]
    return [pb_utils.triton_string_to_numpy("TYPE_" + name).__name__ for name in names]


def type_by_name_bf16(request):
    return pb_utils.triton_string_to_numpy("TYPE_BF16")


def type_by_name_unknown(request):
    return pb_utils.triton_string_to_numpy("FP32")


def types_of_numpy(request):
    kinds = [bool, np.bool_, np.uint8, np.int64, np.float16, np.float64, np.bytes_, np.object_, complex, "x", None]
    return [pb_utils.numpy_to_triton_type(kind) for kind in kinds]


def strings_serialized(request):
    return pb_utils.serialize_byte_tensor(np.array([[b"ab", "c"], [5, b""]], object))


def strings_serialized_type(request):
    return type(pb_utils.serialize_byte_tensor(np.array([b"ab"], object))).__name__


def strings_serialized_fixed(request):
    return pb_utils.serialize_byte_tensor(np.array([b"ab", b"c"]))


def strings_serialized_empty(request):
    return pb_utils.serialize_byte_tensor(np.array([], object))


def strings_serialized_numbers(request):
    return pb_utils.serialize_byte_tensor(np.zeros(2))


def strings_deserialized(request):
    return pb_utils.deserialize_bytes_tensor(b"\2\0\0\0ab\0\0\0\0\1\0\0\0c")


def strings_deserialized_empty(request):
    return pb_utils.deserialize_bytes_tensor(b"")


def strings_deserialized_short(request):
    return pb_utils.deserialize_bytes_tensor(b"\5\0\0\0ab")


def config_of_inputs(request):
    config = json.loads(ARGS["model_config"])
    return [
        pb_utils.get_input_config_by_name(config, "PROBE")["data_type"],
        pb_utils.get_input_config_by_name(config, "X"),
        pb_utils.get_output_config_by_name(config, "RESULT")["dims"],
        pb_utils.get_output_config_by_name(config, "X"),
        pb_utils.using_decoupled_model_transaction_policy(config),
    ]


def config_without_inputs(request):
    return [pb_utils.get_input_config_by_name({}, "X"), pb_utils.get_output_config_by_name({}, "X")]


def config_decoupled(request):
    return [
        pb_utils.using_decoupled_model_transaction_policy(config)
        for config in ({}, {"model_transaction_policy": {}}, {"model_transaction_policy": {"decoupled": True}})
    ]


def arguments(request):
    return [
        sorted(ARGS),
        [type(value).__name__ for value in ARGS.values()],
        *(
            ARGS[name]
            for name in (
                "model_instance_kind",
                "model_instance_name",
                "model_instance_device_id",
                "model_version",
                "model_name",
            )
        ),
    ]


def folder(request):
    return [pb_utils.get_model_dir().endswith("/probes/1"), ARGS["model_repository"].endswith("/probes")]


# ---- configurations that a model completes ---------------------------------------------------------


def config_of(**fields):
    return pb_utils.ModelConfig(json.dumps({"name": "m", "max_batch_size": 0, "input": [], "output": [], **fields}))


def complete_nothing(request):
    return json.dumps(config_of().as_dict(), sort_keys=True)


def complete_all(request):
    config = config_of()
    config.set_max_batch_size(4)
    config.set_dynamic_batching()
    config.add_input({"name": "A", "data_type": "TYPE_FP32", "dims": [1], "optional": True})
    config.add_output({"name": "B", "data_type": "TYPE_FP32", "dims": [-1]})
    config.set_model_transaction_policy({"decoupled": True})
    return json.dumps(config.as_dict(), sort_keys=True)


def complete_smaller_batch(request):
    return config_of(max_batch_size=8).set_max_batch_size(4)


def complete_larger_batch(request):
    config = config_of(max_batch_size=4)
    config.set_max_batch_size(8)
    return config.as_dict()["max_batch_size"]


def complete_dynamic_over_sequences(request):
    return config_of(sequence_batching={}).set_dynamic_batching()


def complete_dynamic_over_ensemble(request):
    return config_of(ensemble_scheduling={}).set_dynamic_batching()


def complete_dynamic_twice(request):
    config = config_of(dynamic_batching={"max_queue_delay_microseconds": 5})
    config.set_dynamic_batching()
    return config.as_dict()["dynamic_batching"]


def complete_input_with_other_keys(request):
    return config_of().add_input({"name": "A", "data_type": "TYPE_FP32", "dims": [1], "other": 1})


def complete_output_with_other_keys(request):
    return config_of().add_output({"name": "A", "data_type": "TYPE_FP32", "dims": [1], "optional": True})


def complete_input_without_name(request):
    return config_of().add_input({"data_type": "TYPE_FP32", "dims": [1]})


def complete_input_without_type(request):
    return config_of().add_input({"name": "A", "dims": [1]})


def complete_input_without_dims(request):
    return config_of().add_input({"name": "A", "data_type": "TYPE_FP32"})


def complete_output_without_name(request):
    return config_of().add_output({"data_type": "TYPE_FP32", "dims": [1]})


def complete_output_without_type(request):
    return config_of().add_output({"name": "A", "dims": [1]})


def complete_output_without_dims(request):
    return config_of().add_output({"name": "A", "data_type": "TYPE_FP32"})


CONFIGURED = {"name": "A", "data_type": "TYPE_INT32", "dims": [2]}


def complete_input_other_type(request):
    return config_of(input=[CONFIGURED]).add_input({"name": "A", "data_type": "TYPE_FP32", "dims": [2]})


def complete_input_other_dims(request):
    return config_of(input=[CONFIGURED]).add_input({"name": "A", "data_type": "TYPE_INT32", "dims": [3]})


def complete_input_other_optional(request):
    configured = {**CONFIGURED, "optional": False}
    return config_of(input=[configured]).add_input({**CONFIGURED, "optional": True})


def complete_output_other_type(request):
    return config_of(output=[CONFIGURED]).add_output({"name": "A", "data_type": "TYPE_FP32", "dims": [2]})


def complete_output_other_dims(request):
    return config_of(output=[CONFIGURED]).add_output({"name": "A", "data_type": "TYPE_INT32", "dims": [3]})


def complete_same_input(request):
    config = config_of(input=[CONFIGURED])
    config.add_input(CONFIGURED)
    return json.dumps(config.as_dict()["input"], sort_keys=True)


def complete_policy_other_keys(request):
    return config_of().set_model_transaction_policy({"other": True})


def complete_policy_changed(request):
    return config_of(model_transaction_policy={"decoupled": False}).set_model_transaction_policy({"decoupled": True})


def complete_policy_empty(request):
    config = config_of()
    config.set_model_transaction_policy({})
    return json.dumps(config.as_dict(), sort_keys=True)


# ---- the model -----------------------------------------------------------------------------------

#: The modules in which classes live, and addresses, differ between servers.
VARYING = re.compile(r"(c_python_backend_utils|triton_python_backend_utils|backends\.python\.\w+)\.")


def shown(value):
    if isinstance(value, np.ndarray):
        return f"array {value.dtype} {value.shape} {value.tolist()}"
    if isinstance(value, (set, frozenset)):
        return f"set {sorted(value)}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} [{', '.join(map(shown, value))}]"
    return repr(value)


class TritonPythonModel:
    def initialize(self, args):
        ARGS.update(args)

    def execute(self, requests):
        responses = []
        for request in requests:
            name = pb_utils.get_input_tensor_by_name(request, "PROBE").as_numpy()[0].decode()
            try:
                text = shown(globals()[name](request))
            except TypeError:  # the texts of Triton's are those of its binding
                text = "TypeError"
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
            text = re.sub(r" at 0x[0-9a-f]+", " at 0x", VARYING.sub("", text))
            tensor = pb_utils.Tensor("RESULT", np.array([text.encode()], object))
            responses.append(pb_utils.InferenceResponse([tensor]))
        return responses
