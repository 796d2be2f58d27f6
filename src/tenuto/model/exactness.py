"""The verdict of a certificate: one of four words, the same wherever a person or a machine reads about a resume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

Exactness = Literal["proven", "no known gap", "unknown", "not exact"]
"""proven: `tenuto certify` found this script exact, on this layout. no known gap: nothing is known that would make a
resume inexact. unknown: what usually matters was out of sight. not exact: something is known."""

EXACT: Final = frozenset({"proven", "no known gap"})


def judged(certificate: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the certificate with its verdict, which follows from what else it says. A proof does not outweigh a known
    reason: certify may have run where it did no harm."""
    verdict: Exactness = "no known gap"
    if certificate.get("reasons"):
        verdict = "not exact"
    elif certificate.get("proof"):
        verdict = "proven"
    elif certificate.get("unknown"):
        verdict = "unknown"
    return {**certificate, "exact": verdict in EXACT, "verdict": verdict}


def exactness(certificate: Mapping[str, Any]) -> Exactness | None:
    """Returns the verdict of a checkpoint's certificate; None without one, as `tenuto.save` writes none."""
    found = certificate.get("verdict")
    return found if found in get_args(Exactness) else None


def because(certificate: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns what the verdict rests on: the reasons, or what is unknown, or the proof; nothing for "no known gap"."""
    match exactness(certificate):
        case "not exact":
            return tuple(map(str, certificate.get("reasons", ())))
        case "unknown":
            return tuple(map(str, certificate.get("unknown", ())))
        case "proven":
            proof = certificate.get("proof")
            found = proof if isinstance(proof, Mapping) else {}
            return (
                f"tenuto certify, {found.get('created')}: killed after step {found.get('saved')} and compared up to "
                f"step {found.get('last')}",
            )
        case _:
            return ()


def in_words(certificate: Mapping[str, Any]) -> str:
    """Returns the verdict in one line with the first thing it rests on; empty without a verdict."""
    verdict, why = exactness(certificate), because(certificate)
    if verdict is None or not why:
        return verdict or ""
    more = f" (and {len(why) - 1} more)" if len(why) > 1 else ""
    return f"{verdict}: {why[0]}{more}"
