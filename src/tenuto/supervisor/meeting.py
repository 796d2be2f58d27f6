"""The process through which the supervisors of a job meet, one on each node, in a directory that all nodes share.

In `ranks` each node is a rank. Each start of the training has a session of its own, which only live processes can join:
what an earlier job or a killed supervisor has left in the directory is in nobody's way. There all nodes say how their
last start has ended, the first node says what follows, and then a round lasts as long as the training: until it has
finished on all nodes, or has ended otherwise on one of them, or a node is lost.

A directory that does not answer holds up this process, and never the supervisor or the training. It says each second
that it lives: one that is stopped is found too. It ends with the pipe to it, and then tells the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Final, Literal

from tenuto.errors import RankFailed, RanksError, RankStoreLost
from tenuto.ranks.agreement import Agreement
from tenuto.ranks.contract import KVStore, Settings
from tenuto.ranks.handshake import PHASE
from tenuto.ranks.kv.shared_files import SharedFiles, SharedFilesKVStore
from tenuto.ranks.round import Round
from tenuto.ranks.session import decode
from tenuto.record import record
from tenuto.supervisor.decide import Kind
from tenuto.supervisor.helper_process import HelperProcess
from tenuto.units import seconds

What = Literal["finished", "ended", "leave", "lost"]
FINISHED: Final[Kind] = "finished"
LEFT: Final[Kind] = "asked to leave"
_UNTIL_LOST_S: Final = 10 * 365 * 86400.0
"""As long as it takes: what ends such a wait early is the loss of a node, or of the directory."""
_CLOSE_S: Final = 5.0
"""How long it may take to tell the others that it ends."""
_ALIVE_S: Final = 1.0
_SILENT_S: Final = 5.0
"""How much longer than another node, or the directory, this process may give no sign of life."""
_BEGIN_S: Final = 60.0
"""And until its first one: an interpreter starts."""
_ODD: Final = 200
_MEET: Final = "where the ranks meet, "
"""Stands in each error of a key-value store before what is wrong with it; `_WAITED` after it."""
_WAITED: Final = "; waited for "


@record
class Outcome:
    """How a start has ended, for all nodes alike. what: "finished" on all; "ended" on one, or is to "leave" there; or
    "lost", a node or the directory. `nodes`: those concerned, none where it is the directory. `evidence`: in words."""

    what: What
    nodes: tuple[int, ...]
    evidence: str


@record
class Answer:
    """What has come of a meeting. `brought`: by each node, on the first one, which then has to `decide`. `verdict`:
    what it has decided. `error`: why there is no meeting; of which class, `kind`; and of which `nodes`."""

    brought: Sequence[Mapping[str, Any]] = ()
    verdict: Mapping[str, Any] | None = None
    error: str = ""
    kind: str = ""
    nodes: tuple[int, ...] = ()


class Meeting:
    """The supervisor's side; it waits for nothing."""

    def __init__(self, directory: Path, node: int, nodes: int, patience_s: float, facts: Mapping[str, str]) -> None:
        """patience_s: how long a node, or the directory, may give no sign of life. facts: equal on all nodes."""
        self._patience_s = patience_s
        self._arguments = (str(directory), str(node), str(nodes), str(patience_s), json.dumps(dict(facts)))
        self._start()
        self._answers: list[Answer] = []
        self._outcomes: list[Outcome] = []

    def _start(self) -> None:
        # Not the supervisor's stderr: whoever reads that waits for its end, and this process may not be able to end.
        self._process = HelperProcess(__name__, *self._arguments, stderr=subprocess.STDOUT)
        self._odd = ""
        self._ended = "the process that meets the other nodes has ended"
        self._silence_s = self._patience_s + _BEGIN_S
        self._heard_s = self._looked_s = time.monotonic()

    def begin(self, brought: Mapping[str, Any], within_s: float) -> None:
        """Has it meet the others before the next start. `answer` gives what comes of it."""
        if self._process.ended:
            self._process.close(0.0)
            self._start()
        self._answers, self._outcomes = [], []
        self._process.put({"begin": brought, "within_s": within_s})

    def decide(self, verdict: Mapping[str, Any]) -> None:
        """Tells all nodes what follows; the first node does."""
        self._process.put({"verdict": verdict})

    def announce(self, kind: Kind, evidence: str) -> None:
        """Tells the others how the training here has ended, or that it is asked to leave."""
        self._process.put({"kind": kind, "evidence": evidence})

    def answer(self) -> Answer | None:
        self._read()
        return self._answers.pop(0) if self._answers else None

    def outcome(self) -> Outcome | None:
        """Returns how this start has ended; None while no node has said so."""
        self._read()
        return self._outcomes[0] if self._outcomes else None

    def close(self) -> None:
        """Leaves the others, who lose this node if they still wait for it. May be called again."""
        self._process.close(_CLOSE_S)

    def _read(self) -> None:
        lines = self._process.lines()
        self._end_if_silent(heard=bool(lines))
        for line in lines:
            try:
                name, values = json.loads(line)
                if name == "outcome":
                    self._outcomes.append(Outcome(values["what"], tuple(values["nodes"]), values["evidence"]))
                elif name == "answer":
                    self._answers.append(Answer(**values))
            except (ValueError, TypeError):  # what its interpreter prints: it may say why it ends
                self._odd = f" ({line.decode(errors='replace').strip()[:_ODD]})"
        if self._process.ended:
            self._outcomes = self._outcomes or [Outcome("lost", (), self._ended + self._odd)]
            self._answers = self._answers or [Answer(error=self._ended + self._odd)]

    def _end_if_silent(self, *, heard: bool) -> None:
        now_s = time.monotonic()
        paused = now_s - self._looked_s > _SILENT_S  # nothing is concluded from a time in which nobody looked
        self._looked_s = now_s
        if heard:
            self._silence_s = self._patience_s + _SILENT_S
        if heard or paused:
            self._heard_s = now_s
        elif now_s - self._heard_s > self._silence_s and not self._process.ended:
            self._ended = f"the process that meets the other nodes has not answered for {seconds(self._silence_s)}"
            self._process.close(0.0)


class _SlowStore(SharedFilesKVStore):
    """Looked at twice a second: it is looked at for days."""

    longest_pause_s: Final = 0.5  # type: ignore[misc]


@record
class _Nodes(SharedFiles):
    def kv_store(self) -> KVStore:
        return _SlowStore(Path(self.directory))


class MeetingProcess:
    """The process itself."""

    def __init__(
        self, directory: Path, node: int, nodes: int, *, patience_s: float, facts: Mapping[str, str], out: int
    ) -> None:
        """`out`: a descriptor, of a pipe."""
        self._facts = facts
        self._directory = directory
        self._ranks = _Nodes(directory / "supervisors", node, nodes)
        beat_s = min(Settings().beat_s, patience_s / 8)  # several that do not come are a silence
        self._settings = Settings(beat_s, dead_after_s=patience_s, answer_s=patience_s)
        self._out = out
        self._writing = threading.Lock()
        self._verdicts: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self._agreement: Agreement | None = None
        self._start: Round | None = None
        """The round that lasts as long as the training."""

    def run(self, requests: IO[str]) -> None:
        """Does what each line asks for, until `requests` ends."""
        threading.Thread(target=self._live, name="alive", daemon=True).start()
        for line in requests:
            request = json.loads(line)
            if "begin" in request:
                self._leave()
                wanted = request["begin"], request["within_s"]
                threading.Thread(target=self._met, args=wanted, name="meeting", daemon=True).start()
            elif "verdict" in request:
                self._verdicts.put(request["verdict"])
            else:
                self._announce(request)
        threading.Timer(_CLOSE_S, os._exit, (1,)).start()  # a directory that does not answer is told nothing
        self._leave()

    def _live(self) -> None:
        while True:
            self._write("alive", {})
            time.sleep(_ALIVE_S)

    def _leave(self) -> None:
        agreement, self._agreement, self._start = self._agreement, None, None
        if agreement is not None:
            agreement.close("its supervisor has ended")

    def _meet(self, brought: Mapping[str, Any], within_s: float) -> None:
        """Meets the others, and then waits for the end of the start."""
        try:
            agreement = self._agreement = Agreement.open(self._ranks, self._facts, within_s, self._settings)
            start = self._start = agreement.round("start")  # already: one that is to leave now says so there
            meeting = agreement.round("meeting")
            meeting.send(json.dumps(brought).encode(), again=True)
            if agreement.is_coordinator:
                brought_by_all = [json.loads(one) for one in meeting.gather(within_s)]
                self._write("answer", asdict(Answer(brought=brought_by_all)))
                meeting.broadcast(json.dumps(self._verdicts.get()).encode())
            verdict = json.loads(meeting.receive(_UNTIL_LOST_S))
            self._write("answer", asdict(Answer(verdict=verdict)))
        except RanksError as error:
            answer = Answer(error=self._words(error), kind=type(error).__name__, nodes=error.ranks)
            self._write("answer", asdict(answer))
            return
        if verdict["restart"]:
            self._write("outcome", asdict(self._outcome(agreement, start)))

    def _met(self, brought: Mapping[str, Any], within_s: float) -> None:
        """Meets the others; what nobody expects, such as a system that starts no thread, is said too."""
        try:
            self._meet(brought, within_s)
        except Exception as error:  # noqa: BLE001 - the supervisor waits for a word
            words = f"{type(error).__name__}: {error}"
            self._write("answer", asdict(Answer(error=words)))
            self._write("outcome", asdict(Outcome("lost", (), words)))

    def _outcome(self, agreement: Agreement, start: Round) -> Outcome:
        try:
            if agreement.is_coordinator:
                said = [json.loads(one)["kind"] for one in start.gather(_UNTIL_LOST_S)]
                if all(kind == FINISHED for kind in said):  # else the round is about to fail
                    start.broadcast(b"")
            start.receive(_UNTIL_LOST_S)
        except RankStoreLost as error:
            return Outcome("lost", (), self._words(error))
        except RanksError as error:
            left = isinstance(error, RankFailed)
            why = self._statement(agreement, start, error.ranks[0]) if left else None
            if why is None or why["kind"] == FINISHED:
                silent = f"no sign of life for {self._settings.dead_after_s:g} s"
                return Outcome("lost", error.ranks, "its supervisor has ended" if left else silent)
            what: What = "leave" if why["kind"] == LEFT else "ended"
            return Outcome(what, error.ranks, f"{why['kind']} ({why['evidence']})")
        return Outcome("finished", (), "status 0")

    def _words(self, error: RanksError) -> str:
        """Returns an error of ranks as one of nodes."""
        if isinstance(error, RankStoreLost):
            wrong, _, _ = error.message.rpartition(_MEET)[2].partition(_WAITED)
            return f"{self._directory}, where the nodes meet, {wrong}"
        words = error.message.removeprefix(f"{PHASE}: ").replace("world size", "--nodes")
        return re.sub(r"(?<!-)\brank(s?)\b", r"node\1", words)

    def _statement(self, agreement: Agreement, start: Round, node: int) -> Mapping[str, Any] | None:
        """Returns what a node said of its end; None if it left without a word."""
        session, key = agreement.session, start.message_key(node)
        try:
            raw = session.ask(lambda timeout: session.kv_store.get(key, timeout=timeout), start.phase)
            return None if raw is None else dict(json.loads(decode(raw, session.id, start.name, node).data))
        except RanksError:
            return None

    def _announce(self, end: Mapping[str, Any]) -> None:
        """Tells the others how the training here ends."""
        start = self._start
        if start is not None:
            with contextlib.suppress(RanksError):  # whoever waits for the end of the start finds the directory lost too
                start.send(json.dumps(end).encode(), again=True)
                if end["kind"] != FINISHED:
                    start.fail(end["evidence"])

    def _write(self, name: str, values: Mapping[str, Any]) -> None:
        data = json.dumps([name, values]).encode() + b"\n"
        with contextlib.suppress(OSError), self._writing:  # the supervisor has ended, and with it what `run` reads
            while data:
                data = data[os.write(self._out, data) :]


def main(directory: str, node: str, nodes: str, patience: str, facts: str) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # a scheduler signals all processes: this one ends after its supervisor
    MeetingProcess(
        Path(directory), int(node), int(nodes),
        patience_s=float(patience), facts=json.loads(facts), out=sys.stdout.fileno(),
    ).run(sys.stdin)  # fmt: skip
    os._exit(0)  # whatever a thread waits for


if __name__ == "__main__":
    main(*sys.argv[1:])
