"""Who a client is, and who is let in: restricted APIs, keys in files and variables, and what the log says of it."""

from __future__ import annotations

import errno
import os
import socket
from typing import TYPE_CHECKING, Any, cast

import pytest

from kernel.errors import BadOption, InvalidArgument, NoDescriptorLeft, NotFound, RequestCancelled
from kernel.options import AdminOptions
from protocols import access as module
from protocols.access import (
    GRPC,
    HTTP,
    LOOPBACK,
    Category,
    Exposure,
    KeyReader,
    OpenPort,
    Peer,
    RestrictedProtocol,
    Restrictions,
    check_traced_model,
    describe_exposure,
    parse_restrictions,
    peer_identity,
)

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator
    from pathlib import Path

    from kernel.serving.kernel import Kernel


def test_there_are_tritons_nine_categories_and_that_of_the_metrics() -> None:
    assert [category.value for category in Category] == [
        "health",
        "metadata",
        "inference",
        "shared-memory",
        "model-config",
        "model-repository",
        "statistics",
        "trace",
        "logging",
        "metrics",
    ]


def test_without_flags_everything_is_open() -> None:
    restrictions = parse_restrictions((), HTTP, KeyReader())
    assert not restrictions
    assert [restrictions.of(category) for category in Category] == [None] * 10


def test_each_category_asks_for_the_header_of_its_flag() -> None:
    restrictions = parse_restrictions(("health,trace:one=1", "logging:Two=a=b:c"), HTTP, KeyReader())
    found = {category: restrictions.of(category) for category in Category}
    asked = {category: (each.header, each.value) for category, each in found.items() if each is not None}
    assert restrictions
    assert asked == {
        Category.HEALTH: ("one", b"1"),
        Category.TRACE: ("one", b"1"),
        Category.LOGGING: ("Two", b"a=b:c"),
    }


@pytest.mark.parametrize(
    ("door", "header", "message"),
    [
        (HTTP, "key", "This API is restricted, expecting header 'key'"),
        (GRPC, "triton-grpc-protocol-key", "This protocol is restricted, expecting header 'triton-grpc-protocol-key'"),
    ],
)
def test_the_doors_name_their_headers_differently(door: RestrictedProtocol, header: str, message: str) -> None:
    restriction = parse_restrictions(("inference:key=value",), door, KeyReader()).of(Category.INFERENCE)
    assert restriction is not None
    assert (restriction.header, restriction.message) == (header, message)


@pytest.mark.parametrize(
    ("given", "admitted"),
    [
        ("sécret", True),
        ("sécret".encode(), True),
        (None, False),
        ("", False),
        ("secret", False),
        ("sécret ", False),
        ("Sécret", False),
        (b"\xff\xfe", False),
        ("\udcff", False),
    ],
)
def test_only_the_very_value_is_admitted(given: str | bytes | None, admitted: bool) -> None:
    restriction = parse_restrictions(("health:key=sécret",), HTTP, KeyReader()).of(Category.HEALTH)
    assert restriction is not None
    assert restriction.admits(given) is admitted


@pytest.mark.parametrize("text", ["", "health", "health:", "health:key", "health:key=", ":key=value", "health:=value"])
def test_a_malformed_value_is_refused(text: str) -> None:
    with pytest.raises(BadOption) as caught:
        parse_restrictions((text,), HTTP, KeyReader())
    assert str(caught.value) == (
        f"--http-restricted-api option format is '<config name>:<setting>=<value>'. Got {text}"
    )


@pytest.mark.parametrize(
    ("texts", "door", "message"),
    [
        (("model-reposit,health:k=v",), HTTP, "unknown restricted api 'model-reposit'"),
        (("health,:k=v",), HTTP, "unknown restricted api ''"),
        (("Health:k=v",), GRPC, "unknown restricted protocol 'Health'"),
        (("metrics:k=v",), GRPC, "unknown restricted protocol 'metrics'"),
        (
            ("health:k=v", "trace,health:k=v"),
            HTTP,
            "restricted api 'health' can not be specified in multiple config groups",
        ),
        (("trace,trace:k=v",), GRPC, "restricted protocol 'trace' can not be specified in multiple config groups"),
    ],
)
def test_categories_are_known_and_come_once(texts: tuple[str, ...], door: RestrictedProtocol, message: str) -> None:
    with pytest.raises(BadOption) as caught:
        parse_restrictions(texts, door, KeyReader())
    assert str(caught.value) == message


# ---- --admin-access --------------------------------------------------------------------------


def asked(
    restrictions: Restrictions, *, peer: object = ("10.0.0.1", 5), administers: bool = True, **headers: str
) -> object:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    return restrictions.refusal(Category.LOGGING, sent.get, peer, administers=administers)


@pytest.mark.parametrize("options", [None, AdminOptions()])
def test_by_default_every_client_administers_the_server(options: AdminOptions | None) -> None:
    restrictions = parse_restrictions((), HTTP, KeyReader(), options)
    assert not restrictions
    assert not restrictions.restricts_admin
    assert asked(restrictions) is None


@pytest.mark.parametrize("peer", [("127.0.0.1", 1), ("::1", 1, 0, 0), ("::ffff:127.0.0.9", 1), "", "@abstract"])
def test_with_local_access_clients_on_the_machine_administer_it(peer: object) -> None:
    restrictions = parse_restrictions((), GRPC, KeyReader(), AdminOptions("local"))
    assert restrictions
    assert asked(restrictions, peer=peer) is None


@pytest.mark.parametrize("peer", [("10.0.0.1", 1), ("::ffff:10.0.0.1", 1), ("fe80::1%lo", 1, 0, 1), None, ()])
def test_with_local_access_others_do_not(peer: object) -> None:
    for protocol, subject in ((HTTP, "This API"), (GRPC, "This protocol")):
        restrictions = parse_restrictions((), protocol, KeyReader(), AdminOptions("local"))
        text = f"{subject} is restricted to clients on the server's machine (--admin-access=local)"
        assert asked(restrictions, peer=peer) == text
        assert asked(restrictions, peer=peer, administers=False) is None


def test_with_a_key_those_who_send_it_administer_the_server() -> None:
    restrictions = parse_restrictions((), HTTP, KeyReader({"KEY": "secret"}), AdminOptions("key", "$KEY"))
    refusal = "This API is restricted, expecting header 'admin-key'"
    assert asked(restrictions) == asked(restrictions, admin_key="Secret") == refusal
    assert asked(restrictions, peer=("127.0.0.1", 1)) == refusal
    assert asked(restrictions, admin_key="secret") is None
    assert asked(restrictions, administers=False) is None
    grpc = parse_restrictions((), GRPC, KeyReader(), AdminOptions("key", "secret"))
    assert asked(grpc) == "This protocol is restricted, expecting header 'triton-grpc-protocol-admin-key'"


def test_the_restriction_of_a_category_holds_as_well() -> None:
    restrictions = parse_restrictions(("logging:k=v",), HTTP, KeyReader(), AdminOptions("key", "secret"))
    assert asked(restrictions, admin_key="secret") == "This API is restricted, expecting header 'k'"
    assert asked(restrictions, k="v") == "This API is restricted, expecting header 'admin-key'"
    assert asked(restrictions, k="v", admin_key="secret") is None


def test_keys_of_flags_come_from_files_too(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("a=b:c\n")
    restrictions = parse_restrictions((f"logging:k=@{tmp_path}/key",), HTTP, KeyReader())
    assert asked(restrictions, k="a=b:c", administers=False) is None
    with pytest.raises(BadOption, match="^--grpc-restricted-protocol: the file '/none' with the key cannot be read"):
        parse_restrictions(("logging:k=@/none",), GRPC, KeyReader())
    with pytest.raises(BadOption, match="^--admin-key: the environment variable 'NONE' has no key"):
        parse_restrictions((), GRPC, KeyReader({}), AdminOptions("key", "$NONE"))


FLAG = "http-restricted-api"


@pytest.mark.parametrize(
    ("text", "key"),
    [("secret", b"secret"), ("@@a", b"@a"), ("$$a", b"$a"), ("a@b$c", b"a@b$c"), ("@@", b"@"), ("é", "é".encode())],
)
def test_a_text_is_the_key(text: str, key: bytes) -> None:
    assert KeyReader({}).read(text, FLAG) == key


@pytest.mark.parametrize("content", [b"secret", b"secret\n", b"secret\r\n"])
def test_a_file_holds_the_key_with_or_without_a_line_end(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)
    assert KeyReader({}).read(f"@{tmp_path}/key", FLAG) == b"secret"


def test_a_variable_holds_the_key() -> None:
    assert KeyReader({"KEY": "secret"}).read("$KEY", FLAG) == b"secret"


def test_a_source_is_read_once(tmp_path: Path) -> None:
    """Two front doors may have the same key, and a pipe (`@/dev/fd/3`) gives it only once."""
    file, reader = tmp_path / "key", KeyReader({})
    file.write_text("secret")
    assert reader.read(f"@{file}", FLAG) == b"secret"
    file.unlink()
    assert reader.read(f"@{file}", "grpc-restricted-protocol") == b"secret"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("$NONE", "the environment variable 'NONE' has no key"),
        ("$", "the environment variable '' has no key"),
        ("$EMPTY", "the environment variable 'EMPTY' has no key"),
        ("@{}/none", "none' with the key cannot be read: No such file or directory"),
        ("@", "' with the key cannot be read"),
        ("@{}", "with the key cannot be read: Is a directory"),
        ("@{}/empty", "empty' has no key"),
        ("@{}/two_lines", "has a line end"),
        ("@{}/large", "more than 4096 bytes"),
        ("@{}/spaces", "a space at its beginning or end"),
        ("", "the text has no key"),
    ],
)
def test_a_source_without_a_usable_key_is_an_error_that_names_the_flag(tmp_path: Path, text: str, problem: str) -> None:
    for name, content in (("empty", "\n"), ("two_lines", "a\nb\n"), ("large", "x" * 5000), ("spaces", "a \n")):
        (tmp_path / name).write_text(content)
    with pytest.raises(BadOption) as caught:
        KeyReader({"EMPTY": ""}).read(text.format(tmp_path), FLAG)
    assert str(caught.value).startswith(f"--{FLAG}: ")
    assert problem in str(caught.value)


USER = f"user {os.getuid()}"


class FakeTransport:
    def __init__(self, peer: object, sock: object = None) -> None:
        self.asked = 0
        self._values = {"peername": peer, "socket": sock}

    def get_extra_info(self, name: str) -> object:
        self.asked += 1
        return self._values[name]


def transport(peer: object, sock: object = None) -> asyncio.BaseTransport:
    return cast("asyncio.BaseTransport", FakeTransport(peer, sock))


@pytest.fixture(params=["IPv4", "IPv6", "IPv4 written as IPv6"])
def both_ends(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    """The server's and the client's end of a connection over loopback from this process."""
    family = socket.AF_INET if request.param == "IPv4" else socket.AF_INET6
    both = request.param == "IPv4 written as IPv6"
    try:
        listening = socket.create_server(("", 0), family=family, dualstack_ipv6=both)
    except OSError:
        pytest.skip("this machine has no IPv6")
    client = "::1" if request.param == "IPv6" else "127.0.0.1"
    with listening, socket.create_connection((client, listening.getsockname()[1])) as connecting:
        accepted, _ = listening.accept()
        with accepted:
            yield accepted, connecting


@pytest.fixture
def connection(both_ends: tuple[socket.socket, socket.socket]) -> socket.socket:
    """The server's end of a connection whose client stays."""
    return both_ends[0]


def test_a_client_over_loopback_is_the_user_who_has_connected(connection: socket.socket) -> None:
    assert peer_identity(transport(connection.getpeername(), connection)) == USER


def test_a_client_over_loopback_whose_user_is_not_known_is_one_of_all(
    connection: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, (host, port, *_) = connection.family, connection.getpeername()
    free = 1 if port != 1 else 2  # no client has this port
    assert module.user_of_tcp(family, (host, free), connection.getsockname()) is None

    def without_netlink(*arguments: Any) -> None:
        raise PermissionError

    monkeypatch.setattr("protocols.access.socket.socket", without_netlink)
    assert peer_identity(transport(connection.getpeername(), connection)) == LOOPBACK


def test_a_client_that_has_closed_its_socket_is_nobody(both_ends: tuple[socket.socket, socket.socket]) -> None:
    """For such a socket the system says user 0."""
    ours, theirs = both_ends
    theirs.sendall(b"request")
    peer = ours.getpeername()
    theirs.shutdown(socket.SHUT_WR)
    assert ours.recv(100) == b"request"
    assert peer_identity(transport(peer, ours)) == USER, "it may wait for the response"
    theirs.close()
    client = Peer(transport(peer, ours))
    for _ in range(2):
        with pytest.raises(RequestCancelled, match="^the client has closed the connection$"):
            _ = client.identity


def test_without_a_descriptor_a_client_is_not_taken_for_another_one(
    connection: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_descriptor(*arguments: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    client = Peer(transport(connection.getpeername(), connection))
    with monkeypatch.context() as patch:
        patch.setattr("protocols.access.socket.socket", without_descriptor)
        with pytest.raises(NoDescriptorLeft):
            _ = client.identity
    assert client.identity == USER


def test_a_client_of_a_unix_socket_is_the_user_who_has_connected() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert peer_identity(transport("", ours)) == USER


@pytest.mark.parametrize(
    ("peer", "identity"),
    [
        (("192.0.2.1", 4000), "192.0.2.1"),
        (("::ffff:192.0.2.1", 4000, 0, 0), "192.0.2.1"),
        (("2001:db8::1", 4000, 0, 0), "2001:db8::1"),
        (("fe80::1%eth0", 4000, 0, 2), "fe80::1"),
        (("nonsense", 1), "nonsense"),
        (None, "unknown"),
    ],
)
def test_a_client_of_another_machine_is_its_address(peer: object, identity: str) -> None:
    assert peer_identity(transport(peer)) == identity


def test_the_client_of_a_connection_is_found_out_once() -> None:
    fake = FakeTransport(("192.0.2.1", 4000))
    peer = Peer(cast("asyncio.BaseTransport", fake))
    assert fake.asked == 0
    assert [peer.identity, peer.identity] == ["192.0.2.1"] * 2
    assert fake.asked == 1


def test_the_client_of_a_lost_connection_is_not_known() -> None:
    with pytest.raises(RequestCancelled):
        _ = Peer(None).identity


ALL = "model-repository,logging,trace,shared-memory"


def ports(
    *, http: str = "", grpc: str = "", admin: AdminOptions | None = None, local: bool = False, mutual: bool = False
) -> list[OpenPort]:
    def restrictions(text: str, protocol: object) -> Restrictions:
        texts = (f"{text}:k=v",) if text else ()
        return parse_restrictions(texts, HTTP if protocol == "http" else GRPC, KeyReader(), admin)

    return [
        OpenPort("HTTP at a:1", restrictions(http, "http"), local, mutual),
        OpenPort("gRPC at a:2", restrictions(grpc, "grpc"), local, mutual),
    ]


def line(found: list[OpenPort], *, explicit: bool = False, client_shm: str = "local") -> Exposure:
    return describe_exposure(found, explicit=explicit, client_shm=client_shm)


CLOSE = "start the server with --admin-access=local or --admin-access=key to close this"


def test_what_everyone_in_the_network_may_do_is_a_warning() -> None:
    both = "(HTTP at a:1, gRPC at a:2)"
    assert line(ports()) == Exposure(
        f"every client in the network may change settings of the log and change settings of traces {both}: {CLOSE}",
        is_warning=True,
    )
    assert line(ports(), explicit=True, client_shm="true") == Exposure(
        "every client in the network may load and unload models, which run code, register shared memory, change "
        f"settings of the log and change settings of traces {both}: {CLOSE}",
        is_warning=True,
    )


def test_a_port_over_which_only_models_are_loaded_is_named_for_that_alone() -> None:
    http, _ = ports()
    openai = OpenPort("OpenAI's API at a:3", http.restrictions, categories=frozenset({Category.MODEL_REPOSITORY}))
    assert line([http, openai], explicit=True).text == (
        "every client in the network may load and unload models, which run code (HTTP at a:1, OpenAI's API at a:3); "
        "every client in the network may change settings of the log and change settings of traces (HTTP at a:1): "
        f"{CLOSE}"
    )


def test_what_one_protocol_restricts_is_open_over_the_other() -> None:
    assert line(ports(http=ALL), explicit=True) == Exposure(
        "every client in the network may load and unload models, which run code, change settings of the log and "
        f"change settings of traces (gRPC at a:2): {CLOSE}",
        is_warning=True,
    )
    assert line(ports(http="trace")).text == (
        "every client in the network may change settings of the log (HTTP at a:1, gRPC at a:2); every client in the "
        f"network may change settings of traces (gRPC at a:2): {CLOSE}"
    )


@pytest.mark.parametrize(
    ("where", "who"),
    [
        ({"local": True}, "on this machine"),
        ({"mutual": True}, "with a certificate"),
        ({"local": True, "mutual": True}, "on this machine or with a certificate"),
    ],
)
def test_what_only_some_clients_reach_is_information(where: dict[str, bool], who: str) -> None:
    assert line(ports(**where)) == Exposure(  # type: ignore[arg-type]
        f"clients {who} may change settings of the log, change settings of traces and "
        "register shared memory (HTTP at a:1, gRPC at a:2): start the server with --admin-access=key to close this"
    )


@pytest.mark.parametrize(
    ("admin", "who", "flag"),
    [
        (AdminOptions("local"), "only clients on this machine", "--admin-access=local"),
        (AdminOptions("key", "k"), "only clients with the key in the header 'admin-key'", "--admin-access=key"),
    ],
)
def test_what_is_closed_says_who_is_left(admin: AdminOptions, who: str, flag: str) -> None:
    assert line(ports(admin=admin), explicit=True) == Exposure(
        f"{who} may load and unload models, which run code, change settings of the log and change settings of traces "
        f"({flag})"
    )


def test_memory_that_only_clients_on_the_machine_may_register_is_no_warning() -> None:
    restricted = "logging,trace"
    assert line(ports(http=restricted, grpc=restricted)) == Exposure(
        "clients on this machine may register shared memory (HTTP at a:1, gRPC at a:2): start the server with "
        "--admin-access=key to close this"
    )


def test_restrictions_on_both_protocols_close_everything() -> None:
    assert line(ports(http=ALL, grpc=ALL)) == Exposure(
        "nobody may change settings of the log and change settings of traces without the key of a restriction"
    )


class Models:
    """The part of a kernel that is asked: `echo` is ready, `loading` is not, and there are no others."""

    def model_ready(self, name: str) -> bool:
        if name not in ("echo", "loading"):
            raise NotFound("no such model")
        return name == "echo"


KERNEL: Kernel = Models()  # type: ignore[assignment]  # see there


def test_a_ready_model_has_trace_settings() -> None:
    check_traced_model(KERNEL, "echo")


@pytest.mark.parametrize("name", ["loading", "other"])
def test_a_model_that_is_not_ready_is_unknown(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^Request for unknown model : {name}$"):
        check_traced_model(KERNEL, name)
