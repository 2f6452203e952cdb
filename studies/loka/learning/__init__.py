"""Learning: recommenders trained in arms that differ in precision alone, paired by seed, and the test of equivalence that judges them."""
