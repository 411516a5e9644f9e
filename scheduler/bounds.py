"""Bounds: what can never run, and what may not wait."""

from __future__ import annotations

from paged.errors import PromptTooLong, QueueFull
from paged.kv.pages import PagePool
from paged.spec import KVView
from scheduler.config import SchedulerConfig
from scheduler.queue import WaitingQueue


class Bounds:
    """Refuses with both numbers what is too long for the model, the pool or a quota, or too much for the queue."""

    def __init__(self, pool: PagePool, max_seq_len: int, config: SchedulerConfig) -> None:
        self.pool = pool
        self.max_seq_len = max_seq_len
        self.config = config

    def in_pages(self, num_pages: int, view: KVView) -> int:
        """Tokens that one request of this view can hold in so many pages."""
        return min(self.max_seq_len, num_pages // view.num_groups * self.pool.page_size)

    def capacity(self, view: KVView, namespace: str = "") -> int:
        """The same, alone in the pool and within the quota of its namespace."""
        most = self.pool.max_pages
        return self.in_pages(min(most, self.config.quota_of(namespace).max_pages or most), view)

    def fit(self, num_prompt: int, max_tokens: int | None, view: KVView, namespace: str = "") -> int:
        """The number of tokens at which a request ends with "length"; PromptTooLong if it can never run."""
        capacity, pages, size = self.capacity(view, namespace), self.pool.max_pages, self.pool.page_size
        if num_prompt + 1 > self.max_seq_len:
            raise PromptTooLong(
                f"the prompt has {num_prompt} tokens and max_seq_len is {self.max_seq_len}, "
                "with at least one token to generate; shorten the prompt"
            )
        if num_prompt + 1 > capacity:
            quota = self.config.quota_of(namespace).max_pages
            if quota and quota < pages:
                where, pages, what = f"the quota of namespace {namespace!r}", quota, "the quota"
            else:
                where, what = "the whole pool", "num_pages"
            raise PromptTooLong(
                f"the prompt has {num_prompt} tokens and {where} holds {capacity} "
                f"({pages} pages of {size}); shorten the prompt or raise {what}"
            )
        wanted = capacity if max_tokens is None else num_prompt + max_tokens
        return min(wanted, capacity)

    def require_room(self, waiting: WaitingQueue, num_requests: int, num_tokens: int) -> None:
        """QueueFull if so many more requests and prompt tokens may not wait. An empty queue takes any one call."""
        config = self.config
        if not len(waiting):
            return
        requests, tokens = len(waiting) + num_requests, waiting.num_tokens + num_tokens
        if config.max_queue_requests and requests > config.max_queue_requests:
            raise QueueFull(
                f"{len(waiting)} requests wait, {num_requests} more came, and max_queue_requests is "
                f"{config.max_queue_requests}; submit again later"
            )
        if config.max_queue_tokens and tokens > config.max_queue_tokens:
            raise QueueFull(
                f"{waiting.num_tokens} tokens wait, {num_tokens} more came, and max_queue_tokens is "
                f"{config.max_queue_tokens}; submit again later"
            )
