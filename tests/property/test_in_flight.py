"""Several saves in flight against the states that they were taken of: whatever is slow, fails, grows or shrinks, what
does not fail is committed, in order, bit for bit, within the budget."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import tenuto
from support.held_store import held
from tenuto import keep, on
from tenuto.engine.staging.pool import WINDOW_UNIT
from tenuto.errors import StoreError
from tenuto.store.memory import MemoryStore
from tenuto.training import exit_status

KIB = 1 << 10
SIZES = (8 * KIB, 200 * KIB, 700 * KIB)
_names = count()


@dataclass(frozen=True)
class Step:
    """`slow`: held back until nobody else may be in flight, or the end; `size`: of an entry that makes another
    structure; `fails`: at its pack; `waited`: for its own commit."""

    slow: bool
    size: int
    fails: bool
    waited: bool


steps = st.lists(
    st.builds(Step, st.booleans(), st.sampled_from(SIZES), st.booleans(), st.just(False))
    | st.builds(Step, st.just(False), st.sampled_from(SIZES), st.just(False), st.booleans()),
    min_size=1,
    max_size=9,
)


def state_of(number: int, size: int) -> dict[str, Any]:
    source = np.random.default_rng([number, size])
    return {"w": source.random(500), "n": number, f"of {size}": source.integers(0, 256, size, np.uint8)}


@settings(max_examples=30, deadline=None)
@given(steps, st.integers(1, 4), st.none() | st.integers(1, 4))
def test_what_does_not_fail_is_committed_in_order_and_as_it_was(todo: list[Step], k: int, images: int | None) -> None:
    """`images`: how many of the largest state's the budget holds."""
    budget = None if images is None else images * max(WINDOW_UNIT, SIZES[-1] + 64 * KIB)
    name = f"in-flight-{next(_names)}"
    store = held(MemoryStore(name), *(number for number, step in enumerate(todo, 1) if step.slow))
    failing = {number for number, step in enumerate(todo, 1) if step.fails}
    store.failures = {number: [StoreError("not today")] for number in failing}
    state = state_of(0, SIZES[0])
    most, gone = 0, set[int]()

    def let_go(*numbers: int) -> None:
        gone.update(numbers)
        store.let_go(*numbers)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with tenuto.Checkpointer(
            store, state, in_flight=k, save=on.end(), keep=keep.all(), memory_budget=budget
        ) as ckpt:
            training = ckpt._training
            assert training is not None
            saver = training.saving.saver
            for number, step in enumerate(todo, 1):
                fits = saver._pool._fingerprint is None or step.size == todo[max(number - 2, 0)].size
                room = images is None or len(saver.in_flight) < images
                # A save that finds no room waits for those in its way: the first ones of a structure find that out.
                if not (saver.free and fits and room):
                    let_go(*range(number))
                if step.waited:
                    let_go(*range(number + 1))
                state.clear()
                state.update(state_of(number, step.size))
                ckpt.step_done()
                save = ckpt.save(wait=step.waited)
                assert save.step == number and (save.committed or not step.waited)
                buffers = saver._pool.buffers
                # Those that are held for certain: one that was let go may be written, and not say so yet.
                held_now = [one for one in saver.in_flight if todo[one.step - 1].slow and one.step not in gone]
                most = max(most, len(held_now))
                assert budget is None or sum(buffer.memory.nbytes for buffer in buffers) <= budget
            store.let_go()
    exit_status._ending.failures.clear()
    assert most <= k
    wanted = [number for number in range(1, len(todo) + 1) if number not in failing]
    found = tenuto.Repository(MemoryStore(name))
    assert [id.step for id in found.checkpoints()] == wanted[::-1]
    assert [step for step in store.committed if step not in failing] == wanted
    for number in wanted:
        loaded, expected = tenuto.load(MemoryStore(name), step=number).state, state_of(number, todo[number - 1].size)
        assert loaded.keys() == expected.keys()
        assert all(np.array_equal(loaded[key], expected[key]) for key in expected)
