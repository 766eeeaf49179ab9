"""The registry of drafters that are not specnb's own: those of a session, and those that installed packages bring."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specnb.options.methods import MethodInfo

ENTRY_POINT_GROUP = "specnb.drafters"
"""An entry point of this group names a function without arguments that calls `specnb.register_drafter`."""


class Registry:
    """The registered drafters, in the order in which they came.

    Attributes:
        failed: why an installed package's entry point could not be loaded, by the entry point's name.
    """

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}
        self._infos: dict[str, MethodInfo] = {}  # replaced and never changed, so that other threads read a whole one
        self._origins: dict[str, str] = {}
        self._loading: EntryPoint | None = None
        self._loaded = False
        self._lock = threading.RLock()
        self._listeners: list[weakref.WeakMethod[Any]] = []

    @property
    def infos(self) -> Mapping[str, MethodInfo]:
        """The registered drafters by name. The first call loads those of installed packages."""
        if not self._loaded:
            self._load()
        return self._infos

    def add(self, info: MethodInfo) -> None:
        """Add a drafter, or replace the one of that name.

        Raises:
            ValueError: two packages bring a drafter of the same name.
        """
        with self._lock:
            if self._loading is None:
                self._load()  # what the session registers stays in place of what packages bring
            else:
                if info.name in self._infos:
                    raise ValueError(f"drafter {info.name!r} is {self._origins[info.name]}'s already")
                self._origins[info.name] = _package(self._loading)
            self._infos = {**self._infos, info.name: info}
        self._changed()

    def remove(self, name: str) -> None:
        """Remove a drafter."""
        with self._lock:
            self._infos = {key: info for key, info in self._infos.items() if key != name}
        self._changed()

    def listen(self, listener: Callable[[], object]) -> None:
        """Call a bound method after every change, for as long as its object lives."""
        self._listeners.append(weakref.WeakMethod(listener))

    def _load(self) -> None:
        with self._lock:
            if self._loaded or self._loading is not None:  # loading calls register_drafter, which reads `infos`
                return
            for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name):
                self._loading = point
                try:
                    point.load()()
                except Exception as error:  # somebody else's code: it must not take specnb's own methods with it
                    said = " ".join(str(error).split()) or type(error).__name__
                    self.failed[point.name] = f"{_package(point)} ({point.value}): {said}"
                finally:
                    self._loading = None
            self._loaded = True
        for name, reason in self.failed.items():
            warnings.warn(f"drafter {name!r} could not be loaded from {reason}", RuntimeWarning, stacklevel=3)

    def _changed(self) -> None:
        called = [(reference, reference()) for reference in self._listeners]
        self._listeners = [reference for reference, listener in called if listener is not None]
        for _, listener in called:
            if listener is not None:
                listener()


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value.partition(":")[0]


REGISTRY = Registry()
"""The registry of this process."""
