"""`naiad chat`: a conversation in the terminal with a model behind OpenAI's API, of this server or any other.

It uses only the standard library, and is not a client library. Text of the model is printed without control
characters, so that it cannot control the terminal.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING, Any, TextIO

from kernel.texts import printable
from kernel.tools.client import ClientError, base_url

if TYPE_CHECKING:
    from collections.abc import Iterator

_TIMEOUT_S = 600

_HELP = """\
/reset          begin a new conversation
/system TEXT    the system message, from now on; without TEXT none
/exit, Ctrl-D   end
Ctrl-C          end the response that is being written
A line that ends with \\ goes on in the next line."""

_DIM, _NORMAL = "\033[2m", "\033[0m"


class ChatServer:
    """A server with OpenAI's API. Every method may raise `ClientError`."""

    def __init__(self, url: str, api_key: str) -> None:
        """`url` is with or without `/v1`. `api_key` may be empty."""
        url = base_url(url)
        self._url = url if urllib.parse.urlsplit(url).path.strip("/") else f"{url}/v1"
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def model_names(self) -> list[str]:
        """Return the names of the models of the server."""
        with self._explained(), self._open("/models") as response:
            return sorted(str(model["id"]) for model in json.load(response)["data"])

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a response as they come; when the iterator is closed, so is the connection."""
        with (
            self._explained(),
            self._open("/chat/completions", json.dumps(body | {"stream": True}).encode()) as response,
        ):
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                event = line[5:].strip()
                if event == b"[DONE]":
                    return
                chunk = json.loads(event)
                if "error" in chunk:
                    raise ClientError(_message(chunk["error"]))
                yield chunk
            raise ClientError("the server has ended the response in the middle")

    def _open(self, path: str, data: bytes | None = None) -> Any:
        request = urllib.request.Request(self._url + path, data=data, headers=self._headers)
        try:
            return urllib.request.urlopen(request, timeout=_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            with error:
                raise ClientError(_refusal(error, self._url)) from None

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise every error of the connection as `ClientError`, with one line that says what to do."""
        try:
            yield
        except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise ClientError(f"{self._url} has sent nothing for {_TIMEOUT_S} s") from None
            if isinstance(reason, OSError):
                raise ClientError(
                    f"no server responds at {self._url}: {reason.strerror or reason}. Start one with 'naiad run --demo "
                    "chat' or 'naiad run MODELS --openai-port 9000', or give the address of another with --url"
                ) from None
            raise ClientError(f"{self._url} is not the address of OpenAI's API: {reason!r}") from None


def _refusal(error: urllib.error.HTTPError, url: str) -> str:
    """Return the text for a response with an error."""
    text = error.read().decode("utf-8", "replace")
    try:
        found = json.loads(text)
        return f"the server returned {error.code}: {_message(found['error'])}"
    except (ValueError, KeyError, TypeError):
        return f"{url} is not the address of OpenAI's API: it returned {error.code} {error.reason}"


def _message(error: Any) -> str:
    return str(error["message"] if isinstance(error, dict) and "message" in error else error)


class Conversation:
    """What was said so far."""

    def __init__(self, server: ChatServer, options: dict[str, Any], system: str) -> None:
        """`options` are fields of each request, such as the model."""
        self._server = server
        self._options = options
        self.system = system
        self._said: list[dict[str, str]] = []

    def reset(self) -> None:
        """Forget what was said."""
        self._said = []

    def ask(self, text: str, out: TextIO) -> str:
        """Say `text` to the model, and write its response to `out` as it comes. Returns a line about how fast it was.

        Ctrl-C (`KeyboardInterrupt`) ends the response, what has come of it stays. Raises `ClientError`; then nothing
        was said.
        """
        said = [*self._said, {"role": "user", "content": text}]
        messages = [{"role": "system", "content": self.system}, *said] if self.system else said
        body = {**self._options, "messages": messages, "stream_options": {"include_usage": True}}
        begin_s, first_s = time.monotonic(), 0.0
        parts: list[str] = []
        note, tokens = "", 0
        chunks = self._server.stream(body)
        try:
            for chunk in chunks:
                usage = chunk.get("usage") or {}
                tokens = usage.get("completion_tokens", tokens)
                for choice in chunk.get("choices", ()):
                    delta = choice["delta"].get("content") or ""
                    if delta and not first_s:
                        first_s = time.monotonic() - begin_s
                    parts.append(delta)
                    out.write(printable(delta, keep="\n\t"))
                    out.flush()
                    if choice.get("finish_reason") == "length":
                        note = ", cut off at the limit of tokens"
        except KeyboardInterrupt:
            note = ", ended by you"
        finally:
            chunks.close()  # type: ignore[attr-defined]  # it is a generator
        answer = "".join(parts)
        if answer:
            self._said = [*said, {"role": "assistant", "content": answer}]
        seconds = time.monotonic() - begin_s
        speed = f"{tokens} tokens, {tokens / seconds:.0f} a second, " if tokens else ""
        return f"{speed}{first_s:.2f} s to the first, {seconds:.2f} s in all{note}"


def chat_in_terminal(
    url: str, model: str, system: str, api_key: str, options: dict[str, Any], *, stdin: TextIO, stdout: TextIO
) -> None:
    """Hold a conversation until the input ends. Raises `ClientError`.

    `model` may be empty for the only model of the server. If `stdin` is no terminal, all of it is one message, and only
    the response is printed.
    """
    server = ChatServer(url, api_key)
    name = model or _only_model(server)
    conversation = Conversation(server, {"model": name, **options}, system)
    if not stdin.isatty():
        conversation.ask(stdin.read().rstrip("\n"), stdout)
        stdout.write("\n")
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # lines of the prompt can be edited
    stdout.write(f"{_DIM}Talking to {printable(name)}. /help lists what you can do.{_NORMAL}\n")
    _converse(conversation, stdout)


def _only_model(server: ChatServer) -> str:
    names = server.model_names()
    if len(names) != 1:
        known = f"it has {', '.join(names[:20])}" if names else "it has none"
        raise ClientError(f"name the model of the server to talk to: {known}")
    return names[0]


def _converse(conversation: Conversation, stdout: TextIO) -> None:
    """Read lines and print responses, until the input ends."""
    while True:
        try:
            text = _read_text()
        except KeyboardInterrupt:
            stdout.write(f"\n{_DIM}Ctrl-D or /exit ends the conversation{_NORMAL}\n")
            continue
        except EOFError:
            stdout.write("\n")
            return
        if text == "/exit":
            return
        if text.startswith("/"):
            stdout.write(f"{_DIM}{_command(conversation, text)}{_NORMAL}\n")
        elif text.strip():
            try:
                note = conversation.ask(text, stdout)
            except ClientError as error:
                stdout.write("\n")
                sys.stderr.write(f"error: {printable(str(error).rstrip(), keep=chr(10))}\n")
            else:
                stdout.write(f"\n{_DIM}{note}{_NORMAL}\n")


def _read_text() -> str:
    """Return what a person has typed, of several lines if all but the last end with a backslash."""
    lines = [input("> ")]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input("  "))
    return "\n".join(lines)


def _command(conversation: Conversation, text: str) -> str:
    """Do what a line that begins with a slash says; returns what was done."""
    name, _, rest = text.partition(" ")
    if name == "/reset":
        conversation.reset()
        return "a new conversation"
    if name == "/system":
        conversation.system = rest.strip()
        return "the system message is changed" if conversation.system else "there is no system message any more"
    if name == "/help":
        return _HELP
    return f"there is no {name}. Begin with a space what is to be sent.\n{_HELP}"
