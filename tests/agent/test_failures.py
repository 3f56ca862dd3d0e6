"""What is said of a failure of ONNX Runtime."""

import numpy as np
import onnx.parser
import onnxruntime
import pytest

from shoal_agent.runtime.failures import failure_of


def test_a_failure_that_takes_many_words_says_what_failed_and_why() -> None:
    text = "agraph (float[1, 8] x, int64[1] s) => (float[N] y) { y = Reshape (x, s) }"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]>\n{text}')
    model.graph.node[0].name = "/model/layers.0/self_attn/" * 20
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    with pytest.raises(Exception, match="cannot be reshaped") as raised:
        session.run(None, {"x": np.ones((1, 8), np.float32), "s": np.array([7])})
    said = str(failure_of(raised.value))
    assert len(str(raised.value)) > 600
    assert len(said) < 510
    assert "while running Reshape node. Name:'/model/layers.0" in said
    assert said.endswith("Input shape:{1,8}, requested shape:{7}")
