"""What servers of S3 have in common: how clients reach them, and one that shares no code with the one under test."""

from __future__ import annotations

import secrets
from functools import cached_property
from typing import Any, ClassVar

import pytest

ACCESS_KEY = "TENUTOTEST"
SECRET_KEY = "tenuto-test-secret-that-shows-nowhere"


class S3Server:
    """Serves S3 at `endpoint`, path style, once started."""

    port: int
    wrong_credentials: ClassVar = {"AWS_SECRET_ACCESS_KEY": "a-secret-of-somebody-else"}

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self, endpoint: str | None = None) -> dict[str, str]:
        """Returns the variables by which any client reaches it, or a proxy in front of it at `endpoint`."""
        return {
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @cached_property
    def client(self) -> Any:
        boto3 = pytest.importorskip("boto3")
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            region_name="us-east-1",
            config=Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}),
        )

    def new_place(self) -> str:
        """Returns the URL of a new bucket."""
        bucket = f"t-{secrets.token_hex(8)}"
        self.client.create_bucket(Bucket=bucket)
        return f"s3://{bucket}"

    def put(self, url: str, name: str, data: bytes) -> None:
        self.client.put_object(**_key(url, name), Body=data)

    def get(self, url: str, name: str) -> bytes | None:
        try:
            found: bytes = self.client.get_object(**_key(url, name))["Body"].read()
        except self.client.exceptions.NoSuchKey:
            return None
        return found

    def delete(self, url: str, name: str) -> None:
        self.client.delete_object(**_key(url, name))

    def unfinished(self, url: str) -> list[str]:
        """Returns the keys of multipart uploads that nobody has completed or aborted."""
        found = self.client.list_multipart_uploads(Bucket=_key(url, "")["Bucket"])
        return [upload["Key"] for upload in found.get("Uploads", [])]


def _key(url: str, name: str) -> dict[str, str]:
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    return {"Bucket": bucket, "Key": f"{prefix}/{name}" if prefix else name}
