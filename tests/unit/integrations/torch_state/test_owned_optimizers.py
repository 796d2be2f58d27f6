"""Modules that own their optimizer: what their state_dict() leaves out is refused or told, never certified."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import tenuto
from tenuto.errors import StateError
from tenuto.integrations.torch.certificate import certificate


@pytest.fixture(autouse=True)
def no_loader_of_other_tests() -> None:
    """A loader that a test left in the middle of its epoch would be told of here."""
    gc.collect()


class Agent(nn.Module):
    def __init__(self, optimizer: Any = torch.optim.Adam) -> None:
        super().__init__()
        self.policy = nn.Linear(2, 1)
        self.optimizer = optimizer(self.policy.parameters())


def engine() -> nn.Module:
    """As far as anybody looks at one: DeepSpeed's own needs a group of processes."""
    kind = type("DeepSpeedEngine", (Agent,), {"__module__": "deepspeed.runtime.engine"})
    return type("PipelineEngine", (kind,), {"__module__": "deepspeed.runtime.pipe.engine"})()


def test_an_engine_of_deepspeed_is_refused_with_what_to_pass(tmp_path: Any) -> None:
    for what in (
        lambda: tenuto.Checkpointer(tmp_path, {"model": engine()}),
        lambda: tenuto.save({"model": engine()}, tmp_path),
    ):
        with pytest.raises(StateError, match=r"(?s)model: .*DeepSpeedEngine .*hint: pass tenuto\.deepspeed"):
            what()
    tenuto.save({"model": nn.Linear(2, 1)}, tmp_path)
    with pytest.raises(StateError, match="DeepSpeedEngine"):
        tenuto.load(tmp_path, into={"model": engine()})


def test_an_optimizer_that_only_a_module_knows_is_told() -> None:
    agent = Agent()
    told = "agent: its optimizer agent.optimizer is not an entry of the state, and is not saved"
    found = certificate({"agent": agent}, None)
    assert not found["exact"] and found["reasons"] == [told]
    agent.optimizer = [agent.optimizer]  # type: ignore[assignment]
    assert certificate({"agent": agent}, None)["reasons"] == [told]


class Wrapped(torch.optim.SGD):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__([nn.Parameter(torch.ones(1))])
        self.optimizer = optimizer


def test_an_optimizer_that_is_an_entry_or_may_be_inside_one_is_no_reason() -> None:
    agent = Agent()
    for entry in (agent.optimizer, {"policy": agent.optimizer}, Wrapped(agent.optimizer)):
        assert certificate({"agent": agent, "optimizer": entry}, None)["exact"]

    class Trainer:
        def state_dict(self) -> dict[str, Any]:
            return agent.optimizer.state_dict()

        def load_state_dict(self, state: dict[str, Any]) -> None:
            agent.optimizer.load_state_dict(state)

    found = certificate({"agent": agent, "trainer": Trainer()}, None)
    assert found["exact"] and any("its optimizer" in caveat for caveat in found["caveats"])


def test_large_and_circular_containers_of_a_module_are_passed_by() -> None:
    """Training waits for the certificate at every save."""
    agent = Agent()
    circle: list[Any] = []
    circle.append(circle)
    agent.circle = circle  # type: ignore[assignment]
    agent.optimizer.optimizer = agent.optimizer  # type: ignore[attr-defined]
    agent.vocabulary = [*range(100_000), torch.optim.SGD(agent.policy.parameters())]  # type: ignore[assignment]
    assert certificate({"agent": agent, "optimizer": agent.optimizer}, None)["exact"]


def test_an_optimizer_in_a_nested_dictionary_is_an_entry() -> None:
    model = nn.Linear(2, 1)
    found = certificate({"model": model, "optimizers": {"0": torch.optim.Adam(model.parameters())}}, None)
    assert not any("no torch optimizer" in one for one in found["caveats"])
    assert any("no torch optimizer" in one for one in certificate({"values": {"0": 1}}, None)["caveats"])
