"""Model: where an ONNX model comes from."""

from typing import Final

from shoal_api.fields import (
    COLUMNS,
    COUNT,
    TENSOR_NAME,
    Condition,
    Resource,
    SecretReference,
    Status,
    aspects,
    digest_of,
    optional,
    printed,
    records,
    secret,
    size,
    uri,
)
from shoal_api.rules import immutable
from shoal_api.schema import Object, member, record
from shoal_api.shapes import Items, Text, Whole

_AXES: Final = 16
_TENSORS: Final = 256


@record(immutable("digest"))
class Source:
    """An address, and what is to be found there."""

    uri: str = member(
        uri("pvc", "file", "https", "s3", "oci"),
        "Where the model is: a volume claim (pvc://CLAIM/PATH), a web server, an S3 bucket, an OCI "
        "registry, or, in local mode, a file. A relative path is relative to the manifest.",
        example="pvc://models/rec.onnx",
    )
    digest: str | None = digest_of(
        "What the file's content must be; of a model with external data, what `shoal inspect` "
        "prints, which is of both. Cannot be changed once it is set."
    )
    secret_ref: SecretReference | None = secret(
        "A Secret with what the store asks for.", "model-store"
    )


@record()
class InputShape:
    """The shape that one dynamic input is profiled and planned with."""

    input: str = member(TENSOR_NAME, "The model's input.", example="x")
    shape: tuple[int, ...] = member(
        Items(of=Whole(minimum=1, maximum=2**31 - 1), max_items=_AXES),
        "Its shape, every axis a number.",
        example=[1, 3, 48, 320],
    )


@record()
class ModelSpec:
    """What a user says of a model."""

    source: Source = member(Object(Source), "Where the model comes from.")
    shapes: tuple[InputShape, ...] = member(
        Items(of=Object(InputShape), max_items=64, key="input"),
        "Shapes to profile and plan with, for inputs with dynamic axes. Items of other shapes run "
        "too; what they take is not planned for, so larger ones may fail where memory is short.",
        default=[],
        example=[{"input": "x", "shape": [1, 3, 48, 320]}],
    )


@record()
class TensorStatus:
    """One of the model's inputs or outputs."""

    name: str = member(TENSOR_NAME, "The tensor's name.", example="x")
    dtype: str = member(Text(max_length=32), "ONNX's name of the type.", example="float")
    shape: tuple[str, ...] = member(
        Items(of=Text(max_length=64), max_items=_AXES),
        "Each axis: a number, a symbolic name, or ? where nobody knows.",
        example=["1", "3", "48", "width"],
    )


@record()
class ModelColumns:
    """A Model in one line."""

    size: str | None = printed("Its size.", "10.4 MiB")
    fragments: str | None = printed("How many fragments its Partitions have.", "3, 5")


@record(immutable("digest"))
class ModelStatus(Status):
    """What was found out about the model."""

    conditions: tuple[Condition, ...] = aspects("Fetched, Verified, Profiled, Ready.")
    digest: str | None = digest_of(
        "The digest of the file; with external data, of both. Cannot be changed once it is set: "
        "other content is another Model."
    )
    size_bytes: int | None = size("The size with external data.", 10905190)
    parameters: int | None = member(
        COUNT, "How many weights the model has.", default=None, example=2700000
    )
    opset: int | None = member(
        Whole(minimum=1, maximum=1000), "Opset of the default domain.", default=None, example=17
    )
    inputs: tuple[TensorStatus, ...] = records(TensorStatus, _TENSORS, "The model's inputs.")
    outputs: tuple[TensorStatus, ...] = records(TensorStatus, _TENSORS, "The model's outputs.")
    columns: ModelColumns | None = optional(ModelColumns, COLUMNS)


@record()
class Model(Resource):
    """An ONNX model: where it comes from, verified and profiled."""

    spec: ModelSpec = member(Object(ModelSpec), "What is wanted.")
    status: ModelStatus | None = optional(ModelStatus, "What is.")
