"""Source: a set's rows of text before any tokenizer, in the three parts of a task.

    source = read(seed=0)                       # of studies.plora.data.banking
    source.train[0]                             # (prompt, class or answer)
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Source", "intent_prompt"]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Rows are (prompt, class name), or (prompt, answer) where `classes` is empty."""

    name: str
    citation: str
    classes: tuple[str, ...]
    train: list[tuple[str, str]]
    validation: list[tuple[str, str]]
    test: list[tuple[str, str]]


def intent_prompt(query: str) -> str:
    return f"Query: {query}\nIntent:"
