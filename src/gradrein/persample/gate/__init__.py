"""The way in: arguments are read, and what is not supported is refused. Behind it there are plain local tensors."""
