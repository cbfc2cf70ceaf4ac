"""What `per_sample` returns: queries that read gradients, and queries that write sums of them."""
