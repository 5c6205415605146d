"""The start command of a Triton: what of it needs a change. Pure.

It may be the command itself, a script of a shell, a Compose file or a manifest of Kubernetes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kernel.command.flags.read import REPOSITORY, read_flags
from kernel.command.migrate.findings import CHANGE, NOTE, MigrationFinding
from kernel.options import BadOption
from kernel.texts import install_command

if TYPE_CHECKING:
    from collections.abc import Iterator

#: What ends a command in a shell.
_ENDS = {"&&", "||", "|", ";", "&", ">", ">>", "2>&1", "2>", "<"}

#: A word with the quotes of shells, YAML and JSON; or what is between words there.
_WORD = re.compile(r"""(?:"(?:\\.|[^"\\])*"|'[^']*'|[^\s"'\[\]])+""")

_QUOTED = re.compile(r"\"((?:\\.|[^\"\\])*)\"|'([^']*)'")

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
