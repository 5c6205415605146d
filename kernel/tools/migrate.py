"""`naiad check --migrate`: what of a Triton repository, its start command and its dashboards needs a change.

Each finding is a line of the report (`MigrationFinding`). The start command may be the command itself, a script of a
shell, a Compose file or a manifest of Kubernetes. In dashboards of Grafana and alert rules of Prometheus it looks for
metrics that this server does not have. Only the command at the end reads files; all else is pure.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer

from kernel.config.generated.model_config_pb2 import ModelInstanceGroup
from kernel.errors import BadOption
from kernel.flags.read import FLAGS, REPOSITORY, read_flags
from kernel.texts import install_command
from kernel.tools.models import examine
from kernel.tools.printing import pretty_json

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from kernel.config.generated.model_config_pb2 import ModelConfig
    from kernel.tools.models import Examined

#: It does not work as it is, or it works and there is something to know.
CHANGE, NOTE = "change", "note"


class MigrationFinding(msgspec.Struct, frozen=True):
    """What was found about a model, a flag or a metric."""

    #: `CHANGE` or `NOTE`.
    kind: str
    #: The model, the flag, or the file and the metric.
    subject: str
    text: str


def report_section(title: str, findings: list[MigrationFinding], count: int) -> str:
    """Return a section of the report: changes first. `count` is how many subjects were looked at."""
    changes = [each for each in findings if each.kind == CHANGE]
    notes = [each for each in findings if each.kind == NOTE]
    subjects = len({each.subject for each in changes})
    verdict = f"{subjects} of {count} need a change" if subjects else f"all {count} stay as they are"
    lines = [f"{title}: {verdict if count else 'none'}"]
    lines += [f"  CHANGE  {each.subject}: {each.text}" for each in changes]
    lines += [f"  note    {each.subject}: {each.text}" for each in notes]
    return "".join(f"{line}\n" for line in lines)


#: What ends a command in a shell.
_ENDS = {"&&", "||", "|", ";", "&", ">", ">>", "2>&1", "2>", "<"}

#: A word with the quotes of shells, YAML and JSON; or what is between words there.
_WORD = re.compile(r"""(?:"(?:\\.|[^"\\])*"|'[^']*'|[^\s"'\[\]])+""")

_IMAGE = re.compile(r"nvcr\.io/nvidia/tritonserver:?\S*")

#: Flags whose values name libraries in C++, and what to do.
_LIBRARIES = {
    "backend-directory": "backends in C++ (libtriton_NAME.so) are not loaded; folders with backend.py or model.py are "
    "(docs/backends.md)",
}

#: Backends whose settings have no receiver here.
_OTHER_BACKENDS = ("tensorflow", "openvino", "dali", "tensorrtllm")


def flags_in(text: str) -> list[str] | None:
    """Return the words behind `tritonserver` in a text; None if no such command is in it.

    A flag whose value is the next word is joined with it. Words of YAML and JSON lists lose their quotes.
    """
    words = list(_words(text))
    starts = [index + 1 for index, word in enumerate(words) if word.rpartition("/")[2] == "tritonserver"]
    # A manifest may have the program in one list and its arguments in the next one.
    starts = [start + _is_key(words[start : start + 1]) for start in starts]
    starts = [start for start in starts if start < len(words) and words[start].startswith("--")]
    if starts:
        return _joined(words[starts[-1] :])
    # It may also have arguments alone, since the image starts the server.
    first = next((index for index, word in enumerate(words) if word.startswith("--model-")), None)
    if first is None:
        return None
    while first and not _is_key(words[first - 1 : first]):
        first -= 1
    return _joined(words[next(index for index in range(first, len(words)) if words[index].startswith("--")) :])


def _is_key(words: list[str]) -> bool:
    """Whether the only one of `words` is the key of a YAML object."""
    return bool(words) and words[0].endswith(":") and not words[0].startswith("--")


def _joined(words: list[str]) -> list[str]:
    """Return the flags at the beginning of `words`, each with its value."""
    found: list[str] = []
    for word in words:
        if word.startswith("--"):
            found.append(word)
        elif word in _ENDS or word.endswith(":") or not found or "=" in found[-1]:
            break
        else:
            found[-1] += f"={word}"
    return found


def _words(text: str) -> Iterator[str]:
    for line in text.replace("\\\n", " ").splitlines():
        content = re.sub(r"(^|\s)#.*", "", line).replace('","', '", "').replace("','", "', '")
        for match in _WORD.finditer(content):
            word = re.sub(
                r"\"((?:\\.|[^\"\\])*)\"|'([^']*)'", lambda found: found[1] or found[2] or "", match[0]
            ).rstrip(",")
            if word and word != "-":
                yield from _split(word)


def _split(word: str) -> Iterator[str]:
    """Yield a word, or the words of a whole command in quotes: sh -c "tritonserver --model-repository=/models"."""
    if " " in word and "tritonserver" in word:
        yield from word.replace(";", " ; ").split()
    elif len(word) > 1 and word.endswith(";"):
        yield from (word[:-1], ";")
    else:
        yield word


def command_findings(text: str) -> tuple[list[MigrationFinding], list[str]]:
    """Return what was found about a start command, and its flags."""
    findings: list[MigrationFinding] = []
    flags = flags_in(text)
    if flags is None:
        return [MigrationFinding(CHANGE, "command", "there is no tritonserver with flags in it")], []
    for flag in flags:
        findings += _flag_findings(flag)
    if not any(each.kind == CHANGE for each in findings):
        try:
            read_flags(flags, {})
        except BadOption as error:  # flags that contradict one another
            findings.append(MigrationFinding(CHANGE, "flags together", str(error)))
    if image := _IMAGE.search(text):
        findings.append(
            MigrationFinding(
                CHANGE, image[0].rstrip("\"',]"), "the image: build docs/deploy/Containerfile, and name it"
            )
        )
    if re.search(r"\bLD_PRELOAD\b", text):
        findings.append(
            MigrationFinding(CHANGE, "LD_PRELOAD", "operators in C++ are not found this way: onnxruntime takes them by "
                             "op_library_filename in the model's configuration")
        )  # fmt: skip
    if re.search(r"--shm-size|/dev/shm", text):
        findings.append(
            MigrationFinding(
                NOTE, "--shm-size", "Python models do not use /dev/shm: it is needed only for regions of clients"
            )
        )
    return findings, flags


def _flag_findings(word: str) -> list[MigrationFinding]:
    """Return what was found about one flag, with its value."""
    name, _, value = word[2:].partition("=")
    try:
        _, notes = read_flags([word], {})
    except BadOption as error:
        if "needs" in str(error) and "-cert" in str(error):  # other flags, which are looked at together
            return []
        return [MigrationFinding(CHANGE, f"--{name}", str(error))]
    found = [
        MigrationFinding(NOTE, f"--{name}", note.removeprefix(f"--{name} "))
        for note in notes
        if " has no effect without --" not in note
    ]
    if name in _LIBRARIES:
        found.append(MigrationFinding(NOTE, f"--{name}", _LIBRARIES[name]))
    if name == "backend-config" and value.partition(",")[0] in _OTHER_BACKENDS:
        backend = value.partition(",")[0]
        found.append(MigrationFinding(NOTE, f"--{name}={backend}", f"there is no backend '{backend}' to take it"))
    if name in (REPOSITORY, "model-store") and value.startswith(("s3://", "gs://", "as://")):
        extra = {"s3": "s3", "gs": "gs", "as": "azure"}[value[:2]]
        found.append(
            MigrationFinding(NOTE, f"--{name}", f"the client of this cloud is an extra: {install_command(extra)}")
        )
    return found


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


#: What to know about a model of a backend.
_OF_BACKEND = {
    "tensorrt": "a plan runs only with the version of TensorRT that has built it: install that one, or build the plan "
    "again (naiad build-engine)",
    "vllm": "NVIDIA's vLLM backend runs from --backend-directory; it needs vllm installed",
}


def model_findings(found: Examined, files: Collection[str]) -> list[MigrationFinding]:
    """Return what was found about a model; `files` are the paths of all files in its folder."""
    findings: list[MigrationFinding] = []
    if found.reason:
        hint = f" ({found.hint})" if found.hint else ""
        findings.append(MigrationFinding(CHANGE, found.name, f"{found.reason}{hint}"))
    findings += [MigrationFinding(NOTE, found.name, line) for line in found.warnings]
    libraries = sorted(file for file in files if file.rpartition("/")[2].startswith("libtriton_") and ".so" in file)
    if libraries:
        text = f"{libraries[0]} is a backend in C++, which is not loaded: write it in Python (docs/backends.md)"
        findings.append(MigrationFinding(CHANGE, found.name, text))
    if found.config is not None:
        findings += [MigrationFinding(NOTE, found.name, text) for text in _config_notes(found.config, files)]
    return findings


def _config_notes(config: ModelConfig, files: Collection[str]) -> list[str]:
    notes = []
    if any(group.kind == ModelInstanceGroup.KIND_GPU for group in config.instance_group):
        trial = "--gpu-kind=cpu tries it without one" if "gpu-kind" in FLAGS else "write KIND_CPU to try it without one"
        notes.append(f"KIND_GPU: the machine needs a GPU, and the server its packages (docs/onnx.md); {trial}")
    if config.backend == "python" and "requirements.txt" in {file.rpartition("/")[2] for file in files}:
        notes.append(
            "the server installs its requirements.txt before it loads the model; --install-requirements=false ignores "
            "it, as Triton does"
        )
    if note := _OF_BACKEND.get(config.backend):
        notes.append(note)
    return notes


#: Files with dashboards and rules; others in a folder are left out.
_ENDINGS = (".json", ".yaml", ".yml", ".rules", ".jsonnet", ".libsonnet")

#: The most files of a model's folder that are listed.
_MOST_FILES = 10_000


class MigrationSection(msgspec.Struct, frozen=True):
    """A part of the report."""

    title: str
    #: How many models, flags or metrics were looked at.
    count: int
    findings: list[MigrationFinding]


def check_migration(path: Path, command: str, dashboards: Sequence[Path], *, as_json: bool, verbose: bool) -> int:
    """Print the report. Returns 1 if something needs a change, else 0. Raises `BadOption`.

    `command` is a start command, or the name of a file that has it; "" for none.
    """
    texts = list(_dashboard_texts(dashboards))
    sections = [_models(path, verbose=verbose)]
    if command:
        findings, flags = command_findings(_command_text(command))
        sections.append(MigrationSection("Start command", len(flags), findings))
    if dashboards:
        found = [dashboard_findings(name, text) for name, text in texts]
        sections.append(
            MigrationSection("Metrics in dashboards and rules", sum(count for _, count in found),
                             [each for findings, _ in found for each in findings])
        )  # fmt: skip
    changes = sum(each.kind == CHANGE for section in sections for each in section.findings)
    notes = sum(each.kind == NOTE for section in sections for each in section.findings)
    if as_json:
        typer.echo(pretty_json(sections))
    else:
        for section in sections:
            typer.echo(report_section(section.title, section.findings, section.count))
        more = "" if command and dashboards else f". Also look at {_not_given(command, dashboards)}"
        needed = f"{changes} changes are" if changes > 1 else "1 change is" if changes else "no change is"
        typer.echo(f"{needed} needed; there are {notes} notes{more}")
    return 1 if changes else 0


def _not_given(command: str, dashboards: Sequence[Path]) -> str:
    parts = [] if command else ["the start command (--start-command FILE)"]
    parts += [] if dashboards else ["dashboards and alert rules (--dashboards FOLDER)"]
    return " and ".join(parts)


def _models(path: Path, *, verbose: bool) -> MigrationSection:
    examination = examine([path], quick=False, verbose=verbose)
    if not examination.results:
        raise BadOption(examination.hints[0] if examination.hints else f"there is no model in '{path}'")
    findings = [MigrationFinding(NOTE, str(path), hint) for hint in examination.hints]
    for each in examination.sorted_results:
        findings += model_findings(each, _files(each.path))
    return MigrationSection("Models", len(examination.results), findings)


def _files(folder: str) -> list[str]:
    """Return the files in a model's folder; not what is in archives, such as packed environments."""
    found: list[str] = []
    for parent, _, names in os.walk(folder):
        found += [os.path.relpath(os.path.join(parent, name), folder) for name in names]
        if len(found) > _MOST_FILES:
            break
    return found


def _command_text(command: str) -> str:
    """Return the text of a command, or of the file that it names."""
    path = Path(command)
    try:
        if "--" not in command and " " not in command:
            return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise BadOption(f"--start-command: cannot read '{command}': {reason}") from None
    return command


def _dashboard_texts(paths: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Yield name and text of the files, and of those in folders. Raises `BadOption`."""
    for path in paths:
        files = sorted(each for each in path.rglob("*") if each.suffix in _ENDINGS) if path.is_dir() else [path]
        for file in files:
            try:
                yield str(file.relative_to(path)) if path.is_dir() else file.name, file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else "it is no text"
                raise BadOption(f"--dashboards: cannot read '{file}': {reason}") from None
