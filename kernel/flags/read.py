"""The flags of `naiad run` as `ServerOptions`. Pure.

`read_flags` reads words of a command line and variables of the environment: `NAIAD_HTTP_PORT=9000` is
`--http-port=9000`, and a flag on the command line takes precedence over its variable. `read_keywords` reads keywords of
Python, `http_port=0` for `--http-port=0`, with defaults for an embedded server.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.errors import BadOption
from kernel.flags.flag import BadValue, parse_switch
from kernel.flags.known import GROUPS, IGNORED
from kernel.flags.trace_flags import trace_values
from kernel.options import (
    CHAT_DEMO_REPOSITORY,
    DEMO_REPOSITORY,
    ListenAddress,
    RepositoryOptions,
    ServerOptions,
    TlsOptions,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from kernel.flags.flag import Flag

    #: The value of a flag, or several values for a repeated flag; None is the same as no flag.
    Keyword = str | int | float | Path | Sequence[str | int | float | Path] | None

PREFIX = "NAIAD_"

#: Between several values of a flag that can be repeated.
_SEPARATOR = re.compile(r"[;\n]")

#: Variables that Kubernetes gives to the containers beside a service whose name begins with naiad, such as
#: NAIAD_SERVICE_HOST, NAIAD_PORT_8000_TCP_ADDR and NAIAD_HTTP_PORT=tcp://10.0.0.7:8000.
_OF_KUBERNETES = re.compile(
    rf"{PREFIX}(?:.*_)?(?:SERVICE_(?:HOST|PORT)(?:_.*)?|PORT(?:_[0-9]+_(?:TCP|UDP|SCTP)(?:_.*)?)?)"
)

_ADDRESS_OF_KUBERNETES = re.compile(r"(?:tcp|udp|sctp)://")

#: Variables of ours that stand for no flag.
_OTHERS = frozenset({f"{PREFIX}WORKER", f"{PREFIX}BENCH_CACHE", f"{PREFIX}URL"})


def variable_of(flag: Flag) -> str:
    """Return the name of the flag's variable."""
    return PREFIX + flag.name.upper().replace("-", "_")


def flags_of_environment(
    environment: Mapping[str, str], flags: Collection[Flag]
) -> tuple[dict[str, list[str]], list[str]]:
    """Return flag name → texts for the variables of `flags`, and a log line for each variable that is not a flag.

    An empty variable is the same as none. Raises `BadOption`, whose message names the variable.
    """
    by_variable = {variable_of(flag): flag for flag in flags}
    found: dict[str, list[str]] = {}
    notes: list[str] = []
    for name, text in sorted(environment.items()):
        if not name.startswith(PREFIX) or not text or _ADDRESS_OF_KUBERNETES.match(text):
            continue
        flag = by_variable.get(name)
        if flag is not None:
            if texts := _texts(name, flag, text):
                found[flag.name] = texts
        elif name not in _OTHERS and _OF_KUBERNETES.fullmatch(name) is None:
            import difflib  # imported late: right variables need none of it

            names = [each.removeprefix(PREFIX) for each in by_variable]
            close = difflib.get_close_matches(name.removeprefix(PREFIX), names, n=1)
            hint = f"; did you mean {PREFIX}{close[0]}?" if close else ""
            notes.append(f"the environment variable {name} has no effect: it stands for no flag{hint}")
    return found, notes


def _texts(name: str, flag: Flag, text: str) -> list[str]:
    """Return the values of a flag in the text of its variable, after a check of each."""
    try:
        if not flag.kind.metavar:  # a flag without a value
            return [""] if parse_switch(text) else []
        texts = [part.strip() for part in _SEPARATOR.split(text)] if flag.repeat else [text]
        texts = [each for each in texts if each]
        for each in texts:
            flag.kind.parse(each)
    except BadValue as error:
        raise BadOption(f"environment variable {name}: {error}") from None
    return texts


FLAGS = {flag.name: flag for group in (*GROUPS, IGNORED) for flag in group.flags}

_ALIASES = {flag.alias: flag for flag in FLAGS.values() if flag.alias}

#: The flag of the words that are not flags.
REPOSITORY = "model-repository"

#: The options without any flag.
DEFAULTS = ServerOptions(RepositoryOptions(paths=(DEMO_REPOSITORY,)))

#: Flag name → its parsed values, in the order of the command line.
GivenFlags = dict[str, list[Any]]


def read_flags(
    words: Sequence[str], environment: Mapping[str, str], *, variables: bool = False
) -> tuple[ServerOptions, list[str]]:
    """Return the options for `words`, and a log line for each flag that has no effect or is deprecated.

    With `variables` the flags that `words` lack are read from `environment` (`NAIAD_HTTP_PORT`). Raises `BadOption`
    with a message of one line, in the cases in which tritonserver refuses the flags as well.
    """
    texts_of = split_words(words)
    strange: list[str] = []
    if variables:
        of_environment, strange = flags_of_environment(environment, FLAGS.values())
        texts_of = {**of_environment, **texts_of}
    given: GivenFlags = {name: [_value(FLAGS[name], text) for text in texts] for name, texts in texts_of.items()}
    _check_together(given)
    options = DEFAULTS
    # In the order of the table: of two flags for the same option, the later one takes precedence.
    for flag in FLAGS.values():
        if flag.name in given and flag.option and not _is_combined(flag):
            values = given[flag.name]
            options = _with_option(options, flag.option, tuple(values) if flag.repeat else values[-1])
    traces, ignored = trace_values(
        given.get("trace-config", ()),
        {name.removeprefix("trace-"): values for name, values in given.items() if _is_old_trace_flag(name)},
        environment,
    )
    http = msgspec.structs.replace(options.http, tls=_tls("http", given))
    grpc = msgspec.structs.replace(options.grpc, tls=_tls("grpc", given))
    metrics_listener = options.metrics_listener
    if "metrics-address" not in given:
        metrics_listener = msgspec.structs.replace(metrics_listener, address=options.http_listener.address)
    openai_listener = _openai_listener(options, given)
    repository = msgspec.structs.replace(
        options.repository,
        paths=tuple(dict.fromkeys(options.repository.paths)),
        load_models=tuple(dict.fromkeys(options.repository.load_models)),
        load_thread_count=max(1, options.repository.load_thread_count),
    )
    options = msgspec.structs.replace(
        options,
        trace=traces,
        http=http,
        grpc=grpc,
        metrics_listener=metrics_listener,
        openai_listener=openai_listener,
        repository=repository,
    )
    return options, [*strange, *_notes(given), *ignored]


def _openai_listener(options: ServerOptions, given: GivenFlags) -> ListenAddress:
    """Return where OpenAI's API listens: where HTTP does, and only if a flag asks for it."""
    listener = options.openai_listener
    if "openai-address" not in given:
        listener = msgspec.structs.replace(listener, address=options.http_listener.address)
    if "allow-openai" not in given:
        asked = "openai-port" in given or options.repository.paths == (CHAT_DEMO_REPOSITORY,)
        listener = msgspec.structs.replace(listener, allow=asked)
    return listener


def split_words(words: Sequence[str]) -> dict[str, list[str]]:
    """Return full flag name → its texts. `words` are `--flag value`, `--flag=value`, or `--flag` without a value.

    As in getopt, a name may be shortened to an unambiguous prefix. A word that is no flag is a model repository.
    """
    found: dict[str, list[str]] = {}
    remaining = iter(words)
    for word in remaining:
        if not word.startswith("--"):
            if word.startswith("-") or not word:
                raise BadOption(f"Unexpected argument: {word}")
            found.setdefault(REPOSITORY, []).append(word)
            continue
        written, equals, text = word[2:].partition("=")
        flag = _find(written)
        if not flag.kind.metavar:
            if equals:
                raise BadOption(f"--{flag.name} takes no value")
        elif not equals:
            following = next(remaining, None)
            if following is None:
                raise BadOption(f"--{flag.name} needs a value: {flag.kind.metavar}")
            text = following
        found.setdefault(flag.name, []).append(text)
    return found


def _find(written: str) -> Flag:
    flag = FLAGS.get(written) or _ALIASES.get(written)
    if flag is not None:
        return flag
    names = [name for name in (*FLAGS, *_ALIASES) if name.startswith(written)] if written else []
    if len(names) == 1:
        return FLAGS.get(names[0]) or _ALIASES[names[0]]
    if names:
        raise BadOption(f"--{written} could be {' or '.join(f'--{name}' for name in names)}")
    import difflib  # imported late: a right command line needs none of it

    close = difflib.get_close_matches(written, (*FLAGS, *_ALIASES), n=1)
    hint = f"; did you mean --{close[0]}?" if close else ""
    raise BadOption(f"there is no flag --{written}{hint} (naiad run --help lists all)")


def _value(flag: Flag, text: str) -> object:
    try:
        return flag.kind.parse(text)
    except BadValue as error:
        # tritonserver's texts already contain the flag.
        message = str(error)
        raise BadOption(message if f"--{flag.name} " in message else f"--{flag.name}: {message}") from None


def _is_combined(flag: Flag) -> bool:
    """Return whether several flags together set the option."""
    return flag.option == "trace" or ".tls" in flag.option


def _is_old_trace_flag(name: str) -> bool:
    return FLAGS[name].option == "trace" and name != "trace-config"


def _with_option(options: Any, path: str, value: object) -> Any:
    """Return a copy of `options` with `value` at `path`."""
    name, _, rest = path.partition(".")
    if rest:
        value = _with_option(getattr(options, name), rest, value)
    return msgspec.structs.replace(options, **{name: value})


def _tls(door: str, given: GivenFlags) -> TlsOptions | None:
    """Return the TLS options of a front door; None without TLS. Mutual TLS includes TLS."""
    mutual = given.get(f"{door}-use-ssl-mutual", [False])[-1]
    if not (mutual or given.get(f"{door}-use-ssl", [False])[-1]):
        return None
    certificate, key, root = (given.get(f"{door}-{name}") for name in ("server-cert", "server-key", "root-cert"))
    if certificate is None or key is None:
        raise BadOption(
            f"--{door}-use-ssl needs a certificate and its key: give --{door}-server-cert and --{door}-server-key"
        )
    if mutual and root is None:
        raise BadOption(f"--{door}-use-ssl-mutual needs --{door}-root-cert, the certificate authority of the clients")
    return TlsOptions(certificate[-1], key[-1], root[-1] if root else None, mutual)


def _check_together(given: GivenFlags) -> None:
    if "response-cache-byte-size" in given and "cache-config" in given:
        raise BadOption(
            "Incompatible flags --response-cache-byte-size and --cache-config both provided. "
            "Please provide one or the other."
        )
    if "demo" in given and REPOSITORY in given:
        raise BadOption("--demo serves models of the package: give it without a model repository")


def _notes(given: GivenFlags) -> list[str]:
    """Return a log line for each given flag that has no effect or is deprecated."""
    notes = []
    for name, values in given.items():
        flag = FLAGS[name]
        if ".tls." in flag.option and flag.kind.metavar == "FILE":
            door = name.partition("-")[0]
            if not (given.get(f"{door}-use-ssl", [False])[-1] or given.get(f"{door}-use-ssl-mutual", [False])[-1]):
                notes.append(f"--{name} has no effect without --{door}-use-ssl=true")
        elif name == "repository-poll-secs" and given.get("model-control-mode", [""])[-1] != "poll":
            notes.append(f"--{name} has no effect without --model-control-mode=poll")
        elif name == "rate-limit-resource" and given.get("rate-limit", [""])[-1] != "execution_count":
            notes.append(f"--{name} has no effect without --rate-limit=execution_count")
        elif flag.note and flag.option:
            notes.append(flag.note if f"--{name}" in flag.note else f"--{name}: {flag.note}")
        elif flag.note and any(value != flag.silent_value for value in values):
            notes.append(f"--{name} has no effect: {flag.note}")
    return notes


_FRONT_DOORS = ("http", "grpc", "metrics")


def read_keywords(flags: Mapping[str, Keyword], environment: Mapping[str, str]) -> tuple[ServerOptions, list[str]]:
    """Return the options for `flags`, and lines for the log, as `read_flags`. Raises `BadOption`.

    Three defaults differ from the command line: a front door is open only if it has a port or its name is True
    (`http=True` is short for `allow_http=True`), it listens on 127.0.0.1, and the server does not poll.
    """
    given = {
        f"allow_{name}" if name in _FRONT_DOORS else name: value for name, value in flags.items() if value is not None
    }
    for door in _FRONT_DOORS:
        given.setdefault(f"allow_{door}", f"{door}_port" in given)
    for door in ("http", "grpc"):  # the default address of metrics is that of HTTP
        given.setdefault(f"{door}_address", "127.0.0.1")
    given.setdefault("busy_poll_us", 0)  # polling would keep the interpreter from the program's own threads
    return read_flags([word for name, value in given.items() for word in _words(name, value)], environment)


def _words(name: str, value: Keyword) -> Iterable[str]:
    """Return the words of the command line for one keyword."""
    flag = name.replace("_", "-")
    values = value if isinstance(value, (list, tuple)) else (value,)
    if flag in FLAGS and not FLAGS[flag].kind.metavar:  # a flag without a value
        return [f"--{flag}" for each in values if each]
    return [f"--{flag}={str(each).lower() if isinstance(each, bool) else each}" for each in values]
