"""The sampling process: reads what detectors watch, each in a thread of its own, and writes samples into a pipe.

A disk or a driver that does not answer holds up its own thread alone, and the supervisor never.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, Final

from tenuto.supervisor.detectors.contract import Detector, Sample
from tenuto.supervisor.detectors.disk import Disk
from tenuto.supervisor.detectors.registry import detectors
from tenuto.supervisor.helper_process import HelperProcess

OWN: Final = "sampling"
"""The source of the samples about this process itself: `cpu_s`, the processor time that it has taken."""
OWN_PERIOD_S: Final = 60.0
END_S: Final = 5.0


class SamplingProcess:
    """The supervisor's side. `report` gets a line where something can no longer be watched."""

    def __init__(self, notices: str, report: Callable[[str], None]) -> None:
        self._report = report
        self._process = HelperProcess(__name__, notices)
        self._places: Sequence[str] = ()
        self._said_odd = False
        self.cpu_s = 0.0
        """Processor time that it has taken, as far as it has said so."""

    def watch(self, places: Sequence[str]) -> None:
        """Has these directories sampled from now on."""
        if places != self._places:
            self._places = places
            self._process.put(list(places))

    def take(self) -> list[Sample]:
        """Returns the samples that have come since the last call. Does not wait."""
        running = not self._process.ended
        lines = self._process.lines()
        if running and self._process.ended:
            self._report("the machine is not watched any more: the process that samples it has ended")
        return self._samples(lines)

    def _samples(self, lines: Sequence[bytes]) -> list[Sample]:
        found = []
        for line in lines:
            try:
                sample = Sample.read(line.decode())
            except ValueError:  # what its interpreter or a library prints: no reason to end the supervisor
                self._report_odd(line)
                continue
            if sample.kind is not None:
                self._report(f"{sample.source} is not watched any more: {sample.kind}")
                continue
            self.cpu_s = sample.values.get("cpu_s", self.cpu_s) if sample.source == OWN else self.cpu_s
            found.append(sample)
        return found

    def _report_odd(self, line: bytes) -> None:
        if not self._said_odd:
            self._said_odd = True
            self._report(f"the process that samples the machine prints something that is not a sample: {line[:80]!r}")

    def close(self) -> None:
        """Ends it. May be called again."""
        self._samples(self._process.close(END_S))  # its own account is the last line


class Sampling:
    """The process itself."""

    def __init__(self, watched: Sequence[Detector], out: int) -> None:
        """`out`: a descriptor, of a pipe."""
        self._watched = watched
        self._out = out
        self._writing = threading.Lock()
        self._due = {detector.source: threading.Event() for detector in watched}
        """Set to sample at once."""

    def run(self, requests: IO[str]) -> None:
        """Samples until `requests` ends; each of its lines holds the directories to sample from then on."""
        for detector in self._watched:
            threading.Thread(target=self._always, args=(detector,), name=detector.source, daemon=True).start()
        threading.Thread(target=self._account, name=OWN, daemon=True).start()
        for line in requests:
            for detector in self._watched:
                if isinstance(detector, Disk):
                    detector.places = json.loads(line)
                    self._due[detector.source].set()
        self._put(Sample(time.time(), OWN, {"cpu_s": time.process_time()}))

    def _always(self, detector: Detector) -> None:
        while True:
            try:
                values = detector.sample()
            except Exception as error:  # noqa: BLE001 - a thread's exception would reach nobody; the others go on
                self._put(Sample(time.time(), detector.source, kind=f"{type(error).__name__}: {error}"))
                return
            if values is None:
                return
            finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
            if finite:
                self._put(Sample(time.time(), detector.source, finite))
            self._due[detector.source].wait(detector.period_s)
            self._due[detector.source].clear()

    def _account(self) -> None:
        while True:
            time.sleep(OWN_PERIOD_S)
            self._put(Sample(time.time(), OWN, {"cpu_s": time.process_time()}))

    def _put(self, sample: Sample) -> None:
        with self._writing, contextlib.suppress(OSError):  # the supervisor has ended, and with it what `run` reads
            os.write(self._out, sample.line().encode() + b"\n")


if __name__ == "__main__":
    Sampling(detectors(sys.argv[1]), sys.stdout.fileno()).run(sys.stdin)
    os._exit(0)  # whatever a thread waits for
