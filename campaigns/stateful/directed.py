"""Short histories that random ones come to rarely, by the same rules and the same model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from campaigns.stateful.machine import Product


class Drawn:
    """Draws what a history says, in its order, instead of something random."""

    def __init__(self, *values: Any) -> None:
        self._values = iter(values)

    def draw(self, strategy: Any) -> Any:
        return next(self._values)


def others_rest_on_what_goes(one: Product) -> None:
    """Retention lets go of checkpoints whose data files later ones name."""
    _train(one, "dedupe", hours=(0, 0, 0))
    one.retain(data=Drawn(one.alive[0]), n=1, pinned_between=False)


def renamed_and_collected(one: Product) -> None:
    """The copies of a renamed run share data files with the originals, which lie in the trash."""
    _train(one, "plain", hours=(0,))
    one.rename(data=Drawn("main"), ended=True)
    one.collect_now()


def hours_apart(one: Product) -> None:
    """Ages count from the older one of the two newest: of three checkpoints that lie two hours apart all stay."""
    _train(one, "plain", hours=(2, 2))
    one.keep_by_hand(data=Drawn("main", False), which="within", n=2, ended=True)


DIRECTED: Final[Sequence[Callable[[Product], None]]] = (others_rest_on_what_goes, renamed_and_collected, hours_apart)


def _train(one: Product, encoding: Any, *, hours: Sequence[int]) -> None:
    one.resume(data=Drawn(("main", 0)), back=0, fresh=False, takeover=False, encoding=encoding)
    for between in hours:
        one.save(data=Drawn(one.alive[0]), count=1, hours=between, point=None)


def run_directed() -> None:
    """Runs each of them; raises what contradicts the model."""
    for history in DIRECTED:
        one = Product()
        try:
            history(one)
            one.everything_matches_the_model()
        finally:
            one.teardown()
