"""Notices of a cloud that takes its machine back: of AWS, Google Cloud and Azure, from their metadata services.

A cloud is asked only where the machine's own firmware names it, or where somebody says so; other machines make no
request. Each service answers on a link-local address; a variable of its own tools puts another one in its place.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final, Protocol

from tenuto.supervisor.detectors.contract import Finding, Name, Sample
from tenuto.units import seconds

DMI: Final = Path("/sys/class/dmi/id")
TIMEOUT_S: Final = 2.0
LEAVE_S: Final = 150.0
"""A notice of more time than this asks for a save first, and to leave once no more than this is left."""
UNANSWERED_S: Final = 300.0
"""A service that has not answered by then is given up, and that is said: some take minutes at first."""
TOKEN_S: Final = 21_600
GOOGLE_S: Final = 30.0
LARGEST: Final = 1 << 20


class Cloud(Protocol):
    """Asks one metadata service."""

    def notices(self) -> Iterator[tuple[str, float]]:
        """Yields `("grace_s", seconds)` for each notice that this machine goes, and `("risk", 1.0)` where that is only
        likely. Raises OSError where nobody answers."""


class Aws:
    """Interruption notices and rebalance recommendations of EC2 spot instances, by IMDSv2."""

    def __init__(self) -> None:
        self._url = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254").rstrip("/")
        self._token, self._until_s = "", 0.0

    def notices(self) -> Iterator[tuple[str, float]]:
        if time.monotonic() > self._until_s:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
            self._token = _asked(f"{self._url}/latest/api/token", headers, "PUT") or ""
            self._until_s = time.monotonic() + TOKEN_S / 2
        headers = {"X-aws-ec2-metadata-token": self._token}
        action = _asked(f"{self._url}/latest/meta-data/spot/instance-action", headers)
        if action is not None:
            found = json.loads(action)
            if found["action"] != "none":
                yield "grace_s", datetime.fromisoformat(found["time"]).timestamp() - time.time()
        if _asked(f"{self._url}/latest/meta-data/events/recommendations/rebalance", headers) is not None:
            yield "risk", 1.0


class Google:
    """Preemption of Compute Engine's spot machines, and maintenance that ends a machine."""

    def __init__(self) -> None:
        host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
        self._url = f"http://{host}/computeMetadata/v1/instance"

    def notices(self) -> Iterator[tuple[str, float]]:
        headers = {"Metadata-Flavor": "Google"}
        if (_asked(f"{self._url}/preempted", headers) or "").strip() == "TRUE":
            yield "grace_s", GOOGLE_S
        event = (_asked(f"{self._url}/maintenance-event", headers) or "").strip()
        if event == "TERMINATE_ON_HOST_MAINTENANCE":
            yield "grace_s", 60.0  # an hour for machines with GPUs, a minute for others: the service does not say
        elif event not in ("", "NONE"):
            yield "risk", 1.0


class Azure:
    """Scheduled events that end or restart this machine."""

    def __init__(self) -> None:
        self._url = os.environ.get("TENUTO_AZURE_METADATA", "http://169.254.169.254").rstrip("/") + "/metadata"
        self._name: str | None = None

    def notices(self) -> Iterator[tuple[str, float]]:
        headers = {"Metadata": "true"}
        if self._name is None:
            path = "instance/compute/name?api-version=2021-02-01&format=text"
            self._name = _asked(f"{self._url}/{path}", headers) or ""
        answer = _asked(f"{self._url}/scheduledevents?api-version=2020-07-01", headers)
        for event in json.loads(answer or "{}").get("Events", ()):
            if self._name and self._name not in event.get("Resources", [self._name]):
                continue  # of another machine of its scale set
            if event.get("EventType") in ("Preempt", "Terminate", "Reboot", "Redeploy"):
                yield "grace_s", _until(event.get("NotBefore"))
            else:
                yield "risk", 1.0  # it stands still for a while


CLOUDS: Final[Mapping[str, Callable[[], Cloud]]] = {"aws": Aws, "gcp": Google, "azure": Azure}
_TITLES: Final = {"aws": "AWS", "gcp": "Google Cloud", "azure": "Azure"}


class Preemption:
    source: Final = "preemption"
    period_s: Final = 5.0

    def __init__(self, cloud: str = "auto") -> None:
        """`cloud`: of CLOUDS; auto: the one that the machine's firmware names; off: none."""
        self._cloud = cloud
        self._asked: Cloud | None = None
        self._began_s = time.monotonic()
        self._answered = False

    def sample(self) -> Mapping[str, float] | None:
        if self._asked is None:
            if self._cloud == "auto":
                self._cloud = recognised() or "off"
            if self._cloud == "off":
                return None
            self._asked = CLOUDS[self._cloud]()
        try:
            found = list(self._asked.notices())
            self._answered = True
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            silent_s = time.monotonic() - self._began_s
            if not self._answered and silent_s >= UNANSWERED_S:
                title = _TITLES.get(self._cloud, self._cloud)
                raise TimeoutError(f"{title} has given no answer for {seconds(silent_s)} ({error})") from error
            self._asked = None  # its token may have become invalid
            return {f"{self._cloud}.answers": 0.0}
        values = {f"{self._cloud}.answers": 1.0}
        graces = [value for name, value in found if name == "grace_s"]
        if graces:
            values[f"{self._cloud}.grace_s"] = max(min(graces), 0.0)
        if len(graces) < len(found):
            values[f"{self._cloud}.risk"] = 1.0
        return values

    def judge(self, sample: Sample) -> Sequence[Finding]:
        if sample.source != self.source:
            return ()
        found = []
        for cloud, values in sample.by_thing().items():
            title, grace_s = _TITLES.get(cloud, cloud), values.get("grace_s")
            if grace_s is not None:
                name: Name = "preemption" if grace_s <= LEAVE_S else "preemption-risk"
                found.append(Finding(name, f"{title} takes this machine in {seconds(grace_s)}", cloud, grace_s))
            elif values.get("risk"):
                found.append(Finding("preemption-risk", f"{title} may take this machine soon", cloud))
        return found


def recognised() -> str | None:
    """Returns which cloud this machine belongs to, by its firmware; None for any other. No network is asked."""

    def firmware(name: str) -> str:
        try:
            return (DMI / name).read_text().strip()
        except OSError:
            return ""

    vendor = firmware("sys_vendor")
    if vendor == "Amazon EC2":
        return "aws"
    if vendor == "Google" or firmware("product_name") == "Google Compute Engine":
        return "gcp"
    if firmware("chassis_asset_tag") == "7783-7084-3265-9085-8269-3286-77":
        return "azure"
    return None


def _until(date: str | None) -> float:
    """Returns in how many seconds a date of HTTP's form is; 0 for none: it has begun."""
    from email.utils import parsedate_to_datetime

    return parsedate_to_datetime(date).timestamp() - time.time() if date else 0.0


def _asked(url: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
    """Returns what the service answers, None for "not found". Raises OSError."""
    import urllib.error
    import urllib.request
    from http.client import HTTPException

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    try:
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            return str(answer.read(LARGEST).decode("utf-8", "replace"))
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise
    except HTTPException as error:
        raise OSError(f"{url}: {error!r}") from error
