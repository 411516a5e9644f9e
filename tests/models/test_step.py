"""Cache windows in one step: sequences that see more and less of their past, each as it is alone, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from feeder import Feeder, random_tokens
from looping import config_of, looped

from paged import load_model
from paged.models.config import ModelConfig
from paged.models.dory import DoryModel
from paged.models.step import _narrower
from paged.models.tiny import random_tensors, tiny_hf_settings

DORY = ModelConfig.from_hf(tiny_hf_settings("dory"))
MODELS = {
    "llama": lambda: load_model("tiny:llama"),
    "hybrid": lambda: load_model("tiny:hybrid"),
    "dory": lambda: DoryModel(DORY, random_tensors(DORY, seed=3).__getitem__),
    "looped": lambda: load_model("tiny:looped"),
    "layers after": lambda: looped(config_of("layers before and after")),
    "mixed windows": lambda: looped(config_of("mixed windows")),
}
WINDOWS = {"all": 0, "one": 1, "few": 7, "also few": 7, "many": 30}
DEPTHS = {"all": 2, "one": 4, "few": 1, "also few": 3, "many": 2}
LENGTHS = {"all": 40, "one": 33, "few": 21, "also few": 47, "many": 35}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return MODELS[request.param]()


def feeder(model, seed: int, windows: dict[str, int], page_size: int = 8) -> Feeder:
    made = Feeder(model, page_size, num_pages=3000, seed=seed)
    made.windows = dict(windows)
    if model.max_loops:
        made.depths = dict(DEPTHS)
    return made


def tokens_of(model, name: str) -> list[int]:
    return random_tokens(LENGTHS[name], model.vocab_size, seed=len(name))


def test_each_sequence_of_a_mixed_step_has_the_bits_it_has_alone(model) -> None:
    together = feeder(model, 1, WINDOWS)
    pieces: dict[str, list[torch.Tensor]] = {name: [] for name in WINDOWS}
    for cut in range(0, 47, 9):  # chunks of all that are not over yet, the last ones shorter
        rows = {name: tokens_of(model, name)[cut : cut + 9] for name in WINDOWS}
        for name, logits in together.step({name: part for name, part in rows.items() if part}).items():
            pieces[name].append(logits)
    for name, window in WINDOWS.items():
        alone = feeder(model, 2, {name: window}, 16).feed(name, tokens_of(model, name))
        assert torch.isfinite(alone).all()
        assert torch.equal(torch.cat(pieces[name]), alone), name


def test_a_window_of_the_whole_sequence_changes_no_bit(model) -> None:
    tokens = tokens_of(model, "all")
    wide = feeder(model, 3, {"all": len(tokens)}).feed("all", tokens)
    assert torch.equal(wide, feeder(model, 4, {}).feed("all", tokens))


def test_what_lies_outside_the_window_is_not_seen(model) -> None:
    """With a window of W, L layers see L * (W - 1) positions back at most; a recurrent state sees everything."""
    if model.state_spec is not None:
        pytest.skip("a recurrent state sees all tokens")
    tokens = random_tokens(60, model.vocab_size)
    other = [(token + 1) % model.vocab_size for token in tokens[:10]] + tokens[10:]
    one, two = (feeder(model, 5, {"one": 2}).feed("one", t) for t in (tokens, other))
    assert torch.equal(one[40:], two[40:])
    assert not torch.equal(one[10], two[10])


def test_pages_outside_every_window_are_not_read(model) -> None:
    """Their rows become NaN, and their places in the table -1."""
    tokens = tokens_of(model, "many")
    feed = feeder(model, 6, {"few": 7})
    feed.feed("few", tokens[:30])
    batch = feed.batch({"few": tokens[30:]})
    gone = (30 - 7 + 1) // 8
    for group in range(model.spec.num_groups):
        for page in batch.page_tables[group, 0, :gone].tolist():
            if page >= 0:
                feed.storage.pages[page] = float("nan")
    batch.page_tables[:, :, :gone] = -1
    got = model.forward(batch, feed.storage)
    assert torch.equal(got, feeder(model, 7, {"few": 7}).feed("few", tokens)[30:])


@pytest.mark.parametrize(("window", "other", "narrower"), [(0, 0, 0), (5, 0, 5), (0, 5, 5), (3, 5, 3), (5, 3, 3)])
def test_the_narrower_of_two_windows(window: int, other: int, narrower: int) -> None:
    assert _narrower(window, other) == narrower


def test_one_window_for_all_needs_no_parts(model) -> None:
    tokens = tokens_of(model, "few")
    both = feeder(model, 8, {"few": 7, "also few": 7})
    got = both.step({"few": tokens, "also few": tokens[:5]})
    assert torch.equal(got["few"], feeder(model, 9, {"few": 7}).feed("few", tokens))
    assert np.isfinite(got["also few"].numpy()).all()
