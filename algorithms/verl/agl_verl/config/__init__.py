"""veRL's configuration, made of agl's, and the algorithm that it is for."""
