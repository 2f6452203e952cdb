"""FP8 for recommendation models: formats, recipes, statistics, quantisation, fused norms, scaled products, and their gradients.

    from kernels.fp8.recipes import RECIPES
    from kernels.fp8.quantise import quantise, quantise_ref

Each operator stands beside its reference (`op`, `op_ref`): casts are equal to the reference bit for bit on every device, products to a
stated signal-to-noise ratio. Importing this imports neither torch nor triton.
"""
