"""Causes of torch's errors: one file per error, run only after torch has raised."""
