"""OTLP intake: spans of agents in other processes and languages, over HTTP and over gRPC.

traces_route    POST …/v1/traces, protobuf or JSON, gzip
over_grpc       the same over gRPC, on a port of its own; not imported here, as few servers need it
TraceService    one export: may it come in, which attempts are its spans of, what became of them
SpanIntake      spans of one attempt → tool results, and the agents of recorded calls, in the store
"""

from agl_core.server.otlp.intake import SpanIntake
from agl_core.server.otlp.over_http import traces_route
from agl_core.server.otlp.service import TraceService

__all__ = ["SpanIntake", "TraceService", "traces_route"]
