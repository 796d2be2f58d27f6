"""What a script holds besides its state is named by its variable."""

import random

import numpy as np

from tenuto.certify.probe import uncovered


class Stateful:
    def __init__(self, **held):
        self.held = held

    def state_dict(self):
        return self.held

    def load_state_dict(self, state):
        self.held = state


class Broken(Stateful):
    def state_dict(self):
        raise RuntimeError("not now")


class Wrapper(Stateful):
    def __init__(self, module):
        super().__init__(weights=1)
        self.module = module


def test_generators_and_stateful_objects_are_found_where_they_are():
    model, average, own = Stateful(weights=1), Stateful(weights=2), random.Random(1)
    trainer = {"ema": [average], "model": model}
    noise = np.random.default_rng(1)
    assert uncovered(({"model": model, "noise": noise}, None)) == (
        f"average ({__name__}.Stateful) is not in `state`",
        "own (random.Random) is not in `state`",
    )
    assert uncovered(({"model": model, "trainer": trainer, "own": own, "noise": noise}, None)) == ()


def test_what_holds_nothing_and_what_wraps_the_state_is_not_named():
    model = Stateful(weights=1)
    loss, wrapped = Stateful(), Wrapper(model)
    assert uncovered(({"model": model}, None)) == ()
    assert loss.held == {} and wrapped.module is model


def test_what_cannot_answer_is_named():
    broken = Broken()
    assert uncovered(({}, None)) == (f"broken ({__name__}.Broken) is not in `state`",)
    assert broken.held == {}
