"""The `gradrein` command."""
