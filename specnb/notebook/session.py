"""What the notebook remembers: loaded models, the current one, the last result."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from specnb.options import unknown

_ATTRIBUTE = "_specnb_session"
LAST = "_specgen"  # the variable that always holds the last result, like IPython's _
LAST_BENCH = "_specbench"  # likewise the last comparison


@dataclass
class Session:
    """Loaded models by name. It is kept on the shell, so that reloading the extension loses no model.

    `listeners` are called without arguments whenever something here has changed: open panels follow in this way.
    """

    pairs: dict[str, Any] = field(default_factory=dict)
    current: str | None = None
    last: Any = None
    _given: dict[str, dict[str, Any]] = field(default_factory=dict)
    listeners: list[Callable[[], object]] = field(default_factory=list, repr=False, compare=False)

    @classmethod
    def of(cls, shell: Any) -> Session:
        """The shell's session, made when there is none."""
        session: Session | None = getattr(shell, _ATTRIBUTE, None)
        if session is None:
            session = cls()
            setattr(shell, _ATTRIBUTE, session)
        return session

    def load(self, name: str, **options: Any) -> Any:
        """Load a pair with `specnb.load`, unless the same is loaded, and make it current. After a failure all is as before."""
        if self._given.get(name) != options:
            import specnb

            before, current = self._given.get(name), self.current
            if before is not None:
                self.drop(name)  # two versions may not fit in memory
            try:
                self.pairs[name] = specnb.load(name, **options)
            except Exception as error:
                if before is not None:
                    traceback.clear_frames(error.__traceback__)  # they hold what was loaded of the new one
                    self.pairs[name], self._given[name] = specnb.load(name, **before), before
                    self.current = current
                    self._changed()
                raise
            self._given[name] = options
        self.use(name)
        return self.pairs[name]

    def add(self, pair: Any) -> str:
        """Take in a pair that was made elsewhere and make it current; the name it has here."""
        for name, known in self.pairs.items():
            if known is pair:
                self.use(name)
                return name
        stem = name = pair.name or "pair"
        number = 1
        while name in self.pairs:
            number += 1
            name = f"{stem} ({number})"
        self.pairs[name] = pair
        self.use(name)
        return name

    def use(self, name: str) -> None:
        """Make a loaded model the current one."""
        self.current = name
        self._changed()

    def keep(self, result: Any) -> None:
        """Remember the last result."""
        self.last = result
        self._changed()

    def load_options(self, name: str) -> dict[str, Any] | None:
        """What a model was loaded with; None if it was made elsewhere."""
        return self._given.get(name)

    def drop(self, name: str) -> None:
        """Forget a model; nothing happens if it is not loaded."""
        self.pairs.pop(name, None)
        self._given.pop(name, None)
        if self.current == name:
            self.current = next(reversed(self.pairs), None)
        self._changed()

    def pair(self, name: str | None = None) -> Any:
        """The named pair, or the current one. ValueError when there is none."""
        if name is not None and name not in self.pairs and self.pairs:
            raise ValueError(unknown("loaded model", name, self.pairs))
        key = self.current if name is None else name
        if key is None or key not in self.pairs:
            wanted = (
                f"%specload {name}" if name else "%specload NAME (without NAME it takes a tiny model of specnb's own)"
            )
            raise ValueError(f"no model is loaded: run {wanted} first.")
        return self.pairs[key]

    def _changed(self) -> None:
        for listener in list(self.listeners):
            listener()
