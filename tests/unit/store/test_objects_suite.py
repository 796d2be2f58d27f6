"""The shipped suite on S3: as users open it, and with objects in parts for all that is longer than a block."""

from __future__ import annotations

import pytest

from support.moto import moto, s3  # noqa: F401 - fixtures
from tenuto.store.contract import Store
from tenuto.store.objects.service import S3
from tenuto.store.objects.store import ObjectStore
from tenuto.store.registry import open_store
from tenuto.testing.store_suite import StoreSuite


class Raw:
    """Reaches objects by boto3."""

    @pytest.fixture(autouse=True)
    def client(self, moto):  # noqa: F811
        self.s3 = moto.client()

    def key(self, store, name):
        bucket, _, prefix = store.url.removeprefix("s3://").partition("/")
        return {"Bucket": bucket, "Key": f"{prefix}/{name}" if prefix else name}

    def raw_put(self, store, name, data):
        self.s3.put_object(**self.key(store, name), Body=data)

    def raw_get(self, store, name):
        try:
            return self.s3.get_object(**self.key(store, name))["Body"].read()
        except self.s3.exceptions.NoSuchKey:
            return None

    def raw_delete(self, store, name):
        self.s3.delete_object(**self.key(store, name))


@pytest.mark.long  # `make test-stores` runs the same
class TestS3(Raw, StoreSuite):
    @pytest.fixture
    def store(self, s3) -> Store:  # noqa: F811
        return open_store(f"{s3}/team a/ckpts")


class TestS3InParts(Raw, StoreSuite):
    """Uploads of several parts, for all objects longer than a block."""

    @pytest.fixture
    def store(self, s3) -> Store:  # noqa: F811
        whole = open_store(s3).inner
        return ObjectStore(whole.url, S3, whole._make, single=4096, part=5 << 18)
