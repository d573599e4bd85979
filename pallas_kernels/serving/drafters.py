"""Who guesses the next tokens. Drafters run on the host, between steps."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np


class Drafter(Protocol):
    """Guesses tokens of a request."""

    def draft(self, request_id: int, tokens: Sequence[int], limit: int) -> list[int]:
        """Returns at most `limit` guesses of what follows `tokens`, possibly none."""


class NgramDrafter:
    """Prompt lookup: what followed the last tokens when they came up before, the most recent time."""

    def __init__(self, longest: int = 3) -> None:
        self._longest = longest

    def draft(self, request_id: int, tokens: Sequence[int], limit: int) -> list[int]:
        """Returns the tokens behind the most recent match of the longest possible n-gram."""
        array = np.asarray(tokens)
        for length in range(min(self._longest, len(array) - 1), 0, -1):
            grams = np.lib.stride_tricks.sliding_window_view(array[:-1], length)
            matches = np.flatnonzero((grams == array[-length:]).all(axis=1))
            if matches.size:
                start = int(matches[-1]) + length
                return array[start : start + limit].tolist()
        return []


class ScriptedDrafter:
    """Knows the truth, and so decides how many of its guesses are accepted."""

    def __init__(self, truth: Mapping[int, Sequence[int]], script: Iterable[tuple[int, int]], vocab_size: int) -> None:
        """Takes what to draft.

        Args:
          truth: all tokens, prompt included, of each request.
          script: numbers of right guesses and of wrong ones after them, taken in turn, over and over.
          vocab_size: tokens are below this.
        """
        self._truth = truth
        self._script = itertools.cycle(script)
        self._vocab_size = vocab_size

    def draft(self, request_id: int, tokens: Sequence[int], limit: int) -> list[int]:
        """Returns the next right tokens, then wrong ones."""
        right, wrong = next(self._script)
        following = self._truth[request_id][len(tokens) : len(tokens) + min(limit, right + wrong)]
        return [token if i < right else (token + 1) % self._vocab_size for i, token in enumerate(following)]
