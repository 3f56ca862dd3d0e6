"""The page as text: what it says, what it cannot be made to do, how large it gets."""

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import vl_convert
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.local.test_report import REPORT, VERIFICATION
from cli.page.recorded import (
    HOSTILE,
    MIB,
    NAMES,
    cut_of,
    device,
    job,
    long_timeline,
    run,
    timelines,
    troubled,
)
from fragment_pools import device as pool_device
from fragment_pools import partition, placed
from shoal_cli.local.report import FailedItem, ReportRefused, RunReport, read_report, write_report
from shoal_cli.local.run_record import Timeline
from shoal_cli.page.charts import charts
from shoal_cli.page.document import document
from shoal_cli.page.graph import MOST_NODES, layout
from shoal_cli.page.writing import library, write_page
from shoal_planner.figures import figures
from shoal_planner.placement import plan as plan_of
from shoal_protocol.choices import Objective

LIBRARY = "function vegaEmbed() {}"
MOST_BYTES = 2_000_000


class Elements(HTMLParser):
    """The tags of a page with their attributes, and its text outside of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.text = ""
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]
        self._inside = tag

    def handle_data(self, data: str) -> None:
        if self._inside not in {"script", "style"}:
            self.text += f"{data}\n"


def long_run() -> RunReport:
    """As large as any: every device has a full timeline, many items failed, the model is long."""
    devices = tuple(device(f"device-with-a-long-name-{number:03}") for number in range(100))
    failed = tuple(
        FailedItem(item=n, input=f"{n:07}.npz", reason="it does not fit " * 10) for n in range(1000)
    )
    names = tuple(each.name for each in devices)
    million = job(4096, names, items=1_000_000, succeeded=999_000, failed=1000, failures=failed)
    periods = tuple(long_timeline(devices=64) for _ in range(3))
    return run((million, million), devices, timelines=periods, seconds=1e5)


def test_nothing_is_fetched_and_no_name_becomes_markup() -> None:
    page = document(troubled(), LIBRARY)
    elements = Elements(page)
    assert elements.tags.count("script") == 3
    assert "b" not in elements.tags
    assert not {"src", "href", "onerror", "a"} & {*elements.attributes}
    assert HOSTILE in elements.text


def test_letters_keep_their_order_whatever_a_file_is_called() -> None:
    failed = FailedItem(item=0, input="\u202ezpn.gpj\x07", reason="\u2066wrong")
    turned = job(4, NAMES, state="Failed", failed=1, failures=(failed,), message="\u202eb")
    page = document(run((turned,), ()), LIBRARY)
    assert not {"\u202e", "\u2066", "\x07"} & {*page}
    assert r"\u202ezpn.gpj\x07" in Elements(page).text


def test_of_many_jobs_and_devices_the_head_says_how_many_there_are() -> None:
    jobs = tuple(job(4, NAMES, name=f"job-{number}") for number in range(20))
    few = document(run(jobs[:3], tuple(map(device, NAMES))), LIBRARY)
    assert "<title>Run of job-0, job-1, job-2</title>" in few
    assert "are in the report" not in few
    many = document(run(jobs, tuple(device(f"d{number}") for number in range(70))), LIBRARY)
    assert "<title>Run of job-0, job-1, job-2 and 17 other jobs</title>" in many
    assert "Charts and times are of 64 devices; 6 more are in the report." in many


def test_everything_that_went_wrong_is_said() -> None:
    said = Elements(document(troubled(), LIBRARY)).text
    for text in (
        "Failed",
        "3 of 24 items failed",
        "device pi-zero killed by SIGKILL, 9.0 s after the run began; it was started again",
        "device pi-4 used 25 MiB of its 24 MiB",
        "rec was cut finer: a fragment took more than planned",
        f"wrong {HOSTILE}",
    ):
        assert text in said
    drawn = {chart.name: chart for chart in charts(troubled())}
    assert "the device was lost" in drawn["activity"].text
    assert "killed; it did not return" in str(drawn["activity"].spec)
    assert "over budget" in str(drawn["memory"].spec)


def test_planned_memory_is_what_a_device_holds_at_once() -> None:
    """Of a stage whose fragments are loaded in turn that is one of them, though the cut lists all
    of them for the device."""
    document = partition([10**8] * 4, [10 * MIB] * 4)
    pool = [pool_device("pi-4", budget=12 * MIB)]
    plan = figures(placed(plan_of(document, pool, Objective.THROUGHPUT)))
    in_turn = replace(job(4, ("pi-4",)), plan=plan)
    (chart,) = [
        each for each in charts(run((in_turn,), (device("pi-4"),))) if each.name == "planned-memory"
    ]
    assert '"kind": "planned", "value": 10.0' in json.dumps(chart.spec)


def test_a_page_says_that_nothing_was_left_to_do_and_what_was_verified() -> None:
    done = job(4, NAMES, resumed=24, verification=VERIFICATION)
    text = Elements(document(run((done,), ()), LIBRARY)).text
    assert "Nothing was left to do" in text
    assert "8 of 24" in text
    assert "Nothing was left" not in document(run((job(4, NAMES),), ()), LIBRARY)


def test_a_run_that_was_interrupted_is_not_called_failed() -> None:
    page = document(replace(troubled(), interrupted=True), LIBRARY)
    assert '<span class="bad">Interrupted</span>' in page
    assert '<span class="bad">Failed</span>' in document(troubled(), LIBRARY)


def test_a_page_of_the_longest_run_is_small(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    assert write_page(long_run(), path) == path.stat().st_size <= MOST_BYTES


@settings(max_examples=30, deadline=None)
@given(found=timelines(), planned=st.booleans(), devices=st.integers(0, 3))
def test_whatever_was_recorded_there_is_a_page(
    found: tuple[Timeline, ...], planned: bool, devices: int
) -> None:
    whole = run(
        (job(4 if planned else 0, NAMES),),
        tuple(map(device, NAMES[:devices])),
        timelines=found,
    )
    names = [chart.name for chart in charts(whole)]
    assert len(names) == len(set(names))
    assert all(f'id="{name}"' in document(whole, LIBRARY) for name in names)


@given(fragments=st.integers(1, 400))
@settings(max_examples=30, deadline=None)
def test_a_cut_of_any_length_has_few_boxes_and_lines_that_go_forward(fragments: int) -> None:
    cut = cut_of(fragments, NAMES)
    nodes, lines = layout(cut)
    assert len(nodes) <= MOST_NODES + 2
    assert all(0 <= line.begin < line.end < len(nodes) for line in lines)
    if fragments <= MOST_NODES:
        assert sum(line.tensors for line in lines) == sum(edge.tensors for edge in cut.edges)


def test_a_report_that_is_read_again_is_the_same(tmp_path: Path) -> None:
    whole = replace(troubled(), timelines=(long_timeline(2),))
    path = tmp_path / "report.json"
    write_report(whole, path)
    assert read_report(path) == whole
    assert max(map(len, path.read_text().splitlines()[:-2])) < 200  # a person can read it


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "it is not JSON"),
        ("[]", "is no report of version 2"),
        ("[" * 200_000, "is nested too deeply"),
        ('{"version": 1}', "is no report of version 2"),
        ('{"version": 2, "seconds": "long"}', "is no report: "),
    ],
)
def test_a_file_that_is_no_report_is_refused_with_the_place(
    text: str, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(ReportRefused, match=why):
        read_report(path)


def test_a_report_from_before_differences_were_counted_is_read(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_report(REPORT, path)
    written = json.loads(path.read_text())
    for field in ("different_items", "matched_items"):
        del written["jobs"][0]["verification"][field]
    path.write_text(json.dumps(written))
    assert read_report(path) == REPORT


def test_a_report_from_before_timelines_has_a_page(tmp_path: Path) -> None:
    whole = run((job(0, NAMES),), (device("pi-4", peak_bytes_above_floor=MIB),))
    path = tmp_path / "report.json"
    write_report(whole, path)
    text = path.read_text().replace('"timelines": []', '"later": 1').replace('"deaths": [],', "")
    path.write_text(text)
    assert read_report(path) == whole
    assert "1 MiB" in document(read_report(path), LIBRARY)


def test_what_draws_is_bundled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundled: list[str] = []

    def bundle(offered: str) -> str:
        bundled.append(offered)
        return LIBRARY

    monkeypatch.setattr(vl_convert, "javascript_bundle", bundle)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):  # as two processes would
        assert library.__wrapped__() == LIBRARY
    assert len(bundled) == 1
    (tmp_path / "shoal").rename(tmp_path / "gone")
    (tmp_path / "shoal").write_text("no folder")
    assert library.__wrapped__() == LIBRARY, "where nothing can be kept it draws all the same"
