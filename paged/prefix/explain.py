"""Why a prompt matches as far as it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paged.prefix.hashing import Int32
from paged.spec import KVView

if TYPE_CHECKING:
    from paged.prefix.cache import PrefixCache
    from paged.prefix.cursor import Cursor


@dataclass(frozen=True, slots=True)
class Explanation:
    """How far a prompt matches, and why no further.

    reason  "complete"            all but the last token, which the model needs for its logits
            "too short"           less than a page is left, and only whole pages match
            "evicted"             what follows was cached and went for room
            "other namespace"     what follows is cached under another salt, model, codec or cache window
            "too shallow"         what follows is cached, with fewer loops than are asked for
            "outside the window"  what follows is cached, and pages that a sliding window needs before it are gone
            "state missing"       the prompt shares more with a checkpoint, and leaves it early
            "never cached"        nobody donated these tokens
    """

    num_tokens: int
    matched: int
    reason: str
    message: str


def explain(cache: PrefixCache, prompt: Int32, namespace: str, view: KVView) -> Explanation:
    """See PrefixCache.explain."""
    matched = cache.match_len(prompt, namespace, view.loops or None, view.cache_window)
    found = _recurrent(cache, prompt, namespace, view, matched) or _paged(cache, prompt, namespace, view, matched)
    return Explanation(len(prompt), matched, *found)


def _recurrent(cache: PrefixCache, prompt: Int32, namespace: str, view: KVView, matched: int) -> tuple[str, str] | None:
    store = cache.checkpoints
    if store is None:
        return None
    if matched >= len(prompt) - 1:
        return "complete", _complete(prompt)
    key = cache.namespace_key(namespace, **view.fields)
    gone = store.evicted_at(key, prompt, matched)
    if gone:
        return "evicted", f"a checkpoint of the first {gone} tokens went for room"
    shared = store.common(key, prompt)
    if shared > matched:
        return "state missing", (
            f"{shared} leading tokens are those of a checkpoint, and no state was kept at that position; "
            f"the deepest one that the prompt passes is at {matched}"
        )
    for other in store.namespaces():
        if other != key and (there := store.find(other, prompt)) is not None and there.num_tokens > matched:
            return "other namespace", f"a checkpoint of {there.num_tokens} tokens is cached under another namespace"
    return "never cached", f"no checkpoint opens with token {matched} of this prompt"


def _paged(cache: PrefixCache, prompt: Int32, namespace: str, view: KVView, matched: int) -> tuple[str, str]:
    size, index = cache.pool.page_size, cache.index
    if matched >= len(prompt) - 1:
        return "complete", _complete(prompt)
    cursor = cache.cursor(namespace, view)
    whole = max(0, len(prompt) - 1) // size
    depth = index.seek(cursor, prompt, whole)
    if depth > matched // size and view.loops and not cache._has_pages(cursor, depth):
        return "too shallow", f"{depth * size} tokens are cached, {matched} of them at a depth of {view.loops} loops"
    if depth > matched // size:
        return "outside the window", (
            f"{depth * size} tokens are cached, and a page that a sliding window still needs there has been given up"
        )
    if depth == whole and not cache.exact:
        return "too short", f"{len(prompt) - matched} tokens are left, and a whole page before the last token is {size}"
    rows = _evicted_rows(cache, cursor, prompt)
    if rows > matched - depth * size:
        return "evicted", f"the page of tokens {depth * size} to {depth * size + rows - 1} was evicted for room"
    for other in index.namespaces():
        if other != cursor.namespace and index.seek(index.cursor(other, view), prompt, whole) > depth:
            return "other namespace", f"token {matched} and what follows is cached under another namespace"
    return "never cached", f"no cached prefix goes on with token {matched} of this prompt"


def _evicted_rows(cache: PrefixCache, cursor: Cursor, prompt: Int32) -> int:
    """Most tokens of the page right below the cursor that an evicted page held; 0: none is remembered."""
    size, depth, index = cache.pool.page_size, cursor.depth, cache.index
    above = cursor.key_above()
    rest = prompt[depth * size : (depth + 1) * size].astype("<i4", copy=False)
    lengths = range(len(rest), 0, -1) if cache.exact else [size] * (len(rest) == size)
    return next((n for n in lengths if index.hash_page(above, rest[:n].tobytes()) in cache.evicted), 0)


def _complete(prompt: Int32) -> str:
    return f"everything but the last of {len(prompt)} tokens is cached; the model needs that one for its logits"
