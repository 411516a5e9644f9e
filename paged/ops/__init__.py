"""Operations on pages (append, attend, copy) behind one dispatch, and one file a backend."""

from paged.ops.dispatch import Backend, get_backend
from paged.ops.plan import AttendPlan, make_plan

__all__ = ["AttendPlan", "Backend", "get_backend", "make_plan"]
