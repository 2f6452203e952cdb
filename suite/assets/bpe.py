"""The byte-level BPE tokenizer of a GGUF file, in the standard library: for hosts that have no `tokenizers` and no `regex`.

    from suite.assets import load_tokenizer
    tokenizer = load_tokenizer()
    ids = tokenizer.encode("Two plus 2?")                   # list of ints
    tokenizer.decode(ids) == "Two plus 2?"

Pre-tokenisation is "smollm" (SmolLM2's own tokenizer.json; llama.cpp names it the same): every numeric character stands alone, the rest
is split by GPT-2's pattern. Transformers' conversion of the GGUF forgets the first step and so differs wherever two or more spaces or
line breaks stand before a digit; we follow the model's authors. The standard `re` knows no \\p{L}, so each character is
first replaced by its class from `unicodedata`; a character that Unicode assigned after this Python was built counts as unassigned.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

from suite.assets._sources import AssetError

_CONTROL = 3  # token type in GGUF: never made from text by merges
_CONTRACTION = re.compile(r"'(?:s|t|re|ve|m|ll|d)")
# GPT-2's pattern over class letters: L letter, W white space, X the rest; a blank keeps itself because it may lead a word.
# Digits never reach it.
_WORD = re.compile(r" ?L+| ?X+|[ W]+(?![^ W])|[ W]+")
_SPACES = frozenset("\t\n\x0b\x0c\r\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000") | {chr(c) for c in range(0x2000, 0x200B)}


def _printable_bytes() -> list[str]:
    """GPT-2's table from byte to a visible character: the printable ones stay, the others move up from U+0100 in order."""
    keep = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(0x100, 0x200))
    return [chr(byte) if byte in keep else chr(next(moved)) for byte in range(256)]


_BYTE_TO_CHAR = _printable_bytes()
_CHAR_TO_BYTE = {char: byte for byte, char in enumerate(_BYTE_TO_CHAR)}


@lru_cache(maxsize=4096)
def _class_of(char: str) -> str:
    if char == " ":
        return " "
    if char in _SPACES:
        return "W"
    return {"L": "L", "N": "N"}.get(unicodedata.category(char)[0], "X")


def split_words(text: str) -> list[str]:
    """The pieces that merges never cross: each numeric character alone, between them GPT-2's words. Joined they are the text."""
    pieces: list[str] = []
    classes = "".join(map(_class_of, text))
    for run in re.finditer(r"N|[^N]+", classes):
        if run[0] == "N":
            pieces.append(text[run.start()])
            continue
        part, kinds, at = text[run.start() : run.end()], run[0], 0
        while at < len(part):
            match = _CONTRACTION.match(part, at) or _WORD.match(kinds, at)
            assert match, f"the pattern covers every class, got {kinds[at]=}"
            pieces.append(part[at : match.end()])
            at = match.end()
    return pieces


@dataclass(frozen=True, kw_only=True)
class ByteBpe:
    """A byte-level BPE vocabulary. `tokens[i]` is the text of id i in GPT-2's visible bytes, `ranks` the merges in order."""

    tokens: tuple[str, ...]
    ranks: dict[tuple[str, str], int]
    control: frozenset[int]
    ids: dict[str, int] = field(repr=False)

    @staticmethod
    def from_gguf(metadata: dict[str, Any]) -> ByteBpe:
        """Builds the tokenizer from GGUF metadata. Raises AssetError for another tokenizer model or another pre-tokenisation."""
        kind = (metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre"))
        if kind != ("gpt2", "smollm"):
            raise AssetError(f"gguf tokenizer: we read ('gpt2', 'smollm'), got {kind=}; use a SmolLM file")
        tokens = metadata["tokenizer.ggml.tokens"]
        merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
        types = metadata["tokenizer.ggml.token_type"]
        if len(types) != len(tokens) or any(len(merge) != 2 for merge in merges):
            raise AssetError(f"gguf tokenizer: token types and merges do not fit, got {len(tokens)=} {len(types)=}; fetch the file again")
        return ByteBpe(tokens=tuple(tokens), ranks={merge: rank for rank, merge in enumerate(merges)},
                       control=frozenset(i for i, kind in enumerate(types) if kind == _CONTROL),
                       ids={token: i for i, token in enumerate(tokens)})

    def encode(self, text: str, *, allow_control: bool = True) -> list[int]:
        """Token ids of `text`, without any added begin or end. With `allow_control`, names such as <|im_end|> become their ids.

        Raises ValueError where a byte of the text is not in the vocabulary (SmolLM2 lacks 21 of the 256).
        """
        if not allow_control:
            return self._encode_plain(text)
        names = sorted((self.tokens[i] for i in self.control), key=len, reverse=True)  # the longest name wins
        ids: list[int] = []
        for part in re.split("(" + "|".join(map(re.escape, names)) + ")", text) if names else [text]:
            is_name = part in self.ids and self.ids[part] in self.control
            ids.extend([self.ids[part]] if is_name else self._encode_plain(part))
        return ids

    def decode(self, ids: list[int], *, skip_control: bool = False) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD. Raises ValueError for an id outside the vocabulary."""
        parts: list[bytes] = []
        for i in ids:
            if not 0 <= i < len(self.tokens):
                raise ValueError(f"a token id is 0 to {len(self.tokens) - 1}, got {i=}; was it made by another tokenizer?")
            if i not in self.control:
                parts.append(bytes(_CHAR_TO_BYTE[char] for char in self.tokens[i]))
            elif not skip_control:
                parts.append(self.tokens[i].encode())
        return b"".join(parts).decode("utf-8", errors="replace")

    def _encode_plain(self, text: str) -> list[int]:
        ids: list[int] = []
        for word in split_words(text):
            for symbol in self._merge([_BYTE_TO_CHAR[byte] for byte in word.encode("utf-8")]):
                if symbol not in self.ids:
                    raise ValueError(f"every byte must be in the vocabulary, got {word=} with {symbol=}; remove that character")
                ids.append(self.ids[symbol])
        return ids

    def _merge(self, symbols: list[str]) -> list[str]:
        """Applies the lowest-ranked merge, everywhere it fits from left to right, until none fits."""
        while len(symbols) > 1:
            best = min(pairwise(symbols), key=lambda pair: self.ranks.get(pair, len(self.ranks)))
            if best not in self.ranks:
                break
            merged, at = [], 0
            while at < len(symbols):
                fits = tuple(symbols[at : at + 2]) == best
                merged.append("".join(best) if fits else symbols[at])
                at += 2 if fits else 1
            symbols = merged
        return symbols
