"""Which sample owns which element: as integers that are carried through a graph, and as a way to cut a tensor."""
