"""One content, put into several stores at once: each of its pieces is asked for once, and given to all of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tenuto.errors import StoreError
from tenuto.model.records import Receipt
from tenuto.store.contract import Content, Store

_BEHIND: Final = "tenuto-copies"


def put_into_all(stores: Sequence[Store], name: str, content: Content, *, token: str) -> list[Receipt | BaseException]:
    """Puts an object into each of `stores`, side by side: by store its receipt, or what went wrong there, which holds
    up none of the others. What the content itself raises is raised, and is nowhere then."""
    if len(stores) == 1:
        return [_put(stores[0], name, content, token)]
    tee = FanOut(content, len(stores))
    found: list[Receipt | BaseException] = [StoreError(f"{name} was not put", subject=name)] * len(stores)

    def put(taker: int) -> None:
        try:
            found[taker] = tee.into(stores[taker], taker, name, token)
        except BaseException as error:  # noqa: BLE001 - raised below, where all have ended
            found[taker] = error

    others = [threading.Thread(target=put, args=(taker,), name=_BEHIND) for taker in range(1, len(stores))]
    started = _started(others)
    for taker in range(1 + started, len(stores)):
        tee.leave(taker)
    put(0)
    for thread in others[:started]:
        thread.join()
    for taker in range(1 + started, len(stores)):
        found[taker] = _put(stores[taker], name, content, token)
    ends = [one for one in found if isinstance(one, BaseException) and not isinstance(one, Exception)]
    for error in (tee.failure, *ends):
        if error is not None:
            raise error
    return found


def _started(threads: Sequence[threading.Thread]) -> int:
    """How many of them could be started: an interpreter that is shutting down starts none."""
    for number, thread in enumerate(threads):
        try:
            thread.start()
        except RuntimeError:
            return number
    return len(threads)


def _put(store: Store, name: str, content: Content, token: str) -> Receipt | BaseException:
    try:
        return store.put_if_absent(name, content, token=token)
    except Exception as error:  # noqa: BLE001 - told by the store that it is of
        return error


class FanOut:
    """The pieces of `content` for so many `takers`, in step: a piece is valid until the next one is asked for, so that
    no taker is given another before all have done with this one. A taker that is done, or fails, holds nobody up; those
    that begin anew are given the content anew once nobody goes in step any more."""

    def __init__(self, content: Content, takers: int) -> None:
        self.content = content
        self.failure: BaseException | None = None
        """What the content has raised."""
        self._source: Iterator[memoryview] | None = None
        self._changed = threading.Condition()
        self._asked = [0] * takers
        """By taker how many pieces it has asked for; -1: none any more."""
        self._given = 0
        self._piece: memoryview | None = None
        self._asking = False

    def into(self, store: Store, taker: int, name: str, token: str) -> Receipt | BaseException:
        """Puts it into one of the stores."""
        try:
            return _put(store, name, FanOutBranch(self, taker), token)
        finally:
            self.leave(taker)

    def leave(self, taker: int) -> None:
        with self._changed:
            self._asked[taker] = -1
            self._changed.notify_all()

    def await_others(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: all(asked < 0 for asked in self._asked))

    def next(self, taker: int) -> memoryview | None:
        """The piece that this taker has not had yet; None at the end. Raises what the content raises."""
        with self._changed:
            self._asked[taker] += 1
            wanted = self._asked[taker]
            self._changed.notify_all()
            while True:
                if self.failure is not None:
                    raise self.failure
                if self._given >= wanted:
                    return self._piece
                if not self._asking and all(asked in (-1, wanted) for asked in self._asked):
                    self._asking = True
                    break
                self._changed.wait()
        piece: memoryview | None = None
        failure: BaseException | None = None
        try:
            if self._source is None:
                self._source = iter(self.content.pieces())
            piece = next(self._source, None)
        except BaseException as error:  # noqa: BLE001 - raised in every taker
            failure = error
        with self._changed:
            self._asking, self._given = False, wanted
            self._piece, self.failure = piece, failure
            self._changed.notify_all()
        if failure is not None:
            raise failure
        return piece


@dataclass
class FanOutBranch:
    """The content as one of the takers is given it."""

    tee: FanOut
    taker: int
    begun: bool = False

    @property
    def length(self) -> int:
        return self.tee.content.length

    def pieces(self) -> Iterator[memoryview]:
        if self.begun:
            self.tee.leave(self.taker)
            self.tee.await_others()
            yield from self.tee.content.pieces()
            return
        self.begun = True
        yield from iter(self._next, None)

    def _next(self) -> memoryview | None:
        return self.tee.next(self.taker)
