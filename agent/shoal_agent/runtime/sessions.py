"""Sessions of ONNX Runtime as the agent opens them: one arena, no spinning, no memory patterns."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import onnxruntime

from shoal_agent.runtime.failures import failure_of
from shoal_agent.runtime.mapped_weights import Weights
from shoal_agent.runtime.recipes import AS_IT_IS, UNPREPARED, Recipe

_EXTERNAL_DATA: Final = "session.model_external_initializers_file_folder_path"
_FUSED_LATE: Final = "ConvActivationFusion"
"""What is fused is a new node, which comes behind all others in the order of the file, and other
branches are run meanwhile: text detection took 55 MiB in place of 45. Without, convolutional models
take up to 2 % longer, measured."""
_NONE_MAPPED: Final[Weights] = {}

OpenSession = Callable[[bytes | str, Path | None, Recipe, Weights], onnxruntime.InferenceSession]
"""Opens a model, whose weights are in files of a folder, beside it where that is None, but for
those that are mapped already; raises `RuntimeFailed`."""


def options_of(
    recipe: Recipe, threads: int, *, in_order: bool = False
) -> onnxruntime.SessionOptions:
    """`in_order`: run the nodes in the order of the file, where nobody has ordered them anew to
    prepare it."""
    options = recipe.options(threads)
    # A plan for all activations at once would be allocated beside what the first run left.
    options.enable_mem_pattern = False
    # A tensor in the place of an earlier one of its size holds that place from the first to the
    # last of them: with several sizes, all of these are there at once.
    options.enable_mem_reuse = False
    if in_order and recipe in UNPREPARED:
        options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    options.add_session_config_entry("session.use_env_allocators", "1")
    # Spinning burns processor time that the other agents of a machine need.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def open_session(
    model: str | bytes,
    options: onnxruntime.SessionOptions,
    recipe: Recipe = AS_IT_IS,
    weights: Path | None = None,
    mapped: Weights = _NONE_MAPPED,
) -> onnxruntime.InferenceSession:
    """`weights` is the folder of its external data, which a path has beside it; those that are
    `mapped` are used from there, and the caller keeps them. Raises `RuntimeFailed`."""
    if weights is not None:
        options.add_session_config_entry(_EXTERNAL_DATA, str(weights))
    for name, value in mapped.items():
        options.add_initializer(name, value)
    disabled = list(recipe.disabled)
    if options.execution_order == onnxruntime.ExecutionOrder.PRIORITY_BASED:
        disabled.append(_FUSED_LATE)
    try:
        session = onnxruntime.InferenceSession(
            model,
            options,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=disabled,
        )
    except Exception as error:  # the runtime's exceptions have no common base but this
        raise failure_of(error) from error
    session._model_bytes = None  # it would hold on to the model that it has read
    return session


def opens(threads: int, *, in_order: bool = False) -> OpenSession:
    """What opens sessions of so many threads."""

    def open_one(
        model: bytes | str, weights: Path | None, recipe: Recipe, mapped: Weights
    ) -> onnxruntime.InferenceSession:
        options = options_of(recipe, threads, in_order=in_order)
        return open_session(model, options, recipe, weights, mapped)

    return open_one
