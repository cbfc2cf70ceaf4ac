"""Thin layers between `bridle.Monitor` and other packages. Import the one you need."""
