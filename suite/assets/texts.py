"""The readers of text sets, for code that names what it reads: a cell's digest then holds the reader, which `load(name)` would import unseen.

    from suite.assets.texts import load_banking77_train
    load_banking77_train()[0]                       # ("I am still waiting on my card?", "card_arrival")
"""

from suite.assets._texts import (
    load_banking77_test, load_banking77_train, load_clinc150, load_cola_dev, load_cola_train, load_gsm8k_test,
    load_gsm8k_train, load_mawps_asdiv, load_mrpc_test, load_mrpc_train, load_sst2_dev, load_sst2_test, load_sst2_train, load_svamp,
)  # fmt: skip

__all__ = [
    "load_banking77_test",
    "load_banking77_train",
    "load_clinc150",
    "load_cola_dev",
    "load_cola_train",
    "load_gsm8k_test",
    "load_gsm8k_train",
    "load_mawps_asdiv",
    "load_mrpc_test",
    "load_mrpc_train",
    "load_sst2_dev",
    "load_sst2_test",
    "load_sst2_train",
    "load_svamp",
]
