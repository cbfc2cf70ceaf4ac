"""Where to cut a graph into what samples share and what belongs to one of them each."""
