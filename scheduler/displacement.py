"""Displacement: running requests that waiting ones may push out, where these could not start otherwise."""

from __future__ import annotations

from itertools import islice

import numpy as np

from paged.kv.pages import Int64
from scheduler.admission import Admission
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
    gone = state.running[:0]
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
        matched, pages = placer.demand(request)
        pages += placer.reserve.growth(request)
        freed = freed_pages(state, np.concatenate([gone, candidates]))[len(gone) :]
        rows = np.concatenate([[0], np.cumsum(wanted[candidates])])
        fits = (slots_left + np.arange(len(rows)) > 0) & (rows_left + rows > 0) & (pages_left + freed >= pages)
        if not fits.any():
            break
        n = int(fits.argmax())
        gone = np.concatenate([gone, candidates[:n]])
        before.append(request)
        slots_left += n - 1
        rows_left = max(0, rows_left + int(rows[n]) - (len(request.known) - matched))
        pages_left -= pages
    return [admission.request_at(slot) for slot in gone.tolist()]


def freed_pages(state: Slots, slots: Int32) -> Int64:
    """Pages that are nobody's any more once the first n of `slots` have gone, int64 [len(slots) + 1]."""
    pool, pages = state.pool, [state.page_ids(slot) for slot in slots.tolist()]
    owner = np.repeat(np.arange(len(slots)), [len(ids) for ids in pages])
    ids = np.concatenate([np.zeros(0, np.int32), *pages])
    order = np.argsort(ids, kind="stable")  # of each page the holders that come later stand last
    ids, owner = ids[order], owner[order]
    last = np.append(ids[1:] != ids[:-1], True)[: len(ids)]
    holders = np.diff(np.flatnonzero(last), prepend=-1)
    ids, owner = ids[last], owner[last]
    alone = holders == pool.refs[ids] - pool.held[ids]
    return np.concatenate([[0], np.cumsum(np.bincount(owner[alone], minlength=len(slots)))])
