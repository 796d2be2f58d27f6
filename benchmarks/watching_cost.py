"""What `tenuto run` spends on watching the machine: processor time of its sampling process, and of the supervisor's
part, as shares of a core, on the machine as it is."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from tenuto.supervisor.detectors.registry import detectors
from tenuto.supervisor.detectors.sampling import SamplingProcess
from tenuto.supervisor.journal import Journal
from tenuto.supervisor.watching import Recorder, Watching
from tenuto.telemetry.heartbeat import TRAINING, Beat

WATCH_S = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--notices", default="auto")
    arguments = parser.parse_args()

    def report(line: str) -> None:
        print(line, file=sys.stderr)

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "run").write_text(f"{name}\nmain\n{name}")
        recorder = Recorder(directory / "samples.jsonl", report)
        sampling = SamplingProcess(arguments.notices, report)
        watching = Watching(
            detectors(arguments.notices), Journal(None, report), report, sampling=sampling, recorder=recorder
        )
        began_s, spent_s, step = time.monotonic(), 0.0, 0
        while (now_s := time.monotonic()) - began_s < arguments.seconds:
            step += 1
            beats = [Beat(rank, rank, step, TRAINING, now_s, 1, 10.0, 1 << 30) for rank in range(arguments.ranks)]
            at_s = time.process_time()
            watching.observe(directory, beats, now_s)
            spent_s += time.process_time() - at_s
            time.sleep(WATCH_S)
        elapsed_s = time.monotonic() - began_s
        cpu_s = watching.close()
        samples = len((directory / "samples.jsonl").read_text().splitlines())
    found = {
        "seconds": round(elapsed_s, 1),
        "samples": samples,
        "sampling_share": round(cpu_s / elapsed_s, 6),
        "supervisor_share": round(spent_s / elapsed_s, 6),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
