"""Keys of pages: what they depend on, what they do not, and what is refused as a token."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from byhand import ids, span
from hypothesis import given
from hypothesis import strategies as st

import paged
from paged.errors import InvalidRequest
from paged.prefix.hashing import as_tokens, extend_keys, namespace_key, page_hash, root_hash


def keys_of(tokens, page_size: int = 4, namespace: bytes = b"") -> list:
    keys: list = []
    extend_keys(keys, root_hash(namespace), as_tokens(tokens), page_size, page_hash)
    return keys


# Chains -----------------------------------------------------------------------------------------------------------


def test_only_full_pages_have_keys() -> None:
    assert [len(keys_of(span(0, n))) for n in (0, 1, 3, 4, 5, 7, 8)] == [0, 0, 0, 1, 1, 1, 2]


def test_a_key_depends_on_every_token_before_it() -> None:
    base = span(10, 16)
    want = keys_of(base)
    for position in range(16):
        other = list(base)
        other[position] += 1
        same = [a == b for a, b in zip(keys_of(other), want, strict=True)]
        assert same == [page < position // 4 for page in range(4)]


def test_the_same_page_after_another_page_has_another_key() -> None:
    assert keys_of([1, 1, 1, 1, 9, 9, 9, 9])[1] != keys_of([2, 2, 2, 2, 9, 9, 9, 9])[1]


def test_a_prefix_of_the_tokens_has_a_prefix_of_the_keys() -> None:
    whole = keys_of(span(0, 40))
    for n in range(41):
        assert keys_of(span(0, n)) == whole[: n // 4]


def test_hashing_while_a_sequence_grows_equals_hashing_it_at_once() -> None:
    tokens, keys = as_tokens(span(3, 37)), []
    for n in range(38):
        extend_keys(keys, root_hash(b""), tokens[:n], 4, page_hash)
    assert keys == keys_of(tokens)


def test_pages_of_another_size_have_other_keys() -> None:
    assert not set(keys_of(span(0, 16), 4)) & set(keys_of(span(0, 16), 8))


def test_a_key_has_128_bits_and_is_the_same_in_every_process() -> None:
    want = "16b6eb05cf29e549cdf07618cde0c9c2"
    assert keys_of(span(1, 64), 16, namespace_key(model="m", salt="s"))[-1].hex() == want
    code = (
        "from paged.prefix.hashing import *; k = [];"
        "extend_keys(k, root_hash(namespace_key(salt='s', model='m')), as_tokens(list(range(1, 65))), 16, page_hash);"
        "print(k[-1].hex())"
    )
    env = {**os.environ, "PYTHONHASHSEED": "2", "PYTHONPATH": str(Path(paged.__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.strip() == want


# Namespaces -------------------------------------------------------------------------------------------------------

FIELDS = [
    {},
    {"salt": "a"},
    {"salt": "b"},
    {"adapter": "a"},
    {"adapter": "a", "salt": "b"},
    {"adapter": "b", "salt": "a"},
    {"adapter": "ab"},
    {"adapter": "a", "path": "x"},
    {"adapter": "a", "path": "y"},
    {"model": "a"},
    {"codec": "a"},
    {"salt": "adaptera"},
    {"salt": b"a"},
    {"salt": 1},
    {"salt": "1"},
    {"media": ["a", "b"]},
    {"media": ["ab"]},
    {"window": 0},
]


def test_no_two_namespaces_share_a_root_or_a_key() -> None:
    roots = [namespace_key(**fields) for fields in FIELDS]
    assert len(set(roots)) == len(FIELDS)
    assert len({root_hash(root) for root in roots}) == len(FIELDS)
    assert len({keys_of(span(0, 4), 4, root)[0] for root in roots}) == len(FIELDS)


@pytest.mark.parametrize("empty", ["", None])
def test_an_empty_field_is_no_field(empty: str | None) -> None:
    assert namespace_key(model="m", adapter=empty) == namespace_key(model="m")


def test_the_order_of_fields_does_not_matter() -> None:
    assert namespace_key(a="1", b="2") == namespace_key(b="2", a="1")


@given(
    st.dictionaries(st.sampled_from("abc"), st.text(min_size=1, max_size=3)),
    st.dictionaries(st.sampled_from("abc"), st.text(min_size=1, max_size=3)),
)
def test_equal_encodings_mean_equal_fields(one: dict[str, str], other: dict[str, str]) -> None:
    assert (namespace_key(**one) == namespace_key(**other)) == (one == other)


# Tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "container",
    [
        list,
        tuple,
        lambda t: np.array(t, np.int32),
        lambda t: np.array(t, np.int64),
        lambda t: np.array(t, np.uint16),
        lambda t: np.array(t, ">i4"),
        lambda t: np.repeat(np.array(t, np.int32), 2)[::2],
        lambda t: [np.int64(x) for x in t],
        range,
    ],
    ids=["list", "tuple", "int32", "int64", "uint16", "big-endian", "strided", "numpy scalars", "range"],
)
def test_equal_ids_give_equal_keys_whatever_holds_them(container) -> None:
    tokens = span(0, 19)
    given = range(19) if container is range else container(tokens)
    assert keys_of(given) == keys_of(tokens)
    assert as_tokens(given).dtype == np.int32
    assert as_tokens(given).flags.c_contiguous


def test_an_int32_array_is_taken_without_a_copy() -> None:
    tokens = ids(*span(0, 9))
    assert as_tokens(tokens) is tokens or np.shares_memory(as_tokens(tokens), tokens)


@pytest.mark.parametrize("empty", [[], (), np.zeros(0, np.int64)])
def test_no_tokens_are_tokens(empty) -> None:
    assert as_tokens(empty).shape == (0,)


@pytest.mark.parametrize("tokens", [[-1], [0], [2**31 - 1], [-(2**31)]])
def test_whatever_int32_holds_is_taken(tokens: list[int]) -> None:
    assert as_tokens(tokens).tolist() == tokens


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ([2**31], InvalidRequest, "must fit int32, got 2147483648"),
        ([0, -(2**31) - 1], InvalidRequest, "must fit int32, got -2147483649"),
        ([2**63], InvalidRequest, "fit int32"),
        ([1, 2**70], InvalidRequest, f"fit int32, got {2**70}"),
        ([1, "a", 2**70], TypeError, "whole numbers"),
        ([[1, 2], [3, 4]], InvalidRequest, "one dimension, got 2"),
        ([[1, 2], [3]], InvalidRequest, "one flat list"),
        (np.zeros((2, 2), np.int32), InvalidRequest, r"shape \(2, 2\)"),
        (np.int32(3) + np.zeros((), np.int32), TypeError, "int32"),
        ([1.0, 2.0], TypeError, "whole numbers, got values of type float64"),
        (np.zeros(3, np.float32), TypeError, "float32"),
        ([True, False], TypeError, "bool"),
        (["a"], TypeError, "whole numbers"),
        ([None], TypeError, "whole numbers"),
        ("text", TypeError, "got str"),
        (b"text", TypeError, "got bytes"),
        (7, TypeError, "got int"),
        (None, TypeError, "got NoneType"),
        ({1, 2}, TypeError, "got set"),
    ],
)
def test_what_is_no_list_of_ids_is_refused(tokens, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        as_tokens(tokens)


def test_only_what_is_not_int32_is_copied() -> None:
    same = np.array([1, 2], np.int32)
    assert as_tokens(same) is same
    assert as_tokens([1, 2]).dtype == np.int32
