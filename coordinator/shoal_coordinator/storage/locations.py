"""Where a job's inputs and results are: the one place that knows how a URI becomes a folder."""

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass(frozen=True, slots=True, kw_only=True)
class LocationRefused(Exception):
    """A URI that this coordinator cannot read or write. `what` is `inputs` or `outputs`."""

    what: str
    uri: str
    reason: str

    def __str__(self) -> str:
        return f"{self.what} {self.uri!r}: {self.reason}"


def local_folder(uri: str, *, what: str) -> Path:
    """The folder that an absolute path or a `file://` URI names; `LocationRefused` for any
    other."""
    if "\0" in uri or len(uri) > 4096:
        raise LocationRefused(what=what, uri=uri[:64], reason="is no path")
    parts = urlsplit(uri)
    if parts.scheme == "file" and ("?" in uri or "#" in uri):  # what follows is no part of the path
        raise LocationRefused(what=what, uri=uri, reason="write %3F for ? and %23 for #")
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        path = Path(unquote(parts.path, errors="surrogateescape"))
    elif not parts.scheme:
        path = Path(uri)
    else:
        raise LocationRefused(
            what=what,
            uri=uri,
            reason="is not a local folder; give a path or file:///PATH that the coordinator sees",
        )
    if not path.is_absolute():
        raise LocationRefused(what=what, uri=uri, reason="is not absolute; give the whole path")
    return path
