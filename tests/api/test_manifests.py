"""Manifests from files: objects, or every error with its file and line."""

import contextlib
import io
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_cli.local.manifests import STDIN, ManifestErrors, Manifests, load_manifests
from shoal_cli.local.yaml_documents import MAX_BYTES, YamlRefused, read_documents

EXAMPLES = Path(__file__).parents[2] / "examples"

MODEL = """\
apiVersion: shoal.dev/v1alpha1
kind: Model
metadata: {name: m}
spec:
  source: {uri: pvc://models/m.onnx}
"""
POOL = """\
apiVersion: shoal.dev/v1alpha1
kind: DevicePool
metadata: {name: shelf}
spec:
  budget: {memory: 64Mi}
  local:
    devices:
    - {name: pi, memory: 24Mi}
"""
JOB = """\
apiVersion: shoal.dev/v1alpha1
kind: InferenceJob
metadata: {name: ocr}
spec:
  modelRef: {name: m}
  poolRef: {name: shelf}
  inputs: {uri: in}
  outputs: {uri: out}
"""


def load(tmp_path: Path, *texts: str) -> Manifests:
    file = tmp_path / "all.yaml"
    file.write_text("---\n".join(texts))
    return load_manifests([file])


def errors(tmp_path: Path, *texts: str) -> list[str]:
    with pytest.raises(ManifestErrors) as caught:
        load(tmp_path, *texts)
    return str(caught.value).replace(f"{tmp_path}/", "").splitlines()


def test_several_documents_in_one_file_are_objects_by_name(tmp_path: Path) -> None:
    manifests = load(tmp_path, MODEL, POOL, JOB, "# nothing\n")
    assert (*manifests.models, *manifests.pools, *manifests.jobs) == ("m", "shelf", "ocr")
    assert manifests.folder_of(manifests.jobs["ocr"]) == tmp_path
    assert manifests.notes == ()


def test_a_folder_is_read_in_the_order_of_names_and_each_file_once(tmp_path: Path) -> None:
    for name, text in {"b.yml": MODEL, "a.yaml": POOL, "c.json": "", "notes.txt": "x: ["}.items():
        (tmp_path / name).write_text(text)
    manifests = load_manifests([tmp_path, tmp_path / "b.yml"])
    assert list(manifests.models) == ["m"]


def test_standard_input_is_read_for_a_dash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO((MODEL + "  x: 1\n").encode())))
    with pytest.raises(
        ManifestErrors, match=r"standard input:6: Model m: spec\.x: there is no such field"
    ):
        load_manifests([STDIN])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(MODEL.encode())))
    manifests = load_manifests([STDIN])
    assert manifests.folder_of(manifests.models["m"]) == tmp_path


def test_json_is_a_manifest_as_well(tmp_path: Path) -> None:
    file = tmp_path / "m.json"
    file.write_text(
        '{"apiVersion": "shoal.dev/v1alpha1", "kind": "Model",\n "metadata": {"name": "m"},'
        ' "spec": {"source": {"uri": "m.onnx"}}}'
    )
    assert list(load_manifests([file]).models) == ["m"]


@pytest.mark.parametrize("folder", [each.name for each in EXAMPLES.iterdir() if each.is_dir()])
def test_the_examples_are_valid(folder: str) -> None:
    if any((EXAMPLES / folder).glob("*.yaml")):
        assert load_manifests([EXAMPLES / folder]).jobs


def test_all_errors_of_all_files_come_sorted_with_file_line_and_field(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_text(POOL.replace("64Mi", "64Mb").replace("24Mi", "24"))
    (tmp_path / "a.yaml").write_text(JOB.replace("spec:", "spec:\n  mode: Streeming"))
    with pytest.raises(ManifestErrors) as caught:
        load_manifests([tmp_path / "b.yaml", tmp_path / "a.yaml"])
    assert str(caught.value).replace(f"{tmp_path}/", "").splitlines() == [
        'a.yaml:5: InferenceJob ocr: spec.mode: "Streeming" is not one of Streaming, Barrier '
        "(did you mean Streaming?)",
        "a.yaml:6: InferenceJob ocr: spec.modelRef.name: there is no Model m; there is none at all",
        'b.yaml:5: DevicePool shelf: spec.budget.memory: "64Mb" is not a quantity such as 64Mi '
        "(did you mean 64Mi?)",
        "b.yaml:8: DevicePool shelf: spec.local.devices[0].memory: 24 is less than 1Mi",
    ]


def test_a_missing_field_is_told_at_the_line_of_what_should_have_it(tmp_path: Path) -> None:
    assert errors(tmp_path, MODEL.replace("{uri: pvc://models/m.onnx}", "{}")) == [
        'all.yaml:5: Model m: spec.source.uri: is missing; for example "pvc://models/rec.onnx"'
    ]


def test_a_reference_to_nothing_lists_what_is_there(tmp_path: Path) -> None:
    job = JOB.replace("name: shelf", "name: shelv")
    assert errors(tmp_path, MODEL, POOL, POOL.replace("shelf", "attic"), job) == [
        "all.yaml:30: InferenceJob ocr: spec.poolRef.name: there is no DevicePool shelv; "
        "known are attic, shelf (did you mean shelf?)"
    ]


def test_a_reference_to_a_broken_object_is_no_second_error(tmp_path: Path) -> None:
    assert len(errors(tmp_path, MODEL.replace("uri:", "url:"), POOL, JOB)) == 2


def test_two_objects_of_one_name_are_refused(tmp_path: Path) -> None:
    assert errors(tmp_path, MODEL, MODEL) == [
        "all.yaml:9: Model m: metadata.name: Model m is there already, at all.yaml:3"
    ]


def test_ordinary_kubernetes_is_skipped_with_a_note(tmp_path: Path) -> None:
    namespace = "apiVersion: v1\nkind: Namespace\nmetadata: {name: n}\n"
    deployment = "apiVersion: apps/v1\nkind: Deployment\n"
    manifests = load(tmp_path, namespace, MODEL, deployment)
    assert [note.partition(": ")[2] for note in manifests.notes] == [
        "Namespace (v1) is for a cluster; ignored here",
        "Deployment (apps/v1) is for a cluster; ignored here",
    ]


def test_the_items_of_a_list_are_manifests_with_their_own_lines(tmp_path: Path) -> None:
    listed = "apiVersion: v1\nkind: List\nmetadata: {resourceVersion: ''}\nitems:\n"
    each = [
        "".join(("- " if not number else "  ") + line for number, line in enumerate(lines))
        for lines in (text.splitlines(keepends=True) for text in (MODEL, POOL, JOB))
    ]
    manifests = load(tmp_path, listed + "".join(each))
    assert (*manifests.models, *manifests.pools, *manifests.jobs) == ("m", "shelf", "ocr")
    wrong = listed + "".join(each).replace("24Mi", "24Mb").replace("name: m}", "name: n}", 1)
    assert [line.partition(": ")[0] for line in errors(tmp_path, wrong)] == [
        "all.yaml:17",
        "all.yaml:22",
    ]


def test_fields_for_a_cluster_are_noted_once(tmp_path: Path) -> None:
    storage = "  cache: {storageClassName: fast}\n  coordinator: {storage: {size: 1Gi}}\n"
    (note,) = load(tmp_path, POOL + "  nodeSelector: {a: b}\n" + storage).notes
    fields = "spec.cache.storageClassName, spec.coordinator.storage"
    assert note == f"DevicePool shelf: {fields}: for a cluster; ignored here"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("apiVersion: shoal.dev/v1\nkind: Model\n", "1: apiVersion: shoal.dev/v1 is not known"),
        (
            "apiVersion: shoal.dev/v1alpha1\nkind: Modle\n",
            "2: kind: Modle is no kind of Shoal (did you mean Model?)",
        ),
        (
            "apiVersion: shoal.dev/v1alpha1\nkind: Device\n",
            "2: kind: Device is written by the operator only",
        ),
        ("apiVersion: shaol.dev/v1alpha1\nkind: Model\n", "1: apiVersion: shaol.dev/v1alpha1 is"),
        ("apiVersion: v1\nkind: List\nitems: {}\n", "3: items: must be a list of manifests"),
        ("apiVersion: v1\nkind: List\nitems:\n- 7\n", "4: a manifest is a mapping"),
        ("kind: Model\n", "1: apiVersion: must be given as text"),
        ("apiVersion: v1\nkind: 7\n", "2: kind: must be given as text"),
        ("- a\n", "1: a manifest is a mapping"),
        ("hello\n", "1: a manifest is a mapping"),
    ],
)
def test_what_is_no_known_kind_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (error,) = errors(tmp_path, text)
    assert error.startswith(f"all.yaml:{message}")


def test_files_without_a_manifest_are_refused(tmp_path: Path) -> None:
    (line,) = errors(tmp_path, "# nothing\n")
    assert line.startswith("all.yaml: has no object of shoal.dev")
    with pytest.raises(ManifestErrors, match=r"has no \.yaml, \.yml, \.json file"):
        load_manifests([_folder(tmp_path / "empty")])
    with pytest.raises(ManifestErrors, match="cannot be read: No such file or directory"):
        load_manifests([tmp_path / "absent.yaml"])


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


# ---- YAML from strangers -------------------------------------------------------------------------

LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "\n".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 10)}]" for i in range(8)
)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a: 1\nb: [\n", 3, "is not YAML"),
        ("a: 1\nb: 2\na: 3\n", 3, '"a" is given twice here; first on line 1'),
        ("a:\n  b: 1\n  'b': 2\n", 3, '"b" is given twice here; first on line 2'),
        ("a: !!python/object/apply:os.system [ls]\n", 1, "is not allowed"),
        ("a: !!binary aGk=\n", 1, "is not allowed"),
        ("a: !mine x\n", 1, "is not allowed"),
        ("a: &x {b: 1}\nc:\n  <<: *x\n", 3, "merge keys"),
        ("a: 1\n? [1, 2]\n: x\n", 2, "must be text"),
        ("a: &x [*x]\n", 1, "nested more than 64 deep"),
        ("a: " + "[" * 80 + "]" * 80, 1, "nested more than 64 deep"),
        ("[" * 5000, 1, ""),
        (LAUGHS, 1, "more than 50000 values"),
        ("a: &a [x,x]\nb: [*a,*a]\n---\n" * 990 + "a: [" + "x," * 40_000 + "]", 2971, "values"),
        ("- x\n" * 200_000, 100_000, "more than 50000 values in one file"),
        ("[" * 500_000, 1, "nested more than 64 deep"),
        ("a: " + "9" * 5000, 1, "too many digits"),
        ("a: \x00", 1, "is not YAML: control characters are not allowed"),
        ("a: b\nc: d\nä: \x1b", 3, "is not YAML: control characters are not allowed"),
        ("---\n---\n".join(f"a: {i}\n" for i in range(1100)), 3000, "more than 1000 documents"),
    ],
)
def test_yaml_that_is_more_than_json_is_refused_with_its_line(
    text: str, line: int, message: str
) -> None:
    with pytest.raises(YamlRefused) as caught:
        read_documents(text.encode())
    assert message in caught.value.message
    assert caught.value.line == line


def test_a_file_that_is_too_large_is_not_parsed() -> None:
    with pytest.raises(YamlRefused, match=f"at most {MAX_BYTES} are read"):
        read_documents(b"#" * (MAX_BYTES + 1))


def test_damaged_yaml_is_read_or_refused_and_nothing_else() -> None:
    chance = random.Random(3)  # noqa: S311 - a seeded test
    sound = (MODEL + '---\na: &b {c: "d", e: [1, 2.5, ~, true]}\nf: *b\n').encode()
    refused = 0
    for _ in range(1000):
        content = bytearray(sound)
        for _ in range(chance.randint(1, 4)):
            content[chance.randrange(len(content))] = chance.choice([chance.randrange(256), 9, 64])
        try:
            read_documents(bytes(content))
        except YamlRefused as error:
            refused += bool(error.message)
    assert refused > 500


def test_an_alias_is_written_out() -> None:
    (document,) = read_documents(b"a: &x {b: 1}\nc: *x\n")
    assert document.value == {"a": {"b": 1}, "c": {"b": 1}}
    assert document.line_of(("c",)) == 2


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("64Mi", "64Mi"),
        ('"0.5"', "0.5"),
        ("0.5", 0.5),
        ("1e3", "1e3"),
        ("17", 17),
        ("-1_000", -1000),
        ("0x1f", 31),
        ("0o17", "0o17"),
        ("017", 15),
        ("12:30", "12:30"),
        ("2026-01-31", "2026-01-31"),
        ("yes", True),
        ("Off", False),
        ("~", None),
        ("", None),
        ("no thing", "no thing"),
    ],
)
def test_scalars_are_read_as_kubernetes_reads_them(text: str, value: object) -> None:
    (document,) = read_documents(f"a: {text}\n".encode())
    assert document.value == {"a": value}


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200) | st.text(alphabet="a:-[]{}&*!|>'\"\n #?,01.<%", max_size=80))
def test_no_input_does_anything_but_be_read_or_refused(content: bytes | str) -> None:
    raw = content if isinstance(content, bytes) else content.encode()
    with contextlib.suppress(YamlRefused):
        for document in read_documents(raw):
            assert document.line_of(("x", 0, "y")) >= 1
