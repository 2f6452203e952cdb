"""Measure functions of the PLoRA study: what a worker runs."""
