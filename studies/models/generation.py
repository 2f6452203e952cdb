"""Whole texts from a decoder, with a digest of every logit that led to them, so that any two schedules can be compared prompt by prompt.

    model = prepare(load_smollm2(), family="fma")
    made = generate(model, prompts, new_tokens=32, schedule=Schedule(batch=8, chunk=16))
    made.tokens[0], made.digest(0)                          # equal for every Schedule, device and number of ranks (exact families)

A `Schedule` says how, never what. Digests are computed on the host after each step: time a `Decoder`, not this.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kernels.exact.digests import digest
from studies.models.decoder import Decoder, Sampling
from studies.models.llama import check_tokens
from studies.models.prepared import Model

__all__ = ["Generation", "Schedule", "generate"]

# observe(step, prompts, logits): the prompts' places in the list given, and their logits fp32 [prompts, V] on the device
Observer = Callable[[int, Sequence[int], torch.Tensor], None]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """`batch`: prompts at a time; `chunk`, `pad_to`: of `Decoder.prefill`; `cache` False: each step reads its whole prefix again.

    `graph`: steps by CUDA graph. Raises ValueError for a graph without a cache.
    """

    batch: int = 1
    chunk: int = 0
    pad_to: int = 0
    cache: bool = True
    graph: bool = False

    def __post_init__(self) -> None:
        if self.batch < 1 or min(self.chunk, self.pad_to) < 0 or (self.graph and not self.cache):
            raise ValueError(f"batch is at least 1, chunk and pad_to at least 0, and a graph needs the cache, got {self}; change that field")


@dataclass(frozen=True, kw_only=True)
class Generation:
    """For each prompt the tokens made, the last one `eos` where it was met, and the digest of the logits that each was chosen from."""

    tokens: tuple[tuple[int, ...], ...]
    logits: tuple[tuple[str, ...], ...]

    def digest(self, prompt: int) -> str:
        """One sha256 over the tokens and logits of a prompt."""
        lines = "".join(f"{token} {row}\n" for token, row in zip(self.tokens[prompt], self.logits[prompt], strict=True))
        return hashlib.sha256(lines.encode()).hexdigest()

    def digests(self) -> tuple[str, ...]:
        """`digest` of every prompt."""
        return tuple(map(self.digest, range(len(self.tokens))))


def generate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    schedule: Schedule | None = None,
    sampling: Sampling | None = None,
    eos: int | None = None,
    requests: Sequence[int] | None = None,
    observe: Observer | None = None,
) -> Generation:
    """Up to `new_tokens` tokens for each prompt, greedy without `sampling`; a prompt ends early with `eos`.

    `requests`: what sampling is keyed to, one number a prompt (default: its place), so that a prompt keeps its text in other company.
    `observe` sees the logits of every step, of prompts that have ended too where others of their batch go on.
    Raises ValueError for no prompts, empty ones, ids outside the vocabulary, and prompts too long for the model's context.
    """
    schedule = schedule or Schedule()
    requests = list(range(len(prompts))) if requests is None else list(requests)
    longest = max(map(len, prompts), default=0)
    if new_tokens < 1 or not longest or len(requests) != len(prompts):
        raise ValueError(f"need prompts, a request number for each and new_tokens >= 1, got {len(prompts)=} {longest=} {len(requests)=} {new_tokens=}")
    check_tokens(model.config, prompts)
    if longest + new_tokens - 1 > model.config.context_tokens:
        raise ValueError(f"prompt and text must fit into the model's context, got {longest=} {new_tokens=} {model.config.context_tokens=}; ask for less")
    decoder = Decoder(model, batch=min(schedule.batch, len(prompts)), capacity_tokens=longest + new_tokens - 1, sampling=sampling, graph=schedule.graph)
    texts: list[_Text] = [_Text(eos=eos) for _ in prompts]
    for first in range(0, len(prompts), decoder.batch):
        group = range(first, min(first + decoder.batch, len(prompts)))
        _generate_group(decoder, prompts, requests, texts, group, new_tokens, schedule, observe)
    return Generation(tokens=tuple(tuple(text.tokens) for text in texts), logits=tuple(tuple(text.logits) for text in texts))


class _Text:
    """What one prompt has led to so far."""

    def __init__(self, *, eos: int | None) -> None:
        self.eos = eos
        self.tokens: list[int] = []
        self.logits: list[str] = []

    @property
    def ended(self) -> bool:
        return self.eos is not None and bool(self.tokens) and self.tokens[-1] == self.eos

    def add(self, token: int, logits_V: torch.Tensor) -> None:
        if not self.ended:
            self.tokens.append(token)
            self.logits.append(digest(logits_V))


def _generate_group(
    decoder: Decoder, prompts: Sequence[Sequence[int]], requests: Sequence[int], texts: Sequence[_Text], group: range, new_tokens: int,
    schedule: Schedule, observe: Observer | None,
) -> None:  # fmt: skip
    """The prompts of one batch, step by step; stops when all have ended."""
    prefixes, named = [list(prompts[i]) for i in group], [requests[i] for i in group]
    for step in range(new_tokens):
        if step == 0 or not schedule.cache:
            logits_RV = decoder.prefill(prefixes, requests=named, chunk=schedule.chunk, pad_to=_width(schedule, prefixes))
        else:
            logits_RV = decoder.step()
        if observe is not None:
            observe(step, list(group), logits_RV)
        chosen, rows = decoder.ids_B[: decoder.rows].tolist(), logits_RV.cpu()
        for place, i in enumerate(group):
            texts[i].add(chosen[place], rows[place])
            prefixes[place].append(chosen[place])
        if all(texts[i].ended for i in group):
            return


def _width(schedule: Schedule, prefixes: Sequence[Sequence[int]]) -> int:
    """`pad_to`, which follows the text where each step reads it again."""
    return max(schedule.pad_to, schedule.chunk or max(map(len, prefixes))) if schedule.pad_to else 0
