"""A file that is damaged, of another kind or of another model: an error that says so, and nothing has changed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from byhand import Hand, span
from fakes import EchoHybrid, EchoModel
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from saving import KIND, contents, everything, forge

from paged.errors import GeometryMismatch, LoadError
from paged.kv.storage import PageStorage
from paged.prefix import saved_file
from paged.prefix.cache import PrefixCache

ROOT = Path(__file__).resolve().parents[2]


def filled(kind: type[EchoModel] = EchoModel, num_pages: int = 20, **options) -> Hand:
    """A cache with branches, a tail, two namespaces; or with checkpoints that share pages."""
    hand = Hand(num_pages, kind=kind, partial=kind is EchoModel, **options)
    for tokens, namespace in (
        (span(0, 8), ""),
        (span(0, 13), ""),
        ([*span(0, 4), *span(50, 6)], ""),
        (span(0, 5), "a"),
    ):
        hand.donate(tokens, namespace, preview=f"{len(tokens)} tokens")
    return hand


@pytest.fixture(params=[EchoModel, EchoHybrid], ids=["pages", "checkpoints"], scope="module")
def whole(request, tmp_path_factory) -> tuple[bytes, Hand, Path]:
    """The bytes of a good file, a cache with other contents that would take it, and a path to write to."""
    path = tmp_path_factory.mktemp("saved") / "cache.safetensors"
    filled(request.param).cache.save(path)
    hand = Hand(40, kind=request.param, partial=request.param is EchoModel)
    hand.donate([*span(0, 4), *span(70, 4)])
    return path.read_bytes(), hand, path


def refused(hand: Hand, path: Path, error: type[Exception] = LoadError, match: str | None = None) -> None:
    """Loading raises `error`, names the file, and leaves everything as it was."""
    before = everything(hand.cache)
    with pytest.raises(error, match=match) as caught:
        hand.cache.load(path)
    assert str(path) in str(caught.value)
    assert everything(hand.cache) == before
    hand.check()


# Bytes ------------------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@example(position=0.0, bit=0)
@example(position=0.0, bit=3)
def test_a_flipped_bit_anywhere_is_found(whole, position: float, bit: int) -> None:
    data, hand, path = whole
    damaged = bytearray(data)
    damaged[int(position * len(data))] ^= 1 << bit
    path.write_bytes(damaged)
    refused(hand, path)


@settings(max_examples=100, deadline=None)
@given(start=st.floats(0, 1, exclude_max=True), with_what=st.binary(min_size=1, max_size=40))
def test_an_overwritten_piece_is_found(whole, start: float, with_what: bytes) -> None:
    data, hand, path = whole
    at = int(start * len(data))
    damaged = (data[:at] + with_what + data[at + len(with_what) :])[: len(data)]
    path.write_bytes(damaged)
    if damaged != data:
        refused(hand, path)


def test_every_byte_of_the_header_counts(whole) -> None:
    data, hand, path = whole
    for at in range(8 + int.from_bytes(data[:8], "little")):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(LoadError):
            hand.cache.load(path)
    hand.check()


def test_a_file_that_ends_too_soon_is_found_wherever_it_ends(whole) -> None:
    data, hand, path = whole
    for end in [*range(64), *range(64, len(data), 37), len(data) - 1]:
        path.write_bytes(data[:end])
        with pytest.raises(LoadError, match=r"cache\.safetensors"):
            hand.cache.load(path)
    refused(hand, path)


@pytest.mark.parametrize("more", [b"\0", b" ", b"more"])
def test_a_file_that_goes_on_is_found(whole, more: bytes) -> None:
    data, hand, path = whole
    path.write_bytes(data + more)
    refused(hand, path)


def test_the_undamaged_file_is_taken(whole) -> None:
    data, hand, path = whole
    path.write_bytes(data)
    assert hand.cache.load(path) > 0
    assert hand.cache.load(path) == 0
    hand.check()
    hand.cache.release()
    hand.donate([*span(0, 4), *span(70, 4)])


# Other files ------------------------------------------------------------------------------------------------------


def test_what_is_no_saved_cache_is_refused(tmp_path) -> None:
    hand = filled()
    refused(hand, tmp_path / "none", match="expected a whole safetensors file")
    refused(hand, tmp_path, match="expected a whole safetensors file")
    (tmp_path / "text").write_text("not a cache")
    refused(hand, tmp_path / "text", match="expected a whole safetensors file")
    save_file({"pages": torch.zeros(2)}, tmp_path / "weights")
    refused(hand, tmp_path / "weights", match="expected a saved prefix cache .* found none")
    save_file({"pages": torch.zeros(2)}, tmp_path / "noted", {"format": "pt"})
    refused(hand, tmp_path / "noted", match=r"expected a saved prefix cache .* found \['format'\]")
    save_file({"pages": torch.zeros(2)}, tmp_path / "other", {KIND: "[]"})
    refused(hand, tmp_path / "other", match="expected the fields of a dict")
    save_file({"pages": torch.zeros(2)}, tmp_path / "unchecked", {KIND: '{"format":1}'})
    refused(hand, tmp_path / "unchecked", match="checksum")


def test_a_file_of_a_later_format_is_refused_by_its_number(tmp_path) -> None:
    hand = filled()
    hand.cache.save(tmp_path / "x")
    forge(tmp_path / "x", header=lambda header: header.update(format=2, more=1))
    refused(hand, tmp_path / "x", match="expected format 1, found 2; load it with the version of paged that wrote it")


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (lambda: Hand(20, vocab_size=98), "with model 'echo-997', and this cache has 'echo-98'"),
        (lambda: Hand(20, page_size=8), "with page_size 4, and this cache has 8"),
        (lambda: Hand(20, num_groups=2), "num_groups=1, .* and this cache has .*num_groups=2"),
        (lambda: Hand(20, windows=(7,)), r"windows=\(0,\).* and this cache has .*windows=\(7,\)"),
        (lambda: Hand(20, kind=EchoHybrid), "with model 'echo-997', and this cache has 'echo-997-hybrid'"),
        (lambda: half("fp16"), "with codec 'fp32', and this cache has 'fp16'"),
        (lambda: stateful(), "with state None, and this cache has StateSpec"),
    ],
    ids=["model", "page_size", "groups", "window", "hybrid", "codec", "state"],
)
def test_a_file_of_another_geometry_is_refused_with_both_named(tmp_path, other: Callable[[], Hand], says: str) -> None:
    filled().cache.save(tmp_path / "x")
    refused(other(), tmp_path / "x", GeometryMismatch, says)


def half(codec: str) -> Hand:
    hand = Hand(20)
    hand.pool = hand.model.create_kv_pool(20, 4, codec)
    hand.cache = PrefixCache(hand.pool)
    return hand


def stateful() -> Hand:
    hand = Hand(20, kind=EchoHybrid)
    hand.pool.fingerprint = "echo-997"
    return hand


# Files that are whole and make no sense ---------------------------------------------------------------------------


def put(name: str, *values) -> Callable[[dict], None]:
    """Set one number of a tensor: (place..., value)."""

    def change(tensors: dict) -> None:
        tensors[name][values[:-1]] = values[-1]

    return change


def without(name: str) -> Callable[[dict], object]:
    return lambda tensors: tensors.pop(name)


def reshaped(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict], None]:
    return lambda tensors: tensors.update({name: change(tensors[name])})


# nodes: 0 [0 1 2 3], 1 [4 5 6 7], 2 [8 9 10 11] below 0 and 1; 3 the tail [12]; 4 [50 51 52 53] below 0, 5 the tail
# [54 55]; 6 [0 1 2 3] of the other namespace, 7 the tail [4]
TREES = {
    "no pages": (without("pages"), "a tensor pages, found none"),
    "no records": (without("records"), "a tensor records, found none"),
    "no parents": (without("node_parent"), "a tensor node_parent, found none"),
    "no tokens": (without("node_tokens"), "a tensor node_tokens, found none"),
    "a page short": (reshaped("pages", lambda t: t[:-1]), "each of 7 pages in one node, found 8 pages in 8 places"),
    "a page more": (reshaped("pages", lambda t: t.repeat(2, 1, 1, 1, 1, 1)), "each of 16 pages in one node, found 8"),
    "other pages": (reshaped("pages", lambda t: t[..., :4]), r"pages as F32 \['any', 1, 2, 1, 4, 8\], found F32"),
    "other values": (reshaped("pages", lambda t: t.half()), "pages as F32 .*, found F16"),
    "wide numbers": (reshaped("node_rows", lambda t: t.long()), r"node_rows as I32 \[8\], found I64"),
    "a node short": (reshaped("node_rows", lambda t: t[:-1]), r"node_rows as I32 \[8\], found I32 \[7\]"),
    "a parent after": (put("node_parent", 1, 2), r"parents before their children, found children of \[2\]"),
    "its own parent": (put("node_parent", 0, 0), r"parents before their children, found children of \[0\]"),
    "no such namespace": (put("node_parent", 0, -3), "2 namespaces, found a node of namespace 2"),
    "no rows": (put("node_rows", 3, 0), r"1 to 4 rows in each page, found \[0\]"),
    "too many rows": (put("node_rows", 3, 5), r"1 to 4 rows in each page, found \[5\]"),
    "a child of a tail": (put("node_parent", 7, 3), "full pages above others, found a partial page with a child"),
    "a negative token": (put("node_tokens", 2, 1, -5), "token ids of 0 or more, found -5"),
    "a token too many": (put("node_tokens", 3, 2, 9), "no tokens behind the last row of a page"),
    "a page twice": (put("node_pages", 2, 0, 1), "each of 8 pages in one node, found 7 pages in 8 places"),
    "a page too high": (put("node_pages", 2, 0, 8), "each of 8 pages in one node"),
    "a missing page": (put("node_pages", 2, 0, -1), "each of 8 pages in one node, found 7 pages in 7 places"),
    "a page too low": (put("node_pages", 2, 0, -2), "each of 8 pages in one node"),
    "no such chain": (put("node_chain", 2, 4), r"4 chains, found \[4\]"),
    "a negative chain": (put("node_chain", 2, -1), r"4 chains, found \[-1\]"),
    "never used": (put("node_last_use", 2, -1), "an order of last use from 0 on, found -1"),
    "two alike": (put("node_tokens", 4, slice(None), torch.arange(4, 8)), "different children below each page"),
}


@pytest.mark.parametrize(("change", "says"), TREES.values(), ids=TREES)
def test_a_tree_that_cannot_be_is_refused(tmp_path, change: Callable, says: str) -> None:
    filled().cache.save(tmp_path / "x")
    forge(tmp_path / "x", change)
    refused(Hand(20, partial=True), tmp_path / "x", match=says)


def test_a_page_that_a_group_without_a_window_lacks_is_refused(tmp_path) -> None:
    hand = filled(windows=(5, 0))
    hand.cache.save(tmp_path / "x")

    def lose(tensors: dict) -> None:
        last = tensors["node_pages"][-1, 1].item()
        tensors["node_pages"][-1, 1] = -1
        tensors["pages"] = tensors["pages"][:last]

    forge(tmp_path / "x", lose)
    refused(Hand(20, windows=(5, 0), partial=True), tmp_path / "x", match="every group that no prefix may lack")


# checkpoints: 0 of 8 tokens, 1 of 13 on top of it, 2 of 10 that leaves them after 4, 3 of 5 in the other namespace
STATES = {
    "no tokens": (without("checkpoint_tokens"), "a tensor checkpoint_tokens, found none"),
    "no pages": (without("checkpoint_pages"), "a tensor checkpoint_pages, found none"),
    "no state": (without("state.carry"), "a tensor state.carry, found none"),
    "a state short": (
        reshaped("state.carry", lambda t: t[1:]),
        r"state.carry as F32 \[4, 2, 3\], found F32 \[3, 2, 3\]",
    ),
    "another state": (reshaped("state.digest", lambda t: t.int()), r"state.digest as I64 \[4, 1\], found I32 \[4, 1\]"),
    "a token short": (reshaped("checkpoint_tokens", lambda t: t[1:]), "checkpoint_tokens as I32"),
    "a page short": (reshaped("checkpoint_pages", lambda t: t[1:]), "checkpoint_pages as I32"),
    "a page unused": (reshaped("pages", lambda t: torch.cat([t, t[:1]])), "pages in a checkpoint, found 1 in none"),
    "a page too high": (put("checkpoint_pages", 5, 99), r"pages below 9, found \[99\]"),
    "a page too low": (put("checkpoint_pages", 5, -2), r"pages below 9, found \[-2\]"),
    "a negative token": (put("checkpoint_tokens", 3, -4), "token ids of 0 or more in checkpoint 0, found -4"),
}


def test_which_checkpoints_the_forged_files_have(tmp_path) -> None:
    hand = filled(EchoHybrid)
    assert [c.num_tokens for c in hand.cache.checkpoints] == [8, 13, 10, 5]
    assert hand.cache.save(tmp_path / "x") == 9


@pytest.mark.parametrize(("change", "says"), STATES.values(), ids=STATES)
def test_checkpoints_that_cannot_be_are_refused(tmp_path, change: Callable, says: str) -> None:
    filled(EchoHybrid).cache.save(tmp_path / "x")
    forge(tmp_path / "x", change)
    refused(Hand(20, kind=EchoHybrid), tmp_path / "x", match=says)


def records(change: Callable[[dict], object]) -> Callable[[Path], object]:
    return lambda path: forge(path, records=change)


def tensors(change: Callable[[dict], object]) -> Callable[[Path], object]:
    return lambda path: forge(path, change)


def header(change: Callable[[dict], object]) -> Callable[[Path], object]:
    return lambda path: forge(path, header=change)


def share_another_prefix(parts: dict) -> None:
    """Checkpoint 2, [0 1 2 3 50 ...], claims the second page of checkpoint 0, [0 1 2 3 4 5 6 7]."""
    pages = parts["checkpoint_pages"]  # 2, 4, 3, 2 of them
    lost = int(pages[7])
    pages[7] = pages[1]
    pages[pages > lost] -= 1
    parts["pages"] = torch.cat([parts["pages"][:lost], parts["pages"][lost + 1 :]])


def share_in_another_place(parts: dict) -> None:
    """Checkpoint 1 has the two pages of checkpoint 0 the other way round."""
    pages = parts["checkpoint_pages"]
    pages[2], pages[3] = int(pages[3]), int(pages[2])


def share_a_partial_page(parts: dict) -> None:
    pages = parts["checkpoint_pages"]
    lost = int(pages[8])
    pages[8] = pages[5]
    pages[pages > lost] -= 1
    parts["pages"] = torch.cat([parts["pages"][:lost], parts["pages"][lost + 1 :]])


def first_record(**fields) -> Callable[[dict], None]:
    return lambda notes: notes["checkpoints"][0].update(fields)


ALSO = {
    "one page missing": (
        tensors(put("checkpoint_pages", 3, -1)),
        "each page that checkpoint 1 needs, found one missing",
    ),
    "one page twice": (
        tensors(lambda parts: put("checkpoint_pages", 3, parts["checkpoint_pages"][4])(parts)),
        "different pages in checkpoint 1, found one of them twice",
    ),
    "another prefix": (
        tensors(share_another_prefix),
        "the tokens of checkpoint 0 in checkpoint 2, which has its pages",
    ),
    "another place": (tensors(share_in_another_place), "pages of checkpoint 1 in their places, found one moved"),
    "a partial page": (tensors(share_a_partial_page), "a partial page of checkpoint 1 alone, found another one has it"),
    "no such namespace": (records(first_record(namespace=2)), "2 namespaces, found checkpoint 0 in number 2"),
    "a negative namespace": (records(first_record(namespace=-1)), "2 namespaces, found checkpoint 0 in number -1"),
    "no tokens": (records(first_record(num_tokens=0)), "checkpoints of at least one token, found 0"),
    "fewer tokens": (records(first_record(num_tokens=7)), r"checkpoint_tokens as I32 \[35\], found I32 \[36\]"),
    "no kind": (records(lambda notes: notes["checkpoints"][0].pop("opening")), "fields of a Records, .*`opening`"),
    "a kind of text": (records(first_record(opening="yes")), "fields of a Records, found: Expected `bool`"),
    "a field too many": (records(first_record(more=1)), "fields of a Records, .*unknown field `more`"),
    "no preview": (records(first_record(preview=None)), "fields of a Records, found: Expected `str`"),
    "a namespace twice": (
        records(lambda notes: notes.update(namespaces=notes["namespaces"][:1] * 2)),
        "different namespaces, found one of them twice",
    ),
    "no namespaces": (records(lambda notes: notes.pop("namespaces")), "fields of a Records, .*`namespaces`"),
    "no codec": (header(lambda fields: fields.pop("codec")), "fields of a Header, .*`codec`"),
    "an impossible page": (header(lambda fields: fields["kv"].update(head_dim=0)), "fields of a Header, .*head_dim"),
    "an unknown plane": (
        header(lambda fields: fields["state"]["planes"][0].update(dtype="int3")),
        "fields of a Header, .*dtype of digest",
    ),
}


@pytest.mark.parametrize(("change", "says"), ALSO.values(), ids=ALSO)
def test_checkpoints_and_records_that_disagree_are_refused(tmp_path, change: Callable, says: str) -> None:
    filled(EchoHybrid).cache.save(tmp_path / "x")
    change(tmp_path / "x")
    refused(Hand(20, kind=EchoHybrid), tmp_path / "x", match=says)


def test_two_checkpoints_of_the_same_tokens_are_refused(tmp_path) -> None:
    hand = Hand(20, kind=EchoHybrid)
    for namespace in ("", "a"):
        hand.donate(span(0, 5), namespace)
    hand.cache.save(tmp_path / "x")
    forge(tmp_path / "x", records=lambda notes: notes["checkpoints"][1].update(namespace=0))
    refused(Hand(20, kind=EchoHybrid), tmp_path / "x", match="other tokens in checkpoint 1 than in any before")


def test_a_forgery_that_changes_nothing_is_taken(tmp_path) -> None:
    for kind in (EchoModel, EchoHybrid):
        hand, other = filled(kind), Hand(20, kind=kind, partial=kind is EchoModel)
        hand.cache.save(tmp_path / "x")
        before = (tmp_path / "x").read_bytes()
        forge(tmp_path / "x")
        assert len((tmp_path / "x").read_bytes()) == len(before)
        other.cache.load(tmp_path / "x")
        assert contents(other.cache) == contents(hand.cache)


# Whatever stops a save or a load ----------------------------------------------------------------------------------


class Stopped(BaseException):
    """Like an interrupt from the keyboard."""


def stop(*args, **kwargs):
    raise Stopped


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_save_that_is_stopped_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, call: str) -> None:
    hand, path = filled(), tmp_path / "x"
    hand.cache.save(path)
    before = path.read_bytes()
    hand.donate(span(80, 8))
    with monkeypatch.context() as patch:
        patch.setattr(saved_file.os, call, stop)
        with pytest.raises(Stopped):
            hand.cache.save(path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["x"]
    hand.check()
    hand.cache.save(path)
    assert path.read_bytes() != before and os.listdir(tmp_path) == ["x"]


def test_a_save_that_is_stopped_while_it_reads_pages_leaves_the_old_file(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(saved_file, "_PIECE", 512)  # two pages at once
    hand, path = filled(), tmp_path / "x"
    assert hand.cache.save(path) == 8
    before = path.read_bytes()
    real, calls = torch.Tensor.index_select, []

    def index_select(self, *args):
        calls.append(args)
        return real(self, *args) if len(calls) < 3 else stop()

    monkeypatch.setattr(torch.Tensor, "index_select", index_select)
    with pytest.raises(Stopped):
        hand.cache.save(path)
    assert len(calls) == 3
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["x"]


def test_a_process_that_dies_in_a_save_leaves_the_old_file(tmp_path) -> None:
    hand, path = filled(), tmp_path / "x"
    hand.cache.save(path)
    before = path.read_bytes()
    code = (
        "import os, sys\n"
        "from byhand import Hand\n"
        "from paged.prefix import saved_file\n"
        "hand = Hand()\n"
        "hand.donate(list(range(8)))\n"
        "saved_file.os.fsync = lambda file: os._exit(9)\n"
        "hand.cache.save(sys.argv[1])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
        check=False,
        capture_output=True,
    )
    assert done.returncode == 9, done.stderr
    assert path.read_bytes() == before
    assert Hand(20, partial=True).cache.load(path) == 8


def test_a_save_into_a_folder_that_is_not_there_says_so(tmp_path) -> None:
    hand = filled()
    with pytest.raises(FileNotFoundError):
        hand.cache.save(tmp_path / "none" / "x")
    hand.check()


@pytest.mark.parametrize("kind", [EchoModel, EchoHybrid])
def test_a_load_whose_copy_fails_leaves_nothing_behind(tmp_path, monkeypatch, kind: type[EchoModel]) -> None:
    filled(kind).cache.save(tmp_path / "x")
    hand = Hand(20, kind=kind, partial=kind is EchoModel)
    hand.donate(span(70, 4))
    before = everything(hand.cache)
    with monkeypatch.context() as patch:
        patch.setattr(saved_file, "_PIECE", 512)
        real, calls = torch.Tensor.index_copy_, []

        def index_copy(self, *args):
            calls.append(args)
            return real(self, *args) if len(calls) < 3 else stop()

        patch.setattr(torch.Tensor, "index_copy_", index_copy)
        with pytest.raises(Stopped):
            hand.cache.load(tmp_path / "x")
        assert len(calls) == 3
    assert everything(hand.cache) == before
    hand.check()
    assert hand.cache.load(tmp_path / "x") > 3


def test_a_load_whose_pool_cannot_grow_leaves_nothing_behind(tmp_path, monkeypatch) -> None:
    filled().cache.save(tmp_path / "x")
    hand = Hand(2, partial=True)
    hand.pool.max_pages = 10

    def grow(self, num_pages: int) -> None:
        raise MemoryError

    before = everything(hand.cache)
    with monkeypatch.context() as patch:
        patch.setattr(PageStorage, "grow", grow)
        with pytest.raises(MemoryError):
            hand.cache.load(tmp_path / "x")
    assert everything(hand.cache) == before
    assert hand.cache.load(tmp_path / "x") == 8
    hand.check()


@pytest.mark.parametrize("kind", [EchoModel, EchoHybrid])
def test_pieces_of_any_size_give_the_same_file_and_the_same_cache(tmp_path, monkeypatch, kind: type[EchoModel]) -> None:
    hand = filled(kind)
    hand.cache.save(tmp_path / "whole")
    for size in (1, 257, 1024):
        with monkeypatch.context() as patch:
            patch.setattr(saved_file, "_PIECE", size)
            hand.cache.save(tmp_path / "x")
            assert (tmp_path / "x").read_bytes() == (tmp_path / "whole").read_bytes()
            other = Hand(20, kind=kind, partial=kind is EchoModel)
            other.cache.load(tmp_path / "x")
        assert contents(other.cache) == contents(hand.cache)
        other.ask(span(0, 14))


def test_a_file_that_is_replaced_while_it_is_opened_is_whole(tmp_path, monkeypatch) -> None:
    """Tensors and checksum come from one file, whenever a writer puts another in its place."""
    path, other = tmp_path / "x", filled()
    other.donate(span(200, 9))
    opened = saved_file.safe_open
    for when in ("before", "after"):
        filled().cache.save(path)
        calls = []

        def replaced(*args, calls=calls, when=when, **kwargs):
            calls.append(args)
            if len(calls) == 1 and when == "before":
                other.cache.save(path)
            handle = opened(*args, **kwargs)
            if len(calls) == 1 and when == "after":
                other.cache.save(path)
            return handle

        monkeypatch.setattr(saved_file, "safe_open", replaced)
        hand = Hand(40, partial=True)
        hand.cache.load(path)
        monkeypatch.undo()
        assert contents(hand.cache) == contents(other.cache)
        hand.check()
