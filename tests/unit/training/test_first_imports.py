"""What the first Checkpointer of a process loads: its own modules, and none of the large ones that torch loads late."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, sys
import torch
model = torch.nn.Linear(4, 4)
import tenuto
before = set(sys.modules)
with tenuto.Checkpointer(sys.argv[1], {"model": model}, save=tenuto.every(steps=1)) as ckpt:
    for _ in ckpt.steps(2):
        pass
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_a_first_checkpointer_of_a_plain_module_loads_nothing_of_torch(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=240, check=True
    )
    loaded = json.loads(done.stdout.splitlines()[-1])
    own = [name for name in loaded if name.partition(".")[0] == "tenuto"]
    assert not [name for name in loaded if name.partition(".")[0] == "torch"]
    assert len(own) > 50 and len(loaded) - len(own) < 60, "numpy's generators, and a few of the standard library"
    assert not [name for name in own if name.startswith(("tenuto.cli", "tenuto.certify.runner", "tenuto.testing"))]
