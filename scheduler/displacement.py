"""Displacement: running requests that waiting ones may push out, where these could not start otherwise."""

from __future__ import annotations

from itertools import islice

import numpy as np

from paged.kv.pages import Int64
from scheduler.admission import Admission
from scheduler.chunking import NO_CAP
from scheduler.request import Int32, Request
from scheduler.slots import Slots


def displaced(admission: Admission, wanted: Int32) -> list[Request]:
    """The running requests that have to go now, so that the first waiting ones can start in this step.

    The policy says who may push out whom. Asked request by request in its order, until one neither fits nor may push
    out enough; nobody goes where that would not be enough. `wanted [num_slots]` is the rows that each running slot
    would compute. Changes nothing. Where all running requests are of one rank it costs one comparison; else
    O(pages of those who might go), vectorised, for each request that does not fit.
    """
    state, config, placer, quotas = admission.state, admission.config, admission.placer, admission.quotas
    policy, pool = admission.waiting.policy, admission.state.pool
    closed, starting = quotas.full(), dict[str, list[Request]]()  # by namespace
    gone = kept = state.running[:0]  # slots that go, and ids of pages that those who start instead attach
    placer.reserve.begin()
    slots_left = state.num_free
    rows_left = config.max_num_batched_tokens - int(wanted[state.running].sum())
    pages_left = pool.num_available - placer.spare
    for request in islice(policy.walk(admission.waiting, closed), config.max_num_seqs):
        candidates = policy.displaceable(request, np.setdiff1d(state.running, gone))
        if not len(candidates):
            break
        before = starting.setdefault(request.namespace, [])
        if quotas.active and (quotas.is_full(request.namespace, len(before)) or quotas.room_for(request, before) < 0):
            closed.add(request.namespace)
            continue
        if placer.awaits(request):
            continue
        demand = placer.demand(request)
        pages = demand.num_pages + placer.reserve.growth(request)
        attached = np.concatenate([kept, demand.attached])
        leaving = np.concatenate([gone, candidates])
        freed = freed_pages(state, leaving, attached)
        freed[1:] += np.cumsum(placer.reserve.of_each(leaving))  # nobody keeps these for them any more
        freed = freed[len(gone) :]
        rows = np.concatenate([[0], np.cumsum(wanted[candidates])])
        fits = (slots_left + np.arange(len(rows)) > 0) & (rows_left + rows > 0) & (pages_left + freed >= pages)
        if not fits.any():
            break
        n = int(fits.argmax())
        gone, kept = np.concatenate([gone, candidates[:n]]), attached
        before.append(request)
        slots_left += n - 1
        takes = min(len(request.known) - demand.matched, config.max_chunk_tokens or NO_CAP)
        rows_left += int(rows[n]) - takes  # below 0: whatever others give up is for this one
        pages_left -= pages
    return [admission.request_at(slot) for slot in gone.tolist()]


def freed_pages(state: Slots, slots: Int32, kept: Int32) -> Int64:
    """Pages, but those `kept`, that are nobody's any more once the first n of `slots` have gone, [len(slots) + 1]."""
    pool, pages = state.pool, [state.page_ids(slot) for slot in slots.tolist()]
    owner = np.repeat(np.arange(len(slots)), [len(ids) for ids in pages])
    ids = np.concatenate([np.zeros(0, np.int32), *pages])
    order = np.argsort(ids, kind="stable")  # of each page the holders that come later stand last
    ids, owner = ids[order], owner[order]
    last = np.append(ids[1:] != ids[:-1], True)[: len(ids)]
    holders = np.diff(np.flatnonzero(last), prepend=-1)
    ids, owner = ids[last], owner[last]
    alone = (holders == pool.refs[ids] - pool.held[ids]) & ~np.isin(ids, kept)
    return np.concatenate([[0], np.cumsum(np.bincount(owner[alone], minlength=len(slots)))])
