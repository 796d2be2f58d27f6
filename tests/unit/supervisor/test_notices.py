"""Notices of clouds, from metadata services that answer on this machine's loopback, as those of the clouds do."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.traces import judged, trace
from tenuto.errors import UsageError
from tenuto.supervisor.detectors import preemption
from tenuto.supervisor.detectors.preemption import Preemption, recognised
from tenuto.supervisor.detectors.registry import detectors

NOW_S = 1_900_000_000.0


class Service(ThreadingHTTPServer):
    """Answers GET by path, 404 elsewhere. AWS's paths want a token, Google's and Azure's their header."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, str] = {}
        self.tokens: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Service

    def do_PUT(self) -> None:
        assert self.headers["X-aws-ec2-metadata-token-ttl-seconds"] and self.path == "/latest/api/token"
        self.server.tokens.append(f"token {len(self.server.tokens)}")
        self._send(200, self.server.tokens[-1])

    def do_GET(self) -> None:
        wanted = {
            "/latest": ("X-aws-ec2-metadata-token", (self.server.tokens or [""])[-1]),
            "/comput": ("Metadata-Flavor", "Google"),
            "/metada": ("Metadata", "true"),
        }[self.path[:7]]
        answer = self.server.answers.get(self.path.partition("?")[0])
        if self.headers[wanted[0]] != wanted[1]:
            self._send(401, "")
        else:
            self._send(404 if answer is None else 200, answer or "")

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Is silent."""


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    found = Service()
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", found.url)
    monkeypatch.setenv("GCE_METADATA_HOST", found.url.removeprefix("http://"))
    monkeypatch.setenv("TENUTO_AZURE_METADATA", found.url)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    # The clock stands still, and an answer may take as long as it takes: the service runs beside much else.
    monkeypatch.setattr(preemption, "time", SimpleNamespace(time=lambda: NOW_S, monotonic=time.monotonic))
    monkeypatch.setattr(preemption, "TIMEOUT_S", 60.0)
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


def in_seconds(left_s: float) -> datetime:
    return datetime.fromtimestamp(NOW_S + left_s, UTC)


def test_aws_says_when_a_spot_machine_goes_and_that_it_may_go(service: Service) -> None:
    detector = Preemption("aws")
    assert detector.sample() == {"aws.answers": 1}
    service.answers["/latest/meta-data/events/recommendations/rebalance"] = '{"noticeTime": "2026-11-26T21:00:00Z"}'
    assert detector.sample() == {"aws.answers": 1, "aws.risk": 1}
    at = in_seconds(120).strftime("%Y-%m-%dT%H:%M:%SZ")
    service.answers["/latest/meta-data/spot/instance-action"] = json.dumps({"action": "terminate", "time": at})
    assert (detector.sample() or {})["aws.grace_s"] == 120
    assert len(service.tokens) == 1, "a token is kept"


def test_a_token_that_has_become_invalid_is_asked_for_anew(service: Service) -> None:
    detector = Preemption("aws")
    detector.sample()
    service.tokens.append("another")
    assert detector.sample() == {"aws.answers": 0}
    assert detector.sample() == {"aws.answers": 1}


def test_google_says_that_a_machine_is_preempted_and_that_it_is_migrated(service: Service) -> None:
    detector, instance = Preemption("gcp"), "/computeMetadata/v1/instance"
    service.answers = {f"{instance}/preempted": "FALSE", f"{instance}/maintenance-event": "NONE"}
    assert detector.sample() == {"gcp.answers": 1}
    service.answers[f"{instance}/maintenance-event"] = "MIGRATE_ON_HOST_MAINTENANCE"
    assert detector.sample() == {"gcp.answers": 1, "gcp.risk": 1}
    service.answers[f"{instance}/preempted"] = "TRUE"
    assert detector.sample() == {"gcp.answers": 1, "gcp.risk": 1, "gcp.grace_s": 30}
    service.answers[f"{instance}/maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
    assert detector.sample() == {"gcp.answers": 1, "gcp.grace_s": 30}


def test_azure_schedules_events_and_those_of_other_machines_are_none_of_ours(service: Service) -> None:
    def scheduled(kind: str, before: str, *resources: str) -> None:
        event = {"EventId": "1", "EventType": kind, "NotBefore": before, "Resources": list(resources)}
        service.answers["/metadata/scheduledevents"] = json.dumps({"DocumentIncarnation": 1, "Events": [event]})

    detector = Preemption("azure")
    service.answers["/metadata/instance/compute/name"] = "node_1"
    scheduled("Preempt", format_datetime(in_seconds(30), usegmt=True), "node_2")
    assert detector.sample() == {"azure.answers": 1}
    scheduled("Preempt", format_datetime(in_seconds(30), usegmt=True), "node_1")
    assert (detector.sample() or {})["azure.grace_s"] == 30
    scheduled("Terminate", "", "node_1")
    assert detector.sample() == {"azure.answers": 1, "azure.grace_s": 0}
    scheduled("Freeze", "", "node_1")
    assert detector.sample() == {"azure.answers": 1, "azure.risk": 1}


@pytest.mark.parametrize("answer", ["", "{", '{"time": "x"}', '{"action": "stop", "time": "soon"}'])
def test_an_answer_that_makes_no_sense_is_no_notice(service: Service, answer: str) -> None:
    service.answers["/latest/meta-data/spot/instance-action"] = answer
    assert Preemption("aws").sample() == {"aws.answers": 0}


def test_where_nobody_answers_there_is_no_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:1")
    assert Preemption("aws").sample() == {"aws.answers": 0}


@pytest.mark.parametrize(
    ("files", "cloud"),
    [
        ({"sys_vendor": "Amazon EC2\n"}, "aws"),
        ({"sys_vendor": "Google\n"}, "gcp"),
        ({"chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77\n", "sys_vendor": "Microsoft Corporation"}, "azure"),
        ({"sys_vendor": "Microsoft Corporation"}, None),
        ({}, None),
    ],
)
def test_the_cloud_is_told_from_the_firmware_and_elsewhere_nobody_is_asked(
    files: dict[str, str], cloud: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(preemption, "DMI", tmp_path)
    assert recognised() == cloud
    if cloud is None:
        assert Preemption().sample() is None
    assert Preemption("off").sample() is None


def test_a_long_notice_asks_for_a_save_first_and_to_leave_when_its_time_comes() -> None:
    notice = trace("preemption", lambda at: {"azure.answers": 1, "azure.grace_s": 900 - at}, period_s=5, lasts_s=900)
    found = judged(Preemption(), notice)
    assert found[0][1].name == "preemption-risk"
    at, leave = next((at, one) for at, one in found if one.name == "preemption")
    assert (at, leave.grace_s, leave.evidence) == (750, 150, "Azure takes this machine in 2 min 30 s")
    risk = trace("preemption", lambda at: {"aws.answers": 1, "aws.risk": 1}, period_s=5, lasts_s=10)
    assert {one.name for _, one in judged(Preemption(), risk)} == {"preemption-risk"}
    silent = trace("preemption", lambda at: {"aws.answers": 0}, period_s=5, lasts_s=600)
    assert not judged(Preemption(), silent)


def test_a_cloud_that_there_is_not_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="there are auto, off, aws, gcp, azure"):
        detectors("amazon")


def test_a_service_that_never_answers_is_given_up_and_said(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    silent, answered = Preemption("aws"), Preemption("aws")
    answered.sample()
    service.answers["/latest/meta-data/spot/instance-action"] = "[]"
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:1")
    assert silent.sample() == {"aws.answers": 0.0}
    monkeypatch.setattr(preemption, "UNANSWERED_S", 0.0)
    with pytest.raises(TimeoutError, match=r"AWS has given no answer for .*refused"):
        silent.sample()
    assert answered.sample() == {"aws.answers": 0.0}, "it had answered before"
