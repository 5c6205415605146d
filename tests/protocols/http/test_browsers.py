"""Which requests of web pages are refused: by their origin, and by the name that they use for the server.

CORS: which pages may read responses in a browser, and the responses to preflight requests.
"""

from __future__ import annotations

import pytest

from kernel.errors import BadOption
from protocols.http.browsers import BrowserRules, CorsPolicy, HostNames, host_name, parse_host_names

IN_NETWORK = HostNames(own=frozenset({"gpu7.corp.example", "gpu7"}))

LOOPBACK = HostNames(own=IN_NETWORK.own, loopback_only=True)

#: Names that no attacker on the Internet can let mean this server.
SAFE_HOSTS = (
    "localhost", "localhost:8000", "LOCALHOST.", "app.localhost", "127.0.0.1:8000", "10.1.2.3", "[::1]:8000",
    "[fe80::1%25eth0]", "gpu7", "gpu7.corp.example:8000", "triton", "triton.default.svc.cluster.local",
    "gpu7.internal", "nas.home.arpa", "",
)  # fmt: skip

FOREIGN = "evil.example:8000"


def refused(names: HostNames, method: str, *, cors: tuple[str, ...] = (), **headers: str) -> str | None:
    """Return the refusal of a request with `headers`, whose names have underscores."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    return BrowserRules(names, CorsPolicy(cors) if cors else None).refusal(method, sent.get)


# ---- the origin ------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [IN_NETWORK, LOOPBACK])
@pytest.mark.parametrize("host", SAFE_HOSTS)
def test_programs_that_are_no_browsers_are_never_refused(names: HostNames, host: str) -> None:
    for method in ("GET", "POST", "OPTIONS", "HEAD"):
        assert refused(names, method, Host=host) is None


@pytest.mark.parametrize("names", [IN_NETWORK, LOOPBACK])
@pytest.mark.parametrize("origin", ["https://evil.example", "http://localhost:3000", "null", "chrome-extension://abc"])
def test_a_page_of_another_origin_changes_nothing(names: HostNames, origin: str) -> None:
    text = refused(names, "POST", Host="localhost:8000", Origin=origin)
    assert text is not None
    assert f"--http-cors-origin={origin}" in text
    assert refused(names, "GET", Host="localhost:8000", Origin=origin) is None, "the browser keeps the response"


@pytest.mark.parametrize("host", ["localhost:8000", "10.1.2.3:8000", "gpu7"])
def test_a_page_of_the_server_itself_is_admitted(host: str) -> None:
    assert refused(IN_NETWORK, "POST", Host=host, Origin=f"http://{host}") is None
    assert refused(IN_NETWORK, "POST", Host=host.upper(), Origin=f"https://{host}") is None


def test_the_port_belongs_to_the_origin() -> None:
    assert refused(IN_NETWORK, "POST", Host="localhost:8000", Origin="http://localhost") is not None
    assert refused(IN_NETWORK, "POST", Host="localhost:8000", Origin="http://localhost:8001") is not None


@pytest.mark.parametrize("cors", ["*", "https://app.example"])
@pytest.mark.parametrize("host", ["localhost:8000", FOREIGN])
def test_an_origin_that_the_operator_allows_is_admitted(cors: str, host: str) -> None:
    assert refused(IN_NETWORK, "POST", cors=(cors,), Host=host, Origin="https://app.example") is None


def test_another_origin_than_the_allowed_one_is_refused() -> None:
    assert refused(IN_NETWORK, "POST", cors=("https://app.example",), Host="x", Origin="https://evil.example")


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_browser_that_says_that_the_page_is_foreign_is_believed(site: str) -> None:
    assert refused(IN_NETWORK, "POST", Host="localhost:8000", Sec_Fetch_Site=site) is not None
    own = "http://localhost:8000"
    assert refused(IN_NETWORK, "POST", Host="localhost:8000", Sec_Fetch_Site=site, Origin=own) is not None
    assert refused(IN_NETWORK, "GET", Host="localhost:8000", Sec_Fetch_Site=site) is None


@pytest.mark.parametrize("site", ["same-origin", "none"])
def test_behind_a_proxy_with_tls_the_browser_says_that_the_page_is_the_servers(site: str) -> None:
    """Whether the proxy passes the name of the server on or not."""
    for host in ("app.example", "10.0.0.2:8000"):
        assert refused(IN_NETWORK, "POST", Host=host, Origin="https://app.example", Sec_Fetch_Site=site) is None


# ---- the name --------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [IN_NETWORK, LOOPBACK])
def test_a_page_whose_name_is_rebound_to_the_server_changes_nothing(names: HostNames) -> None:
    text = refused(names, "POST", Host=FOREIGN, Origin=f"http://{FOREIGN}")
    assert text is not None
    assert "--http-allowed-hosts=evil.example if" in text


def test_it_reads_nothing_either_where_only_this_machine_reaches_the_server() -> None:
    """A GET of a page to its own origin has neither `Origin` nor, without TLS, `Sec-Fetch-Site`."""
    assert refused(LOOPBACK, "GET", Host=FOREIGN, Accept_Language="en") is not None
    assert refused(IN_NETWORK, "GET", Host=FOREIGN, Accept_Language="en") is None
    assert refused(LOOPBACK, "GET", Host="localhost:8000", Accept_Language="en") is None


@pytest.mark.parametrize("names", [IN_NETWORK, LOOPBACK])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_other_programs_may_use_any_name(names: HostNames, method: str) -> None:
    """Such as that of a proxy, or of a service in Kubernetes."""
    for host in (FOREIGN, "triton.models.svc", "bad name", "[::1", "a:b:c"):
        assert refused(names, method, Host=host, User_Agent="curl/8.5") is None


# ---- --http-allowed-hosts --------------------------------------------------------------------


def listed(*texts: str) -> HostNames:
    return HostNames(own=frozenset({"gpu7"}), listed=parse_host_names(texts))


@pytest.mark.parametrize(
    "host",
    ["a.example", "A.EXAMPLE.:80", "b.example", "x.c.example", "y.x.c.example", "localhost:1", "x.localhost",
     "127.0.0.1", "[::1]:8000", ""],
)  # fmt: skip
def test_listed_names_and_those_of_loopback_are_admitted(host: str) -> None:
    for method in ("GET", "POST"):
        assert refused(listed("a.example, B.example.", "*.c.example"), method, Host=host) is None


@pytest.mark.parametrize("host", ["gpu7", "c.example", "xc.example", "a.example.evil", "nas.home.arpa", "a b"])
def test_other_names_are_refused_whichever_program_sends_them(host: str) -> None:
    for method in ("GET", "POST"):
        text = refused(listed("a.example", "*.c.example"), method, Host=host)
        assert text is not None
        assert f"--http-allowed-hosts={host}" in text


def test_a_star_admits_every_name_and_still_no_foreign_page() -> None:
    assert refused(listed("*"), "POST", Host=FOREIGN, Origin=f"http://{FOREIGN}") is None
    assert refused(listed("*"), "POST", Host="localhost", Origin="https://evil.example") is not None


def test_without_the_flag_there_is_no_list() -> None:
    assert parse_host_names(()) is None


@pytest.mark.parametrize("text", ["", "a,", "a:8000", "http://a", "a/b", "*a", "a.*", "a b", "-a"])
def test_what_is_not_a_name_is_refused(text: str) -> None:
    with pytest.raises(BadOption, match=r"^--http-allowed-hosts: '"):
        parse_host_names((text,))


@pytest.mark.parametrize(
    ("host", "name"),
    [("A.b:80", "a.b"), ("[::1]:8000", "[::1]"), ("a.", "a"), ("", ""), ("a:b:c", "a:b:c"), ("a:", "a")],
)
def test_a_port_and_a_last_dot_are_not_part_of_a_name(host: str, name: str) -> None:
    assert host_name(host) == name


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_refusal_repeats_little_of_what_was_sent(method: str) -> None:
    long = "x" * 10_000
    for names in (IN_NETWORK, LOOPBACK, listed("a.example")):
        text = refused(names, method, Host=f"{long}.example", Origin=f"http://{long}")
        assert text is None or len(text) < 1000


EXPOSED = {"Access-Control-Expose-Headers": "Inference-Header-Content-Length"}


@pytest.mark.parametrize("origin", [None, "https://a.example", "null"])
def test_a_star_lets_everybody_read(origin: str | None) -> None:
    assert CorsPolicy(["*"]).response_headers(origin) == {"Access-Control-Allow-Origin": "*", **EXPOSED}


def test_listed_origins_may_read_and_caches_know_the_difference() -> None:
    policy = CorsPolicy(["https://a.example", "http://localhost:3000"])
    for origin in ("https://a.example", "http://localhost:3000"):
        assert policy.response_headers(origin) == {"Vary": "Origin", "Access-Control-Allow-Origin": origin, **EXPOSED}
    for other in (None, "https://b.example", "http://a.example", "https://a.example:8443", "null", "*"):
        assert policy.response_headers(other) == {"Vary": "Origin"}


def test_a_preflight_allows_the_methods_of_the_path_and_the_requested_headers() -> None:
    headers = CorsPolicy(["https://a.example"]).preflight_headers(
        "https://a.example", ["POST", "GET"], "content-type, inference-header-content-length"
    )
    assert headers == {
        "Vary": "Origin, Access-Control-Request-Headers",
        "Access-Control-Allow-Origin": "https://a.example",
        "Access-Control-Allow-Methods": "GET, POST",
        "Access-Control-Allow-Headers": "content-type, inference-header-content-length",
        "Access-Control-Max-Age": "600",
    }


def test_a_preflight_of_another_origin_gets_nothing() -> None:
    assert CorsPolicy(["https://a.example"]).preflight_headers("https://b.example", ["GET"], "x") == {"Vary": "Origin"}


@pytest.mark.parametrize("requested", [None, "", "a b", "a,", "x\udcff", "é"])
def test_what_is_no_list_of_names_is_not_repeated(requested: str | None) -> None:
    headers = CorsPolicy(["*"]).preflight_headers("https://a.example", ["GET"], requested)
    assert "Access-Control-Allow-Headers" not in headers


@pytest.mark.parametrize(
    "origin",
    ["", "example.com", "https://a.example/", "https://a/b", "https://a, https://b", "**", "https://", "file:///a"],
)
def test_what_no_browser_sends_is_refused_at_start(origin: str) -> None:
    with pytest.raises(BadOption, match="is not an origin"):
        CorsPolicy([origin])


@pytest.mark.parametrize("origin", ["null", "file://", "chrome-extension://abc", "*"])
def test_origins_without_a_site_can_be_allowed(origin: str) -> None:
    policy = CorsPolicy([origin])
    assert policy.allows(origin)
    assert policy.allows("https://a.example") is (origin == "*")
