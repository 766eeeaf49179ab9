"""The drafters, one module each; `build_method` makes the target and the drafter of a method."""

from specnb.drafters.build import MethodContext, build_method, runtime_by_role
from specnb.drafters.choice import assistant_method, check_method, drafter_kind, make_schedules, with_defaults

__all__ = [
    "MethodContext",
    "assistant_method",
    "build_method",
    "check_method",
    "drafter_kind",
    "make_schedules",
    "runtime_by_role",
    "with_defaults",
]
