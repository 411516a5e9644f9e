"""What a model asks of its KV pages: the geometry of one page, and how many page groups a sequence has."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Geometry of the KV cache of one model.

    A page holds `page_size` positions of `layers` consecutive layers, K and V:
    `[layers, 2, kv_heads, page_size, head_dim]`. A sequence has one row of page ids per *group*; an ordinary
    model has one group that holds all its layers. `windows[g]` is the sliding window of group g in tokens,
    counting the query itself; 0 means full attention.
    """

    layers: int
    num_kv_heads: int
    head_dim: int
    num_groups: int = 1
    windows: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        for name in ("layers", "num_kv_heads", "head_dim", "num_groups"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"KVSpec.{name} must be a positive int, got {value!r}")
        if len(self.windows) != self.num_groups or any(w < 0 for w in self.windows):
            raise ValueError(
                f"KVSpec.windows needs one window >= 0 for each of {self.num_groups} groups, got {self.windows!r}"
            )

    def page_values(self, page_size: int) -> int:
        """Number of K and V values in one page of `page_size` positions."""
        return self.layers * 2 * self.num_kv_heads * page_size * self.head_dim
