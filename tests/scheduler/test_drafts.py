"""Drafts: a step verifies guesses, and its tokens are those of plain decoding."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from byhand import span
from driver import Driver
from fakes import EchoHybrid, EchoLooped, EchoModel

from paged.grammar import Grammar
from scheduler import Engine, SamplingParams
from scheduler.drafts import kept_rows
from scheduler.proposer import PromptLookup


class Guess:
    """Knows the greedy tokens of a model, and says another one where `wrong` is true of the place."""

    def __init__(self, model: EchoModel, wrong: Callable[[int], bool] = lambda at: False) -> None:
        self.model = model
        self.wrong = wrong
        self.calls = 0

    def propose(self, tokens: np.ndarray, most: int) -> list[int]:
        self.calls += 1
        right = self.model.greedy(tokens.tolist(), most)
        size = self.model.vocab_size
        return [(t + 1) % size if self.wrong(len(tokens) + i) else t for i, t in enumerate(right)]


def drafting(num_pages: int = 64, page_size: int = 4, wrong=lambda at: False, num_drafts: int = 4, **config) -> Driver:
    model = config.pop("model", None) or EchoModel()
    return Driver(
        num_pages, page_size, model=model, proposer=Guess(model, wrong), num_drafts=num_drafts, watermark=0.0, **config
    )


def test_right_guesses_come_five_tokens_a_step() -> None:
    driver = drafting()
    assert driver.solo("a", span(0, 9), 21) == driver.greedy(driver.requests["a"], 21)
    assert driver.plans == [{"a": 9}, *[{"a": 5}] * 4]
    stats = driver.scheduler.stats
    assert (stats.drafted_tokens, stats.accepted_tokens, stats.generated_tokens) == (16, 16, 21)


def test_wrong_guesses_cost_rows_and_change_nothing() -> None:
    driver = drafting(wrong=lambda at: True)
    driver.solo("a", span(0, 9), 12)
    driver.expect_all_exact()
    stats = driver.scheduler.stats
    assert (stats.accepted_tokens, stats.generated_tokens, len(driver.plans)) == (0, 12, 12)
    assert [plan["a"] for plan in driver.plans] == [9, 5, 1, 2, 1, 1, 1, 2, 1, 1, 1, 1]  # pauses of 1, 3 and 7 steps


def test_a_draft_never_reaches_past_the_limit() -> None:
    driver = drafting(num_drafts=7)
    driver.solo("a", span(0, 9), 6)
    assert [plan["a"] for plan in driver.plans] == [9, 5]
    driver.expect_all_exact()


def test_guesses_become_more_where_they_are_right_and_fewer_where_not() -> None:
    driver = drafting(num_drafts=8, wrong=lambda at: at in (12, 20))
    driver.solo("a", span(0, 9), 40)
    # Of 8 guesses 2 are right, of the next 3 all, of 6 then 3, of 4 all; 8 and 8 again, and 4 before the limit.
    assert [plan["a"] for plan in driver.plans] == [9, 9, 4, 7, 5, 9, 9, 5]
    driver.expect_all_exact()


def test_another_request_in_the_slot_begins_anew() -> None:
    driver = drafting(max_num_seqs=1, wrong=lambda at: at < 30)
    driver.solo("a", span(0, 9), 12)
    assert driver.solo("b", span(0, 40), 11) == driver.greedy(driver.requests["b"], 11)
    assert driver.plans[-2] == {"b": 5}


def test_of_three_drafts_the_one_before_the_first_wrong_one_is_kept() -> None:
    driver = drafting(num_drafts=3, wrong=lambda at: at % 4 == 3)
    driver.submit("a", span(0, 9), 20)
    driver.step()  # ten tokens are known
    driver.step()  # guesses at 10, 11 (wrong) and 12
    assert (driver.computed("a"), len(driver.outputs["a"])) == (11, 3)
    driver.run()
    driver.expect_all_exact()


@pytest.mark.parametrize("page_size", [1, 2, 3, 8])
@pytest.mark.parametrize("num_drafts", [1, 2, 7])
@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_any_mixture_of_right_and_wrong_is_exact(page_size: int, num_drafts: int, every: int) -> None:
    driver = drafting(160 // page_size, page_size, lambda at: at % every == 0, num_drafts)
    for i in range(4):
        driver.submit(f"r{i}", span(10 * i, 5 + i), 17 + i)
    driver.run()
    driver.expect_all_exact()
    assert driver.pool.num_live == 0


def test_no_page_of_unverified_tokens_is_published_and_surplus_columns_go_back() -> None:
    driver = drafting(page_size=2, wrong=lambda at: True)
    driver.submit("a", span(0, 3), 10)
    driver.step()
    for _ in range(5):
        driver.step()
        known = int(driver.scheduler.state.known[driver.requests["a"].slot])
        assert len(driver.pages("a")) in (-(-known // 2) - 1, -(-known // 2))
        assert driver.cache.held_pages == driver.computed("a") // 2
    driver.run()
    assert driver.solo("again", [*span(0, 3), *driver.outputs["a"]], 4) is not None
    driver.expect_all_exact()


def test_drafts_take_free_pages_only_and_evict_or_preempt_nothing() -> None:
    driver = drafting(num_pages=6, page_size=4)
    driver.solo("old", span(50, 7), 2)
    held = driver.cache.held_pages
    driver.submit("a", span(0, 8), 6)
    driver.step()
    while driver.scheduler.has_work:
        assert driver.cache.held_pages >= held
        driver.step()
    assert driver.scheduler.stats.num_preemptions == 0 and driver.cache.stats.evicted_pages == 0
    driver.expect_all_exact()


def test_chunks_and_new_requests_come_before_drafts() -> None:
    driver = drafting(page_size=16, max_num_batched_tokens=8)
    driver.submit("a", span(0, 4), 30)
    driver.step()
    driver.submit("b", span(30, 14), 4)
    driver.step()
    driver.step()
    assert driver.plans[1:] == [{"a": 1, "b": 7}, {"a": 1, "b": 7}]
    driver.step()
    assert driver.plans[3] == {"a": 5, "b": 3}  # two decodes leave six rows for drafts
    driver.run()
    driver.expect_all_exact()


def test_an_end_id_among_right_guesses_ends_the_request_there() -> None:
    model = EchoModel()
    prompt = span(0, 9)
    tokens = model.greedy(prompt, 20)
    at = next(i for i in range(4, 20) if tokens[i] not in tokens[:i])
    model.eos_token_ids = (tokens[at],)
    blind = EchoModel()  # guesses on, past the end
    driver = Driver(64, 4, model=model, proposer=Guess(blind), num_drafts=7)
    assert driver.solo("a", prompt, 20) == tokens[:at]
    assert driver.requests["a"].finish_reason == "stop"
    assert driver.scheduler.stats.generated_tokens == at + 1
    assert driver.pool.num_live == 0


def test_min_tokens_hold_for_each_row_of_a_draft() -> None:
    model = EchoModel()
    tokens = model.greedy(span(0, 9), 12)
    driver = Driver(64, 4, model=model, proposer=Guess(EchoModel()), num_drafts=7)
    model.eos_token_ids = (tokens[2], tokens[5])
    driver.solo("a", span(0, 9), 12, min_tokens=4)  # the driver masks nothing: the first end id is passed over
    assert driver.outputs["a"] == tokens[:5]


def test_looped_requests_and_windows_are_drafted_for_exactly() -> None:
    model = EchoLooped(max_loops=3)
    driver = Driver(200, 2, model=model, proposer=PromptLookup(2, 1))
    for i, (loops, window) in enumerate([(1, 0), (2, 5), (3, 0), (3, 3)]):
        driver.submit(f"r{i}", [1, 2, 3, 1, 2, 3, 1 + i], 15, loops=loops, cache_window=window)
    driver.run()
    driver.expect_all_exact()
    assert driver.scheduler.stats.drafted_tokens > 0


def test_kept_rows_are_those_up_to_the_first_that_is_not_its_draft() -> None:
    driver = drafting(page_size=16)
    driver.submit("a", span(0, 4), 30)
    driver.submit("b", span(40, 4), 30)
    driver.step()
    plan = driver.scheduler.schedule()
    assert plan.sample_slots.tolist() == [0] * 5 + [1] * 5
    assert plan.positions.tolist() == [5, 6, 7, 8, 9] * 2
    right = np.append(plan.batch.tokens[1:5], 0), np.append(plan.batch.tokens[6:], 0)
    tokens = np.concatenate(right).astype(np.int32)
    state = driver.scheduler.state
    assert kept_rows(plan, tokens, state).tolist() == list(range(10))
    tokens[2] += 1
    tokens[5] += 1
    assert kept_rows(plan, tokens, state).tolist() == [0, 1, 2, 5]
    driver.scheduler.abort(plan, "")


# The engine -------------------------------------------------------------------------------------------------------


class Bad:
    """A proposer that fails, or names ids that there are not."""

    def __init__(self, answer) -> None:
        self.answer = answer

    def propose(self, tokens, most):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize("answer", [KeyError("no"), [97], [-1], ["x"], None])
def test_a_proposer_that_fails_is_counted_and_changes_nothing(answer) -> None:
    engine = Engine(EchoModel(), num_pages=32, proposer=Bad(answer))
    [output] = engine.generate([span(0, 9)], SamplingParams(max_tokens=5))
    assert output.token_ids == engine.model.greedy(span(0, 9), 5)
    stats = engine.stats()
    assert stats["proposer_errors"] == stats["num_steps"] - 2 and stats["drafted_tokens"] == 0


def test_a_proposer_cannot_write_into_the_tokens() -> None:
    class Writes:
        def propose(self, tokens, most):
            tokens[:] = 0
            return []

    engine = Engine(EchoModel(), num_pages=32, proposer=Writes())
    [output] = engine.generate([span(0, 9)], SamplingParams(max_tokens=5))
    assert output.token_ids == engine.model.greedy(span(0, 9), 5)
    assert engine.stats()["proposer_errors"] > 0


def test_a_model_with_recurrent_state_takes_no_proposer() -> None:
    with pytest.raises(ValueError, match="recurrent state cannot take back drafts"):
        Engine(EchoHybrid(), num_pages=32, proposer="prompt_lookup")


SETTINGS = [
    SamplingParams(max_tokens=40),
    SamplingParams(max_tokens=40, temperature=0.8, seed=7),
    SamplingParams(max_tokens=40, temperature=1.2, top_p=0.9, top_k=20, seed=3),
    SamplingParams(max_tokens=40, repetition_penalty=1.3, frequency_penalty=0.4),
    SamplingParams(max_tokens=40, logprobs=3),
    SamplingParams(max_tokens=40, min_tokens=20, stop_token_ids=list(range(0, 256, 3))),
]


@pytest.mark.parametrize("source", ["tiny:llama", "tiny:looped"])
def test_every_kind_of_sampling_is_the_same_with_and_without_drafts(source: str) -> None:
    prompts = [[5, 6, 7, 8] * 4 + [5], [9] * 12, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]]
    plain = Engine(source, num_pages=512)
    drafted = Engine(source, num_pages=512, proposer=PromptLookup(2, 1))
    for params in SETTINGS:
        expected, outputs = plain.generate(prompts, params), drafted.generate(prompts, params)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in expected], params
        assert [o.logprobs for o in outputs] == [o.logprobs for o in expected]
        assert [o.finish_reason for o in outputs] == [o.finish_reason for o in expected]
        drafted.check()
    stats = drafted.stats()
    assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]
    assert stats["num_steps"] <= plain.stats()["num_steps"]


def test_a_stop_string_among_right_guesses_cuts_the_text_there() -> None:
    plain = Engine("smollm2", num_pages=256)
    drafted = Engine("smollm2", num_pages=256, proposer=PromptLookup(2, 1))
    params, generated = SamplingParams(max_tokens=48), 0
    [whole] = plain.generate(["a b c d a b c d a b c d a b c d a b"], params)
    for at in (3, 10, 17):
        stop = whole.text[at : at + 3]
        params = SamplingParams(max_tokens=48, stop=stop)
        [expected] = plain.generate(["a b c d a b c d a b c d a b c d a b"], params)
        [output] = drafted.generate(["a b c d a b c d a b c d a b c d a b"], params)
        assert (output.text, output.token_ids, output.finish_reason) == (expected.text, expected.token_ids, "stop")
        generated += len(output.token_ids)
    assert drafted.stats()["accepted_tokens"] > 0
    assert drafted.stats()["generated_tokens"] == generated  # not those behind the stop in its step
    drafted.check()


def test_a_request_with_a_grammar_is_not_drafted_for() -> None:
    pytest.importorskip("llguidance")
    engine = Engine("smollm2", num_pages=256, proposer=PromptLookup(2, 1))
    params = SamplingParams(max_tokens=24, grammar=Grammar.regex("(ab )*"))
    [output] = engine.generate(["ab ab ab ab ab ab"], params)
    assert engine.stats()["drafted_tokens"] == 0 and output.text.startswith("ab")


def test_logits_that_are_unusable_behind_a_wrong_guess_hurt_nobody() -> None:
    model = EchoModel()
    guess = Guess(model, wrong=lambda at: at == 12)
    engine = Engine(model, num_pages=32, proposer=guess)
    real = model.forward

    def forward(batch, storage):
        logits = real(batch, storage)
        if batch.kv_lens[0] > 13 and len(batch.tokens) > 3:
            row = 12 - int(batch.kv_lens[0] - len(batch.tokens))
            if 0 <= row < len(logits) and batch.tokens[row] != model.greedy(span(0, 9), 5)[3]:
                logits[row] = float("nan")  # of the guess that was wrong
        return logits

    model.forward = forward
    outputs = engine.generate([span(0, 9)], SamplingParams(max_tokens=12))
    assert outputs[0].token_ids == model.greedy(span(0, 9), 12) and not outputs[0].error
