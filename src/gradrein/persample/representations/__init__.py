"""Per-sample gradients of one value, each held in the representation that is cheapest to compute with."""
