"""ONNX file -> `api.profile.Profile`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from shoal_operator.api.profile import Profile


def profile_model(path: Path, shapes: Mapping[str, Sequence[int]] | None = None) -> Profile:
    """Profile a model; `shapes` gives inputs with dynamic axes the sizes to reckon with."""
    raise NotImplementedError
