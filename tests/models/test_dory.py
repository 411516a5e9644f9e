"""DoryModel, the looped model that transformers has: its logits, and its rows at every depth against themselves."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch
from feeder import Feeder, random_tokens
from safetensors.torch import save_file

from paged.errors import LoadError
from paged.models.config import LoopConfig, ModelConfig
from paged.models.dory import DoryModel
from paged.models.registry import load_model
from paged.models.tiny import TINY_LLAMA, random_tensors, tiny_hf_settings

LENGTH = 45  # more than two pages of 16, more than the longest window below
BOUND = 1e-4

FULL, SLIDING = "full_attention", "sliding_attention"
CASES = {
    "plain": {},
    "one loop": {"n_recurrent_loops": 1},
    "eight loops": {"n_recurrent_loops": 8},
    "all layers loop": {"n_input_layers": 0, "n_output_layers": 0},
    "nothing after": {"n_output_layers": 0},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "windows only": {"layer_types": [SLIDING] * 4},
    "no windows": {"layer_types": [FULL] * 4},
    "two full": {"layer_types": [FULL, SLIDING, FULL, SLIDING], "sliding_window": 17},
    "sizes of no vector": {"hidden_size": 45, "intermediate_size": 53, "num_key_value_heads": 1},
    "other constants": {"initializer_range": 0.5, "ngpt_alpha_init": 0.3},
    "other theta": {
        "rope_parameters": {FULL: {"rope_type": "default", "rope_theta": 100.0}, SLIDING: {"rope_theta": 500.0}}
    },
}


def settings_of(case: str) -> dict:
    return tiny_hf_settings("dory", **CASES[case])


def model_of(case: str = "plain") -> DoryModel:
    config = ModelConfig.from_hf(settings_of(case))
    return DoryModel(config, random_tensors(config, seed=3).__getitem__)


def oracle_of(settings: dict, tensors: dict[str, torch.Tensor]):
    """transformers' model with these weights, in plain attention."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("transformers.models.dory")
    config = transformers.AutoConfig.for_model(**{k: v for k, v in settings.items() if k != "architectures"})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval()


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """(our model, tokens, transformers' logits [LENGTH, vocab])."""
    settings = settings_of(request.param)
    oracle = oracle_of(settings, random_tensors(ModelConfig.from_hf(settings), seed=3))
    folder = tmp_path_factory.mktemp("checkpoint")
    oracle.save_pretrained(folder)
    tokens = random_tokens(LENGTH, settings["vocab_size"])
    with torch.inference_mode():
        want = oracle(torch.tensor([tokens])).logits[0]
    model = load_model(folder)
    assert isinstance(model, DoryModel)
    return model, tokens, want


def at_depth(model: DoryModel, tokens: list[int], depth: int, chunk: int = 0, page_size: int = 16) -> torch.Tensor:
    feeder = Feeder(model, page_size, num_pages=2048, seed=page_size)
    feeder.depths["a"] = depth
    return feeder.feed("a", tokens, chunk)


# Values


@pytest.mark.parametrize("chunk", [0, 7, 1], ids=["whole", "chunks", "decode"])
def test_logits_are_those_of_transformers(case, chunk):
    model, tokens, want = case
    got = Feeder(model, 4, num_pages=1024, seed=chunk).feed("a", tokens, chunk)
    assert got.dtype == torch.float32 and got.shape == want.shape
    assert (got - want).abs().max() < BOUND
    assert want.std() > 0.5, "the weights are too small to tell a right model from a wrong one"


def test_a_depth_given_by_the_batch_is_the_number_of_loops_that_transformers_takes():
    settings = settings_of("plain")
    tensors = random_tensors(ModelConfig.from_hf(settings), seed=3)
    tokens, logits = random_tokens(LENGTH, 96), []
    for depth in (1, 2, 5):
        with torch.inference_mode():
            want = oracle_of({**settings, "n_recurrent_loops": depth}, tensors)(torch.tensor([tokens])).logits[0]
        assert (at_depth(model_of(), tokens, depth) - want).abs().max() < BOUND
        logits.append(want)
    assert min(float((a - b).abs().max()) for a, b in itertools.pairwise(logits)) > 0.01


def test_transformers_decoding_with_its_own_cache_gives_our_logits():
    settings = settings_of("two full")
    oracle = oracle_of(settings, random_tensors(ModelConfig.from_hf(settings), seed=3))
    tokens = random_tokens(30, 96)
    got = Feeder(model_of("two full")).feed("a", tokens, 5)
    with torch.inference_mode():
        out = oracle(torch.tensor([tokens[:20]]), use_cache=True)
        name = next(name for name in ("cache", "past_key_values") if name in out)
        rows = [*out.logits[0]]
        for token in tokens[20:]:
            out = oracle(torch.tensor([[token]]), use_cache=True, **{name: out[name]})
            rows.append(out.logits[0, 0])
    assert (got - torch.stack(rows)).abs().max() < BOUND


def test_weights_in_bf16_stay_near_fp32():
    config = ModelConfig.from_hf(settings_of("plain"))
    tensors = random_tensors(config, seed=3)
    tokens = random_tokens(40, 96)
    want = Feeder(DoryModel(config, tensors.__getitem__)).feed("a", tokens)
    got = Feeder(DoryModel(config, tensors.__getitem__, dtype=torch.bfloat16)).feed("a", tokens, 7)
    assert got.dtype == torch.float32 and 0 < (got - want).abs().max() / want.std() < 0.3


# Rows: promise 1


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["plain", "biases", "sizes of no vector"])
def test_a_row_has_the_same_bits_at_its_depth_whatever_its_neighbours(name, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model, tokens = model_of(name), random_tokens(130, 96)
        for depth in (1, 3):
            want = at_depth(model, tokens, depth)
            assert torch.equal(at_depth(model, tokens, depth, 33, page_size=4), want)
            feeder = Feeder(model, num_pages=4096)
            feeder.depths = {"a": depth, "b": 1, "c": 6, "d": 3}
            pieces = []
            for start in range(0, 130, 13):
                rows = {name: random_tokens(2 * i + 1, 96, i) for i, name in enumerate("bcd")}
                rows = dict(sorted({**rows, "a": tokens[start : start + 13]}.items(), reverse=bool(start % 2)))
                pieces.append(feeder.step(rows)["a"])
            assert torch.equal(torch.cat(pieces), want)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["plain", "nothing after", "all layers loop"])
def test_going_on_from_a_residual_gives_the_bits_of_a_run_from_scratch(name):
    """The residual also holds what entered the first iteration, which every later one gets again."""
    model, tokens = model_of(name), random_tokens(LENGTH, 96)
    want = at_depth(model, tokens, 8)
    feeder = Feeder(model, num_pages=256)
    feeder.depths["a"] = 4
    _, residual = model.run_loops(feeder.batch({"a": tokens}), feeder.storage)
    assert residual.shape == (LENGTH, model.residual_size) == (LENGTH, 96)
    feeder.depths["a"], feeder.lengths["a"] = 8, 0
    batch = feeder.batch({"a": tokens})
    got, deeper = model.run_loops(batch, feeder.storage, residual, 4)
    assert torch.equal(got, want) and torch.equal(deeper[:, 48:], residual[:, 48:])
    more = random_tokens(5, 96, 1)
    assert torch.equal(feeder.step({"a": more})["a"], at_depth(model, tokens + more, 8)[-5:])


# Files


def test_a_released_file_counts_attention_and_mlp_as_two_layers(tmp_path):
    settings = settings_of("plain")
    config = ModelConfig.from_hf(settings)
    tensors = random_tensors(config, seed=3)
    counts = {name: 2 * settings[name] for name in ("num_hidden_layers", "n_input_layers", "n_output_layers")}
    types = [SLIDING, "mlp", SLIDING, "mlp", SLIDING, "mlp", FULL, "mlp"]
    (tmp_path / "config.json").write_text(json.dumps(settings | counts | {"layer_types": types}))
    released = {}
    for name, values in tensors.items():
        if name.startswith("model.layers."):
            layer, rest = name.removeprefix("model.layers.").split(".", 1)
            second = rest.startswith("mlp.") or rest == "lambda_2"
            for ours, theirs in [
                ("self_attn.gate_proj", "mixer.g_proj"),
                ("self_attn", "mixer"),
                ("mlp", "mixer"),
                ("lambda_1", "attn_alpha"),
                ("lambda_2", "mlp_alpha"),
            ]:
                if rest == ours or rest.startswith(ours + "."):
                    rest = theirs + rest.removeprefix(ours)
                    break
            name = f"backbone.layers.{2 * int(layer) + second}.{rest}"
        released[name.replace("model.embed_tokens", "backbone.embeddings")] = values
    save_file(released, str(tmp_path / "model.safetensors"), metadata={"format": "pt"})
    model = load_model(tmp_path)
    assert model.fingerprint == DoryModel(config, tensors.__getitem__).fingerprint
    assert isinstance(model, DoryModel) and model.config == config and model.loop_layers == (1, 3)


def test_the_config_of_a_released_model_is_read():
    released = {"model_type": "dory", "vocab_size": 131072, "hidden_size": 2560, "intermediate_size": 7168}
    config = ModelConfig.from_hf({**released, "num_hidden_layers": 36, "num_attention_heads": 16})
    assert config.loop == LoopConfig((8, 28), 2, 32)
    assert config.layer_windows == (1024, 1024, 1024, 0) * 9 and config.head_dim == 256 and config.num_kv_heads == 4
    assert config.rope_theta == 1e7 and config.sphere is not None and config.sphere.sliding_theta == 1e4
    assert (config.sphere.initializer_range, config.sphere.ngpt_alpha_init) == (0.0177, 0.05)


def test_arguments_change_its_depth():
    config = ModelConfig.from_hf(settings_of("plain"))
    assert config.loop == LoopConfig((1, 3), 3, 32)
    assert config.with_loop(num_loops=5).loop == LoopConfig((1, 3), 5, 32)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"recurrent_kv_cache_mode": "last_loop"}, "only 'per_loop' is supported for recurrent_kv_cache_mode"),
        ({"n_recurrent_layers": 3}, "must add up to 4 layers, found 1, 3 and 1"),
        ({"n_input_layers": 3}, r"a run \(a, b\) of the 4 layers, got \(3, 3\)"),
        ({"n_recurrent_loops": 0}, "num_loops must be a positive int, got 0"),
        ({"initializer_range": 0.0}, "initializer_range must be a positive number, got 0.0"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "expected rope_parameters of each kind of layers"),
        ({"rope_parameters": {SLIDING: {"rope_type": "yarn"}}}, "only 'default' is supported for rope_parameters.slid"),
    ],
)
def test_what_is_not_implemented_is_refused(changes, message):
    with pytest.raises(LoadError, match=rf"config\.json: .*{message}"):
        ModelConfig.from_hf(tiny_hf_settings("dory", **changes))


def test_configs_of_other_families_are_refused():
    config = ModelConfig.from_hf(settings_of("plain"))
    with pytest.raises(ValueError, match="needs a config of the family dory, got one of llama"):
        DoryModel(TINY_LLAMA, random_tensors(TINY_LLAMA).__getitem__)
    with pytest.raises(LoadError, match="belong to the family dory, got llama"):
        replace(TINY_LLAMA, sphere=config.sphere)
    with pytest.raises(LoadError, match="the family dory needs a loop"):
        replace(config, loop=None)
    with pytest.raises(ValueError, match="max_seq_len must be at least 1, got 0"):
        DoryModel(config, random_tensors(config).__getitem__, max_seq_len=0)


def test_its_extra_info_and_its_fingerprint_tell_what_it_is():
    model = model_of()
    info = model.extra_info()
    assert (info["family"], info["loop_layers"], info["default_loops"]) == ("dory", (1, 3), 3)
    assert info["num_parameters"] == sum(t.numel() for t in random_tensors(model.config).values())
    assert len({model.fingerprint, model_of("one loop").fingerprint, model_of("other constants").fingerprint}) == 3
