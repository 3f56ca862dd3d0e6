"""`shoal inspect`."""

import json
from dataclasses import asdict
from typing import Annotated, Final

import typer

from shoal_cli.commands import options

EPILOG: Final = (
    "[bold]Examples[/bold]\n\n"
    "What a model is and takes:  shoal inspect s3://models/rec.onnx\n\n"
    "With a size for its dynamic axes:  shoal inspect model.onnx --shape x=1,3,48,320\n\n"
    "[bold]Exit status[/bold]\n\n"
    "0: it is sound. 1: it could not be fetched; try again. 2: it is refused, or not there."
)


Table = Annotated[
    bool,
    typer.Option(
        "--table",
        help="Print what each fragment that could be cut would need, as one line of JSON.",
    ),
]


def inspect(
    model: options.ModelAddress,
    digest: options.Digest = None,
    shape: options.Shapes = None,
    volume: options.Volumes = None,
    cache: options.ModelCache = None,
    max_download: options.MaxDownload = "64Gi",
    as_json: options.AsJson = False,
    table: Table = False,
) -> None:
    """Fetch a model, check that it is sound, and print what it is: inputs, outputs, size, cost.

    `s3://` is opened with AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and
    AWS_ENDPOINT_URL; `https://` with HTTP_BEARER_TOKEN, or HTTP_USERNAME and HTTP_PASSWORD;
    `oci://` with OCI_USERNAME and OCI_PASSWORD, or DOCKER_CONFIG.
    """
    from shoal_cli.commands.model_tables import inspection_table
    from shoal_cli.commands.tables import output, working
    from shoal_cli.commands.transfers import fetch_model
    from shoal_compiler.errors import ModelRefused
    from shoal_compiler.profile import profile_model

    wanted = options.parse_digest(digest)
    shapes = options.parse_shapes(shape)
    limit = options.parse_size(max_download, "--max-download")
    path = fetch_model(model, options.Security().access(volume), wanted, cache, limit)
    with working(f"reading {path.name}"):
        profile = profile_model(path, shapes or None)
    if wanted is not None and profile.digest != wanted:
        raise ModelRefused(f"is {profile.digest}, not {wanted} as it should be", path=path)
    if table:
        from shoal_planner.cut_tables import table_of
        from shoal_protocol.cut_table import table_to_json

        typer.echo(table_to_json(table_of(profile)))
        return
    if not as_json:
        output().print(inspection_table(path.name, profile))
        return
    names = ("digest", "size_bytes", "opset", "parameters")
    found: dict[str, object] = {name: getattr(profile, name) for name in names}
    for name, specs in (("inputs", profile.inputs), ("outputs", profile.outputs)):
        found[name] = [asdict(each) for each in specs]  # as in `partition.json`
    typer.echo(json.dumps(found))
