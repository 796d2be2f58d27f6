"""One target under a coverage-guided fuzzer, in a process of its own: `python -m campaigns.fuzz.run NAME …`.

What follows the name goes to libFuzzer as it is. Every 32nd input is run with its memory measured.
"""

from __future__ import annotations

import itertools
import sys
import warnings

import atheris

# All of ours inside: a module that is imported before is not instrumented, and nothing guides the fuzzer through it.
OURS = ["tenuto.repo", "tenuto.model", "tenuto.engine.staging", "tenuto.state", "tenuto.codec"]
with atheris.instrument_imports(include=OURS):
    from campaigns.fuzz.audit import watched
    from campaigns.fuzz.seeds import make
    from campaigns.fuzz.targets import TARGETS


MEASURED = 32


def main() -> None:
    target = TARGETS[sys.argv[1]]
    numbers = itertools.count()
    warnings.simplefilter("ignore")
    for data in make()[target.name]:
        target(data)  # what is imported where it is used is there from now on

    def one(data: bytes) -> None:
        watched(target, data, memory=next(numbers) % MEASURED == 0)

    atheris.Setup([sys.argv[0], *sys.argv[2:]], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
