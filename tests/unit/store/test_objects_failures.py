"""What users see of a service that refuses, fails or does not answer, and that no secret is in it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from datetime import timedelta

import pytest

from support.moto import KEY, SECRET, moto, s3  # noqa: F401 - fixtures
from support.s3_proxy import HANG, LOSE, TRUNCATE, UNCONDITIONAL, Answer, proxy
from tenuto.cli import main
from tenuto.errors import (
    AlreadyExists,
    CorruptionError,
    ForkedProcess,
    ObjectNotFound,
    RepositoryError,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    UsageError,
)
from tenuto.repo.repository import Repo
from tenuto.store.contract import Bytes
from tenuto.store.objects import store as module
from tenuto.store.objects.service import S3
from tenuto.store.objects.store import ObjectStore
from tenuto.store.registry import open_store
from tenuto.store.wrappers.retry import Patience, RetryingStore

PARTS = 5 << 20


@pytest.fixture
def answering(monkeypatch):
    """A server that gives each request the same answer, as the S3 endpoint."""
    pytest.importorskip("obstore")
    with proxy(None) as server:
        for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL_S3", "AWS_SESSION_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        yield server


@pytest.fixture
def between(moto, s3, monkeypatch):  # noqa: F811
    """A proxy before moto, and the URL of a bucket behind it."""
    with proxy(moto.endpoint) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        yield server, s3


def bare(url="s3://bucket/ckpts"):
    """The store without the wrapper that retries."""
    return open_store(url).inner


def in_parts(url):
    whole = bare(url)
    return ObjectStore(whole.url, S3, whole._make, single=4096, part=PARTS)


# What a service answers.


@pytest.mark.parametrize(
    ("status", "code", "kind", "says", "hint"),
    [
        (403, "InvalidAccessKeyId", StoreDenied, "the credentials are refused", "AWS_ACCESS_KEY_ID"),
        (403, "SignatureDoesNotMatch", StoreDenied, "the credentials are refused", "AWS_SECRET_ACCESS_KEY"),
        (400, "ExpiredToken", StoreDenied, "the credentials have expired", "AWS_SESSION_TOKEN"),
        (403, "RequestTimeTooSkewed", StoreDenied, "clock differs", "timedatectl"),
        (403, "AccessDenied", StoreDenied, "permission denied", "s3:PutObject"),
        (403, "QuotaExceeded", StoreFull, "quota", None),
        (404, "NoSuchBucket", StoreError, "there is no bucket bucket", "aws s3 mb s3://bucket"),
        (404, "NoSuchKey", ObjectNotFound, "there is no object x", None),
        (301, "PermanentRedirect", StoreError, "in another region", "AWS_REGION"),
        (400, "AuthorizationHeaderMalformed", StoreError, "in another region", "AWS_REGION"),
        (503, "SlowDown", StoreUnavailable, "asks for fewer requests", None),
        (429, "TooManyRequests", StoreUnavailable, "asks for fewer requests", None),
        (500, "InternalError", StoreUnavailable, "busy", None),
        (502, "", StoreUnavailable, "fails", None),
        (501, "NotImplemented", StoreError, "cannot do this", None),
        (418, "", StoreError, "refuses this", None),
    ],
)
def test_what_a_service_refuses_is_said_in_words(answering, status, code, kind, says, hint):
    answering.answer(status, code)
    store = bare()
    for act in (lambda: store.get("x", limit=9), lambda: store.put_if_absent("x", Bytes(b"1"), token="t")):
        with pytest.raises(kind) as caught:
            act()
        assert type(caught.value) is kind
        assert says in caught.value.message and "s3://bucket/ckpts" in caught.value.message
        assert caught.value.subject == "x"
        assert hint is None or hint in caught.value.hint
        assert caught.value.__cause__ is None  # a trace prints the cause, with what the server echoed


def test_a_request_is_sent_once_and_by_the_wrapper_again(answering):
    answering.answer(503, "SlowDown")
    with pytest.raises(StoreUnavailable):
        bare().get("x", limit=9)
    assert len(answering.requests) == 1
    with pytest.raises(StoreUnavailable):
        RetryingStore(bare(), Patience(wait_s=0)).get("x", limit=9)
    assert len(answering.requests) == 6


def test_who_may_list_but_not_write_is_told_so(between):
    server, url = between
    server.rule = lambda asked: (
        Answer(403, b"<Error><Code>AccessDenied</Code></Error>") if asked.method == "PUT" else None
    )
    with pytest.raises(StoreDenied, match=r"putting x at .*permission denied.*AccessDenied") as caught:
        bare(url).put_if_absent("x", Bytes(b"1"), token="t")
    assert "s3:PutObject" in caught.value.hint
    assert not list(bare(url).walk(""))


# No answer.


@pytest.mark.parametrize(
    ("endpoint", "kind", "says"),
    [
        ("http://127.0.0.1:1", StoreUnavailable, "the connection is refused"),
        ("http://nosuch.localhost.invalid:80", StoreError, "plain http:// on another machine"),
        ("https://nosuch.host.invalid", StoreUnavailable, "the name of its host is not known"),
    ],
)
def test_what_is_not_there(answering, monkeypatch, endpoint, kind, says):
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(kind, match=says) as caught:
        bare().get("x", limit=9)
    assert type(caught.value) is kind and "AWS_ENDPOINT_URL" in caught.value.hint


def test_a_server_without_tls_at_an_https_url(answering, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", answering.url.replace("http:", "https:"))
    with pytest.raises(StoreError, match="no TLS connection") as caught:
        bare().get("x", limit=9)
    assert type(caught.value) is StoreError and "certificates" in caught.value.hint


def test_a_hung_server_is_given_up(answering, monkeypatch):
    monkeypatch.setitem(module._ONE, "read_timeout", timedelta(seconds=0.3))
    answering.rule = lambda asked: HANG
    store = bare()
    for act in (lambda: store.get("x", limit=9), lambda: store.children(""), lambda: store.delete(["x"])):
        with pytest.raises(StoreUnavailable, match="no answer in time"):
            act()


def test_every_request_has_a_limit_of_time():
    for limits in (module._ONE, module._PART):
        assert all(timedelta(0) < limits[key] <= timedelta(seconds=120) for key in ("read_timeout", "timeout"))
        assert limits["connect_timeout"] == timedelta(seconds=5)


def test_where_there_are_no_credentials(answering, monkeypatch, tmp_path):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(StoreUnavailable, match="there are no credentials in the environment") as caught:
        bare().get("x", limit=9)
    assert "AWS_ACCESS_KEY_ID" in caught.value.hint
    assert not answering.requests


# Replies that are lost or cut.


def test_a_cut_body_is_read_again(between):
    server, url = between
    store = open_store(url)
    data = os.urandom(100_000)
    store.put_if_absent("x", Bytes(data), token="t")
    for start, end in ((0, len(data)), (70_000, 90_000)):
        for opened in (True, False):
            cut = [True]
            server.rule = lambda asked: None
            reader = store.open("x") if opened else None
            server.rule = lambda asked, cut=cut: TRUNCATE if asked.method == "GET" and cut and cut.pop() else None
            with reader or store.open("x") as reader:
                buffer = bytearray(end - start)
                reader.read_into(start, memoryview(buffer))
                assert buffer == data[start:end] and not cut
    server.rule = lambda asked: None
    with bare(url).open("x") as reader:
        server.rule = lambda asked: TRUNCATE if asked.method == "GET" else None
        with pytest.raises(StoreUnavailable, match="broke off"):
            reader.read_into(70_000, memoryview(bytearray(20_000)))
        with pytest.raises(StoreUnavailable, match="broke off"):
            bare(url).open("x")


@pytest.mark.parametrize("length", [1000, 3 * PARTS])
def test_a_put_whose_reply_was_lost_is_known_as_ones_own(between, length):
    """And no data is read back or sent again where there is much of it."""
    server, url = between
    store = RetryingStore(in_parts(url), Patience(wait_s=0))
    lost = [True]
    last = "PUT" if length == 1000 else "POST"
    server.rule = lambda asked: (
        LOSE if asked.method == last and "uploads" not in asked.path and lost and lost.pop() else None
    )
    data = os.urandom(length)
    assert store.put_if_absent("pack", Bytes(data), token="t").length == length
    assert not lost
    methods = [asked.method for asked in server.requests]
    if length > 1000:
        assert methods.count("GET") == 0 and methods.count("PUT") == 3
    assert store.get("pack", limit=length) == data
    with pytest.raises(AlreadyExists):
        store.put_if_absent("pack", Bytes(data), token="t")


def test_a_part_that_breaks_off_is_sent_again_and_the_others_are_not(between):
    server, url = between
    lost = [True]
    server.rule = lambda asked: Answer(500) if "partNumber=2" in asked.path and lost and lost.pop() else None
    data = os.urandom(3 * PARTS)
    in_parts(url).put_if_absent("pack", Bytes(data), token="t")
    sent = [asked.path for asked in server.requests if asked.method == "PUT"]
    assert len(sent) == 4 and sum("partNumber=2" in path for path in sent) == 2
    assert bare(url).get("pack", limit=len(data)) == data


def test_of_an_upload_that_fails_nothing_stays(between, moto):  # noqa: F811
    server, url = between
    server.rule = lambda asked: (
        Answer(400, b"<Error><Code>InvalidRequest</Code></Error>") if "partNumber=2" in asked.path else None
    )
    with pytest.raises(StoreError, match="refuses this"):
        in_parts(url).put_if_absent("pack", Bytes(bytes(3 * PARTS)), token="t")
    bucket = url.removeprefix("s3://")
    assert not moto.client().list_multipart_uploads(Bucket=bucket).get("Uploads")
    assert not list(bare(url).walk("", leftovers=True))


def test_what_content_raises_is_raised_even_if_the_upload_cannot_be_aborted(between):
    class Content:
        length = 3 * PARTS

        def pieces(self):
            yield memoryview(bytes(PARTS))
            raise FileNotFoundError("of the content, not of the store")

    server, url = between
    server.rule = lambda asked: Answer(400) if asked.method == "DELETE" else None
    with pytest.raises(FileNotFoundError, match="of the content"):
        in_parts(url).put_if_absent("pack", Content(), token="t")


def test_an_object_that_was_replaced_is_not_read_on(s3, moto):  # noqa: F811
    store = open_store(s3)
    place = {"Bucket": s3.removeprefix("s3://"), "Key": "x"}
    for other in (b"b" * 200_000, b"b" * 100_000, b"b" * 400_000):
        moto.client().put_object(**place, Body=b"a" * 200_000)
        with store.open("x") as reader:
            moto.client().put_object(**place, Body=other)
            for start, end in ((0, reader.length), (120_000, 180_000)):
                with pytest.raises(CorruptionError, match="another object") as caught:
                    reader.read_into(start, memoryview(bytearray(end - start)))
                assert caught.value.subject.partition("@")[0] == "x"


# A server that ignores conditions.


def test_a_server_that_ignores_conditions_is_no_place_for_a_repository(between):
    server, url = between
    server.rule = lambda asked: UNCONDITIONAL
    store = open_store(url)
    assert store.capabilities.commits  # not known yet
    assert not store.probe().commits and not store.capabilities.commits
    with pytest.raises(RepositoryError, match="can hold copies of checkpoints, but cannot decide") as caught:
        Repo.create_or_open(store)
    assert "tenuto.Mirror(" in caught.value.hint
    assert not list(store.walk("", leftovers=True))


# Secrets.


def test_no_secret_shows(answering, tmp_path):
    """A training and a command with credentials that are refused: nothing that they print holds one."""
    token = "FwoGZXIvYXdzEXAMPLE-SESSION"
    echo = f"{KEY} {SECRET} {token} x-amz-security-token"  # a server may echo what it was sent
    answering.answer(403, "SignatureDoesNotMatch", echo)
    environment = {**os.environ, "AWS_SESSION_TOKEN": token, "HOME": str(tmp_path), "RUST_LOG": "trace"}
    train = "import tenuto, numpy; tenuto.save({'w': numpy.zeros(3)}, 's3://bucket/ckpts')"
    for command in (
        ["-c", train],
        ["-m", "tenuto", "ls", "s3://bucket/ckpts"],
        ["-m", "tenuto", "verify", "--json", "s3://bucket"],
    ):
        done = subprocess.run(
            [sys.executable, "-X", "dev", *command],
            capture_output=True,
            text=True,
            env=environment,
            cwd=tmp_path,
            timeout=120,
        )
        said = done.stdout + done.stderr
        assert done.returncode != 0 and "credentials are refused" in said, said
        assert not any(secret in said for secret in (KEY, SECRET, token)), said
    store = bare()
    assert SECRET not in repr(store) + store.url + repr(vars(store))


def test_no_signature_of_a_url_shows(answering, monkeypatch):
    signature = "c2lnbmF0dXJlLW9mLWEtc2FzLXRva2Vu"
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "team")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", answering.url)
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", f"sv=2024-11-04&sp=rwdl&sig={signature}")
    answering.answer(403, "AuthenticationFailed", f"Signature fields {signature}")
    store = bare("az://ckpts/team")
    for act in (lambda: store.get("x", limit=9), lambda: store.children(""), lambda: list(store.walk(""))):
        with pytest.raises(StoreDenied, match="the credentials are refused") as caught:
            act()
        assert signature not in str(caught.value) and "AZURE_STORAGE_ACCOUNT_NAME" in caught.value.hint
        assert caught.value.__cause__ is None and caught.value.__suppress_context__
    assert any(signature in asked.path for asked in answering.requests)  # it was in use
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(StoreUnavailable, match="refused") as caught:
        bare("az://ckpts/team").get("x", limit=9)
    assert signature not in str(caught.value)


# Forks.


def test_a_forked_child_is_told_instead_of_waiting_for_ever(s3):  # noqa: F811
    store = open_store(s3)
    store.put_if_absent("x", Bytes(b"1"), token="t")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for here in (store, open_store(s3)):
                try:
                    here.get("x", limit=1)
                except ForkedProcess as error:
                    os.write(write, b"told" if "spawn" in error.hint else b"not helped")
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == b"toldtold"
    assert os.waitpid(child, 0)[1] == 0
    assert store.get("x", limit=1) == b"1"


def test_a_store_that_was_not_used_before_a_fork_works_in_the_child(s3):  # noqa: F811
    code = (
        "import os, sys\n"
        "from tenuto.store.registry import open_store\n"
        "from tenuto.store.contract import Bytes\n"
        "store = open_store(sys.argv[1])\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    store.put_if_absent('x', Bytes(b'1'), token='t')\n"
        "    os._exit(7)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    assert subprocess.run([sys.executable, "-c", code, s3], timeout=120).returncode == 7
    assert open_store(s3).get("x", limit=1) == b"1"


# What a user can write.


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3:/bucket/x", "s3://bucket/x"),
        ("s3:bucket", "s3://bucket"),
        ("s3://", "no bucket"),
        ("s3:///x", "no bucket"),
        ("s3://My-Bucket/x", "s3://my-bucket"),
        ("s3://b/x", "cannot name a bucket"),
        ("s3://bucket/a//b", "empty"),
        ("s3://bucket/a/../b", "'..'"),
        ("s3://bucket/x?versionId=3", "a query"),
        ("s3://bucket/x#y", "a fragment"),
        ("gs://Bucket", "gs://bucket"),
        ("gs:/bucket", "gs://bucket"),
        ("az://", "no container"),
        ("abfss://ckpts@nowhere/x", "no storage account"),
        ("https://", "HOST"),
    ],
)
def test_a_url_that_names_nothing(url, says):
    with pytest.raises(UsageError) as caught:
        open_store(url)
    assert says in str(caught.value) and caught.value.hint


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIA123:hush@bucket/x", "gs://user:hush@bucket/x", "az://c:hush@team.blob.core.windows.net/x",
        "https://user:hush@example.org/x", "s3://bucket/x?X-Amz-Signature=hush", "https://example.org/x?sig=hush",
    ],
)  # fmt: skip
def test_secrets_in_a_url_are_refused_and_not_repeated(url):
    with pytest.raises(UsageError) as caught:
        open_store(url)
    assert "hush" not in str(caught.value) + repr(caught.value) + str(caught.value.subject)


def test_urls_of_azure(monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    url = "abfss://ckpts@team.dfs.core.windows.net/a/b"
    assert open_store(url + "/").url == url
    with pytest.raises(UsageError, match="does not say in which storage account"):
        open_store("az://ckpts/a")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountName=team;AccountKey=aHVzaA==;EndpointSuffix=x")
    assert open_store("az://ckpts/a").url == "az://ckpts/a"


def test_a_place_has_one_url():
    assert open_store("S3://bucket/a/").url == open_store("s3://bucket/a").url == "s3://bucket/a"
    assert open_store("gcs://bucket").url == "gs://bucket"


def test_a_profile_needs_boto3_and_says_so(answering, monkeypatch, tmp_path):
    (tmp_path / "credentials").write_text("[team]\naws_access_key_id = AKIAOFTHEPROFILE\naws_secret_access_key = s\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_PROFILE", "team")
    answering.answer(404, "NoSuchKey")
    with pytest.raises(ObjectNotFound):
        bare().get("x", limit=9)
    monkeypatch.setenv("AWS_PROFILE", "others")
    with pytest.raises(UsageError, match="no AWS profile 'others'"):
        bare().get("x", limit=9)
    monkeypatch.setitem(sys.modules, "obstore.auth.boto3", None)
    with pytest.raises(ImportError, match="only boto3 reads") as caught:
        bare().get("x", limit=9)
    assert "pip install boto3" in caught.value.hint


def test_a_manifest_of_any_length_does_not_replace_one_that_appears_while_it_is_put(s3):  # noqa: F811
    store, other = bare(s3), bare(s3)
    store._single = 1024
    name = "runs/main/a0001/step-00000001/manifest.json"

    class Slow:
        length = 6 << 20

        def pieces(self):
            yield memoryview(bytes(self.length // 2))
            put = threading.Thread(target=other.put_if_absent, args=(name, Bytes(b"aborted")), kwargs={"token": "t1"})
            put.start()
            put.join()
            yield memoryview(bytes(self.length // 2))

    with pytest.raises(AlreadyExists):
        store.put_if_absent(name, Slow(), token="t0")
    assert other.get(name, limit=100) == b"aborted"


@pytest.mark.parametrize("url", ["s3://bucket/x", "gs://bucket/x", "az://bucket/x", "http://127.0.0.1:1/x"])
def test_a_place_that_nobody_serves_is_one_line_and_a_hint_that_repeats_nothing(url, monkeypatch, capfd):
    pytest.importorskip("obstore")
    for name in ("AWS_ENDPOINT_URL", "GOOGLE_BASE_URL", "AZURE_STORAGE_ENDPOINT"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name, value in {
        "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "GOOGLE_SKIP_SIGNATURE": "true",
        "AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_ACCOUNT_KEY": "eHg=",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as caught:
        main(["ls", url])
    error, hint = capfd.readouterr().err.replace("\n  ", " ").splitlines()
    assert caught.value.code == StoreUnavailable.exit_code
    assert error.startswith("error: ") and "the connection is refused" in error
    assert hint.startswith("hint: check the URL") and hint.count("the URL") == 1


def test_a_bucket_that_is_not_there_is_one_line_and_a_hint(moto, s3, monkeypatch, capfd):  # noqa: F811
    missing = "s3://no-such-bucket-here/ckpts"
    for words in (["ls", missing], ["verify", missing], ["status", missing]):
        with pytest.raises(SystemExit):
            main(words)
        error, hint = capfd.readouterr().err.replace("\n  ", " ").splitlines()
        assert error.startswith("error: ") and "there is no bucket no-such-bucket-here" in error
        assert hint.startswith("hint: aws s3 mb s3://no-such-bucket-here")
