"""Search: which adapters to train, when to give one up, and what takes its slot."""
