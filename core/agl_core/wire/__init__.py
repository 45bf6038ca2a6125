"""The protocol of a Lightning Server: headers, keys and requests. Each request is described once."""
