"""A cache in a file: what is saved is what was there, and what is loaded serves as if it had been computed here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from byhand import Hand, growing_pool, ids, span
from fakes import EchoHybrid, EchoModel
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from saving import checkpoints_of, contents, everything, nodes_of

from paged.errors import GeometryMismatch
from paged.kv.pages import PagePool
from paged.prefix.cache import PrefixCache

SETTINGS = settings(max_examples=25, deadline=None)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache.safetensors"


def idle(hand: Hand) -> None:
    """Only the cache holds anything, and all of it can be evicted."""
    hand.check()
    assert hand.pool.num_live == 0
    assert hand.pool.num_cached_only == hand.cache.held_pages
    hand.cache.evict(10**6)
    assert hand.pool.num_free == hand.pool.num_pages
    hand.check()


def three_donations(hand: Hand) -> None:
    hand.donate(span(0, 12), preview="first")
    hand.donate([*span(0, 8), *span(50, 5)], preview="second")
    hand.donate(span(0, 9), "tenant")


# All of it --------------------------------------------------------------------------------------------------------


def test_the_pages_of_three_donations_are_there_again(path) -> None:
    hand, other = Hand(), Hand()
    three_donations(hand)
    assert hand.cache.save(path) == 6
    assert other.cache.load(path) == 6
    other.check()
    assert contents(other.cache) == contents(hand.cache)
    assert other.pages_of(span(0, 12)) == [0, 1, 2]
    assert other.cache.match_len(span(0, 13)) == 12
    assert other.cache.match_len(span(0, 13), "tenant") == 8
    assert other.cache.match_len(span(0, 13), "another") == 0
    before = other.model.num_rows
    other.ask([*span(0, 8), *span(50, 5)]).release()
    assert other.model.num_rows - before == 1
    idle(other)


def test_a_second_load_brings_nothing_new_and_changes_nothing(path) -> None:
    hand, other = Hand(), Hand()
    three_donations(hand)
    hand.cache.save(path)
    other.cache.load(path)
    before = everything(other.cache)
    assert other.cache.load(path) == 0
    assert everything(other.cache) == before


def test_a_file_loaded_into_the_cache_that_it_came_from_brings_nothing(path) -> None:
    hand = Hand()
    three_donations(hand)
    hand.cache.save(path)
    before = everything(hand.cache)
    assert hand.cache.load(path) == 0
    assert everything(hand.cache) == before


def test_saving_changes_nothing(path) -> None:
    hand = Hand()
    three_donations(hand)
    before = everything(hand.cache)
    hand.cache.save(path)
    assert everything(hand.cache) == before


def test_two_saves_of_one_cache_give_the_same_bytes_and_so_does_a_save_of_what_was_loaded(path) -> None:
    hand, other = Hand(), Hand()
    three_donations(hand)
    hand.cache.save(path)
    first = path.read_bytes()
    hand.cache.save(path)
    assert path.read_bytes() == first
    other.cache.load(path)
    other.cache.save(path)
    assert path.read_bytes() == first


def test_an_empty_cache_gives_a_file_without_pages(path) -> None:
    for kind in (EchoModel, EchoHybrid):
        hand = Hand(kind=kind)
        assert hand.cache.save(path) == 0
        assert hand.cache.load(path) == 0
        hand.check()


def test_the_file_is_one_that_the_safetensors_library_reads(path) -> None:
    hand = Hand()
    three_donations(hand)
    hand.cache.save(path)
    file = safe_open(path, framework="pt")
    pages = file.get_tensor("pages")
    assert tuple(pages.shape) == (6, 1, 2, 1, 4, 8) and pages.dtype == torch.float32
    assert file.get_tensor("node_parent").tolist() == [-1, 0, 1, 1, -2, 4]
    assert file.get_tensor("node_pages").ravel().tolist() == [0, 1, 2, 3, 4, 5]
    assert torch.equal(pages[2], hand.pool.storage.pages[hand.pages_of(span(0, 12))[2]])


@pytest.mark.parametrize("kind", [EchoModel, EchoHybrid])
def test_every_tensor_of_the_file_is_aligned_to_its_items(path, kind: type[EchoModel]) -> None:
    hand = Hand(kind=kind)
    hand.donate(span(0, 5), preview="of three")
    hand.cache.save(path)
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    assert end % 8 == 0
    for name, entry in json.loads(data[8:end]).items():
        if name != "__metadata__":
            assert entry["data_offsets"][0] % {"I64": 8, "F32": 4, "I32": 4, "U8": 1}[entry["dtype"]] == 0


@SETTINGS
@given(
    page_size=st.sampled_from([1, 2, 4]),
    groups=st.sampled_from([(0,), (0, 0), (3,), (5, 0), (0, 2, 6)]),
    partial=st.booleans(),
    prompts=st.lists(st.tuples(st.sampled_from(["", "a"]), st.integers(0, 12), st.integers(0, 3)), max_size=8),
    data=st.data(),
)
def test_whatever_was_donated_matches_and_continues_as_before(
    tmp_path_factory, page_size, groups, partial, prompts, data
):
    path = tmp_path_factory.mktemp("saved") / "x"
    opening = [0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 1, 2, 3]
    hand, other = (Hand(40 * len(groups), page_size, vocab_size=4, windows=groups, partial=partial) for _ in range(2))
    for namespace, shared, last in prompts:
        hand.donate([*opening[:shared], last], namespace)
    hand.cache.evict(data.draw(st.integers(0, 6)))
    assert hand.cache.save(path) == hand.cache.held_pages
    assert other.cache.load(path) == hand.cache.held_pages
    other.check()
    assert contents(other.cache) == contents(hand.cache)
    for namespace in ("", "a", "b"):
        for shared in range(len(opening) + 1):
            prompt = [*opening[:shared], data.draw(st.integers(0, 3)), 1]
            assert other.cache.match_len(prompt, namespace) == hand.cache.match_len(prompt, namespace)
            other.ask(prompt, namespace).release()
        other.check()
    idle(other)


@SETTINGS
@given(
    page_size=st.sampled_from([1, 2, 4]),
    groups=st.sampled_from([(0,), (0, 0), (3,), (5, 0)]),
    prompts=st.lists(
        st.tuples(st.sampled_from(["", "a"]), st.integers(1, 12), st.integers(0, 3), st.booleans()), max_size=8
    ),
    data=st.data(),
)
def test_whatever_checkpoints_were_kept_match_and_continue_as_before(
    tmp_path_factory, page_size, groups, prompts, data
):
    path = tmp_path_factory.mktemp("saved") / "x"
    turns = [0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 1, 2, 3]
    room = 150 * len(groups)  # for all of it, and for those that ask below
    hand, other = (Hand(room, page_size, vocab_size=4, windows=groups, kind=EchoHybrid) for _ in range(2))
    for namespace, shared, last, opening in prompts:
        tokens = [*turns[:shared], last]
        session = hand.ask(tokens, namespace)
        hand.cache.insert(session, tokens, f"{shared} {last}", opening)
        session.release()
    assert hand.cache.save(path) == hand.cache.held_pages
    assert other.cache.load(path) == hand.cache.held_pages
    other.check()
    assert contents(other.cache) == contents(hand.cache)
    assert other.cache.checkpoints.num_bytes == hand.cache.checkpoints.num_bytes
    for namespace in ("", "a", "b"):
        for shared in range(len(turns) + 1):
            prompt = [*turns[:shared], data.draw(st.integers(0, 3)), 1]
            assert other.cache.match_len(prompt, namespace) == hand.cache.match_len(prompt, namespace)
            other.ask(prompt, namespace).release()
        other.check()
    idle(other)


# Into a cache that is in use, or small ----------------------------------------------------------------------------


def loaded(path, hand: Hand, *args, **kwargs) -> Hand:
    """Another cache of the same model, which has loaded what `hand` holds."""
    other = Hand(*args, **kwargs)
    hand.cache.save(path)
    other.cache.load(path)
    other.check()
    return other


def test_what_is_loaded_goes_in_the_order_of_its_last_use(path) -> None:
    hand = Hand(12)
    for first in (0, 20, 40, 60):
        hand.donate(span(first, 8))
    for first in (20, 0, 60):
        hand.ask(span(first, 9)).release()
    other = loaded(path, hand, 12)
    for _ in range(8):
        assert list(nodes_of(other.cache)) and nodes_of(other.cache) == nodes_of(hand.cache)
        assert hand.cache.evict(1) == other.cache.evict(1) == 1
        other.check()
    assert other.pool.num_free == 12


def test_checkpoints_that_are_loaded_go_in_the_order_of_their_last_use_and_openings_last(path) -> None:
    hand = Hand(20, kind=EchoHybrid)
    for first in (0, 20, 40, 60):
        session = hand.ask(span(first, 6))
        hand.cache.insert(session, span(first, 6), opening=first == 40)
        session.release()
    for first in (20, 0, 60):
        hand.ask(span(first, 9)).release()
    other = loaded(path, hand, 20, kind=EchoHybrid)
    for left in (3, 2, 1, 0):
        assert checkpoints_of(other.cache) == checkpoints_of(hand.cache)
        assert hand.cache.evict(1) == other.cache.evict(1) == 2
        assert len(other.cache.checkpoints) == left
        other.check()


def test_pages_in_use_are_saved_and_count_as_used_last(path) -> None:
    hand = Hand(12)
    hand.donate(span(0, 4))
    hand.donate(span(20, 4))
    session = hand.ask(span(0, 5))
    hand.donate(span(40, 4))
    other = loaded(path, hand, 12)
    assert contents(other.cache) == contents(hand.cache)
    for tokens in (span(20, 5), span(40, 5), span(0, 5)):
        assert other.cache.match_len(tokens) == 4
        other.cache.evict(1)
        assert other.cache.match_len(tokens) == 0
    session.release()
    hand.check()


def test_what_finds_no_free_page_is_left_out_oldest_first_and_counted(path) -> None:
    hand, other = Hand(12), Hand(5)
    for first in (0, 20, 40):
        hand.donate(span(first, 12))
    hand.ask(span(0, 13)).release()
    hand.cache.save(path)
    assert other.cache.load(path) == 5
    assert other.cache.stats.load_refused == 4
    assert [other.cache.match_len(span(first, 13)) for first in (0, 20, 40)] == [12, 0, 8]
    idle(other)


def test_nothing_that_is_cached_makes_way_for_a_file(path) -> None:
    hand, other = Hand(12), Hand(5)
    for first in (0, 20, 40):
        hand.donate(span(first, 12))
    hand.cache.save(path)
    other.donate(span(60, 8))
    session = other.ask(span(80, 4))
    assert other.cache.load(path) == 2
    assert other.cache.match_len(span(60, 9)) == 8
    assert other.cache.match_len(span(40, 13)) == 8
    assert other.cache.stats.evicted_pages == 0
    assert other.cache.stats.load_refused == 7
    other.check()
    assert other.cache.load(path) == 0
    session.release()
    assert other.cache.load(path) == 1  # the page that the session had
    assert other.cache.match_len(span(40, 13)) == 12
    idle(other)


def test_a_growing_pool_grows_for_a_file_up_to_its_bound(path) -> None:
    hand, other = Hand(16), Hand()
    for first in (0, 20, 40, 60):
        hand.donate(span(first, 16))
    hand.cache.save(path)
    other.pool = growing_pool(other.model, 1, 10)
    other.cache = PrefixCache(other.pool)
    assert other.cache.load(path) == 10
    assert (other.pool.num_pages, other.pool.num_free) == (10, 0)
    assert [other.cache.match_len(span(first, 17)) for first in (0, 20, 40, 60)] == [0, 8, 16, 16]
    other.ask(span(60, 17)[:16]).release()
    idle(other)


def test_the_bound_of_pages_holds(path) -> None:
    hand, other = Hand(12), Hand(12, max_pages=4)
    for first in (0, 20, 40):
        hand.donate(span(first, 12))
    other.donate(span(60, 4))
    hand.cache.save(path)
    assert other.cache.load(path) == 3
    assert other.cache.held_pages == 4 and other.cache.match_len(span(60, 5)) == 4
    assert other.cache.stats.load_refused == 6
    other.check()
    other.donate(span(80, 8))  # what was loaded makes way as usual
    assert other.cache.held_pages == 4 and other.cache.match_len(span(80, 9)) == 8
    idle(other)


def test_two_groups_enter_together_or_not_at_all(path) -> None:
    hand, other = Hand(12, num_groups=2), Hand(5, num_groups=2)
    hand.donate(span(0, 12))
    hand.cache.save(path)
    assert other.cache.load(path) == 4
    assert other.cache.match_len(span(0, 13)) == 8 and other.pool.num_free == 1
    idle(other)


def test_sessions_that_run_meanwhile_are_untouched_and_share_what_came(path) -> None:
    hand, other = Hand(12), Hand(20)
    hand.donate(span(0, 16), preview="theirs")
    hand.cache.save(path)
    other.donate(span(0, 8), preview="ours")
    running = other.ask(span(0, 14))
    late = other.session()
    table = running.table.rows.tolist()
    assert other.cache.load(path) == 2
    other.check()
    assert running.table.rows.tolist() == table
    assert other.pages_of(span(0, 16))[:2] == table[0][:2]
    assert [(c.preview, c.num_pages) for c in other.cache.chains()] == [("ours", 2), ("theirs", 2)]
    assert other.cache.attach(late, span(0, 17)) == 16
    other.expect_exact(late, span(0, 17), late.eval([16]))
    other.expect_exact(running, span(0, 16), running.eval([14, 15]))
    assert other.cache.insert(running, span(0, 16)) == 0  # it goes on with the pages that were loaded
    assert running.table.rows[0].tolist() == other.pages_of(span(0, 16))
    other.check()
    running.release()
    late.release()
    idle(other)


def test_what_was_loaded_is_not_shared_with_the_file_or_with_another_cache(path) -> None:
    hand = Hand(12)
    hand.donate(span(0, 8))
    one, two = loaded(path, hand, 12), loaded(path, hand, 12)
    data = path.read_bytes()
    one.pool.storage.pages.zero_()
    assert path.read_bytes() == data
    two.ask(span(0, 9))


def test_a_release_before_the_load_ends_nothing_after_it(path) -> None:
    hand = Hand(12)
    hand.donate(span(0, 12))
    hand.cache.save(path)
    before = hand.session()
    cursor = hand.cache.cursor()
    hand.cache.release()
    assert hand.cache.load(path) == 3
    assert not cursor.open
    assert hand.cache.attach(before, span(0, 13)) == 12
    hand.expect_exact(before, span(0, 13), before.eval([12]))
    hand.check()


def test_namespaces_carry_over_with_all_their_fields_and_can_be_dropped(path) -> None:
    hand = Hand(12)
    for salt, fields in (("", {}), ("a", {}), ("a", {"adapter": "x"})):
        session = hand.session()
        session.eval(span(0, 8))
        hand.cache.publish(hand.cache.cursor(salt, **fields), ids(*span(0, 8)), session.table.rows)
        session.release()
    other = loaded(path, hand, 12)
    assert other.cache.index.namespaces() == hand.cache.index.namespaces()
    assert other.cache.drop("a") == 2
    assert other.cache.match_len(span(0, 9)) == 8 and other.cache.match_len(span(0, 9), "a") == 0
    assert other.cache.drop("a", adapter="x") == 2
    idle(other)


def test_pinned_pages_are_saved_and_the_pins_are_not(path) -> None:
    hand = Hand(12)
    hand.donate(span(0, 8))
    hand.cache.pin(span(0, 8))
    other = loaded(path, hand, 12)
    assert len(other.cache.pins) == 0
    idle(other)


def test_a_loaded_prefix_can_be_pinned_and_then_stays(path) -> None:
    hand = Hand(12)
    hand.donate(span(0, 8))
    other = loaded(path, hand, 12)
    pin = other.cache.pin(span(0, 8))
    other.cache.evict(12)
    assert other.cache.match_len(span(0, 9)) == 8
    other.cache.unpin(pin)
    idle(other)


# Tails and windows ------------------------------------------------------------------------------------------------


def test_a_cache_of_whole_pages_takes_no_tails(path) -> None:
    hand, other = Hand(12, partial=True), Hand(12)
    hand.donate(span(0, 10))
    assert hand.cache.save(path) == 3
    assert other.cache.load(path) == 2
    assert other.cache.stats.load_refused == 0
    assert other.cache.match_len(span(0, 11)) == 8
    idle(other)


def test_a_tail_whose_rows_are_cached_already_is_not_taken(path) -> None:
    hand, other = Hand(12, partial=True), Hand(12, partial=True)
    hand.donate(span(0, 10))
    hand.donate(span(20, 3))
    other.donate(span(0, 12))
    other.donate(span(20, 2))
    hand.cache.save(path)
    assert other.cache.load(path) == 1  # one row more than the tail that is there
    assert other.cache.match_len(span(0, 13)) == 12
    assert other.cache.match_len(span(20, 4)) == 3
    assert other.cache.load(path) == 0
    other.ask(span(20, 4)).release()
    idle(other)


@pytest.mark.parametrize("options", [{"partial": True}, {"kind": EchoHybrid}], ids=["tail", "checkpoint"])
def test_what_stood_behind_the_rows_of_a_partial_page_is_not_in_the_file(path, options) -> None:
    hand = Hand(4, **options)
    hand.pool.storage.pages.fill_(7)  # another prompt's rows
    hand.donate(span(0, 5))
    other = loaded(path, hand, 4, **options)
    pages = safe_open(path, framework="pt").get_tensor("pages")
    assert not pages[1, :, :, :, 1:].any() and pages[1, :, :, :, 0].any()
    assert other.cache.match_len([*span(0, 5), 70]) == 5
    other.ask([*span(0, 5), 70]).release()
    idle(other)


def test_pages_behind_a_window_that_are_gone_stay_gone_and_the_rest_serves(path) -> None:
    hand = Hand(12, windows=(6, 0))
    session = hand.ask(span(0, 16))
    hand.cache.insert(session, span(0, 16))
    session.release()
    assert hand.cache.held_pages == 6
    other = loaded(path, hand, 12, windows=(6, 0))
    assert contents(other.cache) == contents(hand.cache)
    assert other.cache.match_len(span(0, 17)) == 16 and other.cache.match_len(span(0, 12)) == 0
    other.ask(span(0, 17)).release()
    idle(other)


def test_a_page_that_the_cache_lacks_behind_a_window_is_filled_in(path) -> None:
    hand, other = Hand(12, windows=(6, 0)), Hand(12, windows=(6, 0))
    for end in (8, 16):
        hand.donate(span(0, end))
    session = other.ask(span(0, 16))
    other.cache.insert(session, span(0, 16))
    assert other.cache.held_pages == 6
    assert hand.cache.save(path) == 8
    assert other.cache.load(path) == 2
    assert other.cache.held_pages == 8 and other.cache.match_len(span(0, 9)) == 8
    other.check()
    other.ask(span(0, 9)).release()
    session.release()
    idle(other)


def test_a_chain_whose_pages_are_gone_is_not_there_again_though_places_of_it_are(path) -> None:
    hand = Hand(12, windows=(6,))
    session = hand.ask(span(0, 16))
    hand.cache.insert(session, span(0, 16), "first")
    session.eval(span(16, 8))
    hand.cache.insert(session, span(0, 24), "second")
    session.release()
    hand.cache.evict(2)
    assert [(c.preview, c.num_pages) for c in hand.cache.chains()] == [("second", 2)]
    other = loaded(path, hand, 12, windows=(6,))
    assert len(other.cache.index) == 6
    assert [(c.preview, c.num_pages) for c in other.cache.chains()] == [("second", 2)]
    other.ask(span(0, 25)).release()
    idle(other)


def test_no_place_is_kept_for_nodes_without_pages_where_nothing_stands_on_them(path) -> None:
    hand, other = Hand(12, windows=(6,)), Hand(1, windows=(6,))
    session = hand.ask(span(0, 16))
    hand.cache.insert(session, span(0, 16))
    session.release()
    assert hand.cache.save(path) == 2  # and two places that the window left
    taken = other.pool.alloc(1)
    assert other.cache.load(path) == 0
    assert len(other.cache.index) == 0 and other.cache.chains() == []
    other.check()
    other.pool.release(taken)
    assert other.cache.load(path) == 1
    idle(other)


# Keys, codecs and pools -------------------------------------------------------------------------------------------


def test_keys_are_computed_by_the_cache_that_loads(path) -> None:
    hand = Hand(12)
    hand.donate(span(0, 12))
    other = loaded(path, hand, 12, hash_page=lambda parent, tokens: (parent, tokens))
    assert other.cache.match_len(span(0, 13)) == 12
    other.ask(span(0, 13)).release()
    idle(other)


def test_pages_whose_key_is_taken_are_left_out_with_all_below_them(path) -> None:
    hand, other = Hand(12), Hand(12, hash_page=lambda parent, tokens: tokens[:4])
    hand.donate(span(0, 12))
    hand.donate([*span(0, 4), 8, 1, 1, 1])
    hand.donate([4, *span(50, 7)])
    hand.cache.save(path)
    other.donate([4, 9, 9, 9])
    assert other.cache.load(path) == 2  # [0 1 2 3] and the page of 8 that was used last
    assert other.cache.stats.num_collisions == 3 and other.cache.stats.load_refused == 4
    assert other.cache.match_len([*span(0, 4), 8, 1, 1, 1, 5]) == 8
    assert other.cache.match_len(span(0, 13)) == 4
    other.check()
    other.ask(span(0, 13)).release()
    idle(other)


@pytest.mark.parametrize("codec", ["fp16", "bf16"])
def test_rows_in_half_precision_come_back_bit_for_bit(codec: str, path) -> None:
    hand, other = Hand(), Hand()
    for each in (hand, other):
        each.pool = each.model.create_kv_pool(6, 4, codec)
        each.cache = PrefixCache(each.pool)
    hand.pool.storage.pages.view(torch.int16).copy_(torch.arange(6 * 64).reshape(6, 1, 2, 1, 4, 8))
    pages = hand.pool.alloc(2)
    hand.cache.publish(hand.cache.cursor(), ids(*span(0, 8)), pages[None])
    hand.cache.save(path)
    assert other.cache.load(path) == 2
    assert nodes_of(other.cache) == nodes_of(hand.cache)


def test_a_pool_without_rows_or_without_a_model_is_not_saved(path) -> None:
    with pytest.raises(GeometryMismatch, match="no storage"):
        PrefixCache(PagePool(4)).save(path)
    with pytest.raises(GeometryMismatch, match="no storage"):
        PrefixCache(PagePool(4)).load(path)
    hand = Hand()
    hand.pool.fingerprint = ""
    with pytest.raises(GeometryMismatch, match="no fingerprint"):
        hand.cache.save(path)
    assert not path.exists()


def test_a_released_cache_whose_pool_serves_another_loads_nothing(path) -> None:
    hand = Hand()
    hand.donate(span(0, 8))
    hand.cache.save(path)
    hand.cache.release()
    PrefixCache(hand.pool)
    with pytest.raises(GeometryMismatch, match="another prefix cache"):
        hand.cache.load(path)
    assert hand.pool.num_free == hand.pool.num_pages


# Checkpoints ------------------------------------------------------------------------------------------------------


def keep(hand: Hand, tokens, namespace: str = "", **how) -> None:
    session = hand.ask(tokens, namespace)
    hand.cache.insert(session, tokens, **how)
    session.release()
    hand.check()


def hybrid(*args, **kwargs) -> Hand:
    return Hand(*args, kind=EchoHybrid, **kwargs)


def test_a_checkpoint_is_there_again_and_only_what_follows_it_is_computed(path) -> None:
    hand = hybrid()
    keep(hand, span(0, 6), preview="talk")
    other = loaded(path, hand, kind=EchoHybrid)
    before = other.model.num_rows
    other.ask(span(0, 9)).release()
    assert other.model.num_rows - before == 3
    assert [c.preview for c in other.cache.checkpoints] == ["talk"]
    assert other.cache.match_len(span(0, 6)) == 0
    idle(other)


def test_pages_that_checkpoints_share_are_saved_once_and_shared_again(path) -> None:
    hand = hybrid(20)
    keep(hand, span(0, 8))
    keep(hand, span(0, 13))
    assert hand.cache.held_pages == 4
    other = loaded(path, hand, 4, kind=EchoHybrid)
    assert other.cache.held_pages == 4
    first, second = other.cache.checkpoints
    assert first.pages[0].tolist() == second.pages[0, :2].tolist()
    idle(other)


def test_whole_pages_of_a_checkpoint_that_is_there_serve_those_that_are_loaded(path) -> None:
    hand, other = hybrid(20), hybrid(20)
    keep(hand, span(0, 8))
    hand.cache.save(path)
    other.cache.load(path)
    keep(hand, span(0, 13))
    hand.cache.save(path)
    assert other.cache.load(path) == 2
    assert other.cache.held_pages == 4
    other.check()
    other.ask(span(0, 14)).release()
    idle(other)


def test_both_budgets_hold_and_openings_come_first(path) -> None:
    hand = hybrid(30)
    keep(hand, span(0, 4), opening=True)
    for first in (20, 40, 60):
        keep(hand, span(first, 4))
    two = loaded(path, hand, 30, kind=EchoHybrid, max_states=2)
    assert [c.tokens[0] for c in two.cache.checkpoints] == [0, 60]
    assert two.cache.stats.load_refused == 2
    one = hand.cache.checkpoints.num_bytes // 4
    for budget, want in ((3 * one, [0, 40, 60]), (3 * one - 1, [0, 60]), (one - 1, [])):
        few = loaded(path, hand, 30, kind=EchoHybrid, max_state_bytes=budget)
        assert [c.tokens[0] for c in few.cache.checkpoints] == want
        assert few.cache.stats.load_refused == 4 - len(want)
        idle(few)
    none = loaded(path, hand, 30, kind=EchoHybrid, max_states=0)
    assert len(none.cache.checkpoints) == 0


def test_no_checkpoint_makes_way_for_one_of_a_file(path) -> None:
    hand, other = hybrid(30), hybrid(30, max_states=2)
    for first in (0, 20, 40):
        keep(hand, span(first, 4))
    hand.cache.save(path)
    keep(other, span(60, 4))
    assert other.cache.load(path) == 1
    assert [c.tokens[0] for c in other.cache.checkpoints] == [60, 40]
    assert other.cache.stats.checkpoint_evictions == 0
    assert other.cache.load(path) == 0
    keep(other, span(80, 4))  # from now on what was loaded makes way as usual
    assert [c.tokens[0] for c in other.cache.checkpoints] == [40, 80]
    idle(other)


def test_a_checkpoint_that_finds_no_free_page_is_left_out_and_a_smaller_one_is_not(path) -> None:
    hand, other = hybrid(30), hybrid(3)
    keep(hand, span(0, 3))
    keep(hand, span(20, 9))
    keep(hand, span(40, 5))
    hand.cache.save(path)
    assert other.cache.load(path) == 3
    assert [c.tokens[0] for c in other.cache.checkpoints] == [0, 40]
    assert other.cache.stats.load_refused == 3
    idle(other)


def test_a_loaded_checkpoint_becomes_an_opening_when_anyone_stops_there_again(path) -> None:
    hand = hybrid(20)
    keep(hand, span(0, 4))
    other = loaded(path, hand, 20, kind=EchoHybrid)
    assert [(c.opening, c.donor) for c in other.cache.checkpoints] == [(False, -1)]  # sequences count from 1
    session = other.session()
    session.eval(span(0, 4))
    other.cache.insert(session, span(0, 4))
    assert [c.opening for c in other.cache.checkpoints] == [True]
    other.check()


@pytest.mark.parametrize("kind", [EchoModel, EchoHybrid])
def test_what_was_loaded_needs_the_file_no_more(path, kind: type[EchoModel]) -> None:
    hand = Hand(kind=kind)
    hand.donate(span(0, 8))
    other = loaded(path, hand, kind=kind)
    with open(path, "r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert other.cache.match_len(span(0, 9)) == 8
    other.ask(span(0, 9)).release()
    idle(other)


def test_pages_of_a_checkpoint_that_is_left_out_come_with_a_shorter_one(path) -> None:
    hand, other = hybrid(20), hybrid(3)
    keep(hand, span(0, 8))
    keep(hand, span(0, 13))
    hand.cache.save(path)
    assert other.cache.load(path) == 2
    assert other.cache.match_len(span(0, 14)) == 8
    assert other.cache.stats.load_refused == 2
    idle(other)


@pytest.mark.parametrize("place", ["none/c.st", "file/c.st", "folder"])
def test_where_nothing_can_be_saved_the_error_names_the_path_and_nothing_is_left(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    h = Hand(20)
    h.donate(span(0, 12))
    with pytest.raises(OSError, match="the file could not be saved") as caught:
        h.cache.save(tmp_path / place)
    assert caught.value.filename == str(tmp_path / place)
    assert sorted(tmp_path.rglob("*")) == before


def test_what_a_link_stands_for_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "cache.st")
    h = Hand(20)
    h.donate(span(0, 12))
    saved = h.cache.save(tmp_path / "link")
    assert saved > 0
    assert (tmp_path / "link").is_symlink()
    assert Hand(20).cache.load(tmp_path / "cache.st") == saved
