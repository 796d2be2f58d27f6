"""Every framework that is known keeps what the shipped suite says; a package can declare one of its own."""

from __future__ import annotations

import sys
import types
from importlib import metadata
from typing import Any

import numpy as np
import pytest

import tenuto
from tenuto.state import frameworks
from tenuto.state.frameworks import Framework
from tenuto.state.numpy_arrays import NumpyAdapter
from tenuto.testing.adapter_suite import AdapterSuite


class TestNumpy(AdapterSuite):
    name = "numpy"

    def values(self) -> dict[str, Any]:
        found = {kind: np.arange(12).reshape(3, 4).astype(kind) for kind in ("float16", "float64", "int8", "uint32")}
        return {
            "weights": np.linspace(0, 1, 10, dtype=np.float32),
            "scalar": np.array(7),
            "empty": np.zeros((0, 3)),
        } | found

    def blank(self, value: Any) -> Any:
        return np.full_like(value, 99)

    def change(self, value: Any) -> None:
        value += 1

    def content(self, value: Any) -> bytes:
        return f"{value.dtype} {value.shape} ".encode() + value.tobytes()

    def draw(self) -> Any:
        return np.random.random()


class TestTorch(AdapterSuite):
    name = "torch"

    def values(self) -> dict[str, Any]:
        torch = pytest.importorskip("torch")
        kinds = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8)
        found = {str(kind).removeprefix("torch."): torch.arange(12).reshape(3, 4).to(kind) for kind in kinds}
        return {
            "weights": torch.linspace(0, 1, 10),
            "scalar": torch.tensor(7.0),
            "turned": torch.ones(2, 5).t(),
        } | found

    def blank(self, value: Any) -> Any:
        return value.clone().fill_(99)

    def change(self, value: Any) -> None:
        value.add_(1)

    def content(self, value: Any) -> bytes:
        torch = sys.modules["torch"]
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8) if value.numel() else value
        return f"{value.dtype} {tuple(value.shape)} ".encode() + bytes(raw.tolist())

    def draw(self) -> Any:
        return sys.modules["torch"].rand(1).item()


class TinyArray(np.ndarray):  # type: ignore[type-arg]
    """A tensor of a framework that only this file knows."""


class TinyAdapter(NumpyAdapter):
    def claims(self, kind: type) -> bool:
        return kind is TinyArray


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A framework that another package declares with an entry point."""
    integration = types.ModuleType("tiny_integration")
    integration.adapter = TinyAdapter()  # type: ignore[attr-defined]
    integration.framework = Framework("tinyframework", adapter="tiny_integration")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tiny_integration", integration)
    monkeypatch.setattr(TinyArray, "__module__", "tinyframework.arrays")
    point = metadata.EntryPoint("tinyframework", "tiny_integration:framework", frameworks.GROUP)
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point] if group == frameworks.GROUP else [])
    caches = (frameworks.declared, frameworks.adapter_of)
    for cache in caches:
        cache.cache_clear()
    frameworks._by_type.clear()
    yield integration
    for cache in caches:
        cache.cache_clear()
    frameworks._by_type.clear()


def test_a_framework_is_found_by_its_entry_point(tiny: Any) -> None:
    assert frameworks.adapter_for(TinyArray) is tiny.adapter
    assert frameworks.named("tinyframework") is tiny.framework and not tiny.framework.loaded
    tenuto.save({"weights": np.arange(5.0).view(TinyArray)}, "memory://tiny")
    target = {"weights": np.zeros(5).view(TinyArray)}
    tenuto.load("memory://tiny", target)
    assert target["weights"].tolist() == [0, 1, 2, 3, 4]


def test_no_entry_point_is_looked_for_where_a_type_is_pythons_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(group: str) -> Any:
        raise AssertionError(f"entry points of {group} were looked up")

    frameworks.declared.cache_clear()
    monkeypatch.setattr(metadata, "entry_points", forbidden)
    assert frameworks.named("collections") is None
    assert frameworks.named("torch") is not None
