"""What `certify` tells the Checkpointer of the script that it runs, through the environment."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from holdfast.errors import UsageError
from holdfast.model.checkpoint import Owner
from holdfast.repo.liveness import judge, this_process
from holdfast.store.contract import Where
from holdfast.store.registry import open_store

VARIABLE: Final = "HOLDFAST_CERTIFY"


@dataclass(frozen=True, slots=True)
class Order:
    """where: the place that the script is told to use, and must not touch. scratch: the one that it gets instead.
    trail: the file that it tells its steps in, of several ranks the first one (`trail_of`: each). save_at: the step to
    save, and to be killed after; None saves nothing. last: the step after which to leave. owner: who asks; when that
    process is gone, there is nothing left to do.
    """

    where: str
    scratch: str
    trail: str
    last: int
    save_at: int | None
    owner: Owner

    def environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(dataclasses.asdict(self))}

    def trail_of(self, rank: int) -> str:
        return f"{self.trail}.rank-{rank:05}" if rank else self.trail

    def means(self, where: Where) -> bool:
        """Whether the script means by `where` the place that is redirected."""
        return same_place(where, self.where)

    def orphaned(self) -> bool:
        return judge(self.owner) == "dead"


def same_place(one: Where, other: Where) -> bool:
    """Whether both name one store. Opening touches nothing."""
    return open_store(one).url.rstrip("/") == open_store(other).url.rstrip("/")


def order_of(where: str, scratch: str, trail: str, *, last: int, save_at: int | None) -> Order:
    return Order(where, scratch, trail, last, save_at, this_process())


def standing(environment: Mapping[str, str] | None = None) -> Order | None:
    """The order that this process stands under; None outside `certify`. UsageError for one that cannot be read."""
    text = (os.environ if environment is None else environment).get(VARIABLE)
    if not text:
        return None
    try:
        found: dict[str, Any] = json.loads(text)
        return Order(**{**found, "owner": Owner(**found["owner"])})
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"{VARIABLE} is set and says nothing that can be understood: {error}",
            subject=VARIABLE,
            hint=f"unset {VARIABLE}: only `holdfast certify` sets it, for what it runs",
        ) from None
