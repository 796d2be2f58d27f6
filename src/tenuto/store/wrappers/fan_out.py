"""Puts one content into several stores at once: each piece is requested once and given to all of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tenuto.errors import StoreError
from tenuto.model.records import Receipt
from tenuto.store.contract import Content, Store

_THREAD_NAME: Final = "tenuto-copies"


def put_into_all(stores: Sequence[Store], name: str, content: Content, *, token: str) -> list[Receipt | BaseException]:
    """Puts an object into each of `stores` in parallel. Returns per store its receipt or its error, which does not hold
    up the others. An error of the content itself is raised, and then the object is nowhere."""
    if len(stores) == 1:
        return [_put(stores[0], name, content, token)]
    fan_out = FanOut(content, len(stores))
    found: list[Receipt | BaseException] = [StoreError(f"{name} was not put", subject=name)] * len(stores)

    def put(consumer: int) -> None:
        try:
            found[consumer] = fan_out.into(stores[consumer], consumer, name, token)
        except BaseException as error:  # noqa: BLE001 - raised below, after all have ended
            found[consumer] = error

    others = [threading.Thread(target=put, args=(consumer,), name=_THREAD_NAME) for consumer in range(1, len(stores))]
    started = _start(others)
    for consumer in range(1 + started, len(stores)):
        fan_out.leave(consumer)
    put(0)
    for thread in others[:started]:
        thread.join()
    for consumer in range(1 + started, len(stores)):
        found[consumer] = _put(stores[consumer], name, content, token)
    ends = [one for one in found if isinstance(one, BaseException) and not isinstance(one, Exception)]
    for error in (fan_out.failure, *ends):
        if error is not None:
            raise error
    return found


def _start(threads: Sequence[threading.Thread]) -> int:
    """Starts the threads. Returns how many started: an interpreter that is shutting down starts none."""
    for number, thread in enumerate(threads):
        try:
            thread.start()
        except RuntimeError:
            return number
    return len(threads)


def _put(store: Store, name: str, content: Content, token: str) -> Receipt | BaseException:
    try:
        return store.put_if_absent(name, content, token=token)
    except Exception as error:  # noqa: BLE001 - returned as the error of this store
        return error


class FanOut:
    """Hands the pieces of `content` to `takers` consumers in lockstep, because a piece is valid only until the next one
    is requested. A consumer that is done or fails holds up nobody; one that starts over gets the content anew once the
    others are done."""

    def __init__(self, content: Content, consumers: int) -> None:
        self.content = content
        self.failure: BaseException | None = None
        """The error the content raised."""
        self._source: Iterator[memoryview] | None = None
        self._changed = threading.Condition()
        self._requested = [0] * consumers
        """The number of pieces requested per consumer; -1 if it is done."""
        self._given = 0
        self._piece: memoryview | None = None
        self._requesting = False

    def into(self, store: Store, consumer: int, name: str, token: str) -> Receipt | BaseException:
        """Puts the content into one of the stores."""
        try:
            return _put(store, name, FanOutBranch(self, consumer), token)
        finally:
            self.leave(consumer)

    def leave(self, consumer: int) -> None:
        with self._changed:
            self._requested[consumer] = -1
            self._changed.notify_all()

    def await_others(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: all(requested < 0 for requested in self._requested))

    def next(self, consumer: int) -> memoryview | None:
        """Returns the next piece for this consumer, None at the end. Raises what the content raises."""
        with self._changed:
            self._requested[consumer] += 1
            wanted = self._requested[consumer]
            self._changed.notify_all()
            while True:
                if self.failure is not None:
                    raise self.failure
                if self._given >= wanted:
                    return self._piece
                if not self._requesting and all(requested in (-1, wanted) for requested in self._requested):
                    self._requesting = True
                    break
                self._changed.wait()
        piece: memoryview | None = None
        failure: BaseException | None = None
        try:
            if self._source is None:
                self._source = iter(self.content.pieces())
            piece = next(self._source, None)
        except BaseException as error:  # noqa: BLE001 - raised in every consumer
            failure = error
        with self._changed:
            self._requesting, self._given = False, wanted
            self._piece, self.failure = piece, failure
            self._changed.notify_all()
        if failure is not None:
            raise failure
        return piece


@dataclass
class FanOutBranch:
    """The content as one consumer sees it."""

    fan_out: FanOut
    consumer: int
    begun: bool = False

    @property
    def length(self) -> int:
        return self.fan_out.content.length

    def pieces(self) -> Iterator[memoryview]:
        if self.begun:
            self.fan_out.leave(self.consumer)
            self.fan_out.await_others()
            yield from self.fan_out.content.pieces()
            return
        self.begun = True
        yield from iter(self._next, None)

    def _next(self) -> memoryview | None:
        return self.fan_out.next(self.consumer)
