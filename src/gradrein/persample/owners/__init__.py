"""Which sample owns which element of a gradient: proved from the graph's structure, or asked of the engine."""
