"""HTTP below the routes: the protocol, limits on what is read, and connections to the model server."""
