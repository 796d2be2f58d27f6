"""What the kinds of object stores differ in, as far as errors and listings tell it."""

from __future__ import annotations

from tenuto.record import record


@record
class Service:
    """One kind of object store, in the words of its users.

    name: as messages say it. bucket: what it calls a bucket. credentials: where they are looked for. create: what makes
    a bucket, with `{bucket}`. allow: the permissions that checkpoints need. endpoint: the variable that says where the
    service is. sorts: whether its listings are sorted by name. writable: whether objects can be put.
    """

    name: str
    bucket: str
    credentials: str
    create: str
    allow: str
    endpoint: str
    sorts: bool = True
    writable: bool = True


S3 = Service(
    "S3",
    "bucket",
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN), AWS_PROFILE with boto3 installed, or a role "
    "of this machine; `aws sts get-caller-identity` shows who you are",
    "aws s3 mb s3://{bucket}",
    "s3:GetObject, s3:PutObject, s3:DeleteObject, s3:ListBucket and s3:AbortMultipartUpload",
    "AWS_ENDPOINT_URL and AWS_REGION",
)
GCS = Service(
    "Google Cloud Storage",
    "bucket",
    "GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login`, or a service account of this machine",
    "gcloud storage buckets create gs://{bucket}",
    "storage.objects.get, create, delete and list (the role Storage Object User)",
    "GOOGLE_BASE_URL",
)
AZURE = Service(
    "Azure Blob Storage",
    "container",
    "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, "
    "AZURE_STORAGE_CONNECTION_STRING, or a managed identity",
    "az storage container create --name {bucket}",
    "read, add, create, write, delete and list (the role Storage Blob Data Contributor)",
    "AZURE_STORAGE_ENDPOINT",
    sorts=False,  # accounts with a hierarchical namespace list a directory at its own place, not at that of its "/"
)
HTTP = Service(
    "HTTP",
    "server",
    "none are sent: the server has to let anyone read",
    "",
    "GET, HEAD and PROPFIND",
    "the URL",
    sorts=False,
    writable=False,
)
