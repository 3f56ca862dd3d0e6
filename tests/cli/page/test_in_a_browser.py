"""The page in a real browser: it draws every chart, complains of nothing, and fits."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

import browser
from browser import Page
from cli.page.recorded import HOSTILE, NAMES, device, job, run, troubled
from cli.page.test_page import long_run
from shoal_cli.page.charts import charts
from shoal_cli.page.writing import write_page

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        shutil.which(browser.PROGRAM) is None, reason=f"{browser.PROGRAM} is not here"
    ),
]
MARKS = """Object.fromEntries([...document.querySelectorAll(".chart")].map(chart => [chart.id,
    [...chart.querySelectorAll(".role-mark path, .role-mark text, .role-mark line")]
        .filter(mark => { const box = mark.getBoundingClientRect();
                          return box.width + box.height > 0.01; }).length]))"""
WIDTHS = "[innerWidth, document.documentElement.scrollWidth]"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def page() -> AsyncIterator[Page]:
    async with browser.browsing() as opened:
        yield opened


@pytest.fixture(scope="module")
def troubled_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "page.html"
    write_page(troubled(), path)
    return path


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("dark", [False, True])
async def test_every_chart_has_data_and_nothing_complains(
    page: Page, troubled_page: Path, width: int, dark: bool
) -> None:
    await page.show(troubled_page, width=width, dark=dark)
    marks = await page.evaluate(MARKS)
    assert set(marks) == {chart.name for chart in charts(troubled())}
    assert all(count > 1 for count in marks.values()), marks
    assert not page.complaints
    shown, needed = await page.evaluate(WIDTHS)
    assert shown == width
    assert needed <= width, "it can be scrolled sideways"


@pytest.mark.asyncio(loop_scope="module")
async def test_headings_of_tables_take_one_line_on_a_phone(page: Page, troubled_page: Path) -> None:
    await page.show(troubled_page, width=360)
    heights, line = await page.evaluate("""[[...document.querySelectorAll("thead tr")].map(
        row => row.offsetHeight), parseFloat(getComputedStyle(document.body).lineHeight)]""")
    assert heights
    assert max(heights) < 2 * line


@pytest.mark.asyncio(loop_scope="module")
async def test_a_device_that_was_killed_is_seen(page: Page, troubled_page: Path) -> None:
    await page.show(troubled_page, width=1280)
    crosses = await page.evaluate(
        '[...document.querySelectorAll("#activity .role-mark text")].map(e => e.textContent)'
    )
    assert crosses == ["✕"]
    said = await page.evaluate('document.getElementById("troubles").innerText')
    assert "device pi-zero killed by SIGKILL" in said
    assert HOSTILE in await page.evaluate("document.title")


@pytest.mark.asyncio(loop_scope="module")
async def test_text_is_readable_on_light_and_on_dark_ground(
    page: Page, troubled_page: Path
) -> None:
    for dark, lightest in ((False, 100), (True, 200)):
        await page.show(troubled_page, width=1280, dark=dark)
        colours = await page.evaluate(
            '[...document.querySelectorAll(".role-axis-label text, .role-legend-label text")]'
            ".map(e => getComputedStyle(e).fill.match(/[0-9]+/g).map(Number))"
        )
        assert colours
        assert all((min(colour) >= lightest) == dark for colour in colours)


@pytest.mark.asyncio(loop_scope="module")
async def test_on_paper_charts_are_no_wider_than_it(page: Page, troubled_page: Path) -> None:
    await page.show(troubled_page, width=1280)
    assert (await page.printed()).startswith(b"%PDF")
    await page.call(
        "Emulation.setDeviceMetricsOverride",
        width=720, height=1000, deviceScaleFactor=1, mobile=False,
    )  # fmt: skip
    widest = await page.evaluate(
        'Math.max(...[...document.querySelectorAll("svg, .chart")]'
        ".map(e => e.getBoundingClientRect().right))"
    )
    assert widest <= 720


@pytest.mark.asyncio(loop_scope="module")
async def test_the_longest_run_and_one_without_a_timeline_are_drawn(
    page: Page, tmp_path: Path
) -> None:
    bare = run((job(3, NAMES),), tuple(map(device, NAMES)))
    for report in (long_run(), bare):
        path = tmp_path / "page.html"
        write_page(report, path)
        await page.show(path, width=1280)
        marks = await page.evaluate(MARKS)
        assert set(marks) == {chart.name for chart in charts(report)}
        assert all(count > 1 for count in marks.values()), marks
        assert not page.complaints
