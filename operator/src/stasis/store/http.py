"""HTTP to a registry: connection pool, authentication, retries, and errors told apart.

What is safe to repeat is repeated, with jittered backoff, until `patience` seconds of waiting are used up: after broken
connections, 429 (Retry-After is obeyed) and 5xx. A body that appends (PATCH) is never repeated here.
"""

from __future__ import annotations

import json
import random
import re
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlencode, urljoin, urlsplit

import urllib3
from urllib3.exceptions import HTTPError, SSLError

from stasis.errors import Denied, NoSpace, NotFound, StoreError, Unavailable
from stasis.store.credentials import Credentials
from stasis.store.media import Buffer
from stasis.store.trust import tls_context

_LOOPBACK = re.compile(r"(localhost|127(\.\d+){3}|\[::1\])(:\d+)?")
_CHALLENGE = re.compile(r'([A-Za-z_]+)="([^"]*)"')
_FULL = re.compile(
    rb'no space left|insufficient.?storage|disk quota|quota exceeded|QUOTA|"Err":(28|122)\b', re.IGNORECASE
)
_ERROR_BODY = 64 << 10
MAX_ANSWER = 4 << 20  # bytes; also what a manifest may have
_ACTION = {"GET": "pull", "HEAD": "pull", "DELETE": "delete"}  # tokens are kept apart by what they allow
Response = urllib3.BaseHTTPResponse


@dataclass(frozen=True)
class HttpOptions:
    """Seconds; `patience` bounds the sum of the waits between tries of one request."""

    connect_timeout: float = 10
    read_timeout: float = 120
    patience: float = 60
    first_wait: float = 0.2
    longest_wait: float = 10


@dataclass(frozen=True)
class Answer:
    headers: Mapping[str, str]
    body: bytes


class Retries:
    """The waits of one operation."""

    def __init__(self, options: HttpOptions) -> None:
        self._options = options
        self._left = options.patience
        self._next = options.first_wait

    def wait(self, error: StoreError) -> None:
        """Sleeps before another try; raises `error` if it cannot be retried or patience is used up."""
        asked = error.retry_after if isinstance(error, Unavailable) else 0
        delay = max(asked, random.uniform(self._next / 2, self._next))
        if not error.retryable or delay > self._left:
            raise error
        self._left -= delay
        self._next = min(self._next * 2, self._options.longest_wait)
        time.sleep(delay)


class Client:
    """For any number of threads; `host` is what the user wrote."""

    def __init__(
        self, host: str, credentials: Callable[[], Credentials | None], *, plain: bool | None, options: HttpOptions
    ) -> None:
        self.options = options
        self._host, self._find = host, credentials
        plain = bool(_LOOPBACK.fullmatch(host)) if plain is None else plain
        self._plain = plain
        address = "registry-1.docker.io" if host == "docker.io" else host
        self.base = f"{'http' if plain else 'https'}://{address}"
        self._pool = _pool(self.base, options, tls_context(host))
        self._lock = threading.Lock()
        self._tokens: dict[str, str] = {}  # action -> Authorization

    def request(
        self, method: str, url: str, *, headers: Mapping[str, str] | None = None, body: Sequence[Buffer] = ()
    ) -> Answer:
        """An answer of 2xx; anything else is an error of stasis.errors. Not for PATCH."""
        retries = Retries(self.options)
        while True:
            try:
                return self.once(method, url, headers=headers, body=body)
            except StoreError as error:
                retries.wait(error)

    def once(
        self, method: str, url: str, *, headers: Mapping[str, str] | None = None, body: Sequence[Buffer] = ()
    ) -> Answer:
        """One try, two where the registry asks for authentication."""
        response = self.stream(method, url, headers=headers, body=body)
        return Answer(response.headers, _read(response, MAX_ANSWER, method, url))

    def stream(
        self, method: str, url: str, *, headers: Mapping[str, str] | None = None, body: Sequence[Buffer] = ()
    ) -> Response:
        """As `once`; the body is for the caller to read, and the connection to release or close."""
        url = urljoin(self.base, url)
        action = _ACTION.get(method, "push")
        response = self._send(method, url, headers or {}, body, self._tokens.get(action, ""))
        if response.status == 401 and self._ours(url):
            challenge = response.headers.get("WWW-Authenticate", "")
            response.close()
            token = self._authenticate(challenge, action)
            response = self._send(method, url, headers or {}, body, token)
        if 200 <= response.status < 300:
            return response
        raise self._error(method, url, response)

    def _ours(self, url: str) -> bool:
        return urlsplit(url)[:2] == urlsplit(self.base)[:2]

    def _send(self, method: str, url: str, headers: Mapping[str, str], body: Sequence[Buffer], token: str) -> Response:
        sent = {"User-Agent": "stasis", **headers}
        if token and self._ours(url):  # an upload's location may be elsewhere
            sent["Authorization"] = token
        if method not in ("GET", "HEAD"):
            sent["Content-Length"] = str(sum(map(len, body)))
        follow = method in ("GET", "HEAD")
        try:
            return self._pool.request(
                method,
                url,
                headers=sent,
                body=cast(Iterable[bytes], iter(body)) if body else None,
                preload_content=False,
                redirect=follow,
                retries=urllib3.Retry(0, redirect=5, raise_on_redirect=True, raise_on_status=False)
                if follow
                else False,
            )
        except (HTTPError, OSError) as error:
            what = f"{method} {_shown(url)}: {_cause(error)}"
            if isinstance(getattr(error, "reason", error), SSLError):
                raise StoreError(what, remedy="trust the registry's certificate (SSL_CERT_FILE)") from error
            raise Unavailable(what) from error

    def _authenticate(self, challenge: str, action: str) -> str:
        kind, _, rest = challenge.partition(" ")
        credentials = self._find()
        if kind.lower() == "basic":
            if credentials is None:
                raise Denied(f"{self._host} asks for a user and password", remedy="log in, as with docker login")
            token = credentials.basic
        elif kind.lower() == "bearer":
            token = "Bearer " + self._access_token(dict(_CHALLENGE.findall(rest)), credentials)
        else:
            raise Denied(f"{self._host} asks for an authentication that is not known: {challenge[:100]!r}")
        with self._lock:
            self._tokens[action] = token
        return token

    def _access_token(self, asked: Mapping[str, str], credentials: Credentials | None) -> str:
        realm = asked.get("realm", "")
        if urlsplit(realm).scheme != "https" and not (self._plain and urlsplit(realm).scheme == "http"):
            raise Denied(f"{self._host} sends credentials to {realm[:200]!r}, which is not https")
        fields = {key: asked[key] for key in ("service", "scope") if key in asked}
        headers = {"User-Agent": "stasis"}
        method, url, form = "GET", f"{realm}?{urlencode(fields)}", None
        if credentials and credentials.identity_token:
            fields |= {
                "grant_type": "refresh_token",
                "refresh_token": credentials.identity_token,
                "client_id": "stasis",
            }
            method, url, form = "POST", realm, urlencode(fields)
            headers["Content-Type"] = "application/x-www-form-urlencoded"
        elif credentials:
            headers["Authorization"] = credentials.basic
        retries = Retries(self.options)
        while True:
            try:
                response = self._pool.request(
                    method, url, headers=headers, body=form, preload_content=False, retries=False
                )
                if response.status != 200:
                    raise self._error(method, url, response)
                answer = json.loads(_read(response, MAX_ANSWER, method, url))
                return str(answer.get("token") or answer["access_token"])
            except (ValueError, KeyError, AttributeError):
                raise Denied(f"{_shown(realm)} gave no token for {self._host}") from None
            except (HTTPError, OSError) as error:
                retries.wait(Unavailable(f"{_shown(realm)}: {_cause(error)}"))
            except StoreError as error:
                retries.wait(error)

    def _error(self, method: str, url: str, response: Response) -> StoreError:
        status = response.status
        try:
            text = response.read(_ERROR_BODY)
        except (HTTPError, OSError):
            text = b""
        if len(text) < _ERROR_BODY:
            response.release_conn()
        else:
            response.close()
        what = f"{method} {_shown(url)}: {status} {_message(text)}".strip()
        if status in (401, 403):
            return Denied(what, remedy="log in with an account that may do this")
        if status == 404:
            return NotFound(what)
        if status == 507 or (status >= 400 and _FULL.search(text)):
            return NoSpace(what, remedy="free space in the registry")
        if status == 429 or status >= 500 or status == 408:
            error = Unavailable(what)
            error.status = status
            error.retry_after = _retry_after(response.headers.get("Retry-After", ""))
            return error
        return Refusal(what, status)

    def close(self) -> None:
        self._pool.clear()


class Refusal(StoreError):
    """An answer of 4xx that says neither of the other things."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def _pool(base: str, options: HttpOptions, tls: ssl.SSLContext) -> urllib3.PoolManager:
    timeout = urllib3.Timeout(connect=options.connect_timeout, read=options.read_timeout)
    scheme, host = urlsplit(base).scheme, urlsplit(base).hostname or ""
    proxy = urllib.request.getproxies().get(scheme)
    if proxy and not urllib.request.proxy_bypass(host) and not _LOOPBACK.fullmatch(host):
        return urllib3.ProxyManager(proxy, maxsize=16, timeout=timeout, ssl_context=tls)
    return urllib3.PoolManager(maxsize=16, timeout=timeout, ssl_context=tls)


def _read(response: Response, limit: int, method: str, url: str) -> bytes:
    """The whole body, at most `limit` bytes."""
    try:
        body = response.read(limit + 1)
    except (HTTPError, OSError) as error:
        response.close()
        raise Unavailable(f"{method} {_shown(url)}: {_cause(error)}") from error
    if len(body) > limit:
        response.close()
        raise StoreError(f"{method} {_shown(url)}: answers with more than {limit} bytes")
    response.release_conn()
    return body


def _shown(url: str) -> str:
    """Without the query: it may hold a signature."""
    return url.partition("?")[0]


def _cause(error: Exception) -> str:
    reason = getattr(error, "reason", None) or error
    return f"{type(reason).__name__}: {str(reason)[:300]}"


def _message(body: bytes) -> str:
    try:
        first = json.loads(body)["errors"][0]
        detail = first.get("detail") or ""
        return f"{first.get('code', '')} {first.get('message', '')} {detail}"[:500].strip()
    except (ValueError, LookupError, TypeError, AttributeError):
        return body[:200].decode(errors="replace").strip()


def _retry_after(value: str) -> float:
    return min(float(value), 3600) if value.isascii() and value.isdigit() else 0
