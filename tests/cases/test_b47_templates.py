"""Templates: exactly one BOS, and each turn finds of the turns before it what its template leaves as it was.

Public reports saw two BOS tokens or none, and chats whose every turn missed the cache because the template rendered
the earlier turns anew: thoughts stripped, the time at the top.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

import numpy as np
import pytest
from byhand import Hand
from loaders.chats import bpe, chat_of, noon, running

from paged.loaders.borders import common_prefix
from paged.loaders.renderer import MarkedPrompt

QUESTIONS = ("What is for dinner?", "Is there cake?", "May I have some tea?")
OTHERS = ("\nWhy?", " 7 and 8", "(none)")
REPLIES = ("<think>They eat.</think>Soup.", "<think>They like it.</think>There is.", "<think>Why not?</think>Sure.")
CASES = {
    "plain": ("plain", noon),
    "bos": ("bos", noon),
    "strips": ("strips", noon),
    "a clock that stands": ("clock", noon),
}


class Chat:
    """Three turns: their prompts, and the tokens that each has computed when its reply is closed."""

    def __init__(self, template: str, clock: Callable[[], datetime] = noon, questions: Sequence[str] = QUESTIONS):
        chat = chat_of(template, clock=clock)
        self.prompts: list[MarkedPrompt] = []
        self.histories: list[np.ndarray] = []
        for question, reply in zip(questions, REPLIES, strict=True):
            chat.add_user(question)
            prompt = chat.render_marked()
            said = bpe().encode(reply, add_special=False)
            self.prompts.append(prompt)
            self.histories.append(np.concatenate([prompt.tokens, said, chat.close_tokens()]))
            chat.add_assistant(reply)

    def shared(self, turn: int) -> int:
        """Leading tokens that the prompt of a turn has in common with what was computed before it."""
        return max(common_prefix(self.prompts[turn].tokens, history) for history in self.histories[:turn])


@pytest.mark.parametrize("case", CASES)
def test_each_turn_begins_with_exactly_one_bos(case: str) -> None:
    for prompt in Chat(*CASES[case]).prompts:
        assert prompt.tokens.tolist().count(1) == 1
        assert prompt.tokens[0] == 1


@pytest.mark.parametrize("case", ["plain", "bos", "a clock that stands"])
def test_a_template_that_leaves_history_alone_shares_all_of_it(case: str) -> None:
    chat = Chat(*CASES[case])
    for turn in (1, 2):
        assert chat.shared(turn) == len(chat.histories[turn - 1])


def test_a_template_that_strips_thoughts_shares_up_to_the_reply_to_the_last_question() -> None:
    chat = Chat("strips")
    for turn in (1, 2):
        assert chat.shared(turn) == len(chat.prompts[turn - 1].tokens) > chat.prompts[turn - 1].messages_end
        assert chat.shared(turn) < len(chat.histories[turn - 1]) - 10


def test_a_clock_that_runs_shares_what_stands_before_the_time() -> None:
    chat = Chat("clock", running())
    before = len(bpe().encode("<|im_start|>[system]It is 1"))
    for turn in (1, 2):
        assert before <= chat.shared(turn) <= before + 3
        assert chat.prompts[turn].stable <= before + 3


@pytest.mark.parametrize("case", CASES)
def test_the_opening_and_the_stable_part_exclude_what_varies_with_the_question(case: str) -> None:
    template, clock = CASES[case]
    ours, theirs = Chat(template, clock), Chat(template, clock, OTHERS)
    last = Chat(template, clock, (*QUESTIONS[:2], OTHERS[2]))
    for turn in range(3):
        one, other = ours.prompts[turn], theirs.prompts[turn]
        assert one.opening == other.opening == ours.prompts[0].opening == ours.prompts[0].stable
        assert bpe().decode(one.tokens[: one.opening], skip_special=False).endswith("Be brief.<|im_end|>\n[user]")
        assert one.tokens[: one.opening].tolist() == other.tokens[: one.opening].tolist()
    stable = ours.prompts[2].stable
    assert ours.prompts[2].tokens[:stable].tolist() == last.prompts[2].tokens[:stable].tolist()
    assert bpe().decode(ours.prompts[2].tokens[stable:]).startswith(QUESTIONS[2])


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("case", [*CASES, "a clock that runs"])
def test_a_turn_matches_the_whole_pages_of_what_it_shares_and_computes_what_a_cold_one_does(
    case: str, page_size: int
) -> None:
    chat = Chat(*CASES[case]) if case in CASES else Chat("clock", running())
    hand = Hand(1024 // page_size, page_size)
    for turn, (prompt, history) in enumerate(zip(chat.prompts, chat.histories, strict=True)):
        expected = chat.shared(turn) // page_size * page_size if turn else 0
        assert hand.cache.match_len(prompt.tokens) == expected
        hand.ask(prompt.tokens.tolist()).release()
        hand.donate(history.tolist())
