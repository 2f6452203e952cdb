"""LoKA: where in a recommender FP8 is safe and fast, what it costs in log-loss, and the plan that follows."""
