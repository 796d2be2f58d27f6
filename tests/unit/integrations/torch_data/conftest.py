"""Workers of a data loader that are collected as garbage end when they next look whether to: after 5 s, where nobody
shortens that."""

from collections.abc import Iterator

import pytest
import torch.utils.data._utils as torch_workers
import torchdata.stateful_dataloader.worker as torchdata_workers

LOOK_S = 0.5


@pytest.fixture(autouse=True, scope="package")
def workers_that_end_soon() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (torch_workers, torch_workers.worker, torchdata_workers):
            patch.setattr(module, "MP_STATUS_CHECK_INTERVAL", LOOK_S)
        yield
