"""Dashboards of Grafana and alert rules of Prometheus: which metrics in them this server does not have. Pure."""

from __future__ import annotations

import difflib
import re

from kernel.command.migrate.findings import CHANGE, NOTE, MigrationFinding

#: Every family of Triton that the metrics page can have. A test compares it with docs/metrics.md.
FAMILIES = frozenset({
    "nv_cache_hit_duration_per_model", "nv_cache_hit_summary_per_model", "nv_cache_insertion_duration",
    "nv_cache_lookup_duration", "nv_cache_miss_duration_per_model", "nv_cache_miss_summary_per_model",
    "nv_cache_num_entries", "nv_cache_num_evictions", "nv_cache_num_hits", "nv_cache_num_hits_per_model",
    "nv_cache_num_lookups", "nv_cache_num_misses", "nv_cache_num_misses_per_model", "nv_cache_util",
    "nv_cpu_memory_total_bytes", "nv_cpu_memory_used_bytes", "nv_cpu_utilization", "nv_energy_consumption",
    "nv_gpu_memory_total_bytes", "nv_gpu_memory_used_bytes", "nv_gpu_power_limit", "nv_gpu_power_usage",
    "nv_gpu_utilization", "nv_inference_compute_infer_duration_us", "nv_inference_compute_infer_summary_us",
    "nv_inference_compute_input_duration_us", "nv_inference_compute_input_summary_us",
    "nv_inference_compute_output_duration_us", "nv_inference_compute_output_summary_us", "nv_inference_count",
    "nv_inference_exec_count", "nv_inference_first_response_histogram_ms", "nv_inference_pending_request_count",
    "nv_inference_queue_duration_us", "nv_inference_queue_summary_us", "nv_inference_request_duration_us",
    "nv_inference_request_failure", "nv_inference_request_success", "nv_inference_request_summary_us",
    "nv_model_load_duration_secs", "nv_pinned_memory_pool_total_bytes", "nv_pinned_memory_pool_used_bytes",
})  # fmt: skip

_METRIC = re.compile(r"\b(nv_(?:inference|cache|gpu|cpu|energy|pinned|model)\w*|nv_trt_llm\w*)\b")
_OTHER_METRIC = re.compile(r"\b((?:vllm:|nv_llm|DCGM_FI_)\w*)")
_SUFFIXES = ("_bucket", "_sum", "_count")

#: What to know about a family, by a part of its name.
_NOTES = {
    "nv_inference_request_failure": "exceptions of Python models count here too, so that a rate of errors may rise",
    "_summary_": "only with --metrics-config=summary_latencies=true, as in Triton",
    "_first_response_histogram_ms": "only with --metrics-config=histogram_latencies=true, as in Triton",
}


def family_of(name: str) -> str:
    """Return the family of a sample: its name without what histograms and summaries add."""
    if name in FAMILIES:
        return name
    for suffix in _SUFFIXES:
        if name.endswith(suffix) and name.removesuffix(suffix) in FAMILIES:
            return name.removesuffix(suffix)
    return name


def metrics_in(text: str) -> list[str]:
    """Return the names of Triton's metrics in a text, each once. A wildcard such as `nv_inference_.*` is none."""
    return list(dict.fromkeys(match[1] for match in _METRIC.finditer(text) if not _is_pattern(text, match.end())))


def _is_pattern(text: str, end: int) -> bool:
    return text[end - 1] == "_" or text.startswith((".*", ".+"), end)


def dashboard_findings(name: str, text: str) -> tuple[list[MigrationFinding], int]:
    """Return what was found about the file called `name`, and how many metrics of Triton are in it."""
    found: list[MigrationFinding] = []
    metrics = metrics_in(text)
    for metric in metrics:
        family = family_of(metric)
        subject = f"{name}: {metric}"
        if family not in FAMILIES:
            close = difflib.get_close_matches(metric, sorted(FAMILIES), n=1, cutoff=0.75)
            hint = f"; the nearest one is {close[0]}" if close else ""
            found.append(MigrationFinding(CHANGE, subject, f"there is no such metric{hint}"))
            continue
        found += [MigrationFinding(NOTE, subject, note) for part, note in _NOTES.items() if part in family]
    for other in dict.fromkeys(match[1] for match in _OTHER_METRIC.finditer(text)):
        found.append(
            MigrationFinding(
                NOTE, f"{name}: {other}", "it comes from a backend or an exporter of its own, not from the server"
            )
        )
    return found, len(metrics)
