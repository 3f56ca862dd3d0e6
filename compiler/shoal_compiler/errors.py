"""The one error of this folder: a model, or a way to cut it, that is refused, and why."""

from pathlib import Path


class ModelRefused(Exception):
    """A model cannot be taken as it is.

    `reason` says what is wrong; `node`, `tensor` and `path` name the place if there is one.
    """

    def __init__(
        self,
        reason: str,
        *,
        node: str | None = None,
        tensor: str | None = None,
        path: Path | None = None,
    ) -> None:
        places = [
            f"{kind} {name}"
            for kind, name in (("node", node), ("tensor", tensor), ("file", path))
            if name is not None
        ]
        super().__init__(f"{', '.join(places)}: {reason}" if places else reason)
        self.reason = reason
        self.node = node
        self.tensor = tensor
        self.path = path
