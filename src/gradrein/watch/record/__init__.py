"""What runs inside the training process: hooks, measurements, the file."""
