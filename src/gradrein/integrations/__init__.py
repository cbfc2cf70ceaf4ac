"""Thin layers between `gradrein.Monitor` and other packages. Import the one you need."""
