"""Probing: what the operands of a product look like while a model runs, and what every recipe would make of them. Sketches, predictions, stopping, the paper's surrogate."""
