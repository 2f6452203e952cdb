"""Pricing: what a product in FP8 costs in log-loss and saves in time, and the plan that follows: prices, flips, the allocator, the rules of others."""
