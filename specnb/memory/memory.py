"""`specnb.Memory`: past requests, from which method "suffix" drafts."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from specnb.memory.file import read, write
from specnb.memory.suffix_index import Match, SuffixIndex
from specnb.memory.tokenizer_identity import TokenizerIdentity, identify

CONTEXT_TOKENS = 32
"""The last tokens of a prompt that are kept before its output, so that the start of the output can be found."""


class Memory:
    """Outputs of past requests, for `specnb.generate(..., method="suffix", memory=memory)`.

    Every run that is given the memory adds its output to it, also if it is interrupted. Later runs draft from it, so
    that the same or an edited prompt is answered sooner. The text of a run does not depend on the memory. It stays in
    this process and is written to a file by `save` only. Several threads may use it at once.

    Args:
        max_tokens: most tokens to keep. The oldest requests are dropped first; of a request that is longer than that,
            the end is kept.
        tokenizer: the tokenizer or processor that the tokens are of. None takes that of the first run.

    Raises:
        ValueError: `max_tokens` is not a whole number >= 1.
    """

    def __init__(self, max_tokens: int = 100_000, tokenizer: Any = None) -> None:
        if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens!r} is not valid: it must be a whole number >= 1.")
        self.max_tokens = max_tokens
        self._identity: TokenizerIdentity | None = None
        self._lock = threading.RLock()
        self._index, self._sizes = SuffixIndex(), deque[int]()
        if tokenizer is not None:
            self.bind(tokenizer)

    # ---- sizes
    @property
    def num_tokens(self) -> int:
        """Number of tokens in the memory."""
        return sum(self._sizes)

    @property
    def num_requests(self) -> int:
        """Number of requests in the memory."""
        return len(self._sizes)

    @property
    def tokenizer_name(self) -> str | None:
        """Name of the tokenizer that the tokens are of; None as long as it is not known."""
        return self._identity and self._identity.name

    def __len__(self) -> int:
        return self.num_tokens

    def __bool__(self) -> bool:
        return True  # also when empty

    def __repr__(self) -> str:
        of = f", tokenizer {self.tokenizer_name}" if self.tokenizer_name else ""
        return f"Memory({self.num_tokens:,} of {self.max_tokens:,} tokens in {self.num_requests:,} requests{of})"

    def __copy__(self) -> Memory:
        """Another memory with the same requests; each then goes its own way."""
        with self._lock:
            other, requests = type(self)(self.max_tokens), self.requests()
            other._identity = self._identity
        for ids in requests:
            other._add(ids)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Memory:
        return self.__copy__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a specnb.Memory is not pickled: write it with save(FILE), and read it with Memory.load(FILE).")

    # ---- content
    def bind(self, tokenizer: Any) -> None:
        """Say which tokenizer the tokens are of.

        Raises:
            ValueError: the memory already holds tokens of another one.
        """
        found = identify(tokenizer)
        with self._lock:
            if self._identity is not None and self._identity.digest != found.digest:
                raise ValueError(
                    f"this memory holds tokens of the tokenizer {self._identity.name}, and the model's tokenizer "
                    f"{found.name} does not do the same: use another specnb.Memory() for it, or clear() this one."
                )
            self._identity = found

    def add(self, ids: Iterable[int], prompt: Sequence[int] = ()) -> None:
        """Add a request; does nothing if it has no output.

        Args:
            ids: token ids of the output.
            prompt: token ids of the prompt, of which the last `CONTEXT_TOKENS` are kept.
        """
        output = [int(token) for token in ids]
        if not output:
            return
        self._add([*map(int, prompt[-CONTEXT_TOKENS:]), *output])

    def _add(self, ids: Sequence[int]) -> None:
        ids = ids[-self.max_tokens :]
        with self._lock:
            self._index.extend(ids)
            self._index.begin()
            self._sizes.append(len(ids))
            while self.num_tokens > self.max_tokens:
                self._index.drop(self._sizes.popleft() + 1)  # a separator follows each request

    def clear(self) -> None:
        """Forget everything, the tokenizer too."""
        with self._lock:
            self._index, self._sizes, self._identity = SuffixIndex(), deque(), None

    def requests(self) -> list[list[int]]:
        """The token ids of each request, oldest first."""
        with self._lock:
            found, at = [], 0
            for size in self._sizes:
                found.append(self._index.tokens[at : at + size])
                at += size + 1
            return found

    # ---- look-up, for the drafter
    def matches(self, ids: Sequence[int], shortest: int, longest: int, most: int) -> list[Match]:
        """Occurrences of the suffixes of a text, as in `SuffixIndex.matches`."""
        with self._lock:
            return self._index.matches(ids, shortest, longest, most)

    def continuation(self, position: int, count: int) -> tuple[int, ...]:
        """What follows a position, as in `SuffixIndex.continuation`."""
        with self._lock:
            return self._index.continuation(position, count)

    # ---- files
    def save(self, path: str | Path) -> None:
        """Write the memory to a file in the safetensors format: token ids, and no code.

        Args:
            path: of the file. A memory that is there is replaced.

        Raises:
            OSError: it cannot be written, or something else is there.
        """
        with self._lock:
            requests, identity = self.requests(), self._identity
        write(Path(path), requests, identity, self.max_tokens)

    @classmethod
    def load(cls, path: str | Path, max_tokens: int | None = None) -> Memory:
        """Read a memory that `save` wrote.

        Args:
            path: of the file.
            max_tokens: most tokens to keep; None takes the limit that was saved.

        Returns:
            The memory.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is damaged, or was not written by `save`.
        """
        requests, identity, saved_limit = read(Path(path))
        memory = cls(saved_limit if max_tokens is None else max_tokens)
        memory._identity = identity
        for ids in requests:
            memory._add(ids)
        return memory
