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


def gone_back_and_back_again(one: Product) -> None:
    """A step that two attempts have saved means the one on the line of training, which need not be the newer one's."""
    _train(one, "plain", hours=(0, 0))
    first, _, last = sorted(one.model.committed)
    one.roll_back(data=Drawn("main", first), force=False, ended=True)
    _train(one, "plain", hours=(0,))
    one.roll_back(data=Drawn("main", last), force=False, ended=True)
    _train(one, "plain", hours=(), back=1)


DIRECTED: Final[Sequence[Callable[[Product], None]]] = (
    others_rest_on_what_goes,
    renamed_and_collected,
    hours_apart,
    gone_back_and_back_again,
)


def _train(one: Product, encoding: Any, *, hours: Sequence[int], back: int = 0) -> None:
    """Resumes from the newest, or so many checkpoints before it, and saves; then again, so many hours later each."""
    one.resume(data=Drawn(("main", 0)), back=back, fresh=False, takeover=False, encoding=encoding)
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
