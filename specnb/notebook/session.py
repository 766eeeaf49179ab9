"""The state of a notebook: loaded models, the current one, and the last result."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from specnb.memory import Memory
from specnb.memory.tokenizer_identity import identify
from specnb.options import parts_of, unknown

_ATTRIBUTE = "_specnb_session"
LAST = "_specgen"  # variable that holds the last result, like IPython's _
_PLAIN_RUNS = 16  # how many are kept
LAST_BENCH = "_specbench"  # variable that holds the last comparison


@dataclass
class Session:
    """The loaded models and the last result. The shell keeps it, so that models survive reloading the extension.

    Attributes:
        pairs: the loaded pairs by name.
        current: name of the current pair; None without any.
        last: the last result.
        memories: what the runs have written, by the digest of the tokenizer; method "suffix" drafts from it.
        listeners: called without arguments after every change, so that open panels can refresh.
    """

    pairs: dict[str, Any] = field(default_factory=dict)
    current: str | None = None
    last: Any = None
    memories: dict[str, Memory] = field(default_factory=dict, repr=False)
    _given: dict[str, dict[str, Any]] = field(default_factory=dict)
    _plain_runs: dict[tuple[str, tuple[int, ...]], Any] = field(default_factory=dict, repr=False)
    listeners: list[Callable[[], object]] = field(default_factory=list, repr=False, compare=False)

    @classmethod
    def for_shell(cls, shell: Any) -> Session:
        """The session of a shell; creates one if there is none."""
        session: Session | None = getattr(shell, _ATTRIBUTE, None)
        if session is None:
            session = cls()
            setattr(shell, _ATTRIBUTE, session)
        return session

    def load(self, name: str, **options: Any) -> Any:
        """Load a pair, unless it is already loaded with the same options, and make it the current one.

        After an error the session is as it was before.

        Args:
            name: the name, as for `specnb.load`.
            options: further arguments of `specnb.load`.

        Returns:
            The pair.
        """
        if self._given.get(name) != options:
            import specnb

            before, current = self._given.get(name), self.current
            if before is not None:
                self.drop(name)  # two versions may not fit in memory
            try:
                self.pairs[name] = specnb.load(name, **options)
            except Exception as error:
                if before is not None:
                    traceback.clear_frames(error.__traceback__)  # the frames keep the new model's tensors alive
                    self.pairs[name], self._given[name] = specnb.load(name, **before), before
                    self.current = current
                    self._changed()
                raise
            self._given[name] = options
        self.set_current(name)
        return self.pairs[name]

    def add(self, pair: Any) -> str:
        """Add a pair that was not loaded here and make it the current one. Returns its name in the session."""
        for name, known in self.pairs.items():
            if known is pair:
                self.set_current(name)
                return name
        stem = name = pair.name or "pair"
        number = 1
        while name in self.pairs:
            number += 1
            name = f"{stem} ({number})"
        self.pairs[name] = pair
        self.set_current(name)
        return name

    def set_current(self, name: str) -> None:
        """Make a loaded model the current one."""
        self.current = name
        self._changed()

    def set_result(self, result: Any) -> None:
        """Remember the last result, and runs of plain decoding, with which others are compared."""
        self.last = result
        if result.method == "plain" and len(result.rows) == 1:
            self._plain_runs[result.model, result.rows[0].prompt_ids] = result
            while len(self._plain_runs) > _PLAIN_RUNS:
                del self._plain_runs[next(iter(self._plain_runs))]
        self._changed()

    def plain_run(self, result: Any) -> Any:
        """The last run of plain decoding of the same model from the same prompt; None without one."""
        return self._plain_runs.get((result.model, result.rows[0].prompt_ids)) if len(result.rows) == 1 else None

    def memory(self, pair: Any) -> Memory:
        """The memory for the tokenizer of a pair; creates one if there is none."""
        digest = identify(pair.tokenizer).digest
        if digest not in self.memories:
            self.memories[digest] = Memory(tokenizer=pair.tokenizer)
        return self.memories[digest]

    def set_memory(self, pair: Any, memory: Memory) -> None:
        """Use another memory for the tokenizer of a pair.

        Raises:
            ValueError: it holds tokens of another tokenizer.
        """
        memory.bind(pair.tokenizer)
        self.memories[identify(pair.tokenizer).digest] = memory

    def drafts_from(self, pair: Any, method: str | None) -> dict[str, Any]:
        """The memory as an argument of `generate`, for a method that drafts from it."""
        drafts = method is not None and "suffix" in parts_of(method) and pair.tokenizer is not None
        return {"memory": self.memory(pair)} if drafts else {}

    def remember(self, pair: Any, result: Any) -> None:
        """Add a result to the memory, unless its method has done so itself."""
        if "suffix" not in parts_of(result.method) and pair.tokenizer is not None:
            for row in result.rows:
                self.memory(pair).add(row.ids, row.prompt_ids)

    def load_options(self, name: str) -> dict[str, Any] | None:
        """The options with which a pair was loaded; None if it was added by `add`."""
        return self._given.get(name)

    def drop(self, name: str) -> None:
        """Remove a pair, if it is loaded."""
        self.pairs.pop(name, None)
        self._given.pop(name, None)
        if self.current == name:
            self.current = next(reversed(self.pairs), None)
        self._changed()

    def pair(self, name: str | None = None) -> Any:
        """The pair of that name, or the current one.

        Raises:
            ValueError: there is no such pair.
        """
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
