"""All detectors, in the order in which their findings are taken."""

from __future__ import annotations

from tenuto.errors import UsageError, did_you_mean
from tenuto.supervisor.detectors.clock import Clock
from tenuto.supervisor.detectors.contract import Detector
from tenuto.supervisor.detectors.disk import Disk
from tenuto.supervisor.detectors.gpu import Gpu
from tenuto.supervisor.detectors.memory import Memory
from tenuto.supervisor.detectors.network import Network
from tenuto.supervisor.detectors.preemption import CLOUDS, Preemption
from tenuto.supervisor.detectors.steps import StepTimes


def detectors(notices: str = "auto") -> list[Detector]:
    """Returns new ones. notices: as `Preemption` has it; raises UsageError for anything else."""
    known = ("auto", "off", *CLOUDS)
    if notices not in known:
        raise UsageError(
            f"--notices {notices}: there are {', '.join(known)}",
            subject="--notices",
            hint=did_you_mean(notices, known) or "--notices aws",
        )
    return [Preemption(notices), Gpu(), Memory(), Disk(), Network(), Clock(), StepTimes()]
