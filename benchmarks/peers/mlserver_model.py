"""The small model of the benchmark as mlserver serves it, by NumPy."""

from typing import Any

import numpy as np
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse

WIDTH = 16


class Mlp(MLModel):  # type: ignore[misc]  # it is not installed here
    """Two layers of 16."""

    async def load(self) -> bool:
        rng = np.random.default_rng(0)
        self._w = rng.standard_normal((2, WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        x: Any = NumpyCodec.decode_input(payload.inputs[0])
        for w in self._w:
            x = np.tanh(x @ w)
        y = NumpyCodec.encode_output("y", x)
        return InferenceResponse(model_name=self.name, outputs=[y])
