"""Fuzzes every reader of bytes: `python -m campaigns.fuzz --seconds 300 --json out.json`.

Needs the extra `fuzz`. Each target runs in a process of its own with bounded memory, from its valid inputs
and from the corpus; an input that breaks a rule is kept, and the exit status is 1.
"""

from __future__ import annotations

import importlib.util
import re
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from campaigns.fuzz.seeds import make
from campaigns.fuzz.targets import MAX_BYTES, TARGETS, Target
from campaigns.result_file import ResultHeader, deliver, options
from tenuto.errors import MissingExtra, install

MODULE: Final = "campaigns.fuzz"
ADDRESS_SPACE: Final = 4 << 30
"""Bytes; the instrumented interpreter with numpy takes the better part of one."""
_DONE: Final = re.compile(r"Done (\d+) runs")
_STATUS: Final = re.compile(r"^#(\d+)\s.*?cov: (\d+) ft: (\d+) corp: (\d+)/", re.MULTILINE)
_ERROR: Final = re.compile(r"^(?:\w+\.)*(\w+(?:Error|Exception|Broken|Exit)\b.*|Broken.*)$", re.MULTILINE)


@dataclass
class Fuzzed:
    """What one target came to."""

    target: str
    executions: int = 0
    coverage: int = 0
    features: int = 0
    corpus: int = 0
    seconds: float = 0.0
    seed: int = 0
    crashes: list[dict[str, str]] = field(default_factory=list)


def fuzz(target: Target, seconds: float, corpus: Path | None, keep: Path, seed: int) -> Fuzzed:
    """Fuzzes one target for so long; after a crash it goes on with what is left of the time."""
    found = Fuzzed(target.name, seed=seed)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tenuto-fuzz-") as place:
        inputs = Path(place) / "inputs"
        inputs.mkdir()
        for number, data in enumerate(make()[target.name]):
            (inputs / f"seed-{number}").write_bytes(data)
        words = Path(place) / "words"
        words.write_text("".join(f'"{_quoted(word)}"\n' for word in target.words))
        given = [corpus / target.name] if corpus is not None and (corpus / target.name).is_dir() else []
        while (left := seconds - (time.monotonic() - began)) > 1 and len(found.crashes) < 10:
            kept = Path(place) / f"crash-{len(found.crashes)}-"
            options = [
                *map(str, (inputs, *given)),
                f"-max_total_time={max(1, int(left))}",
                f"-artifact_prefix={kept}",
                f"-dict={words}",
                f"-seed={seed + len(found.crashes)}",
            ]
            _run(options, left, found)
            crash = next(Path(place).glob(f"{kept.name}*"), None)
            if crash is None:
                break
            keep.mkdir(parents=True, exist_ok=True)
            name = keep / f"{target.name}-{crash.name.rpartition('-')[2][:12]}"
            name.write_bytes(crash.read_bytes())
            found.crashes[-1]["file"] = name.name
    found.seconds = round(time.monotonic() - began, 1)
    return found


def _run(options: list[str], seconds: float, found: Fuzzed) -> None:
    command = [
        *(sys.executable, "-m", "campaigns.fuzz.run", found.target, *options),
        f"-max_len={min(MAX_BYTES, 16384)}",
        "-timeout=20",
        "-rss_limit_mb=2048",
        "-print_final_stats=1",
    ]
    limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))  # noqa: E731
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, errors="replace", preexec_fn=limit, timeout=seconds + 120
    )
    told = done.stdout + done.stderr
    statuses = _STATUS.findall(told)
    if statuses:
        runs, coverage, features, corpus = map(int, statuses[-1])
        found.coverage, found.features = max(found.coverage, coverage), max(found.features, features)
        found.corpus = max(found.corpus, corpus)
        ended = _DONE.search(told)
        found.executions += int(ended[1]) if ended else runs
    if done.returncode != 0:
        errors = _ERROR.findall(told)
        found.crashes.append({"error": errors[-1][:300] if errors else told.strip()[-300:]})


def _quoted(word: str) -> str:
    return "".join(char if char.isalnum() or char in " _!:,[]{}-." else f"\\x{ord(char):02x}" for char in word)


def main(arguments: list[str] | None = None) -> int:
    parser = options(MODULE, __doc__, workers=2)
    parser.add_argument("--seconds", type=float, default=300, help="over all targets, on one core")
    parser.add_argument("--targets", nargs="*", choices=sorted(TARGETS), default=sorted(TARGETS))
    parser.add_argument("--corpus", type=Path, default=Path("tests/attacks/corpus"), help="a directory for each target")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-crashes"), help="where to put what breaks a rule")
    given = parser.parse_args(arguments)
    if importlib.util.find_spec("atheris") is None:
        raise MissingExtra("fuzzing needs atheris", subject="atheris", hint=install("fuzz"))
    each = given.seconds / len(given.targets)
    result_header = ResultHeader(MODULE, arguments, seed=given.seed, packages=["numpy", "atheris"])
    with ThreadPoolExecutor(given.workers) as pool:
        jobs = [pool.submit(fuzz, TARGETS[name], each, given.corpus, given.keep, given.seed) for name in given.targets]
        results = []
        for job in jobs:
            results.append(job.result())
            sys.stderr.write(f"{results[-1]}\n")
    report = result_header.result(
        {
            "seconds_each": each,
            "executions": sum(found.executions for found in results),
            "crashes": sum(len(found.crashes) for found in results),
            "targets_that_never_ran": [found.target for found in results if not found.executions],
            "corpus_kept": sum(1 for path in given.corpus.rglob("*") if path.is_file()),
            "targets": [asdict(found) for found in results],
        }
    )
    deliver(report, given.json)
    return 1 if report["crashes"] or report["targets_that_never_ran"] else 0


if __name__ == "__main__":
    sys.exit(main())
