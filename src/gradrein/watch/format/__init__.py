"""What a record looks like: its lines, how they are thinned out, the names of its files."""
