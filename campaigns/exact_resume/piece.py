"""One process of one training: `python -m campaigns.exact_resume.piece CASE WHERE RUN [STEP HOW]`."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

from campaigns.exact_resume.cases import CASES, CONTROLS, End
from campaigns.exact_resume.training import piece


def main(arguments: list[str]) -> int:
    name, where, run, *rest = arguments
    how: Any = rest[1] if rest else None
    warnings.simplefilter("ignore")
    return piece({**CASES, **CONTROLS}[name], Path(where), run, End(int(rest[0]), how) if rest else None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
