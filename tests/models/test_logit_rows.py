"""The rows whose logits are wanted may be named in any order, all of them too."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paged.models.base import ForwardBatch
from paged.models.registry import load_model
from paged.session import Session


@pytest.mark.parametrize("name", ["llama", "hybrid", "looped"])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4], [4, 0, 1, 2, 3], [4, 1], [2], []], ids=str)
def test_each_row_of_logits_is_that_of_the_row_named(name: str, rows: list[int]) -> None:
    model = load_model(f"tiny:{name}")
    logits = []
    for wanted in ([0, 1, 2, 3, 4], rows):
        session = Session(model, model.create_kv_pool(num_pages=32))
        session.table.ensure(0, 5)
        batch = session.batch(np.array([5, 9, 2, 2, 7], np.int32))
        batch.logit_rows = np.array(wanted, np.int32)
        logits.append(model.forward(batch, session.storage))
    assert torch.equal(logits[0][rows], logits[1])


def test_all_rows_in_order_are_not_copied() -> None:
    x = torch.arange(6.0).reshape(3, 2)
    none = np.zeros(0, np.int32)
    batch = ForwardBatch(none, none, none, none, np.arange(3, dtype=np.int32))
    assert batch.wanted(x) is x
    batch.logit_rows = np.array([2, 0, 1], np.int32)
    assert batch.wanted(x).tolist() == [[4.0, 5.0], [0.0, 1.0], [2.0, 3.0]]
