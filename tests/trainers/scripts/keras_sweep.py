"""Resumes `keras_fit` from its steps, one after the other in one process."""

from __future__ import annotations

import json
import shutil


def differences(directory, steps, *words, capsys=None):
    """Returns what differs from a training that nothing interrupted, by step."""
    from keras_fit import parsed, train

    out = ["--out", str(directory / "found.json")]
    whole = train(parsed(["--where", str(directory / "whole"), "--every-step", *words, *out]))
    wrong = {}
    for step in steps:
        where = directory / f"from{step}"
        shutil.copytree(directory / "whole", where)
        found = train(parsed(["--where", str(where), "--resume-from", str(step), *words, *out]))
        names = [name for name, digest in whole["digest"].items() if found["digest"][name] != digest]
        if names or json.dumps(found["history"]) != json.dumps(whole["history"]):
            wrong[step] = names
        shutil.rmtree(where)
    return wrong
