import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.codec.digest import digest
from tenuto.engine.staging.buffer_layout import SAVE_ID_KEY, BufferLayout, plan_layout
from tenuto.errors import DuplicatePath, UsageError
from tenuto.model.leaf import DTYPES, LeafSpec, dtype
from tenuto.repo.format.object_names import is_home_pack, is_part
from tenuto.repo.format.safetensors import parse_header

SAVE_ID = "0123456789abcdef" * 2
DTYPE_NAMES = [*sorted(DTYPES), "numpy:<U3", "numpy:|V5", "numpy:>f8", "numpy:<M8[ns]", "numpy:<f16"]

SPECS = st.lists(
    st.builds(
        LeafSpec,
        path=st.text(st.characters(codec="utf-8"), max_size=8).filter(lambda path: path != "__metadata__"),
        dtype=st.sampled_from(DTYPE_NAMES),
        shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
        private=st.booleans(),
    ),
    max_size=25,
    unique_by=lambda spec: spec.path,
)


def fill(layout: BufferLayout, specs: list[LeafSpec], seed: int = 0) -> np.ndarray:
    """An image that was full of rubbish, stamped, with random leaves."""
    generator = np.random.default_rng(seed)
    image = np.full(layout.nbytes, 0xEE, np.uint8)
    layout.stamp(image, SAVE_ID)
    for number in range(len(specs)):
        start, length = int(layout.start[number]), int(layout.length[number])
        image[start : start + length] = generator.integers(0, 256, length, dtype=np.uint8)
    return image


@settings(max_examples=60, derandomize=True, deadline=None)
@given(SPECS, st.sampled_from([500_000, 7, 1]), st.sampled_from([64 << 20, 4096]))
def test_any_leaves_make_whole_packs(specs: list[LeafSpec], max_leaves: int, max_header: int) -> None:
    layout = plan_layout(specs, rank=3, max_leaves=max_leaves, max_header=max_header)
    image = fill(layout, specs)
    assert sorted(layout.order.tolist()) == list(range(len(specs)))
    assert (np.diff(layout.start[layout.order]) >= 0).all()
    seen: list[str] = []
    end = 0
    for number, plan in enumerate(layout.packs):
        assert plan.start == end and plan.start % 4096 == plan.header_length % 4096 == 0
        end = plan.start + -(-plan.length // 4096) * 4096
        pack = image[plan.start : plan.start + plan.length].tobytes()
        assert not image[plan.start + plan.length : end].any(), "what no leaf fills is zero"
        # The parser refuses holes, overlaps and trailing bytes.
        header = parse_header(pack, name=plan.name, max_header=max_header)
        assert header.metadata == {SAVE_ID_KEY: SAVE_ID}
        assert header.length == plan.header_length
        assert pack[: plan.header_length] == layout.header(number, SAVE_ID)
        assert layout.header_digest(number, SAVE_ID) == digest(pack[: plan.header_length])
        assert len(header) <= max_leaves
        safetensors.deserialize(pack)
        for leaf in np.flatnonzero(layout.pack == number).tolist():
            spec, found = specs[leaf], header[specs[leaf].path]
            known = dtype(spec.dtype)
            assert (found.start, found.stop - found.start) == (layout.offset[leaf], layout.length[leaf])
            assert layout.start[leaf] == plan.start + layout.offset[leaf]
            assert (found.code, found.shape) == ((known.code, spec.shape) if known.code else ("U8", (spec.nbytes,)))
            if spec.nbytes and known.size in (1, 2, 4, 8, 16):
                assert layout.start[leaf] % known.size == 0, "every usual leaf is aligned to its item"
            seen.append(spec.path)
    assert end == layout.nbytes
    assert sorted(seen) == sorted(spec.path for spec in specs)


def test_larger_items_come_first_then_paths() -> None:
    specs = [
        LeafSpec("b", "uint8", (3,)),
        LeafSpec("z", "float32", (1,)),
        LeafSpec("a", "float32", (1,)),
        LeafSpec("c", "complex128", (1,)),
        LeafSpec("h", "bfloat16", (1,)),
        LeafSpec("i", "int64", (1,), private=True),
    ]
    assert [specs[number].path for number in plan_layout(specs).order.tolist()] == ["c", "i", "a", "z", "h", "b"]


def test_the_layout_does_not_depend_on_the_order_of_the_leaves() -> None:
    specs = [LeafSpec(f"l{number}", "float32" if number % 2 else "bfloat16", (number,)) for number in range(20)]
    first, second = plan_layout(specs), plan_layout(specs[::-1])
    assert first.templates == second.templates
    assert first.start.tolist() == second.start.tolist()[::-1]


@pytest.mark.parametrize("other", ["float32", "float64"])
def test_two_leaves_with_one_path_are_refused(other: str) -> None:
    with pytest.raises(DuplicatePath, match="'a/b'") as caught:
        plan_layout([LeafSpec("a/b", "float32", (1,)), LeafSpec("x", "uint8", ()), LeafSpec("a/b", other, (2,))])
    assert caught.value.subject == "a/b"


@pytest.mark.parametrize("specs", [[], [LeafSpec("empty", "float32", (0, 3))]])
def test_a_state_without_bytes_is_one_pack_that_opens(specs: list[LeafSpec]) -> None:
    layout = plan_layout(specs)
    (plan,) = layout.packs
    assert (plan.name, plan.length, layout.nbytes) == ("rank-00000.safetensors", 4096, 4096)
    assert len(safetensors.deserialize(fill(layout, specs).tobytes())) == len(specs)


def test_packs_are_named_and_split_at_the_limits() -> None:
    specs = [LeafSpec(f"layer.{number:03d}", "float32", (2,)) for number in range(250)]
    by_count = plan_layout(specs, rank=12, max_leaves=100)
    assert [plan.name for plan in by_count.packs] == [
        "rank-00012.safetensors",
        "rank-00012.01.safetensors",
        "rank-00012.02.safetensors",
    ]
    assert np.bincount(by_count.pack).tolist() == [100, 100, 50]
    by_header = plan_layout(specs, max_header=8192)
    assert len(by_header.packs) > 1
    assert {plan.header_length for plan in by_header.packs[:-1]} == {8192}


def test_what_the_home_has_too_is_in_packs_of_its_own_behind_the_others() -> None:
    specs = [LeafSpec(f"l{number}", "float32", (number + 1,)) for number in range(6)]
    layout = plan_layout(specs, rank=3, in_home=frozenset({1, 2, 5}), max_leaves=2)
    names = ["rank-00003.safetensors", "rank-00003.01.safetensors"]
    names += ["rank-00003.home.safetensors", "rank-00003.home.01.safetensors"]
    assert [plan.name for plan in layout.packs] == names
    assert [pack >= 2 for pack in layout.pack.tolist()] == [False, True, True, False, False, True]
    assert all(is_home_pack(f"runs/main/a0001/step-00000005/{name}") == (".home" in name) for name in names)
    assert all(is_part(name) for name in names)
    image = fill(layout, specs)
    for plan in layout.packs:
        safetensors.deserialize(image[plan.start : plan.start + plan.length].tobytes())


def test_a_rank_that_writes_for_the_home_alone_has_an_empty_pack_too() -> None:
    layout = plan_layout([LeafSpec("a", "float32", ())], in_home=frozenset({0}))
    assert [plan.length for plan in layout.packs] == [4096, 4100]


def test_a_save_id_must_be_of_its_fixed_length() -> None:
    layout = plan_layout([])
    for wrong in ("", "a" * 31, "a" * 33, 'a"b' + "c" * 29, "é" * 32):
        with pytest.raises(UsageError):
            layout.header(0, wrong)


def test_the_pack_opens_with_safetensors_with_equal_values(tmp_path) -> None:
    generator = torch.Generator().manual_seed(5)
    raw = torch.randint(0, 255, (96,), dtype=torch.uint8, generator=generator)
    tensors = {
        name: raw[: 6 * dtype(name).size].clone().view(getattr(torch, name)).reshape(2, 3)
        for name, row in DTYPES.items()
        if row.code is not None and hasattr(torch, name) and name != "bool"
    }
    tensors["bool"] = torch.tensor([True, False, True])
    tensors["scalar"] = torch.tensor(1.5)
    specs = [LeafSpec(name, str(one.dtype).removeprefix("torch."), tuple(one.shape)) for name, one in tensors.items()]
    layout = plan_layout(specs)
    image = np.zeros(layout.nbytes, np.uint8)
    layout.stamp(image, SAVE_ID)
    for number, one in enumerate(tensors.values()):
        data = one.reshape(-1).view(torch.uint8).numpy()
        image[layout.start[number] : layout.start[number] + layout.length[number]] = data
    path = tmp_path / layout.packs[0].name
    path.write_bytes(image[: layout.packs[0].length].tobytes())
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {SAVE_ID_KEY: SAVE_ID}
        for name, one in tensors.items():
            found = file.get_tensor(name)
            assert (found.dtype, found.shape) == (one.dtype, one.shape)
            assert found.reshape(-1).view(torch.uint8).equal(one.reshape(-1).view(torch.uint8)), name


def test_stamping_writes_nothing_into_the_leaves() -> None:
    specs = [LeafSpec("a", "uint8", (5000,)), LeafSpec("b", "float32", (7,))]
    layout = plan_layout(specs)
    image = fill(layout, specs)
    before = image.copy()
    layout.stamp(image, "f" * 32)
    changed = np.flatnonzero(before != image)
    assert len(changed) and changed.max() < layout.packs[0].header_length
