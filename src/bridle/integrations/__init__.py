"""Where people already are: thin files between `bridle.Monitor` and other packages. Import the one you need."""
