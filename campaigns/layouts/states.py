"""Pairs of layouts, and the state of one rank in either of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from campaigns.layouts import trainings
from campaigns.layouts.meshes import DTENSOR, Key, Meshes, draw_dtensor, dtensor_kinds, hold_dtensor, meshes_of
from campaigns.layouts.places import LocalPart, Place, draw_place, hold, kinds_for
from campaigns.layouts.trainings import Spread, Trained
from campaigns.layouts.truth import Leaf, content, draw_leaves, of_leaf
from tenuto.state.declarations import PerRank, Shard, per_rank

OWN: Final = "own/"
PLAIN: Final = {"rate": 0.125, "name": "cosine", "betas": (0.9, 0.999), 3: [True, 2**70, None]}


@dataclass(frozen=True, slots=True)
class Collected:
    """A layout of many leaves, each of which lies in a way of its own."""

    world: int
    places: Mapping[str, Place]


@dataclass(frozen=True, slots=True)
class Pair:
    """One content, and two ways in which it lies over ranks. `arrays`: whether what numpy has is numpy's; `fresh`:
    whether an optimizer has no state yet when it is restored into."""

    number: int
    seed: int
    worlds: tuple[int, int]
    leaves: Sequence[Leaf] = ()
    collected: Sequence[Collected] = ()
    arrays: bool = False
    trained: Trained | None = None
    spreads: Sequence[Spread] = ()
    fresh: bool = False

    @property
    def truth(self) -> str:
        return f"{self.seed} {self.number}"

    @property
    def other(self) -> str:
        """The seed of what lies in a target before it is restored into."""
        return f"{self.truth} other"

    def kinds(self, side: int) -> list[str]:
        """What the layout of one side is made of, for the counts."""
        if self.trained is not None:
            return [self.spreads[side].kind]
        return sorted({place.kind for place in self.collected[side].places.values()})

    def meshes(self) -> list[Key]:
        """All that either side needs, in the order in which they are made."""
        if self.trained is not None:
            return [key for spread in self.spreads for key in trainings.meshes_of_spread(spread)]
        return [key for one in self.collected for key in meshes_of(one.places)]


@dataclass(slots=True)
class Made:
    """One rank's state, and what it holds by path, as it is now."""

    state: dict[str, Any]
    read: Callable[[], dict[str, Any]]


def pairs(seed: int, *, processes: bool, worlds: Sequence[int]) -> Iterator[Pair]:
    """Without end. `processes`: whether ranks are processes that have a group; else nothing lies on a mesh."""
    number = 0
    while True:
        chance = random.Random(f"{seed} {processes} {number}")
        chosen = chance.choice(worlds), chance.choice(worlds)
        if processes and number % 2:
            yield _draw_training(chance, number, seed, chosen)
        else:
            yield _draw_collection(chance, number, seed, chosen, processes)
        number += 1


def _draw_training(chance: random.Random, number: int, seed: int, worlds: tuple[int, int]) -> Pair:
    trained = Trained(
        chance.choice(trainings.WIDTHS), chance.choice(trainings.DTYPES), chance.choice(list(trainings.OPTIMIZERS))
    )
    spreads = [trainings.draw_spread(chance, world, trained) for world in worlds]
    return Pair(number, seed, worlds, trained=trained, spreads=spreads, fresh=chance.random() < 0.5)


def _draw_collection(chance: random.Random, number: int, seed: int, worlds: tuple[int, int], processes: bool) -> Pair:
    leaves = draw_leaves(chance, chance.randint(4, 9))
    found = []
    for world in worlds:
        places: dict[str, Place] = {}
        for leaf in leaves:
            if processes and chance.random() < 0.5:
                kind = chance.choice(dtensor_kinds(leaf, world))
                places[leaf.path] = draw_dtensor(chance, leaf, world, kind)
            else:
                places[leaf.path] = draw_place(chance, leaf, world, chance.choice(kinds_for(leaf, world)))
        found.append(Collected(world, places))
    arrays = not processes and chance.random() < 0.5
    return Pair(number, seed, worlds, leaves=leaves, collected=found, arrays=arrays)


# -- one rank's state ----------------------------------------------------------------------------------------------


def make(pair: Pair, side: int, seed: str, rank: int, meshes: Meshes | None = None, *, fresh: bool = False) -> Made:
    """The state of `rank` in one of the two layouts, with the content that `seed` has. On all ranks in one order where
    there are meshes."""
    if pair.trained is not None:
        assert meshes is not None, "trainings need processes"
        training = trainings.build(pair.trained, pair.spreads[side], seed, rank, meshes, stepped=not fresh)
        return Made({**training.state(), "plain": dict(PLAIN)}, training.read)
    layout, values, locals_ = pair.collected[side], {}, {}
    for leaf in pair.leaves:
        place, whole = layout.places[leaf.path], of_leaf(seed, leaf)
        if place.kind in DTENSOR:
            assert meshes is not None, "a mesh needs processes"
            held: LocalPart | None = hold_dtensor(place, whole, meshes)
        else:
            held = hold(place, leaf, whole, rank, layout.world)
        if held is not None:
            held = _as_array(held) if pair.arrays else held
            values[leaf.path], locals_[f"t/{leaf.path}"] = held.value, held.local
    mine = content(seed, f"{OWN}{rank}", torch.int64, (rank + 1, 2))
    state: dict[str, Any] = {
        "t": values,
        "own": per_rank({"numbers": mine, "name": f"rank {rank}"}),
        "plain": dict(PLAIN),
    }
    return Made(state, lambda: {**locals_, **_own(state["own"])})


def _own(mark: PerRank) -> dict[str, Any]:
    return {f"{OWN}numbers": mark.value["numbers"]}


def _as_array(held: LocalPart) -> LocalPart:
    """The same in an array of numpy's, where that has the type."""
    try:
        array = held.local.numpy()
    except TypeError:
        return held
    if isinstance(held.value, torch.Tensor):
        return LocalPart(array, array)
    held.value.value = array
    return LocalPart(held.value, array)


def full_tensors(pair: Pair) -> dict[str, torch.Tensor]:
    """The content as whole tensors, by path."""
    if pair.trained is not None:
        return trainings.full_tensors(pair.trained, pair.truth)
    return {f"t/{leaf.path}": of_leaf(pair.truth, leaf) for leaf in pair.leaves}


def wanted(pair: Pair, side: int, rank: int, held: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """What a target has to hold after a restore: `held`, but what was each rank's own only where as many saved it."""
    if pair.worlds[side] == pair.worlds[1 - side]:
        return dict(held)
    return {path: (before if path.startswith(OWN) else held)[path] for path in held}


__all__ = ["Made", "Pair", "Shard", "full_tensors", "make", "pairs", "wanted"]
