"""Uploads that a killed process has left in S3: no listing shows their parts, and they cost as much as objects.

obstore cannot list them, boto3 can; where it is not installed, or the credentials do not allow it, only a lifecycle
rule of the bucket frees them (AbortIncompleteMultipartUpload). Google has the same rule; Azure frees them after a week.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from tenuto.errors import StoreUnavailable
from tenuto.store.contract import TEMPORARY, Entry, final_name, is_listable

_FRESH_S: Final = 3600.0
_NOT_FOR_US: Final = frozenset(
    {"AccessDenied", "NotImplemented", "MethodNotAllowed", "NoSuchUpload", "403", "405", "501"}
)


class UnfinishedUploads:
    """The uploads of a bucket below a prefix, as temporaries of the objects that they were to become.

    All are listed at once, and again after `_FRESH_S`: retention looks for the leftovers of each checkpoint it removes,
    which would be one request more for each. Gc opens the store anew, and so lists them anew.
    """

    def __init__(self, bucket: str, prefix: str, make: Callable[[], Any]) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._make = make
        self._found: dict[str, tuple[Entry, str]] = {}
        """Entry and upload id, by name."""
        self._listed = -_FRESH_S
        self._lock = threading.Lock()

    def entries(self, prefix: str) -> list[Entry]:
        with self._lock:
            if time.monotonic() - self._listed >= _FRESH_S:
                self._found = dict(self._list())
                self._listed = time.monotonic()
            start = f"{prefix}/" if prefix else ""
            return [entry for name, (entry, _) in self._found.items() if name.startswith(start)]

    def _list(self) -> Iterator[tuple[str, tuple[Entry, str]]]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            pages = self._make().get_paginator("list_multipart_uploads")
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix):
                for upload in page.get("Uploads", ()):
                    id = upload["UploadId"]
                    object = upload["Key"].removeprefix(self._prefix)
                    name = f"{object}{TEMPORARY}{hashlib.sha256(id.encode()).hexdigest()[:16]}"
                    if is_listable(name):
                        yield name, (Entry(name, 0, int(upload["Initiated"].timestamp()) * 1_000_000_000), id)
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") not in _NOT_FOR_US:
                raise _unavailable("listing", self._bucket, error) from None
        except BotoCoreError as error:
            raise _unavailable("listing", self._bucket, error) from None

    def abort(self, name: str) -> None:
        """Frees the upload that was listed as `name`, if there is one."""
        from botocore.exceptions import BotoCoreError, ClientError

        with self._lock:
            found = self._found.pop(name, None)
        if found is None:
            return
        key = self._prefix + final_name(name)
        try:
            self._make().abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=found[1])
        except (BotoCoreError, ClientError) as error:
            code = error.response.get("Error", {}).get("Code") if isinstance(error, ClientError) else ""
            if code != "NoSuchUpload":  # completed, or freed by another
                raise _unavailable("freeing", name, error) from None


def _unavailable(doing: str, what: str, error: Exception) -> StoreUnavailable:
    # Of the error only its kind: what it says may hold what a server echoes of a request.
    return StoreUnavailable(f"{doing} unfinished uploads of {what}: {type(error).__name__}", subject=what)
