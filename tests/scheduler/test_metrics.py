"""The text that Prometheus reads, read by its own parser."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import fields

import pytest
from byhand import span
from fakes import EchoHybrid, EchoModel

from paged.counters import readings
from paged.errors import ExtraMissing
from paged.prefix.stats import PrefixStats
from scheduler import AsyncEngine, Engine, SamplingParams
from scheduler.metrics import GAUGES, EngineCollector
from scheduler.stats import SchedulerStats

prometheus_client = pytest.importorskip("prometheus_client")
from prometheus_client.parser import text_string_to_metric_families as parse  # noqa: E402


def used(model=None) -> Engine:
    engine = Engine(model or EchoModel(), num_pages=64)
    for _ in range(2):
        engine.generate([span(0, 40), span(0, 20)], SamplingParams(max_tokens=5))
    engine.submit([1, 2], request_id="gone")
    engine.cancel("gone")
    engine.submit([3, 4], SamplingParams(max_tokens=50))
    engine.step()
    return engine


@pytest.mark.parametrize("stats", [SchedulerStats, PrefixStats])
def test_every_counter_says_what_it_counts_in_one_sentence(stats: type) -> None:
    texts = []
    for item in fields(stats):
        text = item.metadata["help"]
        assert text[0].isupper() and text.endswith(".") and item.metadata["kind"] in ("counter", "gauge"), item.name
        texts.append(text)
    assert len(set(texts)) == len(texts) == len(list(readings(stats())))


@pytest.mark.parametrize("model", [EchoModel, EchoHybrid])
def test_the_text_has_every_number_of_stats_once_with_its_help(model) -> None:
    engine = used(model())
    families = {f.name: f for f in parse(engine.metrics_text())}
    stats = engine.stats()
    seen: set[str] = set()
    for group, items in (("", readings(engine.scheduler.stats)), ("prefix_", readings(engine.cache.stats))):
        for item in items:
            family = families[f"paged_{group}{item.name.removeprefix('num_')}"]
            assert family.type == ("counter" if item.grows else "gauge")
            assert family.documentation == item.text
            assert [s.value for s in family.samples] == [stats[item.name]], item.name
            seen |= {family.name, item.name}
    for name, text in GAUGES.items():
        if name in stats:
            family = families[f"paged_{name.removeprefix('num_')}"]
            assert (family.type, family.documentation) == ("gauge", text)
            assert [s.value for s in family.samples] == [stats[name]]
            seen |= {family.name, name}
    assert set(stats) <= seen
    assert {f.name for f in families.values() if f.type == "histogram"} == set(families) - seen
    assert stats["num_cancelled"] == 1 and families["paged_cancelled"].samples[0].value == 1


def test_histograms_are_cumulative_and_end_with_all() -> None:
    engine = used()
    families = {f.name: f for f in parse(engine.metrics_text())}
    counts = {}
    for name, text, h in engine.delivery.latencies.items():
        family = families[f"paged_{name}_seconds"]
        assert family.documentation == text
        buckets = [(s.labels["le"], s.value) for s in family.samples if s.name.endswith("_bucket")]
        values = [value for _, value in buckets]
        assert values == sorted(values) and buckets[-1][0] == "+Inf"
        [count] = [s.value for s in family.samples if s.name.endswith("_count")]
        [total] = [s.value for s in family.samples if s.name.endswith("_sum")]
        assert count == values[-1] == h.counts.sum() and total == h.sum_s
        counts[name] = count
    # four ended by themselves; of the one that was cancelled in the queue nothing is counted, nor of the live one
    assert counts == dict.fromkeys(counts, 4)


def test_several_engines_are_told_apart_by_a_label() -> None:
    engines = {"a": used(), "b": Engine(EchoModel(), num_pages=8, prefix_cache=False)}
    registry = prometheus_client.CollectorRegistry()
    registry.register(EngineCollector(engines))
    families = {f.name: f for f in parse(prometheus_client.generate_latest(registry).decode())}
    steps = {s.labels["engine"]: s.value for s in families["paged_steps"].samples}
    assert steps == {name: engine.stats()["num_steps"] for name, engine in engines.items()}
    assert [s.labels for s in families["paged_prefix_queries"].samples] == [{"engine": "a"}]
    assert all(s.labels["engine"] in engines for f in families.values() for s in f.samples)


def test_an_engine_without_a_prefix_cache_has_no_numbers_of_one() -> None:
    engine = Engine(EchoModel(), num_pages=8, prefix_cache=False)
    names = {f.name for f in parse(engine.metrics_text())}
    assert "paged_steps" in names and not any(name.startswith("paged_prefix") for name in names)


def test_an_async_engine_gives_them_between_two_steps() -> None:
    async def main() -> str:
        async with AsyncEngine(EchoModel(), num_pages=64) as engine:
            await engine.generate([[1, 2]], SamplingParams(max_tokens=3))
            return await engine.metrics_text()

    families = {f.name: f for f in parse(asyncio.run(main()))}
    assert families["paged_generated_tokens"].samples[0].value == 3


def test_without_the_package_one_sentence_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(
        ExtraMissing, match=r"prometheus-client, which is not installed: pip install 'paged\[metrics\]'"
    ):
        Engine(EchoModel(), num_pages=8).metrics_text()
