"""Plain decoding, which the engine must agree with: one token at a time, no cache of any kind, nothing speculated."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.serving.model import LanguageModel, empty_cache


@dataclasses.dataclass(frozen=True)
class Decoded:
    """Greedy output of a prompt.

    Attributes:
      tokens: the generated tokens.
      margins: by how much each one's logit leads the second best.
    """

    tokens: list[int]
    margins: list[float]


def decode_plainly(
    model: LanguageModel,
    weights: Any,
    prompts: Sequence[Sequence[int]],
    num_output: int,
    *,
    batch: int,
    progress: Callable[[int], Any] | None = None,
) -> list[Decoded]:
    """Decodes every prompt greedily.

    Args:
      model: the model.
      weights: its weights.
      prompts: token ids.
      num_output: tokens to generate for each.
      batch: rows computed at once, as many as the engine has: a matrix product may sum in another order for another
        number of rows.
      progress: called with the number of tokens fed in each step.
    """
    decoded = []
    for first in range(0, len(prompts), batch):
        decoded += _decode_batch(model, weights, prompts[first : first + batch], num_output, batch, progress)
    return decoded


def _decode_batch(
    model: LanguageModel,
    weights: Any,
    prompts: Sequence[Sequence[int]],
    num_output: int,
    batch: int,
    progress: Callable[[int], Any] | None,
) -> list[Decoded]:
    """Decodes at most `batch` prompts side by side; each goes over to its own output when its prompt ends."""
    length = max(map(len, prompts)) + num_output - 1
    given = np.zeros((batch, length), np.int32)
    num_given = np.ones(batch, np.int32)
    for row, prompt in enumerate(prompts):
        given[row, : len(prompt)] = prompt
        num_given[row] = len(prompt)
    texts, lengths = jax.device_put((given, num_given))
    cache, best, outputs = empty_cache(model, batch), jnp.zeros(batch, jnp.int32), []
    for position in range(length):
        best, margin, cache = _decode_token(weights, cache, texts, lengths, best, position, model=model)
        outputs.append((best, margin))
        if progress:
            progress(len(prompts))
    tokens, margins = (np.stack(column, axis=1) for column in zip(*jax.device_get(outputs), strict=True))
    at = [slice(len(prompt) - 1, len(prompt) - 1 + num_output) for prompt in prompts]
    return [Decoded(tokens[row, here].tolist(), margins[row, here].tolist()) for row, here in enumerate(at)]


@functools.partial(jax.jit, static_argnames="model", donate_argnames="cache")
def _decode_token(
    weights: Any,
    cache: Any,
    given: jax.Array,
    num_given: jax.Array,
    best: jax.Array,
    position: int,
    *,
    model: LanguageModel,
) -> tuple[jax.Array, jax.Array, Any]:
    """Feeds the token at `position`, the prompt's or the last best one; returns the next, its lead, and the state."""
    token = jnp.where(position < num_given, given[:, position], best)
    logits, cache = model.one_token(weights, cache, token)
    (first, second), (best, _) = (part.T for part in jax.lax.top_k(logits, 2))
    return best.astype(jnp.int32), first - second, cache


def agrees(tokens: Sequence[int], want: Decoded, tolerance: float = 0.0) -> bool:
    """Whether tokens are the reference's.

    Args:
      tokens: what was generated.
      want: the reference.
      tolerance: the first difference is forgiven where the two best logits lie within this of each other: what follows
        another token is another text. 0 forgives nothing.
    """
    for got, token, margin in zip(tokens, want.tokens, want.margins, strict=True):
        if got != token:
            return margin < tolerance
    return True
