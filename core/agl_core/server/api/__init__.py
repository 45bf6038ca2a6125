"""The control plane below /agl/v1: what workers, applications and operators ask of the server."""
