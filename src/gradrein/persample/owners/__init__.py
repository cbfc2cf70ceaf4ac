"""Which sample owns which element of a gradient: proved from structure, or observed by running the engine."""
