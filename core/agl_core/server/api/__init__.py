"""The control plane below /agl/v1: what workers and trainers ask of the server."""
