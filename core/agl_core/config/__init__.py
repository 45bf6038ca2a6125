"""How a run is described: reading its TOML file, and checking that its parts go together."""
