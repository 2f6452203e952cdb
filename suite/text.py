"""Text on its way to a person: without control codes, without passwords.

    print(clean(masked(f"store {uri}")))        # store postgresql://***@db.example/mlflow

`clean` is for whatever may come from strangers (bundles, archives), `masked` for whatever may hold an address with credentials
(a tracking URI, an error that quotes one). Both leave ordinary text as it is. Neither makes text safe for HTML or a shell.
"""

from __future__ import annotations

import os
import re

# SQLAlchemy takes '/' and '@' inside a password as they are, so after "user:" all up to the last '@' of the word is hidden.
_USER = re.compile(r"(?<=://)(?:[^\s/:@'\"]*:[^\s'\"]*|[^\s/@'\"]+)@")
_WORD = re.compile(r"(?i)\b((?:[a-z0-9]+_)*(?:password|passwd|pwd|passphrase|token|secret|sslpassword|api_?key|access_?key)\s*=\s*)(\"[^\"]*\"|'[^']*'|[^\s&;,'\"]+)")
_SECRETS = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
_SHORTEST_SECRET = 4  # a shorter one would hide ordinary words


def clean(text: str) -> str:
    """The text without control codes; line breaks and tabs stay."""
    return "".join(c if c == "\n" or c == "\t" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def masked(text: str) -> str:
    """The text with `***` in the place of credentials: user and password of an address, `password=...`, the values of MLflow's own variables."""
    text = _WORD.sub(r"\1***", _USER.sub("***@", text))
    for name in _SECRETS:
        value = os.environ.get(name, "")
        if len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, "***")
    return text
