"""Store URLs: what they say and whether they make sense, without connecting and without redis-py (0.1 s to import).

    redis://[user:password@]host[:6379][/db]          one server; rediss:// with TLS
    unix://[user:password@]/path/to/socket
    redis+sentinel://[user:password@]host[:26379][,host...]/primary[/db]     the primary that Sentinels name
    redis+cluster://[user:password@]host[:6379][,host...]                    a cluster, found through any node of it

`rediss+sentinel` and `rediss+cluster` speak TLS. Options follow a question mark, see `OPTIONS`. Special characters of
user and password are percent-encoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from urllib.parse import unquote

from vllm_pd.errors import SettingsError
from vllm_pd.layered import boolean, nearest, redact

REDIS_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
_PORT = 6379
_SENTINEL_PORT = 26379
_HIGHEST_PORT = 65535
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_TLS_OPTIONS = (*_FILES, "ssl_check_hostname", "ssl_cert_reqs")
_SENTINEL_OPTIONS = ("sentinel_username", "sentinel_password")
OPTIONS = ("db", "username", "password", "client_name", *_TLS_OPTIONS, *_SENTINEL_OPTIONS)
"""Options of a URL, named as redis-py names them: authorities, own certificate and its key (PEM files), whether the
host name is checked (true), and whether the server needs a certificate (required, optional, none)."""
_CERT_REQS = ("required", "optional", "none")


class Topology(StrEnum):
    """What stands behind a URL."""

    SERVER = "server"
    SOCKET = "socket"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """A store URL, taken apart.

    Attributes:
        address: the URL without passwords and options, for messages.
        hosts: (host, port) of servers, Sentinels or nodes; empty for a socket.
        path: of the Unix socket.
        primary: the name under which Sentinels know the server.
        tls: options of TLS by redis-py's names; None where there is no TLS.
        username, password: of the server; "" for none.
        sentinel_username, sentinel_password: of the Sentinels, which have users of their own.
    """

    topology: Topology
    address: str
    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""
    primary: str = ""
    db: int = 0
    tls: Mapping[str, str | bool] | None = field(default=None, repr=False)
    username: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    sentinel_username: str = field(default="", repr=False)
    sentinel_password: str = field(default="", repr=False)
    client_name: str = ""


def address_of(url: str) -> str:
    """A store URL as it may be shown: without passwords, and without its options, which may hold some too."""
    return redact(url).partition("?")[0]


def parse_store_url(url: str) -> StoreUrl:
    """Take a store URL apart.

    Raises:
        SettingsError: an unknown scheme or option, a malformed part, or a certificate file that is not there.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in REDIS_SCHEMES:
        raise SettingsError(
            f"The store URL {address_of(url)!r} must begin with one of "
            f"{', '.join(f'{known}://' for known in REDIS_SCHEMES)}"
            f"{nearest(scheme, list(REDIS_SCHEMES)) if separator else ''}."
        )
    try:
        return _parse(scheme, rest, address_of(url))
    except _Wrong as e:
        raise SettingsError(f"The store URL {address_of(url)} {e}.") from None


class _Wrong(Exception):
    """A phrase that completes "The store URL ... "; it never quotes what could be a piece of a password."""


def _parse(scheme: str, rest: str, address: str) -> StoreUrl:
    before, _, query = rest.partition("?")
    userinfo, at, place = before.rpartition("@")
    username, _, password = userinfo.partition(":")
    authority, _, path = place.partition("/")
    if "/" in userinfo or (at and not userinfo):
        raise _malformed(scheme)
    transport, _, kind = scheme.partition("+")
    topology = Topology.SOCKET if scheme == "unix" else Topology(kind or Topology.SERVER)
    options = _options(query, topology, tls=transport == "rediss")
    primary, db_text = "", path
    if topology is Topology.SENTINEL:
        primary, _, db_text = path.partition("/")
        if not primary:
            raise _Wrong("does not name the primary; write redis+sentinel://host:26379/NAME, as the Sentinels call it")
    if topology is Topology.SOCKET:
        if authority or not path:
            raise _Wrong("names no socket; write unix:///path/to/socket")
        hosts: tuple[tuple[str, int], ...] = ()
    else:
        default = _SENTINEL_PORT if topology is Topology.SENTINEL else _PORT
        hosts = tuple(_host(text, default, scheme) for text in authority.split(","))
        if topology is Topology.SERVER and len(hosts) > 1:
            raise _Wrong(
                f"names {len(hosts)} servers; name one, or say with {transport}+sentinel:// or {transport}+cluster:// "
                "what they are"
            )
    db = _db(options.get("db", "" if topology is Topology.SOCKET else db_text), topology)
    return StoreUrl(
        topology,
        address,
        hosts,
        path=unquote(f"/{path}") if topology is Topology.SOCKET else "",
        primary=unquote(primary),
        db=db,
        tls=_tls(options) if transport == "rediss" else None,
        username=unquote(username) or options.get("username", ""),
        password=unquote(password) or options.get("password", ""),
        sentinel_username=options.get("sentinel_username", ""),
        sentinel_password=options.get("sentinel_password", ""),
        client_name=options.get("client_name", ""),
    )


def _malformed(scheme: str) -> _Wrong:
    return _Wrong(
        f"is malformed; write {scheme}://[user:password@]host:port, with special characters of the password "
        "percent-encoded"
    )


def _host(text: str, default_port: int, scheme: str) -> tuple[str, int]:
    """`host`, `host:port`, `[::1]` or `[::1]:port`."""
    if text.startswith("["):
        host, bracket, port = text[1:].partition("]")
        if not bracket or (port and not port.startswith(":")):
            raise _malformed(scheme)
        port = port[1:]
    else:
        host, _, port = text.partition(":")
    digits = not port or (port.isascii() and port.isdigit() and 0 < int(port) <= _HIGHEST_PORT)
    if not host or not digits:
        raise _malformed(scheme)
    return unquote(host), int(port or default_port)


def _options(query: str, topology: Topology, *, tls: bool) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in query.split("&") if query else ():
        name, equals, value = part.partition("=")
        if name not in OPTIONS:
            # What follows an unencoded question mark of a password is quoted neither.
            known = [option for option in OPTIONS if equals]
            raise _Wrong(f"has an option that is unknown{nearest(name, known)}; the options are {', '.join(OPTIONS)}")
        if name in options:
            raise _Wrong(f"has the option {name} twice; keep one")
        if name in _TLS_OPTIONS and not tls:
            raise _Wrong(f"has the option {name}, which is about TLS; begin it with rediss, or drop the option")
        if name in _SENTINEL_OPTIONS and topology is not Topology.SENTINEL:
            raise _Wrong(f"has the option {name}, which only Sentinels have a use for; drop it")
        options[name] = unquote(value)
    return options


def _db(text: str, topology: Topology) -> int:
    digits = text or "0"
    if not (digits.isascii() and digits.isdigit()):
        raise _Wrong("is malformed; the number of a database follows the last slash, or nothing")
    if int(digits) and topology is Topology.CLUSTER:
        raise _Wrong("names a database, of which a cluster has only number 0; drop it")
    return int(digits)


def _tls(options: Mapping[str, str]) -> dict[str, str | bool]:
    tls: dict[str, str | bool] = {name: options[name] for name in _TLS_OPTIONS if name in options}
    for name in _FILES:
        if name in options and not Path(options[name]).is_file():
            raise _Wrong(f"gives {name}={options[name]}, which is no file here; give a PEM file")
    if "ssl_keyfile" in tls and "ssl_certfile" not in tls:
        raise _Wrong("gives ssl_keyfile without ssl_certfile; give the certificate of that key too")
    if "ssl_check_hostname" in tls:
        try:
            tls["ssl_check_hostname"] = boolean(options["ssl_check_hostname"])
        except ValueError as e:
            raise _Wrong(f"has an ssl_check_hostname that {e}") from None
    if tls.get("ssl_cert_reqs", "required") not in _CERT_REQS:
        raise _Wrong(f"has an ssl_cert_reqs that is none of {', '.join(_CERT_REQS)}")
    if tls.get("ssl_cert_reqs") == "none":
        # Python's TLS refuses to check the name in a certificate that it does not check.
        tls["ssl_check_hostname"] = False
    return tls
