"""Packed multi-adapter LoRA: many adapters of mixed rank train in one pass over one frozen base.

Segments (`segments`) say which rows belong to which adapter; every kernel has its reference beside it.
"""
