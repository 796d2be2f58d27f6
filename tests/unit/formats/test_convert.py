"""Rounding as torch does it, and rules for names."""

from __future__ import annotations

import numpy as np
import pytest

from tenuto.errors import UsageError
from tenuto.formats.contract import ArrayTensor
from tenuto.formats.convert import ConvertedTensor, Renaming, float_type, paths, renamed

torch = pytest.importorskip("torch")
FLOATS = ("float64", "float32", "float16", "bfloat16")


@pytest.mark.parametrize("of", FLOATS)
@pytest.mark.parametrize("to", FLOATS)
def test_values_are_rounded_as_torch_rounds_them(of: str, to: str) -> None:
    random = torch.Generator().manual_seed(0)
    values = torch.randn(200_000, generator=random, dtype=torch.float64) * 10.0 ** torch.randint(-40, 38, (200_000,))
    special = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, 1e-45, 65519.9]
    source = torch.cat([torch.tensor(special, dtype=torch.float64), values]).to(getattr(torch, of))
    wanted = source.to(getattr(torch, to))
    tensor = ConvertedTensor(ArrayTensor(source.view(torch.uint8).numpy(), of, source.shape), to)
    found = np.concatenate([block.copy() for block in tensor.blocks(65_536)])
    found = torch.from_numpy(found).view(getattr(torch, to))
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(7).view(torch.uint8), wanted.nan_to_num(7).view(torch.uint8))


def test_values_that_become_infinite_are_told_of() -> None:
    values = np.array([1.0, float("inf"), 1e6], np.float32)
    told = []
    for array, to in ((values, "float16"), (values[:2], "float16"), (values, "bfloat16")):
        tensor = ConvertedTensor(ArrayTensor(np.ascontiguousarray(array).view(np.uint8), "float32", array.shape), to)
        list(tensor.blocks())
        told.append(tensor.overflowed)
    assert told == [True, False, False]


def test_words_for_element_types() -> None:
    assert [float_type(word) for word in ("bf16", "FP32", "torch.float16")] == ["bfloat16", "float32", "float16"]
    with pytest.raises(UsageError, match="int4"):
        float_type("int4")


def test_rules_are_applied_one_after_the_other() -> None:
    rules = Renaming([r"^net\.(\d+)=layer.\1", r"weight$=w"], strip="module.")
    names = ["module.net.0.weight", "module.head.bias"]
    rules.check(names)
    assert [rules(name) for name in names] == ["layer.0.w", "head.bias"]


@pytest.mark.parametrize(
    ("rules", "strip", "said"),
    [
        (["nothing=x"], "", "meets no name"),
        ([], "modul.", "no name begins so"),
        ([r"\.[ab]$="], "", "both become"),
        ([".*="], "", "no name left"),
        (["("], "", "not a rule"),
        (["a"], "", "not a rule"),
        ([r"(=x"], "", "not a rule"),
        ([r"w=\2"], "", "not a rule"),
    ],
)
def test_rules_that_meet_nothing_or_make_two_names_one_are_refused(rules: list[str], strip: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Renaming(rules, strip).check(["w.a", "w.b"])


def test_a_nested_state_is_renamed_by_paths() -> None:
    tree = {"net": {"module.a": 1, "b": {"c": [2]}}, "step": 3, 4: {"d": 5}, "none": {}}
    rules = Renaming(["^net/b=model/b"], strip="module.")
    rules.check(paths(tree))
    assert renamed(tree, rules, flat=False) == {
        "net": {"a": 1},
        "model": {"b": {"c": [2]}},
        "step": 3,
        4: {"d": 5},
        "none": {},
    }
