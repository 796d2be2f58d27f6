"""Trainings that certify is to judge, by name. `python training.py NAME WHERE`; numpy alone, to start fast."""

import argparse
import os
import random
import subprocess
import sys
import time
from unittest import mock

import numpy as np

import tenuto
from tenuto import every, keep


def begin(seed=0):
    random.seed(seed)
    np.random.seed(seed)
    return {"weights": np.random.rand(4), "momentum": np.zeros(4), "rate": 0.1}


def learn(state, batch=1.0, noise=None):
    noise = np.random.rand(4) if noise is None else noise
    state["momentum"] = 0.9 * state["momentum"] + (state["weights"] - batch) * noise
    state["weights"] = state["weights"] - state["rate"] * state["momentum"]


BATCHES = [np.full(4, float(number)) for number in range(7)]


def exact(where):
    state = begin()
    with tenuto.Checkpointer(where, state, data=BATCHES, save=every(steps=3)) as ckpt:
        for _ in ckpt.steps(1000):
            learn(state, next(ckpt.batches))
            state["rate"] *= 0.99


def epochs(where):
    state = begin()
    with tenuto.Checkpointer(where, state, data=BATCHES, save=every(epochs=1)) as ckpt:
        for _ in ckpt.epochs(100, accumulate=2):
            for batch in ckpt.batches:
                learn(state, batch)
            state["rate"] *= 0.9


def epochs_end(where):
    """Saved with the last batch of an epoch that is not over yet: nobody has asked for another one."""
    state = begin()
    with tenuto.Checkpointer(where, state, data=BATCHES[:3]) as ckpt:
        for _ in ckpt.epochs(100):
            for batch in ckpt.batches:
                learn(state, batch)
            state["rate"] *= 0.9


def step_done(where):
    """Keeps by a metric that it never logs."""
    state = begin()
    with tenuto.Checkpointer(where, state, keep=keep.best(1, "val_loss")) as ckpt:
        ckpt.restore()
        while ckpt.step < 1000:
            learn(state)
            ckpt.step_done(step=ckpt.step + 1, loss=float(state["weights"].sum()))


def no_restore(where):
    """Forgets to restore."""
    state = begin()
    with tenuto.Checkpointer(where, state, resume_from=None) as ckpt:
        for _ in ckpt.steps(1000):
            learn(state)


def unseeded(where):
    state = begin(seed=None)
    with tenuto.Checkpointer(where, state) as ckpt:
        for _ in ckpt.steps(1000):
            learn(state)


def unseeded_unused(where):
    """Python's generator is neither seeded nor asked for anything."""
    state = begin()
    random.seed()
    with tenuto.Checkpointer(where, state) as ckpt:
        for _ in ckpt.steps(1000):
            learn(state)


class Augmented:
    """Batches that are changed by a generator that nobody seeds."""

    def __len__(self):
        return len(BATCHES)

    def __getitem__(self, index):
        if index >= len(self):
            raise IndexError
        return BATCHES[index] + np.random.default_rng().random(4)

    def __iter__(self):
        return (self[index] for index in range(len(self)))


def augmented(where):
    state = begin()
    with tenuto.Checkpointer(where, state, data=Augmented()) as ckpt:
        for _ in ckpt.steps(1000):
            learn(state, next(ckpt.batches))


def nondeterministic(where):
    state = begin()
    with tenuto.Checkpointer(where, state, data=BATCHES) as ckpt:
        for step in ckpt.steps(1000):
            batch = next(ckpt.batches)
            learn(state, batch + (time.time_ns() % 1000 if step == 4 else 0))


class Average:
    """A moving average of the weights, which the training follows."""

    def __init__(self, weights):
        self.weights = weights.copy()

    def update(self, weights):
        self.weights = 0.9 * self.weights + 0.1 * weights

    def state_dict(self):
        return {"weights": self.weights}

    def load_state_dict(self, state):
        self.weights = state["weights"]


def average(where):
    state = begin()
    average = Average(state["weights"])
    with tenuto.Checkpointer(where, state) as ckpt:
        for _ in ckpt.steps(1000):
            learn(state, average.weights)
            average.update(state["weights"])


def harmless_average(where):
    """An average that is lost, and that nothing in `state` can show."""
    state = begin()
    average = Average(state["weights"])
    with tenuto.Checkpointer(where, state) as ckpt:
        for _ in ckpt.steps(1000):
            learn(state)
            average.update(state["weights"])


def scheduler(where):
    """A rate that follows from a count that is not in `state`."""
    state = {**begin(), "optimizer": {"param_groups": [{"lr": 0.1}]}}
    with tenuto.Checkpointer(where, state) as ckpt:
        for number, _ in enumerate(ckpt.steps(1000)):
            learn(state)
            state["optimizer"]["param_groups"][0]["lr"] = 0.1 * 0.9**number


def generator(where):
    state, own = begin(), np.random.default_rng(3)
    with tenuto.Checkpointer(where, state) as ckpt:
        for _ in ckpt.steps(1000):
            learn(state, noise=own.random(4))


class Rotating:
    """Starts anew in each process: it cannot be put back."""

    def __iter__(self):
        return iter(BATCHES)


def data(where):
    state = begin()
    with tenuto.Checkpointer(where, state, data=Rotating()) as ckpt:
        for _ in ckpt.steps(1000):
            learn(state, next(ckpt.batches))


class Forgetful(Average):
    def load_state_dict(self, state):
        pass


def forgetful(where):
    state = begin()
    state["average"] = Forgetful(state["weights"])
    with tenuto.Checkpointer(where, state) as ckpt:
        for _ in ckpt.steps(1000):
            learn(state)
            state["average"].update(state["weights"])


def broken_restore(where):
    """What a fault in Tenuto itself would look like: the generators are not put back."""
    with mock.patch("tenuto.state.position.training_position.apply", lambda state: ()):
        exact(where)


def warm_up(where):
    """Draws after the restore, which nothing before the kill did at this step."""
    state = begin()
    with tenuto.Checkpointer(where, state) as ckpt:
        for number, _ in enumerate(ckpt.steps(1000)):
            if number == 0:
                np.random.rand()
            learn(state)


def ends_early(where):
    state = begin()
    with tenuto.Checkpointer(where, state) as ckpt:
        for _ in ckpt.steps(5):
            learn(state)


def crashes(where):
    state = begin()
    with tenuto.Checkpointer(where, state) as ckpt:
        for step in ckpt.steps(1000):
            learn(state)
            if step == 2:
                print("about to divide")
                1 / 0  # noqa: B018


def no_checkpointer(where):
    print("trained without saving")


def elsewhere(where):
    with tenuto.Checkpointer(where + "-other", begin()) as ckpt:
        for _ in ckpt.steps(1000):
            pass


def two(where):
    state = begin()
    with tenuto.Checkpointer(where, state), tenuto.Checkpointer(where, state, run="other"):
        pass


def asks(where):
    input("Overwrite? ")


def hangs(where):
    state = begin()
    with tenuto.Checkpointer(where, state) as ckpt:
        for _ in ckpt.steps(1000):
            time.sleep(3600)


def catches(where):
    """Will not be told to leave."""
    state = begin()
    ckpt = tenuto.Checkpointer(where, state)
    loop = ckpt.steps(1000)
    while True:
        try:
            next(loop)
        except BaseException as error:  # noqa: BLE001
            print(f"caught {error!r}")
        learn(state)


def children(where):
    """Starts processes, one of them in a session of its own."""
    state = begin()
    for apart in (False, True):
        sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=apart)
        with open(os.environ["CHILDREN"], "a") as file:
            file.write(f"{sleeper.pid}\n")
    with tenuto.Checkpointer(where, state) as ckpt:
        for _ in ckpt.steps(1000):
            learn(state)
            if "SLOWLY" in os.environ:
                time.sleep(0.05)


def moves(where):
    """Works in a directory of its own."""
    state = begin()
    os.chdir("/")
    with tenuto.Checkpointer(where, state) as ckpt:
        for _ in ckpt.steps(1000):
            learn(state)


def saves_too(where):
    """Saves by itself as well, asks whether there is anything to resume from, and exports."""
    state = begin()
    print("found", os.path.exists(where))
    with tenuto.Checkpointer(where, state) as ckpt:
        for step in ckpt.steps(1000):
            learn(state)
            if step % 2:
                ckpt.save(wait=True)
            if step == 3:
                tenuto.save({"weights": state["weights"]}, where, run="export")


CASES = (
    *("exact", "epochs", "epochs_end", "step_done", "no_restore"),
    *("unseeded", "unseeded_unused", "augmented", "nondeterministic"),
    *(
        "average",
        "harmless_average",
        "scheduler",
        "generator",
        "data",
        "forgetful",
        "broken_restore",
        "warm_up",
        "ends_early",
        "crashes",
    ),
    *("no_checkpointer", "elsewhere", "two", "asks", "hangs", "catches", "saves_too"),
)

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("where")
    given = parser.parse_args()
    globals()[given.name](given.where)
