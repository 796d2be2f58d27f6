"""What the integration of a framework has to keep, as tests: subclass `AdapterSuite` and give its fixtures.

    class TestMine(AdapterSuite):
        name = "mine"

        def values(self): ...
        def blank(self, value): ...
        def change(self, value): ...
        def content(self, value): ...

Everything goes through what a user calls: `tenuto.save`, `tenuto.load`, `tenuto.Checkpointer`.
"""

from __future__ import annotations

import uuid
from typing import Any

import pytest

import tenuto
from tenuto.errors import StateMismatch
from tenuto.state import frameworks
from tenuto.state.position import rng


class AdapterSuite:
    """The tests. `name` is the framework's top-level module; `immutable`: its tensors are replaced, never written."""

    name: str
    immutable = False

    def values(self) -> dict[str, Any]:
        """Returns tensors of the framework by name, of several dtypes and shapes; one of them called "weights"."""
        raise NotImplementedError

    def blank(self, value: Any) -> Any:
        """Returns a tensor of the same dtype, shape and kind, with other contents."""
        raise NotImplementedError

    def change(self, value: Any) -> Any:
        """Writes something else into a tensor, in place; where they are immutable, returns another one instead."""
        raise NotImplementedError

    def change_all(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            changed = self.change(value)
            state[name] = changed if self.immutable else value

    def content(self, value: Any) -> bytes:
        """Returns a tensor's elements in row-major order, with its dtype and shape."""
        raise NotImplementedError

    def draw(self) -> Any:
        """Draws from the framework's global random generator. Needed where the framework declares `rng`."""
        raise NotImplementedError

    @pytest.fixture
    def place(self) -> str:
        return f"memory://adapter-{uuid.uuid4().hex}"

    def test_it_is_declared(self) -> None:
        self.values()
        framework = frameworks.named(self.name)
        assert framework is not None and framework.loaded
        assert framework.ability("adapter").adapter is frameworks.adapter_of(self.name)

    def test_it_claims_its_values_and_no_others(self) -> None:
        adapter = frameworks.adapter_of(self.name)
        assert all(adapter.claims(type(value)) for value in self.values().values())
        assert not any(adapter.claims(kind) for kind in (int, str, dict, object, AdapterSuite))

    def test_a_load_fills_the_values_that_exist(self, place: str) -> None:
        saved = self.values()
        tenuto.save(saved, place)
        target = {name: self.blank(value) for name, value in saved.items()}
        before = dict(target)
        tenuto.load(place, target)
        assert {name: self.content(value) for name, value in target.items()} == {
            name: self.content(value) for name, value in saved.items()
        }
        if not self.immutable:
            assert all(target[name] is before[name] for name in target), "the target's own values are filled"

    def test_a_load_without_a_target_makes_them_anew(self, place: str) -> None:
        saved = self.values()
        tenuto.save(saved, place)
        made = tenuto.load(place).state
        for name, value in saved.items():
            assert type(made[name]) is type(value), name
            assert self.content(made[name]) == self.content(value), name

    def test_what_is_one_value_stays_one(self, place: str) -> None:
        value = self.values()["weights"]
        tenuto.save({"first": value, "second": value}, place)
        made = tenuto.load(place).state
        if self.immutable:
            assert made["first"] is made["second"]
            return
        self.change(made["first"])
        assert self.content(made["first"]) == self.content(made["second"])

    def test_a_value_of_another_shape_is_refused(self, place: str) -> None:
        value = self.values()["weights"]
        tenuto.save({"weights": value}, place)
        target = {"weights": self.blank(value)[1:]}
        before = self.content(target["weights"])
        with pytest.raises(StateMismatch) as caught:
            tenuto.load(place, target)
        assert "weights" in str(caught.value)
        assert self.content(target["weights"]) == before

    def test_an_asynchronous_save_has_the_values_of_its_step(self, place: str) -> None:
        state = self.values()
        with tenuto.Checkpointer(place, state, save=tenuto.every(steps=1)) as checkpointer:
            checkpointer.restore()
            wanted = {name: self.content(value) for name, value in state.items()}
            checkpointer.step_done(1)
            self.change_all(state)
            checkpointer.wait()
            assert {name: self.content(value) for name, value in tenuto.load(place).state.items()} == wanted

    def test_a_structure_that_is_saved_again_is_read_anew(self, place: str) -> None:
        state = self.values()
        with tenuto.Checkpointer(place, state, save=tenuto.every(steps=1)) as checkpointer:
            checkpointer.restore()
            for step in (1, 2, 3):
                self.change_all(state)
                checkpointer.step_done(step)
        found = tenuto.load(place)
        assert found.step == 3
        assert {name: self.content(value) for name, value in found.state.items()} == {
            name: self.content(value) for name, value in state.items()
        }

    def test_its_random_generators_continue_where_they_were(self) -> None:
        framework = frameworks.named(self.name)
        assert framework is not None
        if not framework.rng and self.name not in rng.PLAIN:
            pytest.skip(f"{self.name} declares no random generators")
        captured = rng.capture()
        drawn = self.draw()
        self.draw()
        assert rng.apply(captured) == ()
        assert self.draw() == drawn
