"""Calls of a model server by plain HTTP and gRPC."""

import http.client
import json
import socket
from typing import Any

import grpc

import jgraph as jg
from jgraph.cluster.polling import Polling
from jgraph.serving._pb import inference_pb2 as pb


def call(
    server: jg.ModelServer,
    method: str,
    path: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
) -> tuple[int, Any, dict[str, str]]:
    """Status, body and headers of an answer; JSON is read."""
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=20)
    sent = {"Authorization": f"Bearer {server.token.value}", **(headers or {})}
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
    if body is not None:
        sent.setdefault("Content-Type", "application/json")
    connection.request(method, path, body, sent)
    answer = connection.getresponse()
    data: Any = answer.read()
    told = {name.lower(): value for name, value in answer.getheaders()}
    connection.close()
    if told.get("content-type") == "application/json":
        data = json.loads(data)
    return answer.status, data, told


def infer(
    server: jg.ModelServer, request: pb.ModelInferRequest
) -> pb.ModelInferResponse:
    """The answer over gRPC."""
    with grpc.insecure_channel(server.grpc_target) as channel:
        method = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelInferResponse.FromString,
        )
        answer: pb.ModelInferResponse = method(
            request, timeout=20, metadata=server.token.metadata
        )
        return answer


def connected(server: jg.ModelServer) -> socket.socket:
    """A connection on which nothing has been sent."""
    return socket.create_connection(("127.0.0.1", server.http_port), 20)


def heard(pipe: socket.socket) -> bytes:
    """What comes on a connection until its end."""
    pieces = []
    while piece := pipe.recv(4096):
        pieces.append(piece)
    return b"".join(pieces)


def queued(server: jg.ModelServer, rows: int) -> bool:
    """Whether so many rows wait, soon."""
    polling = Polling(every_s=0.01, timeout_s=20)
    while True:
        text = call(server, "GET", "/metrics")[1].decode()
        values = [
            float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line.startswith("jgraph_serve_queued_rows{")
        ]
        if sum(values) == rows:
            return True
        if not polling.wait():
            return False
