"""What a type checker has to refuse, each line with its error. Read by mypy and pyright; never run.

Both are told to complain where a line needs no ignoring, so a wrong use that passes fails the test.
"""

from __future__ import annotations

from typing import cast

import tenuto
from tenuto import every, keep, on

tenuto.Checkpointer()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
tenuto.Checkpointer("here", [1, 2])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
tenuto.Checkpointer("here", {}, "gpt")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
tenuto.Checkpointer("here", {}, save=keep.latest(3))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
tenuto.Checkpointer("here", {}, keep=every(steps=1))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
tenuto.Checkpointer("here", {}, on_busy="drop")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
tenuto.Checkpointer("here", {}, on_error="ignore")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
tenuto.Checkpointer("here", {}, save_every=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
every(200)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
every(steps="200")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
every(steps=1) | keep.latest(1)  # type: ignore[operator]  # pyright: ignore[reportOperatorIssue]
on.improve("loss", mode="lowest")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
keep.best("loss")  # type: ignore[call-arg, arg-type]  # pyright: ignore[reportCallIssue]
tenuto.save({})  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
tenuto.load("here", step=1.5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
tenuto.load("here", stirct=False)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
tenuto.restore("here")  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]

ckpt = cast(tenuto.Checkpointer, None)
ckpt.steps("10")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
ckpt.epochs()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
ckpt.step = 3  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
ckpt.restore().state  # type: ignore[union-attr]  # pyright: ignore[reportOptionalMemberAccess]
ckpt.log({"loss": 1})  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
