"""From the files of a run to one `Run`."""
