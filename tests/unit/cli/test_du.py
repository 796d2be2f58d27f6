"""`tenuto du`: what checkpoints take, and what removing some would free."""

from __future__ import annotations

import json

import numpy as np
from typer.testing import CliRunner

import tenuto
from tenuto import every, keep
from tenuto.cli.application import application


def du(*words):
    done = CliRunner().invoke(application(), ["du", *map(str, words)])
    assert done.exit_code == 0, done.output
    return done.stdout


def trained(place, **more):
    state = {"frozen": np.random.default_rng(0).random(200_000), "w": np.zeros(1000)}
    with tenuto.Checkpointer(place, state, save=every(steps=1), **more) as ckpt:
        for step in ckpt.steps(4):
            state["w"][:] = step


def test_of_plain_checkpoints_each_takes_what_it_is(tmp_path):
    trained(tmp_path, keep=keep.all())
    found = json.loads(du(tmp_path, "--json"))
    assert all(one["unique"] == one["stored"] >= one["logical"] > 1_600_000 for one in found["checkpoints"])
    assert len(found["checkpoints"]) == 4


def test_what_is_named_is_counted_once_and_freed_with_the_last_that_names_it(tmp_path):
    trained(tmp_path, keep=keep.latest(2), encoding="dedupe")
    found = json.loads(du(tmp_path, "--json", "--if-removed", "3"))
    assert [one["checkpoint"]["step"] for one in found["checkpoints"]] == [3, 4]
    assert found["logical"] > 3_200_000 > 2_000_000 > found["stored"] > found["needed"] > 1_500_000
    assert found["if_removed"]["frees"] == found["checkpoints"][0]["stored"]
    both = json.loads(du(tmp_path, "--json", "--if-removed", "3", "--if-removed", "4"))
    assert both["if_removed"]["frees"] == found["stored"]
    assert "of removed ones that others need" in du(tmp_path)
