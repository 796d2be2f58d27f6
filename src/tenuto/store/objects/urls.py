"""From a URL to its store, with region, endpoint and credentials from where the service's own tools have them.

A URL holds none of these: it stands in logs, manifests and errors.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, unquote, urlsplit

from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store

from tenuto.errors import MissingExtra, StoreError, UsageError
from tenuto.store.contract import check_prefix
from tenuto.store.objects.service import AZURE, GCS, HTTP, S3, Service
from tenuto.store.objects.store import MakeClient, ObjectStore
from tenuto.store.objects.unfinished import UnfinishedUploads

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]", re.ASCII)
_ACCOUNT: Final = re.compile(r"[a-z0-9]{3,24}", re.ASCII)
_HOST: Final = re.compile(r"[a-z0-9]{3,24}\.(dfs|blob)\.core\.[a-z.]+", re.ASCII)
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


def open_url(url: str) -> ObjectStore:
    """Opens the store of a URL, without touching it. Raises UsageError for one that names none."""
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    if scheme in ("http", "https"):
        return _http(url, scheme)
    _check_no_more(url, scheme, rest)
    place, _, prefix = rest.partition("/")
    prefix = _prefix(prefix, f"{scheme}://{rest}")
    if scheme in ("gs", "gcs"):
        return ObjectStore(_url("gs", _bucket(place, "gs", GCS), prefix), GCS, _gcs(place, prefix))
    if scheme == "s3":
        shown = _url("s3", _bucket(place, "s3", S3), prefix)
        return ObjectStore(shown, S3, _s3(place, prefix), _unfinished(place, prefix))
    container, at, host = place.partition("@")
    if at and _HOST.fullmatch(host) is None:
        raise UsageError(
            f"{scheme}://{place} names no storage account",
            subject=f"{scheme}://",
            hint="write abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/the/prefix, or az://CONTAINER/the/prefix",
        )
    shown = _url(scheme, _bucket(container, scheme, AZURE) + (f"@{host}" if at else ""), prefix)
    return ObjectStore(shown, AZURE, _azure(container, host.partition(".")[0], prefix, shown))


# --------------------------------------------------------------------------------------------------
# What a URL may hold.


def _check_no_more(url: str, scheme: str, rest: str) -> None:
    """Refuses what could be a secret, without repeating it."""
    place = rest.partition("/")[0]
    azure = scheme in ("az", "abfs", "abfss")
    if "?" in rest or "#" in rest or ("@" in place and (not azure or ":" in place)):
        raise UsageError(
            f"a {scheme}:// URL names a place and nothing else: this one has a query, a fragment or a user name",
            subject=f"{scheme}://",
            hint="credentials, region and endpoint belong into the environment: docs/guides/object-stores.md",
        )


def _prefix(prefix: str, url: str) -> str:
    prefix = prefix.strip("/")
    try:
        check_prefix(prefix)
    except StoreError:
        prefix = "\n"
    if not prefix.isprintable():
        raise UsageError(
            f"{url!r} has a part that is empty, '.' or '..', or not printable",
            subject=url,
            hint="write one / between the parts of the prefix",
        )
    return prefix


def _bucket(name: str, scheme: str, service: Service) -> str:
    if _BUCKET.fullmatch(name):
        return name
    lower = name.lower()
    good = lower if _BUCKET.fullmatch(lower) else service.bucket.upper()
    says = f"{name!r} cannot name a {service.bucket} of {service.name}" if name else f"it names no {service.bucket}"
    raise UsageError(
        f"{scheme}://{name}: {says}",
        subject=f"{scheme}://{name}",
        hint=f"write {scheme}://{good}/the/prefix" + (f"; a {service.bucket}'s name is in lower case" if name else ""),
    )


def _url(scheme: str, place: str, prefix: str) -> str:
    return f"{scheme}://{place}/{prefix}" if prefix else f"{scheme}://{place}"


def _may_be_plain(endpoint: str | None) -> bool:
    """Returns whether requests may go out unencrypted: to this machine, or where the user says so."""
    if os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true", "yes"):
        return True
    return endpoint is not None and endpoint.startswith("http://") and urlsplit(endpoint).hostname in _LOOPBACK


def _first(environment: Mapping[str, str], *names: str) -> str | None:
    return next((value for name in names if (value := environment.get(name))), None)


# --------------------------------------------------------------------------------------------------
# Clients. Each takes its own variables of the environment, but for what is given here.


def _s3(bucket: str, prefix: str) -> MakeClient:
    endpoint = _endpoint()
    plain = _may_be_plain(endpoint)

    def make(options: ClientConfig, retries: RetryConfig) -> S3Store:
        config: dict[str, Any] = {"endpoint": endpoint} if endpoint else {}
        return S3Store(
            bucket,
            prefix=prefix or None,
            client_options={**options, "allow_http": plain},
            retry_config=retries,
            credential_provider=_profile(),
            **config,
        )

    return make


def _unfinished(bucket: str, prefix: str) -> UnfinishedUploads | None:
    if find_spec("boto3") is None or os.environ.get("AWS_SKIP_SIGNATURE"):
        return None

    def make() -> Any:
        import boto3
        from botocore.config import Config

        # Nothing is retried here: the wrapper does that.
        config = Config(connect_timeout=5, read_timeout=30, retries={"total_max_attempts": 1})
        session = boto3.Session()
        region = os.environ.get("AWS_REGION") or session.region_name or "us-east-1"
        return session.client("s3", endpoint_url=_endpoint(), region_name=region, config=config)

    return UnfinishedUploads(bucket, prefix, make)


def _endpoint() -> str | None:
    return _first(os.environ, "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


def _profile() -> Any:
    """Returns what gives the credentials of the AWS profile, None where the environment or the machine gives them.

    The client does not read ~/.aws; boto3 does, and knows single sign-on and roles too.
    """
    named = os.environ.get("AWS_PROFILE")
    if not named and (
        _first(os.environ, "AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE", "AWS_WEB_IDENTITY_TOKEN_FILE")
        or not any(Path(path).expanduser().is_file() for path in _aws_files())
    ):
        return None
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ModuleNotFoundError:
        if not named:
            return None
        raise MissingExtra(
            "AWS_PROFILE is set, and only boto3 reads the profiles of ~/.aws",
            subject="AWS_PROFILE",
            hint="pip install boto3, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        ) from None
    from botocore.exceptions import ProfileNotFound

    try:
        return Boto3CredentialProvider()
    except ProfileNotFound:
        raise UsageError(
            f"there is no AWS profile {named!r}",
            subject="AWS_PROFILE",
            hint="`aws configure list-profiles` lists them",
        ) from None
    except ValueError:  # no credentials in these files: a role of the machine may have some
        return None


def _aws_files() -> tuple[str, str]:
    return (
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
        os.environ.get("AWS_CONFIG_FILE", "~/.aws/config"),
    )


def _gcs(bucket: str, prefix: str) -> MakeClient:
    emulator = os.environ.get("STORAGE_EMULATOR_HOST")
    if emulator and "://" not in emulator:
        emulator = f"http://{emulator}"
    plain = _may_be_plain(emulator or os.environ.get("GOOGLE_BASE_URL"))

    def make(options: ClientConfig, retries: RetryConfig) -> GCSStore:
        # Unsigned requests alone would do for reading: the client asks for a token before it puts.
        nobody = {
            "gcs_base_url": emulator,
            "disable_oauth": True,
            "client_email": "",
            "private_key": "",
            "private_key_id": "",
        }
        config: dict[str, Any] = {"service_account_key": json.dumps(nobody)} if emulator else {}
        return GCSStore(
            bucket,
            prefix=prefix or None,
            client_options={**options, "allow_http": plain},
            retry_config=retries,
            **config,
        )

    return make


def _azure(container: str, account: str, prefix: str, url: str) -> MakeClient:
    said = _connection_string(os.environ.get("AZURE_STORAGE_CONNECTION_STRING", ""))
    config: dict[str, Any] = {}
    if account:
        config["account_name"] = account
    elif not _first(os.environ, "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_USE_EMULATOR"):
        if not (name := said.get("AccountName") or os.environ.get("AZURE_STORAGE_ACCOUNT")):
            raise UsageError(
                f"{url} does not say in which storage account the container is",
                subject=url,
                hint=f"set AZURE_STORAGE_ACCOUNT_NAME, or write abfss://{container}@ACCOUNT.dfs.core.windows.net/…",
            )
        config["account_name"] = name
    for variable, key, option in (
        ("AZURE_STORAGE_ACCOUNT_KEY", "AccountKey", "account_key"),
        ("AZURE_STORAGE_SAS_TOKEN", "SharedAccessSignature", "sas_key"),
        ("AZURE_STORAGE_ENDPOINT", "BlobEndpoint", "endpoint"),
    ):
        if key in said and variable not in os.environ:
            config[option] = said[key]
    if "account_key" not in config and (short := os.environ.get("AZURE_STORAGE_KEY")):
        config["account_key"] = short
    endpoint = config.get("endpoint") or _first(os.environ, "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
    plain = _may_be_plain(endpoint) or bool(os.environ.get("AZURE_STORAGE_USE_EMULATOR"))

    def make(options: ClientConfig, retries: RetryConfig) -> AzureStore:
        return AzureStore(
            container,
            prefix=prefix or None,
            client_options={**options, "allow_http": plain},
            retry_config=retries,
            **config,
        )

    return make


def _connection_string(text: str) -> dict[str, str]:
    pairs = (pair.partition("=") for pair in text.split(";") if "=" in pair)
    return {key.strip(): value for key, _, value in pairs}


def _http(url: str, scheme: str) -> ObjectStore:
    parts = urlsplit(url)
    if parts.username is not None or parts.query or parts.fragment or not parts.hostname:
        raise UsageError(
            f"an {scheme}:// URL of checkpoints names a server and a directory and nothing else: no user, query or "
            "fragment",
            subject=f"{scheme}://",
            hint=f"write {scheme}://HOST/the/directory",
        )
    directory = _prefix(unquote(parts.path), url)
    root = f"{scheme}://{parts.netloc.lower()}"

    def make(options: ClientConfig, retries: RetryConfig) -> HTTPStore:
        # At the root: with a directory in its URL, the client lists names that still have the directory.
        return HTTPStore(root, client_options={**options, "allow_http": scheme == "http"}, retry_config=retries)

    return ObjectStore(f"{root}/{quote(directory)}".rstrip("/"), HTTP, make, directory=directory)
