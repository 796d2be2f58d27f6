"""What a failed request of an object store means, as an error of ours.

The client has few kinds of errors, so the status, the service's code and the client's own words decide. Its text may
hold a signed URL or what the server echoes of a request's headers: only the status and the code are ever repeated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from obstore.exceptions import AlreadyExistsError, BaseError, InvalidPathError

from tenuto.errors import (
    AlreadyExists,
    CorruptionError,
    ObjectNotFound,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    TenutoError,
)
from tenuto.store.objects.service import Service

_STATUS: Final = re.compile(r"status code: (\d{3})|\bstatus: (\d{3}),")
_CODE: Final = re.compile(r"<Code>(\w{1,64})</Code>")
_TLS: Final = re.compile(r"certificate|InvalidMessage|InvalidContentType|rustls|AlertReceived|HandshakeFailure", re.I)
_METADATA: Final = re.compile(r"latest/(api/token|meta-data)|computeMetadata|metadata/identity|/oauth2/token")
_NO_BUCKET: Final = frozenset({"NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted"})
_CREDENTIALS: Final = frozenset(
    {
        "AuthenticationFailed", "AuthenticationRequired", "ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId",
        "InvalidAuthenticationInfo", "InvalidSecurity", "InvalidToken", "NoAuthenticationInformation",
        "SignatureDoesNotMatch", "TokenRefreshRequired",
    }
)  # fmt: skip
_CLOCK: Final = frozenset({"RequestTimeTooSkewed", "RequestExpired"})
_REGION: Final = frozenset(
    {"AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException", "TemporaryRedirect"}
)
_FULL: Final = frozenset({"QuotaExceeded", "InsufficientCapacity", "XMinioStorageFull", "EntityTooLarge"})
_PASSING: Final = frozenset(
    {"SlowDown", "ServerBusy", "InternalError", "ServiceUnavailable", "RequestTimeout", "OperationTimedOut",
     "ConditionalRequestConflict", "OperationAborted", "RequestLimitExceeded", "Throttling", "TooManyRequests"}
)  # fmt: skip

_Make = Callable[..., StoreError]


@contextmanager
def translated(service: Service, url: str, doing: str, name: str) -> Iterator[None]:
    """Raises what the client raises as an error of ours, without the client's own as its cause: a trace prints that."""
    try:
        yield
    except (BaseError, OSError, NotImplementedError, ValueError) as error:
        if isinstance(error, TenutoError):
            raise
        raise meaning(error, service, url, doing, name) from None


def meaning(error: Exception, service: Service, url: str, doing: str, name: str) -> TenutoError:
    text = str(error)
    status, code = _status(text), _code(text)
    said = f" (HTTP {status}{f', {code}' if code else ''})" if status or code else ""
    what = f"{doing} {name}" if name else doing
    bucket = url.partition("://")[2].partition("/")[0].partition("@")[0]

    def one(kind: type[StoreError], says: str, hint: str | None = None) -> StoreError:
        return kind(f"{what} at {url}: {says}{said}", subject=name or url, hint=hint)

    if code in _PASSING or status in (408, 429):
        slow = code in ("SlowDown", "ServerBusy", "Throttling", "TooManyRequests") or status == 429
        return one(StoreUnavailable, "the service asks for fewer requests" if slow else "the service is busy")
    if isinstance(error, AlreadyExistsError):
        return AlreadyExists(f"{name} exists already ({url})", subject=name)
    if code in ("NoSuchUpload", "InvalidBlockList"):  # completed, and the reply was lost: the next try finds it there
        return one(StoreUnavailable, "the upload is not there any more")
    if code in _NO_BUCKET:
        return one(
            StoreError,
            f"there is no {service.bucket} {bucket}",
            f"{service.create.format(bucket=bucket)}, or correct the URL",
        )
    if isinstance(error, FileNotFoundError):
        return ObjectNotFound(f"there is no object {name} ({url})", subject=name)
    if status == 416:
        return CorruptionError(f"{name} is another object now, shorter than the one that was opened", subject=name)
    if isinstance(error, InvalidPathError):
        return one(
            StoreError,
            "an object there has a name with an empty part or a control character, at which the listing ends",
            "remove that object, or keep checkpoints under a prefix of their own",
        )
    if code in _FULL or status == 507:
        return one(StoreFull, "no space is left, or the quota is reached")
    if code in _CLOCK:
        return one(StoreDenied, "this machine's clock differs from the service's", "set the clock: timedatectl status")
    if code in _CREDENTIALS or status == 401:
        expired = code is not None and code.startswith(("Expired", "TokenRefresh"))
        return one(
            StoreDenied,
            f"the credentials {'have expired' if expired else 'are refused'}",
            f"{service.name} takes {service.credentials}" if service.writable else service.credentials,
        )
    if code in _REGION or status in (301, 307) or "redirect without LOCATION" in text:
        return one(StoreError, f"the {service.bucket} is in another region", f"set {service.endpoint}")
    if status == 403 or (status == 400 and code is None):  # the answer to HEAD has no body to say more
        return one(
            StoreDenied,
            "permission denied",
            f"allow {service.allow} there"
            + (f", or give other credentials: {service.credentials}" if service.writable else ""),
        )
    if status is not None and status >= 500 and status not in (501, 505):
        return one(StoreUnavailable, "the service fails")
    if status in (405, 501) or isinstance(error, NotImplementedError):
        if not service.writable and doing == "listing":
            return one(
                StoreError,
                "this web server cannot list what it has",
                "serve the directory by WebDAV, such as with `rclone serve webdav --read-only DIRECTORY`",
            )
        return one(StoreError, "the service cannot do this")
    if status is not None:
        return one(StoreError, "the service refuses this")
    return _without_answer(text, one, service, url)


def _without_answer(text: str, one: _Make, service: Service, url: str) -> StoreError:
    """What a request means that was never answered."""
    *looks, last = dict.fromkeys(("the URL", "the network", service.endpoint))
    where = f"check {', '.join(looks)} and {last}"
    if _METADATA.search(text):
        return one(
            StoreUnavailable,
            "there are no credentials in the environment, and this machine's metadata service gives none",
            f"{service.name} takes {service.credentials}",
        )
    if "BadScheme" in text:
        return one(
            StoreError,
            "the endpoint is plain http:// on another machine",
            f"set {service.endpoint.partition(' ')[0]} to https://, or AWS_ALLOW_HTTP=true if that network is yours",
        )
    if "NotPartial" in text:
        return one(
            StoreError,
            "it answers a read of a range with something else",
            f"use another server: check {service.endpoint}",
        )
    if "dns error" in text:
        return one(StoreUnavailable, "the name of its host is not known", where)
    if "ConnectionRefused" in text:
        return one(StoreUnavailable, "the connection is refused", where)
    if "kind: Connect" in text and _TLS.search(text):
        return one(
            StoreError,
            "no TLS connection that can be trusted",
            "check https:// in the endpoint, this machine's clock, and the certificates (SSL_CERT_FILE)",
        )
    if "TimedOut" in text or "timed out" in text or "kind: Timeout" in text:
        return one(StoreUnavailable, "no answer in time", where)
    if "kind: Connect" in text:
        return one(StoreUnavailable, "it cannot be reached", where)
    return one(StoreUnavailable, "the answer broke off, or cannot be understood")


def _status(text: str) -> int | None:
    found = _STATUS.search(text)
    return int(found[1] or found[2]) if found else None


def _code(text: str) -> str | None:
    found = _CODE.search(text)
    return found[1] if found else None
