"""explain(tokens): how far a prompt matches, and why it stops there. Dropping a namespace."""

from __future__ import annotations

import pytest
from byhand import Hand, span
from fakes import EchoHybrid

PROMPT = span(0, 14)


def why(h: Hand, tokens, namespace: str = "") -> tuple[int, str]:
    found = h.cache.explain(tokens, namespace)
    assert found.num_tokens == len(tokens)
    assert found.matched == h.cache.match_len(tokens, namespace)
    assert found.message
    return found.matched, found.reason


@pytest.mark.parametrize(
    ("n", "answer"),
    [
        (14, (12, "too short")),
        (13, (12, "complete")),
        (12, (8, "too short")),
        (9, (8, "complete")),
        (1, (0, "complete")),
        (3, (0, "too short")),
    ],
)
def test_whole_pages_stop_short_of_the_last_token(n: int, answer: tuple[int, str]) -> None:
    h = Hand(20, 4)
    h.donate(span(0, 16))
    assert why(h, PROMPT[:n]) == answer


def test_an_exact_cache_is_complete_at_any_length() -> None:
    h = Hand(20, 4, partial=True)
    h.donate(span(0, 16))
    for n in range(1, 15):
        assert why(h, PROMPT[:n]) == (n - 1, "complete")


def test_tokens_that_nobody_donated() -> None:
    h = Hand(20, 4)
    h.donate(span(0, 8))
    assert why(h, [*span(0, 8), *span(90, 9)]) == (8, "never cached")
    assert why(h, span(90, 9)) == (0, "never cached")
    assert "token 8" in h.cache.explain([*span(0, 8), *span(90, 9)]).message


def test_an_evicted_page_is_remembered() -> None:
    h = Hand(20, 4)
    h.donate(span(0, 12))
    h.cache.evict(1)
    assert why(h, PROMPT) == (8, "evicted")
    assert "tokens 8 to 11" in h.cache.explain(PROMPT).message
    h.cache.evict(9)
    assert why(h, PROMPT) == (0, "evicted")
    h.cache.release()
    assert why(h, PROMPT) == (0, "never cached")


def test_another_namespace_is_named_as_the_reason() -> None:
    h = Hand(20, 4)
    h.donate(span(0, 12), "a")
    h.donate(span(0, 4), "b")
    assert why(h, PROMPT, "a") == (12, "too short")
    assert why(h, PROMPT, "b") == (4, "other namespace")
    assert why(h, PROMPT) == (0, "other namespace")


def test_a_recurrent_model_tells_of_the_state_that_was_not_kept() -> None:
    h = Hand(40, 4, kind=EchoHybrid)
    for n in (6, 11):
        h.donate(span(0, n))
    h.donate(span(50, 9), "a")
    assert why(h, [*span(0, 9), 90, 91]) == (6, "state missing")
    assert "9 leading tokens" in h.cache.explain([*span(0, 9), 90, 91]).message
    assert why(h, span(0, 12)) == (11, "complete")
    assert why(h, [*span(50, 9), 1, 2]) == (0, "other namespace")
    assert why(h, [700, 701]) == (0, "never cached")


def test_an_evicted_checkpoint_is_remembered() -> None:
    h = Hand(40, 4, kind=EchoHybrid)
    h.donate(span(0, 10))
    h.cache.evict(99)
    assert why(h, span(0, 14)) == (0, "evicted")
    assert "first 10 tokens" in h.cache.explain(span(0, 14)).message
    h.donate(span(0, 12))
    assert why(h, span(0, 14)) == (12, "never cached")
    h.cache.release()
    assert why(h, span(0, 14)) == (0, "never cached")


def test_an_evicted_tail_is_remembered_and_an_exact_cache_is_never_too_short() -> None:
    h = Hand(20, 4, partial=True)
    h.donate(span(0, 10))
    h.cache.evict(1)
    assert why(h, span(0, 12)) == (8, "evicted")
    assert "tokens 8 to 9" in h.cache.explain(span(0, 12)).message
    assert why(h, [*span(0, 8), 90, 91]) == (8, "never cached")


def test_chains_list_checkpoints_with_their_labels() -> None:
    h = Hand(40, 4, kind=EchoHybrid)
    h.donate(span(0, 10), preview="one")
    h.donate(span(50, 5), preview="two")
    h.ask(span(50, 9)).release()
    shown = [(c.id, c.preview, c.num_tokens, c.num_pages, c.num_hits) for c in h.cache.chains()]
    assert shown == [(1, "one", 10, 3, 0), (2, "two", 5, 2, 1)]


def test_explaining_touches_nothing() -> None:
    h = Hand(20, 4, partial=True)
    h.donate(span(0, 12))
    before = (h.pool.refs.tolist(), h.cache.index.last_use.tolist(), h.cache.stats)
    for _ in range(50):
        h.cache.explain(PROMPT)
        h.cache.explain(PROMPT, "other")
    assert (h.pool.refs.tolist(), h.cache.index.last_use.tolist(), h.cache.stats) == before


# drop(namespace) --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [None, EchoHybrid])
def test_one_namespace_goes_and_the_others_stand(kind) -> None:
    h = Hand(40, 4, **({"kind": kind} if kind else {}))
    for name in ("", "a", "b"):
        h.donate(span(0, 8), name)
    h.donate([*span(0, 4), *span(60, 8)], "a")
    held = h.cache.held_pages
    gone = h.cache.drop("a")
    assert gone == held - h.cache.held_pages > 0
    assert [h.cache.match_len([*span(0, 8), 1], name) for name in ("", "a", "b")] == [8, 0, 8]
    h.check()
    assert h.cache.drop("a") == 0
    assert h.cache.drop("nobody") == 0
    h.donate(span(0, 8), "a")
    assert h.cache.match_len([*span(0, 8), 1], "a") == 8
    h.check()


def test_a_running_session_keeps_its_pages_and_what_it_goes_on_to_compute_is_cached_no_more() -> None:
    h = Hand(40, 4)
    h.donate(span(0, 8), "a")
    session = h.session("a")
    h.cache.attach(session, span(0, 12))
    cursor = h.cache.cursor("a")
    h.cache.seek(cursor, session.tokens)
    h.cache.drop("a")
    h.expect_exact(session, span(0, 12), session.eval(span(8, 4)))
    assert h.cache.publish(cursor, session.tokens, session.table.rows) == 0
    assert h.cache.held_pages == 0 and cursor.epoch.over
    session.release()
    assert h.pool.num_free == 40
    h.check()


def test_a_cursor_without_pages_publishes_nothing_after_the_drop_either() -> None:
    h = Hand(40, 4)
    cursor = h.cache.cursor("a")
    session = h.session("a")
    session.eval(span(0, 8))
    h.cache.drop("a")
    h.cache.publish(cursor, session.tokens, session.table.rows)
    assert h.cache.held_pages == 0
    other = h.cache.cursor("a")
    h.cache.publish(other, session.tokens, session.table.rows)
    assert h.cache.held_pages == 2
    h.check()
