"""An interrupt in the middle of a step: it reaches the caller, and the engine can be used again or closed."""

from __future__ import annotations

import pytest
from byhand import span
from fakes import EchoModel

from scheduler import Engine, SamplingParams

PARAMS = SamplingParams(max_tokens=8)


class Interrupted(EchoModel):
    """Its third forward is interrupted."""

    def forward(self, batch, storage):
        if self.num_forwards == 2:
            self.num_forwards += 1
            raise KeyboardInterrupt
        return super().forward(batch, storage)


def test_a_batch_that_was_interrupted_leaves_no_request_and_no_page() -> None:
    model = Interrupted()
    engine = Engine(model, num_pages=32)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([span(0, 20), span(30, 9)], PARAMS)
    engine.check()
    assert not engine.has_work
    assert engine.pool.num_live == 0
    assert engine.generate([span(0, 20)], PARAMS)[0].token_ids == model.greedy(span(0, 20), 8)


def test_an_interrupted_step_ends_its_requests_and_the_engine_closes() -> None:
    engine = Engine(Interrupted(), num_pages=32)
    engine.submit(span(0, 20), PARAMS)
    engine.step()
    engine.step()
    with pytest.raises(KeyboardInterrupt), engine:
        engine.step()
    assert engine.pool.num_free == 32
