"""Per-sample gradients of one value, each held in the form that is cheapest to compute with."""
