"""Messages to people about a supervised training: which events are worth one, and how they are sent.

A process of its own sends them, by apprise: a service that does not answer holds up no restart, and what a library
imports and starts stays out of the supervisor. URLs hold tokens, so they go there by a pipe, and are never printed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, Literal

from tenuto import log_lines
from tenuto.errors import MissingExtra, UsageError, install
from tenuto.printable import clean
from tenuto.record import record
from tenuto.supervisor.decide import HOUR_S
from tenuto.units import count, seconds

Severity = Literal["info", "success", "warning", "failure"]
SEND_S: Final = 30.0
"""How long the last messages may take to be sent, once the training has ended."""
_FROM_ENVIRONMENT: Final = "env:"


@record
class Message:
    """`key`: messages of the same one are alike, and sent once within an hour; empty for those that are always sent."""

    severity: Severity
    title: str
    text: str
    key: str = ""


def message_of(event: str, facts: Mapping[str, Any], what: str) -> Message | None:
    """Returns what people are told of an event of the journal; None for most. what: the training, in words."""
    if event == "died" and facts["kind"] == "another node":
        return None  # that node tells it
    if event == "died":
        at = "" if facts.get("step") is None else f" at step {facts['step']}"
        return Message("warning", f"{what}: {facts['kind']}", f"{facts['evidence']}{at}", f"died {facts['kind']}")
    if event == "recovered":
        text = f"as far again at step {facts['step']}, {seconds(facts['lost_s'])} after its end"
        return Message("info", f"{what}: recovered", text, "recovered")
    if event == "ended":
        step = "" if facts.get("step") is None else f"; step {facts['step']}"
        saved = f"; {facts['saved']}" if facts.get("saved") else ""
        text = f"{facts['reason']}; status {facts['status']}{step}{saved}"
        if facts["failed"]:
            return Message("failure", f"{what}: given up", text)
        return Message("success", f"{what}: {'done' if not facts['status'] else 'has left'}", text)
    if facts.get("severity") == "severe":
        text = str(facts.get("evidence") or facts.get("message") or event)
        name = facts.get("finding", event)
        return Message("warning", f"{what}: {name}", text, f"{event} {name} {facts.get('subject', '')}")
    return None


class Repeats:
    """Counts messages that are alike within an hour instead of sending each."""

    def __init__(self) -> None:
        self._sent_s: dict[str, float] = {}
        self._more: dict[str, int] = {}

    def admit(self, message: Message, now_s: float) -> Message | None:
        """Returns the message as it is sent, with how many have been left out before it; None if it is left out."""
        if not message.key:
            return message
        if now_s - self._sent_s.get(message.key, -HOUR_S) < HOUR_S:
            self._more[message.key] = self._more.get(message.key, 0) + 1
            return None
        self._sent_s[message.key] = now_s
        more = self._more.pop(message.key, 0)
        text = f"{message.text} (and {count(more, 'time')} more since the last message)" if more else message.text
        return Message(message.severity, message.title, text, message.key)


def urls_of(texts: Sequence[str]) -> list[str]:
    """Returns the URLs of `--notify`: each as it is, and those that an environment variable has, of `env:NAME`. Raises
    UsageError for one that is not set."""
    found: list[str] = []
    for text in texts:
        name = text.removeprefix(_FROM_ENVIRONMENT)
        if name == text:
            found.append(text)
        elif value := os.environ.get(name, "").split():
            found += value
        else:
            raise UsageError(
                f"--notify {text}: {name} is not set", subject=name, hint=f"{name}='slack://…' tenuto run …"
            )
    return found


def redacted(url: str) -> str:
    """Returns which service a URL is of, without what it holds."""
    scheme, found, _ = url.partition("://")
    return f"{scheme}://…" if found else "…"


class Notifier:
    """Hears the events of a journal, and has messages sent of those that are worth one."""

    def __init__(self, urls: Sequence[str], command: Sequence[str], report: Callable[[str], None]) -> None:
        """Starts the process that sends. Raises MissingExtra without apprise, and UsageError for a URL that it does not
        know."""
        if importlib.util.find_spec("apprise") is None:
            raise MissingExtra("notifications need apprise", hint=install("notify"))
        script = next((word for word in command if word.endswith(".py")), command[0])
        self._what = f"{Path(script).name} on {socket.gethostname()}"
        self._report = report
        self._repeats = Repeats()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], env=environment, text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._put(list(urls))
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        unknown = json.loads(answer) if answer else []
        if not answer or unknown:
            self.close()
            which = ", ".join(redacted(urls[number]) for number in unknown) or "any"
            raise UsageError(
                f"apprise cannot send to {which}",
                subject="--notify",
                hint="https://github.com/caronc/apprise lists the URLs of each service",
            )

    def take(self, event: str, facts: Mapping[str, Any]) -> None:
        message = message_of(event, facts, self._what)
        sent = None if message is None else self._repeats.admit(message, time.monotonic())
        if sent is not None:
            self._put([sent.severity, sent.title, sent.text])

    def close(self) -> None:
        """Waits until all is sent, for SEND_S at most."""
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()
        try:
            self._process.wait(SEND_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            self._report(f"notifications were not sent within {seconds(SEND_S)}")

    def _put(self, value: object) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        try:
            pipe.write(f"{json.dumps(value)}\n")
            pipe.flush()
        except OSError:
            self._report("notifications are no longer sent: the process that sends them has ended")


def serve(requests: IO[str], answers: IO[str]) -> None:
    """Sends messages: the first line holds the URLs, each further one a message. Runs until the pipe ends."""
    import apprise

    urls = json.loads(requests.readline())
    services = [(redacted(url), apprise.Apprise()) for url in urls]
    unknown = [number for number, url in enumerate(urls) if not services[number][1].add(url)]
    answers.write(f"{json.dumps(unknown)}\n")
    answers.flush()
    for line in requests:
        severity, title, text = json.loads(line)
        for name, service in services:
            if not service.notify(body=text, title=title, notify_type=apprise.NotifyType(severity)):
                log_lines.put(f"tenuto: a notification could not be sent to {clean(name)}\n")


if __name__ == "__main__":
    import logging

    logging.disable()  # apprise logs what it sends to, and to whom
    serve(sys.stdin, sys.stdout)
