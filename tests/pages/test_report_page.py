"""The report in a real browser: nothing is fetched, everything can be reached and read, on a phone and in the dark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe

PHONE = {"width": 375, "height": 812}
DESK = {"width": 1280, "height": 900}
Look = Callable[..., Any]


@pytest.fixture
def look(chromium: Any, page_file: Path) -> Iterator[Look]:
    """Opens the page; what the console says and what is fetched is in `said` and `fetched` of the result."""
    contexts = []

    def opened(**options: Any) -> Any:
        context = chromium.new_context(**{"viewport": DESK, "color_scheme": "light", **options})
        contexts.append(context)
        page = context.new_page()
        page.fetched, page.said = [], []
        page.on("request", lambda request: page.fetched.append(request.url))
        page.on("console", lambda message: page.said.append(message.text))
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.goto(page_file.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()


def shown(page: Any) -> list[str]:
    """The checkpoints that the table shows, as they stand there."""
    return [one.inner_text() for one in page.locator("#checkpoints tbody tr:visible td:first-child").all()]


def test_nothing_is_fetched_and_nothing_goes_wrong(look: Look, page_file: Path) -> None:
    page = look()
    page.get_by_role("button", name="Theme").click()
    assert [url for url in page.fetched if not url.startswith("data:")] == [page_file.as_uri()]
    assert page.said == []


def test_what_needs_attention_stands_on_top(look: Look) -> None:
    page = look(viewport=PHONE)
    box = page.get_by_text("1 thing needs attention").bounding_box()
    assert box["y"] + box["height"] < PHONE["height"] / 2
    assert "step 5" in page.get_by_label("What needs attention").inner_text()


def test_an_old_page_says_so(look: Look) -> None:
    page = look()
    assert not page.get_by_text("make it again").is_visible()
    page.clock.set_fixed_time("2030-01-10T12:00:00Z")
    page.reload()
    assert "days old" in page.get_by_text("make it again").inner_text()


def test_the_theme_follows_the_system_until_it_is_chosen(look: Look) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    light, dark = look().evaluate(colour), look(color_scheme="dark").evaluate(colour)
    assert light != dark
    page = look()
    toggle = page.get_by_role("button", name="Theme")
    found = []
    for _ in range(3):
        toggle.click()
        found.append((toggle.inner_text(), page.evaluate(colour)))
    assert found == [("Theme: light", light), ("Theme: dark", dark), ("Theme: auto", light)]


def test_the_table_sorts_by_numbers(look: Look) -> None:
    page = look()
    head = page.locator("#checkpoints th").filter(has_text="val_loss")
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    column = head.evaluate("head => head.cellIndex")
    cells = (
        f"[...document.querySelectorAll('#checkpoints tbody tr')].map(row => Number(row.cells[{column}].textContent))"
    )
    values = page.evaluate(cells)
    assert values == sorted(values) and len(values) == 71
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    assert page.evaluate(cells) == values[::-1] or page.evaluate(cells)[0] == values[-1]


def test_the_table_is_searched_and_filtered(look: Look) -> None:
    page = look()
    assert len(shown(page)) == 71
    page.get_by_label("Search checkpoints").fill("best-yet")
    assert shown(page) == ["gpt/a0001/20"]
    page.get_by_label("Search checkpoints").fill("best val_loss gpt")
    assert shown(page) == ["gpt/a0003/60"]
    page.get_by_label("Search checkpoints").fill("")
    page.get_by_label("Run").select_option("small")
    assert len(shown(page)) == 5 and page.get_by_role("status").inner_text() == "5 of 71"
    page.get_by_label("Run").select_option("")
    page.get_by_role("checkbox", name="needs attention").check()
    assert shown(page) == ["gpt/a0001/5"]


def test_without_scripts_it_is_a_plain_page(look: Look) -> None:
    page = look(java_script_enabled=False)
    assert len(shown(page)) == 71
    assert not page.locator("#controls").is_visible() and not page.locator("#theme").is_visible()
    assert page.locator("figure svg").first.is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_nothing_is_wider_than_the_screen(look: Look, scheme: str) -> None:
    page = look(viewport=PHONE, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    heights = page.evaluate("[...document.querySelectorAll('svg text')].map(one => one.getBoundingClientRect().height)")
    assert len(heights) > 20 and min(height for height in heights if height) >= 10


@pytest.mark.parametrize(("scheme", "viewport"), [("light", DESK), ("dark", DESK), ("dark", PHONE)])
def test_everybody_can_read_it(look: Look, scheme: str, viewport: dict[str, int]) -> None:
    """The rules of axe: contrast, names of controls, structure of tables and headings."""
    page = look(color_scheme=scheme, viewport=viewport)
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


def test_texts_of_drawings_have_contrast(look: Look) -> None:
    """Which axe does not look at: 4.5 to 1, by the formula of WCAG 2."""
    for scheme in ("light", "dark"):
        ratios = look(color_scheme=scheme).evaluate(CONTRASTS)
        assert len(ratios) > 20 and min(ratios) >= 4.5


CONTRASTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const luminance = (colour) => {
    canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((part) => {
      const value = part / 255;
      return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  return [...document.querySelectorAll("figure text, .lineage text")].map((text) => {
    const back = luminance(getComputedStyle(text.closest("figure, .lineage")).backgroundColor);
    const fore = luminance(getComputedStyle(text).fill);
    return (Math.max(back, fore) + 0.05) / (Math.min(back, fore) + 0.05);
  });
}"""


def test_printed_it_is_light_and_whole(look: Look) -> None:
    page = look(color_scheme="dark")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator("#theme").is_visible()
