"""Sites: the products of a model, found by tracing, and rewritten by a plan. registry finds, apply and fuse rewrite, dispatch chooses while a model trains."""
