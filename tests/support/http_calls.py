"""Plain HTTP calls of a model server."""

import http.client
import json
from typing import Any

import jgraph as jg


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
