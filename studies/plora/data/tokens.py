"""From text to token ids: the tokenizer, one answer token for each class, rows that are too long or empty.

    tokenizer = smollm2()                                          # by suite.assets.bpe, no other package needed
    tokenizer = from_huggingface(AutoTokenizer.from_pretrained(...))
    class_tokens(("card_arrival", "card_linking"), tokenizer)      # int32 [2], distinct: " arrival", " linking"
    part = encode_classes([("Where is it?", "card_arrival")], names, choices, tokenizer)

Prompt and answer are encoded apart, so that the answer begins at a token of its own. A prompt begins with what the tokenizer puts before
every text (Llama's begin token; SmolLM2 and Qwen2 have none); an answer without classes ends with the tokenizer's end token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from studies.plora.data.task import Examples

__all__ = ["Tokenizer", "class_tokens", "encode_answers", "encode_classes", "fitting", "from_huggingface", "smollm2"]


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """encode: text to ids, nothing added, no text taken for a control token. begin: ids before every prompt. end: id after an answer, or None."""

    name: str
    encode: Callable[[str], list[int]]
    begin: tuple[int, ...] = ()
    end: int | None = None


def smollm2() -> Tokenizer:
    """SmolLM2-135M-Instruct's; its answers end with <|im_end|>. Raises suite.assets.AssetError."""
    from suite.assets import load_tokenizer

    bpe = load_tokenizer()
    return Tokenizer(name="smollm2", encode=lambda text: bpe.encode(text, allow_control=False), end=bpe.ids["<|im_end|>"])


def from_huggingface(tokenizer: Any) -> Tokenizer:
    """A transformers tokenizer of a decoder. Text that looks like a special token is still encoded as one where the tokenizer insists on it."""
    bos = tokenizer.bos_token_id
    leads = bos is not None and tokenizer("").input_ids[:1] == [bos]
    return Tokenizer(name=type(tokenizer).__name__, encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
                     begin=(bos,) if leads else (), end=tokenizer.eos_token_id)


def class_tokens(names: Sequence[str], tokenizer: Tokenizer) -> np.ndarray:
    """For each class one token of its name that no other class has: int32 [C], the same at every call.

    A maximum matching of classes to the tokens of their names (augmenting paths): words in lower case first, then their parts, then
    capitalised words. Raises ValueError where no matching serves all classes.
    """
    candidates = [_name_tokens(name, tokenizer) for name in names]
    owner: dict[int, int] = {}

    def place(c: int, tried: set[int]) -> bool:
        for token in candidates[c]:
            if token not in tried:
                tried.add(token)
                if token not in owner or place(owner[token], tried):
                    owner[token] = c
                    return True
        return False

    unserved = [name for c, name in enumerate(names) if not place(c, set())]
    if unserved:
        raise ValueError(f"every class has an answer token of its own from its name, got none left for {unserved[:5]} of {len(names)} classes; rename them")
    choices = np.empty(len(names), np.int32)
    for token, c in owner.items():
        choices[c] = token
    return choices


def _name_tokens(name: str, tokenizer: Tokenizer) -> list[int]:
    words = name.replace("_", " ").replace("?", "").split()
    whole = [(word, tokenizer.encode(f" {word}")) for word in [w.lower() for w in words]]
    ordered = [ids[0] for _, ids in whole if len(ids) == 1] + [i for _, ids in whole for i in ids]
    ordered += [i for word, _ in whole for i in tokenizer.encode(f" {word.capitalize()}")]
    return list(dict.fromkeys(ordered))


def encode_classes(rows: Sequence[tuple[str, str]], names: Sequence[str], choices: np.ndarray, tokenizer: Tokenizer) -> Examples:
    """Rows of (prompt, class name). Raises ValueError for a class that `names` lacks and for an empty prompt."""
    index = {name: c for c, name in enumerate(names)}
    if unknown := sorted({name for _, name in rows} - set(index)):
        raise ValueError(f"every row's class is among the {len(names)} given, got {unknown[:5]}; add them or drop their rows")
    labels = np.array([index[name] for _, name in rows], np.int32)
    return _examples([(prompt, [int(choices[c])]) for (prompt, _), c in zip(rows, labels, strict=True)], tokenizer, labels, choices)


def encode_answers(rows: Sequence[tuple[str, str]], tokenizer: Tokenizer) -> Examples:
    """Rows of (prompt, answer); a blank is put before the answer. Raises ValueError for an empty prompt or answer."""
    if empty := sum(not answer.strip() for _, answer in rows):
        raise ValueError(f"every row has an answer, got {empty} of {len(rows)} without; drop them")
    end = [] if tokenizer.end is None else [tokenizer.end]
    return _examples([(prompt, tokenizer.encode(f" {answer.strip()}") + end) for prompt, answer in rows], tokenizer, None, None)


def _examples(rows: list[tuple[str, list[int]]], tokenizer: Tokenizer, labels: np.ndarray | None, choices: np.ndarray | None) -> Examples:
    if empty := sum(not prompt.strip() for prompt, _ in rows):
        raise ValueError(f"every row has a prompt, got {empty} of {len(rows)} without; drop them")
    prompts = [[*tokenizer.begin, *tokenizer.encode(prompt)] for prompt, _ in rows]
    ids = tuple(np.array(prompt + answer, np.int32) for prompt, (_, answer) in zip(prompts, rows, strict=True))
    return Examples(ids=ids, answer_from=np.array([len(prompt) for prompt in prompts], np.int32), labels=labels, choices=choices)


def fitting(examples: Examples, tokens: int, *, what: str, drop_longer: bool) -> tuple[Examples, int]:
    """The rows of at most `tokens` tokens, and how many were longer. Raises ValueError where there are such and they may not be dropped,
    and where nothing is left."""  # fmt: skip
    lengths = examples.lengths
    keep = np.flatnonzero(lengths <= tokens)
    longer = len(lengths) - len(keep)
    if longer and (not drop_longer or not len(keep)):
        raise ValueError(f"rows have at most {tokens} tokens, got {longer} of {len(lengths)} rows of {what} that are longer, the longest "
                         f"{lengths.max()}; raise tokens" + (" or pass drop_longer=True" if len(keep) else ""))
    return (examples if not longer else examples.take(keep)), longer
