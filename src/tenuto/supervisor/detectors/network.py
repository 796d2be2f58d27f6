"""Network interfaces and InfiniBand ports: errors, drops, and links that go down."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from tenuto.supervisor.detectors.contract import Finding, Sample
from tenuto.supervisor.detectors.trend import Streaks

INTERFACES: Final = Path("/sys/class/net")
INFINIBAND: Final = Path("/sys/class/infiniband")
_COUNTERS: Final = ("rx_packets", "tx_packets", "rx_errors", "tx_errors", "rx_dropped", "tx_dropped")
_PORT_COUNTERS: Final = ("link_downed", "link_error_recovery", "port_rcv_errors", "port_xmit_discards", "symbol_error")
_VIRTUAL: Final = ("lo", "docker", "veth", "virbr", "ifb", "br-", "cali", "tunl")
BAD: Final = 0.001
DROPPED: Final = 0.01
"""Shares of packets with errors, and dropped ones, that are too many."""
ENOUGH: Final = 10
"""So many of them in a period, at least."""
SYMBOLS: Final = 10.0
"""Symbol errors a second of an InfiniBand port."""
IN_A_ROW: Final = 3


class Network:
    source: Final = "network"
    period_s: Final = 10.0

    def __init__(self) -> None:
        self._before: dict[str, dict[str, float]] = {}
        self._at = 0.0
        self._streaks = Streaks()

    def sample(self) -> Mapping[str, float] | None:
        values: dict[str, float] = {}
        for interface in _below(INTERFACES):
            if not interface.name.startswith(_VIRTUAL):
                values |= _counters(interface.name, interface / "statistics", _COUNTERS)
        for device in _below(INFINIBAND):
            for port in _below(device / "ports"):
                values |= _counters(f"{device.name}/{port.name}", port / "counters", _PORT_COUNTERS)
        return values or None

    def judge(self, sample: Sample) -> Sequence[Finding]:
        if sample.source != self.source:
            return ()
        found: list[Finding] = []
        elapsed_s = sample.at - self._at
        for name, values in sample.by_thing().items():
            before = self._before.get(name)
            if before is not None and elapsed_s > 0:
                grown = {key: max(value - before.get(key, value), 0.0) for key, value in values.items()}
                found += self._found(name, grown, elapsed_s)
            self._before[name] = values
        self._at = sample.at
        return found

    def _found(self, name: str, grown: Mapping[str, float], elapsed_s: float) -> Iterator[Finding]:
        def total(*keys: str) -> float:
            return sum(grown.get(key, 0.0) for key in keys)

        packets = total("rx_packets", "tx_packets")
        errors = total("rx_errors", "tx_errors", "port_rcv_errors", "port_xmit_discards", "link_error_recovery")
        dropped = total("rx_dropped", "tx_dropped")
        if total("link_downed"):
            yield Finding("network", f"the link of {name} went down", name)
        bad = errors >= ENOUGH and errors > BAD * packets
        if self._streaks.count(f"{name} errors", bad or total("symbol_error") > SYMBOLS * elapsed_s) >= IN_A_ROW:
            number = errors or total("symbol_error")
            yield Finding("network", f"{name} has {number:.0f} errors in {elapsed_s:.0f} s", name)
        if self._streaks.count(f"{name} drops", dropped >= ENOUGH and dropped > DROPPED * packets) >= IN_A_ROW:
            yield Finding("network", f"{name} drops {dropped / max(packets, dropped):.1%} of its packets", name)


def _below(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


def _counters(name: str, directory: Path, counters: Sequence[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for counter in counters:
        try:
            found[f"{name}.{counter}"] = float((directory / counter).read_text())
        except (OSError, ValueError):
            continue  # a driver that does not count it
    return found
