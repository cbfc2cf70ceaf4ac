"""Whether the data of one sample enters the loss of another."""
