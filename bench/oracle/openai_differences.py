"""Which of Triton's tests of its front end for OpenAI's API say nothing of our server, and which it fails on purpose.

Keys are parts of the tests' names, behind the name of the folder. docs/openai.md shows both tables.
"""

from __future__ import annotations

_OWN = "tests a class of Triton's front end, without a server"

_DOWNLOAD = "needs files from Hugging Face"

_NUMBERS = "compares numbers that the model all-MiniLM-L6-v2 makes, which is a download"

#: Not run.
LEFT_OUT = {
    "test_lora.py::test_": _OWN,
    "test_lora.py::LoRATest": _DOWNLOAD,
    "test_request_size.py::TestContentLengthValidation": _OWN,
    "test_openai_restricted_apis.py::test_restricted_feature_summary": _OWN,
    "test_openai_restricted_apis.py::test_startup_log": _OWN,
    "test_chat_completions_custom_tokenizer": _DOWNLOAD,
    "test_chat_completions_invalid_chat_tokenizer": _DOWNLOAD,
    "test_embeddings_defaults": _NUMBERS,
    "test_embeddings_parameters": _NUMBERS,
}

_METRICS = "metrics have a port of their own"

_WORDS = "the command refuses it, in other words"

#: Run, and expected to fail.
CHANGED = {
    "test_completions_sampling_parameters[logit_bias": "`logit_bias` reaches models of vLLM's backend",
    "test_chat_completions_sampling_parameters[logit_bias": "`logit_bias` reaches models of vLLM's backend",
    "test_chat_completions_multiple_choices": "`n` works",
    "test_completions_multiple_choices": "`n` works; the refusal of `best_of` has other words",
    "test_chat_completions_no_tokenizer": "a chat without a chat template is 400, and the text says what is missing",
    "TestObservability::test_startup_metrics": _METRICS,
    "RestrictedAPIs::test_unrestricted_endpoints": _METRICS,
    "MultipleRestrictions::test_unrestricted_endpoints": _METRICS,
    "test_unknown_endpoint_names": _WORDS,
    "test_non_explicit_mode_load_model_error": _WORDS,
    "test_explicit_mode_load_nonexistent_model_error": _WORDS,
    "test_explicit_mode_load_invalid_model_name_error": _WORDS,
    "test_tool_call_with_required_tool_choice": "`finish_reason` of a required call is `tool_calls`, as at OpenAI",
    "test_truncated_when_tool_call_exceeds_limit": "a call has at most 131072 characters; a longer one becomes text",
}
