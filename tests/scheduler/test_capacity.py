"""How many pages an engine takes when nobody says."""

from __future__ import annotations

import os

import pytest
from fakes import EchoModel

from paged.kv.storage import PageStorage
from scheduler.capacity import CPU_SHARE, default_num_pages, memory_bytes


def test_on_the_cpu_a_quarter_of_the_machines_memory_is_the_bound() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory_bytes(EchoModel()) == int(total * CPU_SHARE)


@pytest.mark.parametrize("groups", [1, 3])
def test_no_more_pages_are_taken_than_the_sequences_can_use(groups: int) -> None:
    model = EchoModel(max_seq_len=100, num_groups=groups)
    assert default_num_pages(model, 16, "auto", max_num_seqs=5) == 5 * 7 * groups


def test_a_large_model_gets_what_memory_holds_and_never_less_than_one_page_a_group(monkeypatch) -> None:
    model = EchoModel(max_seq_len=10**6, num_groups=2)
    one = PageStorage(model.spec, 1, 16, "fp32").page_bytes
    monkeypatch.setattr("scheduler.capacity.memory_bytes", lambda _: 10 * one + 1)
    assert default_num_pages(model, 16, "fp32", 256) == 10
    assert default_num_pages(model, 16, "fp16", 256) == 20
    monkeypatch.setattr("scheduler.capacity.memory_bytes", lambda _: 0)
    assert default_num_pages(model, 16, "fp32", 256) == 2
