"""What is done about each finding: one table, which users extend, beside that of causes in `strategies`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final, Literal, get_args

from tenuto.errors import UsageError, did_you_mean
from tenuto.supervisor.decide import Kind
from tenuto.supervisor.detectors.contract import FINDINGS, Name

Action = Literal["note", "warn", "save", "leave", "restart"]
"""note: it stands in the journal. The others say it too, and send a message. warn: nothing else. save: the training is
asked for a save, and trains on. leave: it is asked to save and leave, and is not started again here. restart: it is
ended, and started again."""
ACTIONS: Final[tuple[Action, ...]] = get_args(Action)

TABLE: Final[Mapping[Name, Action]] = {
    "memory": "save",
    "gpu-memory": "note",
    "disk-filling": "warn",
    "disk-failing": "warn",
    "disk-slow": "warn",
    "gpu-lost": "restart",
    "gpu-xid": "restart",
    "gpu-ecc": "restart",
    "gpu-error": "note",
    "gpu-hot": "warn",
    "gpu-throttled": "warn",
    "network": "warn",
    "clock": "note",
    "preemption": "leave",
    "preemption-risk": "save",
    "straggler": "warn",
    "slow-steps": "note",
    "risk": "save",
}
"""What is done about each finding unless told otherwise."""

CAUSES_OF: Final[Mapping[Name, Kind]] = {
    "gpu-lost": "device",
    "gpu-xid": "device",
    "gpu-ecc": "device",
    "gpu-error": "device",
    "memory": "out of memory",
    "disk-filling": "disk full",
}
"""The cause of an end that a finding has brought about; "hung" for the others."""
_EXAMPLE: Final = "--on straggler=restart, --on memory=warn"


def written(texts: Iterable[str]) -> tuple[dict[Name, Action], list[str]]:
    """Returns the table with each `FINDING=ACTION` put over it, and the texts that are about causes. Raises UsageError
    for a finding with something that is no action."""
    table, rest = dict(TABLE), []
    for text in texts:
        match = re.fullmatch(r"\s*([\w-]+)\s*=\s*(\S+)\s*", text)
        name = next((one for one in FINDINGS if match is not None and one == match[1]), None)
        if match is None or name is None:
            rest.append(text)
            continue
        action = next((one for one in ACTIONS if one == match[2]), None)
        if action is None:
            raise UsageError(
                f"{text!r}: there is no {match[2]!r}, but {', '.join(ACTIONS)}",
                subject=text,
                hint=did_you_mean(match[2], ACTIONS) or _EXAMPLE,
            )
        table[name] = action
    return table, rest
