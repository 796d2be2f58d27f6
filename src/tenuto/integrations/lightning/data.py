"""The position in the data of a fit: that of each training loader, whoever iterates it, and what the epoch has logged
so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from torch.utils.data import DataLoader

from tenuto.integrations.torch.data.resumable import position_of, resumable
from tenuto.state.position.positions import CountedPosition, OrderCursor, WorldSizeChange, has_state, length

READ_AHEAD: Final = (
    "Lightning reads a loader without a length one batch ahead of training: random augmentation in this process, which "
    "that batch draws, is not repeated"
)


class FitPosition(CountedPosition):
    """The position of a fit as this process's own part of a checkpoint: of the training loaders, and of what it has
    logged in the epoch that is not over."""

    kind = "lightning"
    in_source = True

    def __init__(self) -> None:
        super().__init__(self)
        self.over = False
        """Whether the last step was the last of its epoch."""
        self.inside = False
        """Whether training is to continue inside an epoch."""
        self.logged: Callable[[], Mapping[str, Any]] = dict
        """Returns what this process has logged in the open epoch."""
        self.logged_before: Mapping[str, Any] = {}
        """What `logged` returned when the restored checkpoint was made."""
        self.gaps: tuple[str, ...] = ()
        """Why a resume is not exact, besides the data."""
        self.doubts: tuple[str, ...] = ()
        """What may make a resume inexact, and cannot be seen."""
        self._loaders: list[Any] = []
        self._uncounted: list[str] = []
        self._reads_ahead = False
        self._at: list[Any] = []
        """Where the loaders were before the batch that has been read ahead."""
        self._restored: Mapping[str, Any] | None = None
        """The restored position, until the loaders are there."""

    # -- what the loop tells -----------------------------------------------------------------------------------------

    def count(self, loaders: Iterable[Any]) -> list[Any]:
        """Returns loaders that give the same batches and count them."""
        loaders = list(loaders)
        longest = max((length(loader) or 0 for loader in loaders), default=0)
        found = [_counted(loader, runs_out=(length(loader) or longest) < longest) for loader in loaders]
        self._loaders = [one for one in found if has_state(one)]
        self._uncounted = [type(one).__name__ for one in found if not has_state(one)]
        self._reads_ahead = any(length(one) is None for one in found)
        if self.inside:
            self._place()
        return found

    def begin_epoch(self) -> None:
        """Places the loaders behind the restored epoch, which is over. Called behind the first iterators that Lightning
        makes, which it throws away there."""
        if not self.inside:
            self._place()

    def batch_read(self) -> None:
        """Notes that everything but the batch that comes next is trained on, or that the first one is read."""
        self._at = [one.state_dict() for one in self._loaders] if self._reads_ahead else []

    def _place(self) -> None:
        if self._restored is None:
            return
        saved, self._restored = self._restored["loaders"], None
        if len(saved) != len(self._loaders):
            self._add_reason(
                f"training counts {len(self._loaders)} loaders, and counted {len(saved)} when it was saved"
            )
            return
        for loader, state in zip(self._loaders, saved, strict=True):
            loader.load_state_dict(state)

    # -- the position ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if self._restored is not None:
            return dict(self._restored)
        states = self._at if self._reads_ahead and not self.over else [one.state_dict() for one in self._loaders]
        if self.over:  # also where a limit has ended the epoch before its last batch
            states = [{**state, "ended": True} if "ended" in state else state for state in states]
        return {"kind": self.kind, "over": self.over, "loaders": states, "logged": {} if self.over else self.logged()}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._restored = state
        self.over, self.inside, self.logged_before = state["over"], not state["over"], state["logged"]

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError("Lightning iterates its loaders")

    @property
    def reasons(self) -> tuple[str, ...]:
        uncounted = (f"training reads a {name}, whose batches nothing counts" for name in self._uncounted)
        return (
            *super().reasons,
            *self.gaps,
            *uncounted,
            *(reason for one in self._positions for reason in one.reasons),
        )

    @property
    def caveats(self) -> tuple[str, ...]:
        ahead = (READ_AHEAD,) if self._reads_ahead else ()
        return (*self.doubts, *ahead, *(caveat for one in self._positions for caveat in one.caveats))

    @property
    def _positions(self) -> list[Any]:
        return [found for one in self._loaders if (found := position_of(one)) is not None]

    @property
    def _source(self) -> str:
        return "the position of a fit"

    def move(self, moved: WorldSizeChange, cursor: OrderCursor | None, epoch: int, batch: int) -> int:
        self._add_moved_reason(moved, "an interrupted epoch reads its data from the beginning")
        return 0


def _counted(loader: Any, *, runs_out: bool) -> Any:
    """`runs_out`: whether it is shorter than another one, and begun again when it has ended."""
    return resumable(loader, runs_out=runs_out) if issubclass(type(loader), DataLoader) else loader
