"""Settings of the whole suite."""

from __future__ import annotations

import os

import pytest

# Two workers on two cores: more threads inside each would only spin against the other worker.
if os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("PAGED_THREADS", "1")


@pytest.fixture(scope="session")
def smollm2():
    """The packaged SmolLM2-135M-Instruct, loaded once a worker; skips where its package is not installed."""
    from paged import LoadError, load_model

    try:
        return load_model("smollm2")
    except LoadError as error:
        pytest.skip(f"the default model is not here: {error}")
