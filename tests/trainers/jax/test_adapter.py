"""JAX's integration keeps what the shipped suite says, and what is particular to JAX."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import tenuto
from tenuto.errors import StateError, StateMismatch, TenutoWarning, Unserialisable
from tenuto.integrations.jax import arrays, versions
from tenuto.testing.adapter_suite import AdapterSuite
from trainers.jax.bits import raw


def mesh(*shape: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), ("x", "y")[: len(shape)])


def placed(value: Any, over: Mesh, *axes: Any) -> jax.Array:
    return jax.device_put(value, NamedSharding(over, PartitionSpec(*axes)))


class TestJax(AdapterSuite):
    name = "jax"
    immutable = True

    def values(self) -> dict[str, Any]:
        kinds = (jnp.float16, jnp.bfloat16, jnp.int32, jnp.uint8, jnp.bool_, jnp.complex64, jnp.float8_e4m3fn)
        found = {kind.dtype.name: jnp.arange(12).reshape(3, 4).astype(kind) for kind in kinds}
        return {
            "weights": jnp.linspace(0, 1, 10),
            "scalar": jnp.array(7, jnp.float32),
            "weak": jnp.full((3,), 2.0),
            "empty": jnp.zeros((0, 3)),
            "key": jax.random.key(3),
            "keys": jax.random.split(jax.random.key(4, impl="rbg"), 3),
        } | found

    def blank(self, value: Any) -> Any:
        if arrays.is_key(value):
            return jax.random.wrap_key_data(
                jnp.zeros_like(jax.random.key_data(value)), impl=str(jax.random.key_impl(value))
            )
        return jnp.full_like(value, 1)

    def change(self, value: Any) -> Any:
        if arrays.is_key(value):
            return (
                jax.vmap(lambda key: jax.random.fold_in(key, 1))(value) if value.shape else jax.random.fold_in(value, 1)
            )
        return ~value if value.dtype == jnp.bool_ else value + value.dtype.type(1)

    def content(self, value: Any) -> bytes:
        return raw(value)


def test_a_sharded_array_is_one_leaf_and_comes_back_on_any_mesh() -> None:
    whole = np.arange(64, dtype=np.float32).reshape(8, 8)
    tenuto.save({"both": placed(whole, mesh(4, 2), "x", "y"), "rows": placed(whole, mesh(4, 2), "x")}, "memory://mesh")
    assert [leaf.shape for leaf in tenuto.open("memory://mesh").values()] == [(8, 8), (8, 8)]
    for over, axes in ((mesh(2, 4), ("y", "x")), (mesh(8), (None, "x")), (mesh(2), ()), (mesh(4, 2), (("x", "y"),))):
        target = {"both": placed(np.zeros((8, 8), np.float32), over, *axes), "rows": jnp.zeros((8, 8))}
        wanted = target["both"].sharding
        tenuto.load("memory://mesh", target)
        assert target["both"].sharding == wanted and not target["rows"].committed
        assert np.array_equal(target["both"], whole) and np.array_equal(target["rows"], whole)


def test_a_restore_reads_no_more_than_the_shapes_that_a_target_is_made_of() -> None:
    value = placed(np.arange(16, dtype=np.float32), mesh(8), "x")
    state = {"w": value, "key": jax.random.key(5), "n": jnp.arange(3)}
    tenuto.save(state, "memory://shapes")
    struct = jax.ShapeDtypeStruct((16,), jnp.float32, sharding=NamedSharding(mesh(4), PartitionSpec("x")))
    target = {"w": struct, **jax.eval_shape(lambda: {"key": jax.random.key(0), "n": jnp.arange(3)})}
    tenuto.load("memory://shapes", target)
    assert target["w"].sharding == struct.sharding and np.array_equal(target["w"], value)
    assert raw(target["key"]) == raw(state["key"]) and np.array_equal(target["n"], [0, 1, 2])
    with pytest.raises(Unserialisable, match="ShapeDtypeStruct has no values"):
        tenuto.save({"w": struct}, "memory://shapes2")


def test_a_donated_buffer_was_captured_before() -> None:
    step = jax.jit(lambda train: {"w": train["w"] * 2 + 1, "n": train["n"] + 1}, donate_argnums=0)
    state = {"train": {"w": jnp.arange(1 << 20, dtype=jnp.float32), "n": jnp.array(0)}}
    wanted = {}
    with tenuto.Checkpointer("memory://donated", state, save=tenuto.every(steps=1), keep=tenuto.keep.all()) as ckpt:
        ckpt.restore()
        for number in range(1, 6):
            before = state["train"]["w"]
            place = before.unsafe_buffer_pointer()
            state["train"] = step(state["train"])
            assert before.is_deleted() and state["train"]["w"].unsafe_buffer_pointer() == place, "it was donated"
            wanted[number] = raw(state["train"]["w"])
            ckpt.step_done(number)
    for number, content in wanted.items():
        assert raw(tenuto.load("memory://donated", step=number).state["train"]["w"]) == content


def test_a_state_that_still_holds_donated_arrays_is_told_what_to_assign() -> None:
    state = {"train": jnp.arange(4.0)}
    jax.jit(lambda one: one + 1, donate_argnums=0)(state["train"])
    with pytest.raises(StateError, match=r"train: this array has been donated") as caught:
        tenuto.save(state, "memory://gone")
    assert "state['train'] = " in str(caught.value.hint)


def test_what_has_no_bytes_or_no_form_is_refused_by_its_path() -> None:
    with pytest.raises(Unserialisable, match="w: an array of int4") as caught:
        tenuto.save({"w": jnp.ones(4, jnp.int4)}, "memory://int4")
    assert "astype(jax.numpy.int8)" in str(caught.value.hint)
    with pytest.raises(Unserialisable, match="w: an array of float8_e4m3") as caught:
        tenuto.save({"w": jnp.full(4, 0.5, jnp.float8_e4m3)}, "memory://float8")
    assert "astype(jax.numpy.float32)" in str(caught.value.hint)
    with pytest.raises(Unserialisable, match="w: a traced value"):
        jax.jit(lambda one: tenuto.save({"w": one}, "memory://traced"))(jnp.ones(2))
    with pytest.raises(Unserialisable, match="w: a part of an array of JAX cannot be declared"):
        tenuto.save({"w": tenuto.shard(jnp.ones(2), whole=(4,), offsets=(0,))}, "memory://declared")


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ({"w": jnp.zeros(3, jnp.float32)}, "bfloat16 [3] in the checkpoint, float32 [3] in the target"),
        ({"key": jax.random.key(0, impl="rbg")}, "those of threefry2x32 in the checkpoint, random keys of rbg"),
        ({"key": jnp.zeros(2, jnp.uint32)}, "key: a prngkey in the checkpoint"),
        ({"w": jax.random.key(0)}, "w: bfloat16 [3] in the checkpoint, random keys of threefry2x32"),
    ],
)
def test_what_does_not_fit_is_named(target: dict[str, Any], said: str) -> None:
    tenuto.save({"w": jnp.zeros(3, jnp.bfloat16), "key": jax.random.key(0)}, "memory://fit")
    with pytest.raises(StateMismatch, match=re.escape(said)):
        tenuto.load("memory://fit", target)


def test_what_numpy_saved_jax_takes_and_the_reverse() -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    tenuto.save({"w": values}, "memory://from-numpy")
    target: dict[str, Any] = {"w": jnp.zeros((2, 3))}
    tenuto.load("memory://from-numpy", target)
    assert isinstance(target["w"], jax.Array) and np.array_equal(target["w"], values)
    tenuto.save(target, "memory://from-jax")
    into = {"w": np.zeros((2, 3), np.float32)}
    tenuto.load("memory://from-jax", into)
    assert np.array_equal(into["w"], values)
    with tenuto.open("memory://from-jax") as opened:
        assert opened["w"].kind == "jax" and np.array_equal(opened["w"][1:], values[1:])


def test_elements_of_64_bits_are_kept_or_refused_and_never_narrowed() -> None:
    with jax.enable_x64(True):
        wide = jnp.arange(3, dtype=jnp.int64) + 2**40
        tenuto.save({"w": wide}, "memory://wide")
        target = {"w": jnp.zeros(3, jnp.int64)}
        tenuto.load("memory://wide", target)
        assert raw(target["w"]) == raw(wide)
    narrow = {"w": jnp.zeros(3, jnp.int32)}
    with pytest.raises(StateMismatch, match="int64"):
        tenuto.load("memory://wide", narrow)
    found = tenuto.load("memory://wide").state["w"]
    assert type(found) is np.ndarray and found.tolist() == (np.arange(3) + 2**40).tolist()
    with pytest.raises(StateError, match="JAX makes int32 of int64"):
        tenuto.load("memory://wide", {"w": jax.ShapeDtypeStruct((3,), np.dtype("int64"))})


def test_a_save_of_an_unchanged_structure_walks_the_state_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from tenuto.state.encode.flattener import Flattener

    state: dict[str, Any] = {
        "train": {f"w{n}": jnp.full((3,), n, jnp.float32) for n in range(8)},
        "key": jax.random.key(0),
    }
    flattener = Flattener(state)
    for _ in range(5):
        flattener.flatten()
        state["train"] = {name: one + 1 for name, one in state["train"].items()}
        state["key"] = jax.random.split(state["key"])[0]
    assert flattener.full_walks == 1
    state["train"] = {name: one.astype(jnp.bfloat16) for name, one in state["train"].items()}
    assert {spec.dtype for spec in flattener.flatten().specs[:8]} == {"bfloat16"}
    assert flattener.full_walks == 2


@pytest.mark.parametrize(("version", "said"), [((0, 99, 0), "newer"), ((0, 4, 30), "older")])
def test_another_version_of_jax_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...], said: str
) -> None:
    monkeypatch.setattr(jax, "__version_info__", version)
    with pytest.warns(TenutoWarning, match=f"is {said} than what Tenuto was tested with"):
        versions.check_version()


def test_a_private_name_that_is_gone_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(versions._PRIVATE, "gone", ("jax._src.tree_util", "nothing_of_that_name"))
    with pytest.raises(StateError, match=r"has no jax\._src\.tree_util\.nothing_of_that_name"):
        versions.private("gone")


@pytest.mark.parametrize("assigned", [True, False])
def test_a_state_that_nobody_assigns_to_is_told_once(assigned: bool) -> None:
    train = {"w": jnp.zeros(3)}
    state = {"train": train, "frozen": jnp.ones(2)}
    said: list[str] = []
    with pytest.warns(TenutoWarning) if not assigned else contextlib.nullcontext() as found:
        with tenuto.Checkpointer(f"memory://stale-{assigned}", state, save=tenuto.every(steps=5)) as ckpt:
            for _ in ckpt.steps(30):
                train = {"w": train["w"] + 1}
                if assigned:
                    state["train"] = train
    said = [str(one.message) for one in found or () if "same arrays" in str(one.message)]
    assert len(said) == (0 if assigned else 1)
    assert assigned or "assign in the mapping that you passed, state['train'] = …" in said[0]
