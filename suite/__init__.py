"""The harness: cells, bundles, plans, workers, tracking, claims. It knows no study and no kernel."""
