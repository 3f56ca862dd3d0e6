"""Writes from the kinds crds/, the chart's CRD templates and the kinds' reference in docs/; with
--check, says what is stale.

.venv/bin/python hack/kinds/write_kinds.py [--check]
"""

import sys
from pathlib import Path

import yaml

from kind_definitions import definition
from kind_reference import pages
from shoal_api.kinds import KINDS, KindNames
from shoal_api.schema import GROUP

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = "helm/shoal/templates/crds"
NOTE = "Written by `make generate` from api/shoal_api/kinds; do not edit by hand."


class _Plain(yaml.SafeDumper):
    """Writes what appears twice twice."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def main() -> None:
    wanted = files()
    standing = {str(path.relative_to(ROOT)) for path in _standing()}
    if "--check" not in sys.argv[1:]:
        for name in standing - wanted.keys():
            (ROOT / name).unlink()
        for name, text in wanted.items():
            (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / name).write_text(text)
        return
    stale = [name for name in sorted(standing | wanted.keys()) if not _is_current(name, wanted)]
    if stale:
        raise SystemExit(f"not current: {', '.join(stale)}; run `make generate`")


def files() -> dict[str, str]:
    """What the repository is to have, by path."""
    found = {f"docs/{name}": text for name, text in pages().items()}
    for names in KINDS.values():
        found[f"crds/{GROUP}_{names.plural}.yaml"] = f"# {NOTE}\n{as_yaml(names)}"
        found[f"{TEMPLATES}/{names.plural}.yaml"] = as_template(names)
    return found


def as_yaml(names: KindNames) -> str:
    """A kind's definition for `kubectl apply`."""
    text: str = yaml.dump(
        definition(names), Dumper=_Plain, sort_keys=False, width=100, allow_unicode=True
    )
    assert "{{" not in text, "Helm would take it for a template"
    return text


def as_template(names: KindNames) -> str:
    """The same for Helm: behind `crds.install`, and kept when the release goes with `crds.keep`."""
    labels, rest = as_yaml(names).split("  labels:\n    app.kubernetes.io/name: shoal\n")
    return f"""\
{{{{- /* {NOTE} */ -}}}}
{{{{- if .Values.crds.install }}}}
{labels}  labels:
    {{{{- include "shoal.labels" . | nindent 4 }}}}
  {{{{- if .Values.crds.keep }}}}
  annotations:
    helm.sh/resource-policy: keep
  {{{{- end }}}}
{rest}{{{{- end }}}}
"""


def _standing() -> list[Path]:
    folders = (("crds", "*.yaml"), (TEMPLATES, "*.yaml"), ("docs/kinds", "*.md"))
    return [path for folder, names in folders for path in (ROOT / folder).glob(names)]


def _is_current(name: str, wanted: dict[str, str]) -> bool:
    path = ROOT / name
    return path.is_file() and path.read_text() == wanted.get(name)


if __name__ == "__main__":
    main()
