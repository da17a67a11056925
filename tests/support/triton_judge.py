"""Asks a model server by ``tritonclient``, in a process of its own; asserts answers.

``python triton_judge.py HTTP GRPC TOKEN_FILE``. Imports nothing of jgraph.
"""

import asyncio
import queue
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.grpc.aio as over_grpc_aio
import tritonclient.http as over_http
import tritonclient.http.aio as over_http_aio
from tritonclient.utils import InferenceServerException

X = np.array([1, 2, 5], np.float32)
WANTED = [3.5, 4.0, 5.5]
MODEL = "half_plus_three"


def asked(module: Any, *, as_json: bool = False) -> Any:
    one = module.InferInput("x", [3], "FP32")
    if as_json:
        one.set_data_from_numpy(X, binary_data=False)
    else:
        one.set_data_from_numpy(X)
    return [one]


def control(client: Any, headers: dict[str, str]) -> None:
    assert client.is_server_live(headers=dict(headers))
    assert client.is_server_ready(headers=dict(headers))
    assert client.is_model_ready(MODEL, headers=dict(headers))
    client.unload_model("mean", headers=dict(headers))
    assert not client.is_model_ready("mean", headers=dict(headers))
    client.load_model("mean", headers=dict(headers))
    assert client.is_model_ready("mean", headers=dict(headers))


def by_http(url: str, headers: dict[str, str]) -> None:
    with over_http.InferenceServerClient(url) as client:
        control(client, headers)
        for as_json in (False, True):
            found = client.infer(
                MODEL,
                asked(over_http, as_json=as_json),
                headers=dict(headers),
                request_id="7",
            )
            assert found.as_numpy("y").tolist() == WANTED
            assert found.get_response()["id"] == "7"
        outputs = [over_http.InferRequestedOutput("y", binary_data=False)]
        found = client.infer(
            MODEL, asked(over_http), outputs=outputs, headers=dict(headers)
        )
        assert found.as_numpy("y").tolist() == WANTED
        told = client.get_model_metadata(MODEL, headers=dict(headers))
        assert told["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1]}]
        index = client.get_model_repository_index(headers=dict(headers))
        assert {row["name"] for row in index} >= {MODEL, "mean"}
        stats = client.get_inference_statistics(MODEL, headers=dict(headers))
        assert stats["model_stats"][0]["inference_count"] >= 9
        with pytest.raises(InferenceServerException, match="JG-601"):
            client.infer("nobody", asked(over_http), headers=dict(headers))


def by_grpc(target: str, headers: dict[str, str]) -> None:
    with over_grpc.InferenceServerClient(target) as client:
        control(client, headers)
        found = client.infer(
            MODEL,
            asked(over_grpc),
            headers=dict(headers),
            request_id="7",
            client_timeout=20,
        )
        assert found.as_numpy("y").tolist() == WANTED
        assert found.get_response().id == "7"
        told = client.get_model_metadata(MODEL, headers=dict(headers))
        assert list(told.inputs[0].shape) == [-1]
        assert told.versions == ["1"]
        index = client.get_model_repository_index(headers=dict(headers))
        assert {row.name for row in index.models} >= {MODEL, "mean"}
        stats = client.get_inference_statistics(MODEL, headers=dict(headers))
        assert stats.model_stats[0].inference_stats.success.count >= 1
        answers: queue.Queue[Any] = queue.Queue()
        client.start_stream(
            lambda result, error: answers.put((result, error)), headers=dict(headers)
        )
        for number in range(20):
            client.async_stream_infer(MODEL, asked(over_grpc), request_id=str(number))
        got = [answers.get(timeout=20) for _ in range(20)]
        assert all(error is None for _, error in got), got
        assert {r.get_response().id for r, _ in got} == {str(n) for n in range(20)}
        client.async_stream_infer("nobody", asked(over_grpc))
        assert "JG-601" in str(answers.get(timeout=20)[1])
        client.stop_stream()
        with pytest.raises(InferenceServerException, match="UNAUTHENTICATED"):
            client.infer(MODEL, asked(over_grpc))


async def by_aio(url: str, target: str, headers: dict[str, str]) -> None:
    async with over_http_aio.InferenceServerClient(url) as client:
        found = await client.infer(MODEL, asked(over_http), headers=dict(headers))
        assert found.as_numpy("y").tolist() == WANTED
    async with over_grpc_aio.InferenceServerClient(target) as client:
        many = [
            client.infer(MODEL, asked(over_grpc), headers=dict(headers))
            for _ in range(50)
        ]
        for found in await asyncio.gather(*many):
            assert found.as_numpy("y").tolist() == WANTED


def main() -> None:
    url, target, token = sys.argv[1:]
    headers = {"authorization": f"Bearer {Path(token).read_text().strip()}"}
    by_http(url.removeprefix("http://"), headers)
    by_grpc(target, headers)
    asyncio.run(by_aio(url.removeprefix("http://"), target, headers))
    print("as asked")  # noqa: T201


if __name__ == "__main__":
    main()
