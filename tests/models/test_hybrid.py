"""HybridModel against transformers' Qwen3.5, and its rows against themselves: cut, batched, moved, restored."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest
import torch
from feeder import Feeder, random_tokens

from paged.errors import GeometryMismatch, StateMismatch
from paged.kv.state import UNKNOWN, StatePool
from paged.models import hybrid
from paged.models.base import ForwardBatch, LanguageModel
from paged.models.config import ModelConfig
from paged.models.hybrid import HybridModel
from paged.models.registry import load_model
from paged.models.tiny import TINY_HYBRID, TINY_LLAMA, random_tensors, tiny_hf_settings
from paged.spec import StatePlane, StateSpec

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.models.qwen3_5")

LENGTH = 45  # more than two pages of 16
BOUND = 1e-4

rope = partial(dict, rope_theta=10000.0, rope_type="default")
FULL, LINEAR = "full_attention", "linear_attention"
CASES = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True},
    "every second layer": {"full_attention_interval": 2},
    "attention first and last": {"layer_types": [FULL, LINEAR, LINEAR, FULL, FULL], "num_hidden_layers": 5},
    "half rotated": {"rope_parameters": rope(partial_rotary_factor=0.5, rope_theta=500.0)},
    "all rotated": {"rope_parameters": rope(partial_rotary_factor=1.0)},
    "yarn": {
        "rope_parameters": rope(
            partial_rotary_factor=0.5, rope_type="yarn", factor=4.0, original_max_position_embeddings=64
        )
    },
    "a value head for each key head": {"linear_num_key_heads": 3, "linear_num_value_heads": 3},
    "sizes of no vector": {"linear_key_head_dim": 10, "linear_value_head_dim": 7, "hidden_size": 45},
    "two taps, one kv head": {"linear_conv_kernel_dim": 2, "num_key_value_heads": 1},
}


def oracle_of(settings: dict, tensors: dict[str, torch.Tensor]):
    """transformers' model with these weights, in plain attention."""
    config = transformers.AutoConfig.for_model(**{k: v for k, v in settings.items() if k != "architectures"})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval()


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """(our model, tokens, transformers' logits [LENGTH, vocab])."""
    settings = tiny_hf_settings("qwen3_5", **CASES[request.param])
    oracle = oracle_of(settings, random_tensors(ModelConfig.from_hf(settings), seed=3))
    folder = tmp_path_factory.mktemp("checkpoint")
    oracle.save_pretrained(folder)
    tokens = random_tokens(LENGTH, settings["vocab_size"])
    with torch.inference_mode():
        want = oracle(torch.tensor([tokens])).logits[0]
    model = load_model(folder)
    assert isinstance(model, HybridModel)
    return model, tokens, want


@pytest.fixture(scope="module")
def tiny() -> HybridModel:
    model = load_model("tiny:hybrid")
    assert isinstance(model, HybridModel)
    return model


# Values


@pytest.mark.parametrize("chunk", [0, 7, 1], ids=["whole", "chunks", "decode"])
def test_logits_are_those_of_transformers(case, chunk):
    model, tokens, want = case
    got = Feeder(model, 4, seed=chunk).feed("a", tokens, chunk)
    assert got.dtype == torch.float32 and got.shape == want.shape
    assert (got - want).abs().max() < BOUND
    assert want.std() > 0.5, "the weights are too small to tell a right model from a wrong one"


def test_logits_are_those_of_transformers_without_native_code(case, monkeypatch):
    monkeypatch.setenv("PAGED_BACKEND", "reference")
    model, tokens, want = case
    assert (Feeder(model).feed("a", tokens, 20) - want).abs().max() < BOUND


def test_sequences_in_one_batch_do_not_see_each_other(case):
    model, tokens, want = case
    feeder = Feeder(model, 4)
    other = random_tokens(30, model.vocab_size, seed=9)
    feeder.step({"b": other[:3], "a": tokens[:20], "c": other[:11]})
    feeder.step({"c": other[11:], "b": other[3:4]})
    got = feeder.step({"a": tokens[20:44], "b": other[4:]})["a"]
    assert (got - want[20:44]).abs().max() < BOUND
    got = feeder.step({"b": other[:1], "c": other[:1], "a": tokens[44:]}, wanted="last")["a"]
    assert (got - want[44:]).abs().max() < BOUND


def test_transformers_decoding_with_its_own_cache_gives_our_logits(tmp_path):
    """Its prefill and its decoding use two algorithms; ours is one."""
    settings = tiny_hf_settings("qwen3_5")
    oracle = oracle_of(settings, random_tensors(ModelConfig.from_hf(settings), seed=5))
    oracle.save_pretrained(tmp_path)
    tokens = random_tokens(20, 96)
    got = Feeder(load_model(tmp_path)).feed("a", tokens, 5)
    with torch.inference_mode():
        out = oracle(torch.tensor([tokens[:12]]), use_cache=True)
        cache = next(name for name in ("cache", "past_key_values") if name in out)  # its name changes in version 5.40
        rows = [*out.logits[0]]
        for token in tokens[12:]:
            out = oracle(torch.tensor([[token]]), use_cache=True, **{cache: out[cache]})
            rows.append(out.logits[0, 0])
    assert (got - torch.stack(rows)).abs().max() < BOUND


def test_a_folder_of_a_model_for_text_and_images_is_read_as_its_text_model(tmp_path, recwarn):
    text = {k: v for k, v in tiny_hf_settings("qwen3_5").items() if k != "architectures"}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48}
    config = transformers.AutoConfig.for_model(
        "qwen3_5", text_config=text | {"eos_token_id": 7}, vision_config=vision, image_token_id=90, video_token_id=91
    )
    torch.manual_seed(0)
    peer = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    tensors = random_tensors(ModelConfig.from_hf(text), seed=3)
    names = {n.replace("model.", "model.language_model.", 1): t for n, t in tensors.items()}
    assert not peer.load_state_dict(names, strict=False).unexpected_keys
    peer.save_pretrained(tmp_path)
    recwarn.clear()
    model = load_model(tmp_path)
    assert not [w for w in recwarn if "ignored" in str(w.message)]
    assert isinstance(model, HybridModel) and model.eos_token_ids == (7,)
    tokens = random_tokens(LENGTH, 90)
    with torch.inference_mode():
        want = peer(torch.tensor([tokens])).logits[0]
    assert (Feeder(model).feed("a", tokens, 16) - want).abs().max() < BOUND


def test_weights_in_bf16_compute_in_bf16_and_stay_near_fp32(tiny):
    tokens = random_tokens(40, 512)
    want = Feeder(tiny).feed("a", tokens)
    model = HybridModel(TINY_HYBRID, random_tensors(TINY_HYBRID).__getitem__, dtype=torch.bfloat16)
    got = Feeder(model).feed("a", tokens, 7)
    assert got.dtype == torch.float32 and model.state_spec == tiny.state_spec
    error = (got - want).abs().mean() / want.std()
    assert 0 < error < 0.1


@pytest.mark.parametrize("layer", range(4))
def test_every_layer_changes_the_logits(tiny, layer, monkeypatch):
    tokens = random_tokens(30, 512)
    want = Feeder(tiny).feed("a", tokens)
    monkeypatch.setattr(tiny, "_layers", tiny._layers[:layer] + tiny._layers[layer + 1 :])
    assert (Feeder(tiny).feed("a", tokens) - want).abs().max() > 0.1


# Bits


@pytest.fixture(params=[("cpu", 1), ("cpu", 2), ("reference", 1)], ids=lambda p: f"{p[0]}-{p[1]}")
def backend(request, monkeypatch):
    name, threads = request.param
    if name == "cpu":
        pytest.importorskip("paged._native")
    monkeypatch.setenv("PAGED_BACKEND", name)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    yield name
    torch.set_num_threads(before)


MODELS = {
    "tiny": TINY_HYBRID,
    "odd sizes": ModelConfig.from_hf(
        tiny_hf_settings(
            "qwen3_5", hidden_size=44, intermediate_size=53, linear_value_head_dim=12, num_attention_heads=2
        )
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_rows_bits_do_not_depend_on_chunks_neighbours_pages_or_slots(name, backend):
    model = HybridModel(MODELS[name], random_tensors(MODELS[name], seed=1).__getitem__)
    tokens = random_tokens(150, model.vocab_size)
    want = Feeder(model).feed("a", tokens)
    assert want.isfinite().all()
    one_by_one = torch.get_num_threads() == 1  # threads of small steps mostly wait for each other
    for seed, chunk in enumerate((1, 7, 64) if one_by_one else (30, 64)):
        feeder = Feeder(model, seed=seed)
        assert torch.equal(feeder.feed("a", tokens, chunk), want), f"chunks of {chunk}"
        feeder.states.check()
    assert torch.equal(Feeder(model, 1, seed=9).feed("a", tokens, 50), want), "pages of one token"
    for chunk in (13, 60) if one_by_one else (40,):
        assert torch.equal(in_company(model, tokens, chunk), want), f"chunks of {chunk} among others"


def in_company(model, tokens, chunk: int) -> torch.Tensor:
    """The same rows while other sequences start, run and end around them, in slots that they leave dirty."""
    feeder, rng, pieces = Feeder(model, 16, seed=5), np.random.default_rng(2), []
    for start in range(0, len(tokens), chunk):
        rows = {f"before {i}": random_tokens(int(rng.integers(1, 40)), model.vocab_size, i) for i in range(2)}
        rows["a"] = tokens[start : start + chunk]
        rows |= {f"after {i}": random_tokens(int(rng.integers(1, 9)), model.vocab_size, i) for i in range(3)}
        if start % 2:
            rows = dict(reversed(rows.items()))
        pieces.append(feeder.step(rows)["a"])
        for name in [name for name, length in feeder.lengths.items() if name != "a" and length > 30]:
            feeder.drop(name)
    return torch.cat(pieces)


def test_sequences_decoded_together_have_the_bits_of_each_alone(tiny, backend):
    prompts = {str(n): random_tokens(n, 512, seed=n) for n in (1, 2, 15, 16, 17, 40, 64, 65)}
    steps = {name: random_tokens(5, 512, seed=99) for name in prompts}
    want = {name: Feeder(tiny).feed(name, prompt + steps[name])[len(prompt) :] for name, prompt in prompts.items()}
    feeder = Feeder(tiny, seed=3)
    feeder.step(prompts, wanted="last")
    for i in range(5):
        got = feeder.step({name: steps[name][i : i + 1] for name in reversed(prompts)})
        for name, row in got.items():
            assert torch.equal(row, want[name][i : i + 1]), (name, i)


def test_a_restored_snapshot_continues_with_the_same_bits_in_any_slot(tiny, backend):
    tokens = random_tokens(90, 512)
    want = Feeder(tiny).feed("a", tokens)
    for cut in (1, 3, 33, 64, 89) if torch.get_num_threads() == 1 else (33,):
        feeder = Feeder(tiny, seed=cut)
        feeder.feed("a", tokens[:cut])
        saved = feeder.states.snapshot(feeder.slots["a"])
        assert saved.position == cut and saved.num_bytes == tiny.state_spec.num_bytes
        feeder.feed("a", tokens[cut:])
        feeder.slots["a"] = feeder.free_slots.pop()
        feeder.states.restore(feeder.slots["a"], saved)
        feeder.lengths["a"] = cut
        assert torch.equal(feeder.feed("a", tokens[cut:], 20), want[cut:]), f"restored at {cut}"


def test_a_copied_slot_continues_beside_its_donor(tiny):
    tokens = random_tokens(40, 512)
    want = Feeder(tiny).feed("a", tokens)
    feeder = Feeder(tiny, page_size=4)
    feeder.feed("a", tokens[:20])
    feeder.tables["b"] = [list(row) for row in feeder.tables["a"]]
    feeder.lengths["b"], feeder.slots["b"] = 20, feeder.free_slots.pop()
    feeder.states.copy(feeder.slots["a"], feeder.slots["b"])
    got = feeder.step({"b": tokens[20:33], "a": random_tokens(9, 512, 4)})["b"]
    assert torch.equal(got, want[20:33])


def test_forwards_from_two_threads_on_slots_of_their_own_do_not_meet(tiny):
    tokens = {name: random_tokens(60, 512, seed) for seed, name in enumerate("ab")}
    want = {name: Feeder(tiny).feed(name, ids, 3) for name, ids in tokens.items()}
    got = {}

    def run(name: str) -> None:
        got[name] = Feeder(tiny, seed=7).feed(name, tokens[name], 3)

    threads = [threading.Thread(target=run, args=(name,)) for name in tokens]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(got[name], want[name]) for name in tokens)


# Parts that, broken on purpose, must be found


def test_a_plain_sigmoid_of_the_gate_is_found(monkeypatch):
    """A few hundred rows of 120 gates are more than one thread's share, and two threads meet inside a vector."""
    pytest.importorskip("paged._native")
    settings = tiny_hf_settings("qwen3_5", num_hidden_layers=2, full_attention_interval=2, num_attention_heads=5)
    config = ModelConfig.from_hf(settings | {"num_key_value_heads": 1, "head_dim": 24, "max_position_embeddings": 512})
    tokens, chunks = random_tokens(500, 96), (275, 281, 283, 287, 293, 299, 301, 305)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        model = HybridModel(config, random_tensors(config).__getitem__)
        want = Feeder(model).feed("a", tokens, 50)
        assert all(torch.equal(Feeder(model).feed("a", tokens, chunk), want) for chunk in chunks)
        if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
            pytest.skip("this processor's exp may round the same in vectors and outside")
        monkeypatch.setattr(hybrid, "by_rows", lambda function, x: function(x))
        want = Feeder(model).feed("a", tokens, 50)
        assert not all(torch.equal(Feeder(model).feed("a", tokens, chunk), want) for chunk in chunks)
    finally:
        torch.set_num_threads(before)


def test_a_state_that_is_not_restored_is_found(tiny, monkeypatch):
    """What B49 is about: pages alone continue nothing."""
    tokens = random_tokens(60, 512)
    want = Feeder(tiny).feed("a", tokens)
    feeder = Feeder(tiny)
    feeder.feed("a", tokens[:40])
    slot = feeder.slots["a"]
    for plane in feeder.states.planes.values():
        plane[slot] = 0
    got = feeder.feed("a", tokens[40:])
    assert (got - want[40:]).abs().max() > 0.05


@pytest.mark.parametrize("plane", ["conv", "delta"])
@pytest.mark.parametrize("layer", range(3))
def test_one_changed_value_of_any_layers_state_changes_later_rows(tiny, plane, layer):
    tokens = random_tokens(40, 512)
    want = Feeder(tiny).feed("a", tokens)
    feeder = Feeder(tiny)
    feeder.feed("a", tokens[:30])
    feeder.states.planes[plane][feeder.slots["a"], layer].view(-1)[-1] += 1.0
    assert not torch.equal(feeder.feed("a", tokens[30:]), want[30:])


def test_what_an_earlier_sequence_left_in_a_slot_is_not_seen(tiny):
    tokens = random_tokens(20, 512)
    want = Feeder(tiny).feed("a", tokens)
    feeder = Feeder(tiny)
    feeder.feed("b", random_tokens(50, 512, 8))
    slot = feeder.slots["b"]
    feeder.drop("b")
    assert feeder.states.positions[slot] == 50
    assert torch.equal(feeder.feed("a", tokens, 6), want)
    assert feeder.slots["a"] == slot


def test_padding_sequences_change_nothing(tiny):
    """A padding sequence has length 0 and one row at position -1; its slot may be anything."""
    tokens = random_tokens(20, 512)
    want = Feeder(tiny).feed("a", tokens)
    feeder = Feeder(tiny)
    feeder.feed("a", tokens[:19])
    slot, pages = feeder.slots["a"], feeder.tables["a"][0]
    before = feeder.states.snapshot(slot)
    table = np.full((1, 3, len(pages)), -1, np.int32)
    table[0, 1] = pages
    batch = ForwardBatch(
        tokens=np.array([5, tokens[19], 5], np.int32),
        q_indptr=np.arange(4, dtype=np.int32),
        kv_lens=np.array([0, 20, 0], np.int32),
        page_tables=table,
        logit_rows=np.array([1], np.int32),
        state_slots=np.array([slot, slot, -3], np.int32),
        states=feeder.states,
    )
    assert torch.equal(tiny.forward(batch, feeder.storage), want[19:])
    assert before.position == 19 and feeder.states.positions[slot] == 20


# Refusals


def batch_of(feeder: Feeder, model: LanguageModel, slot: int, start: int, count: int) -> ForwardBatch:
    pages = -(-(start + count) // feeder.page_size)
    return ForwardBatch(
        tokens=np.ones(count, np.int32),
        q_indptr=np.array([0, count], np.int32),
        kv_lens=np.array([start + count], np.int32),
        page_tables=np.arange(pages, dtype=np.int32).reshape(1, 1, -1),
        logit_rows=np.array([count - 1], np.int32),
        state_slots=np.array([slot], np.int32),
        states=feeder.states,
    )


@pytest.mark.parametrize("start", [1, 9, 11])
def test_rows_at_another_position_than_the_states_are_refused_and_nothing_moves(tiny, start):
    feeder = Feeder(tiny)
    feeder.feed("a", random_tokens(10, 512))
    slot = feeder.slots["a"]
    before = feeder.states.snapshot(slot)
    with pytest.raises(StateMismatch, match=f"rows at position {start} need .* slot {slot} is at position 10"):
        tiny.forward(batch_of(feeder, tiny, slot, start, 3), feeder.storage)
    after = feeder.states.snapshot(slot)
    assert after.position == 10
    assert all(torch.equal(before.tensors[name], after.tensors[name]) for name in before.tensors)


def test_a_batch_without_states_or_with_states_of_another_model_is_refused(tiny):
    feeder = Feeder(tiny)
    batch = batch_of(feeder, tiny, 0, 0, 3)
    for name in ("states", "state_slots"):
        broken = batch_of(feeder, tiny, 0, 0, 3)
        setattr(broken, name, None)
        with pytest.raises(ValueError, match=r"tiny:hybrid keeps recurrent state: the batch needs states"):
            tiny.forward(broken, feeder.storage)
    batch.states = StatePool(StateSpec((StatePlane("conv", (3,)),)), 4)
    with pytest.raises(GeometryMismatch, match="made for another model"):
        tiny.forward(batch, feeder.storage)
    batch = batch_of(feeder, tiny, 0, 0, 3)
    batch.state_slots = np.zeros(2, np.int32)
    with pytest.raises(ValueError, match="a step of 1 sequences needs as many state slots, got 2"):
        tiny.forward(batch, feeder.storage)


def test_what_is_wrong_before_the_layers_run_leaves_the_states_alone(tiny):
    feeder = Feeder(tiny)
    feeder.feed("a", random_tokens(10, 512))
    batch = batch_of(feeder, tiny, feeder.slots["a"], 10, 3)
    batch.tokens[1] = 512
    with pytest.raises(IndexError):
        tiny.forward(batch, feeder.storage)
    assert feeder.states.positions[feeder.slots["a"]] == 10


def test_after_a_failure_in_a_layer_the_slot_must_start_again(tiny, monkeypatch):
    tokens = random_tokens(30, 512)
    want = Feeder(tiny).feed("a", tokens)
    feeder = Feeder(tiny)
    feeder.feed("a", tokens[:10])
    saved = feeder.states.snapshot(feeder.slots["a"])
    with monkeypatch.context() as broken, pytest.raises(MemoryError):
        broken.setattr(hybrid, "silu_mul", lambda *_: (_ for _ in ()).throw(MemoryError()))
        feeder.feed("a", tokens[10:])
    assert feeder.states.positions[feeder.slots["a"]] == UNKNOWN
    feeder.lengths["a"] = 10
    with pytest.raises(StateMismatch, match="no valid state since a forward failed"):
        feeder.feed("a", tokens[10:])
    feeder.states.restore(feeder.slots["a"], saved)
    feeder.lengths["a"] = 10
    assert torch.equal(feeder.feed("a", tokens[10:]), want[10:])


def test_a_config_without_delta_layers_is_refused():
    with pytest.raises(ValueError, match="config with delta layers, got one of the family llama"):
        HybridModel(TINY_LLAMA, random_tensors(TINY_LLAMA).__getitem__)
    with pytest.raises(ValueError, match="max_seq_len must be at least 1, got 0"):
        HybridModel(TINY_HYBRID, random_tensors(TINY_HYBRID).__getitem__, max_seq_len=0)
