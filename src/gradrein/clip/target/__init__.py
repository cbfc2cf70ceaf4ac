"""What a call is about: parameters and their names, which policy each has, and where plain tensors are placed."""
