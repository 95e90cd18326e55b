"""Pages and pictures in headless Chromium, at a README's width and at a narrow one.

Nothing is fetched, nothing fails, charts are drawn, no text meets another, and all can be read in
the dark and reached by keys.
"""

import json
import shutil
import tempfile
from pathlib import Path

import pytest
from optuna.distributions import CategoricalDistribution
from optuna.trial import create_trial

pytest.importorskip("selenium", reason="needs selenium, which drives a browser")
pytest.importorskip("plotly", reason="pages are drawn by plotly")

from selenium.webdriver import ActionChains, Chrome
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

import jetfire
from jetfire.cli import execute
from jetfire.core import files
from jetfire.gpt2.training import curves, log
from jetfire.report import plot, tuned, tuning
from jetfire.tests import (
    test_history,
    test_report,
    test_training_report,
    test_tuned_report,
    test_tuner_report,
)
from jetfire.tuner.saved_study import SavedStudy

ROOT = Path(jetfire.__file__).parent
LIBRARY = (Path(__file__).parent / "data" / "browser.js").read_text()
WIDTHS = (830, 500)
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync
    --disable-background-networking --disable-component-update --disable-dev-shm-usage"""
# Names of runs: no rule of matplotlib's, TeX's or HTML's is for them.
NAMES = ("_first", r"$\second$ <b>" + " with a long name" * 6)


class Browser(Chrome):
    """Chromium, with what the tests do in it."""

    def open(self, file, width=830):
        self.requests()
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.get(file.as_uri())

    def ask(self, expression):
        """Return the value of an expression of JavaScript, in which browser.js is known."""
        return self.execute_script(f"{LIBRARY}\nreturn {expression};")

    def wait(self, expression):
        WebDriverWait(self, 120, 0.05).until(lambda _: self.ask(expression))

    def scheme(self, name):
        feature = {"name": "prefers-color-scheme", "value": name}
        self.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def faults(self):
        """Return what cannot be read, by what is wrong with it."""
        names = ("overlaps", "cut", "small", "faint", "empty")
        found = {name: self.ask(f"{name}()") for name in names}
        return {name: texts for name, texts in found.items() if texts}

    def requests(self):
        """Return the addresses asked for since the last call that are not in the page."""
        messages = [json.loads(one["message"])["message"] for one in self.get_log("performance")]
        sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        urls = [one["request"]["url"] for one in sent]
        return [url for url in urls if not url.startswith(("file:", "data:", "blob:"))]

    def press(self, key):
        ActionChains(self, duration=0).send_keys(key).perform()

    def tab_to(self, name):
        """Press Tab until what begins with a name has the focus, which shows at each stop."""
        for _ in range(60):
            self.press(Keys.TAB)
            found, seen = self.ask("focus()")
            assert seen, f"{found}: its focus does not show"
            if found.startswith(name):
                return
        raise AssertionError(f"{name}: no key reaches it")


@pytest.fixture(scope="module")
def browser():
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("needs chromium and chromedriver")
    options = Options()
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for flag in [*FLAGS.split(), f"--user-data-dir={folder}"]:
            options.add_argument(flag)
        with Browser(options=options, service=Service(driver)) as made:
            yield made


@pytest.fixture(scope="module")
def place(browser, tmp_path_factory):
    """A folder with a page of each kind, and with pictures that the committed ones do not show."""
    folder = tmp_path_factory.mktemp("pages")
    search, both = searches()
    write(folder / "one.html", search)
    write(folder / "several.html", search, both, wide(), test_tuner_report.study_of([]))
    (folder / "history").mkdir()
    for i, ms in enumerate((1.0, 1.01, 1.0, 0.99, 1.3, 1.31, 1.29, 1.3)):
        rows = [test_history.row(ms), test_history.row(1.0, "other")]
        file = folder / "history" / f"a-rather-long-name-of-a-file-{i}.json"
        test_history.save(file, rows, time=f"2026-01-0{i + 1}T00:00:00+00:00")
    words = [str(folder / "history"), "--report", str(folder / "history.html")]
    assert execute("history", words) == 0
    runs = [watched(folder, name, i) for i, name in enumerate(NAMES)]
    curves.plot(runs, folder / "runs.html")
    curves.plot(runs, folder / "runs.svg")
    results = test_report.sample()
    plot.plot(results.rows, results.device, folder / "bench.svg")
    plot.plot(results.rows[:1], results.device, folder / "bars.svg")
    entries = [tuned.ShippedEntry("layernorm", one) for one in test_tuned_report.LAYERNORM]
    lookups = [tuned.Lookup(**one) for one in test_tuned_report.LOOKUPS]
    tuned.plot(entries, lookups, results.device, folder / "tuned.svg")
    return folder


def write(file, *studies):
    files.write(file, tuning.render([SavedStudy.of(study) for study in studies]))


def searches():
    """Return a search with a trial of every outcome, and one of time and energy."""
    t = test_tuner_report
    final = {**t.FINAL, "kept": True}
    failed = [t.trial(outcome) for outcome in ("illegal", "timeout", "crash", "wrong")]
    points = [(1.0, 0.5), (2.0, 0.2), (3.0, 0.3), (0.9, 0.9)]
    two = [t.trial(ms=a, joules=b, objective="both", tile_m=(64, 128)[a > 1]) for a, b in points]
    both = t.study_of(two, name="both", objective="both", flops=0.0)
    return t.study_of([*t.TRIALS, *failed], final=final), both


def begins(text, name):
    """Return whether a label, which may be on several lines, is a run's."""
    return text.startswith(f"{name}: "[:20])


def wide():
    """Return a search of so many fields that their names have no room at any width."""
    space = {f"in_flight_{i}": [1, 2] for i in range(12)}
    distributions = {name: CategoricalDistribution(values) for name, values in space.items()}
    trials = []
    for i in range(12):
        chosen = {name: 1 + (i == at) for at, name in enumerate(space)}
        said = {"outcome": "ok", "config": chosen, "ms": 1.0 + i, "seconds": 1.0}
        trials.append(
            create_trial(
                values=[1.0 + i], params=chosen, distributions=distributions, user_attrs=said
            )
        )
    return test_tuner_report.study_of(trials, "wide", space=space, default={})


def watched(folder, name, number):
    t = test_training_report
    run = t.write(folder, name, recipe=f"recipe{number}", validation=(4.0, 3.0, 3.0 + number))
    names = [f"blocks.{i}.feed_forward.down" for i in range(3 + 20 * number)]
    with (run / log.NAME).open("a") as file:
        for step in range(5, 31, 5):
            ratios = {layer: 50.0 - step - i for i, layer in enumerate(names)}
            print(json.dumps(t.watch_record(step, ratios)), file=file)
    return run


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["one", "several", "runs", "history"])
def test_a_page_is_whole_and_can_be_read(browser, place, name, width):
    browser.scheme("dark")
    browser.open(place / f"{name}.html", width)
    browser.ask("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    browser.wait("drawn()")
    assert browser.faults() == {}
    browser.scheme("light")
    assert browser.ask("faint()") == []
    assert browser.ask("document.title")
    assert browser.ask("document.documentElement.scrollWidth") <= width
    assert browser.requests() == []
    assert browser.get_log("browser") == []
    if name == "runs":
        legends = browser.ask("[...document.querySelectorAll('.legendtext')].map(named)")
        assert all(begins(text, name) for text, name in zip(legends, NAMES * 2, strict=True))


PICTURES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.svg"))
MADE = ["runs.svg", "bench.svg", "bars.svg", "tuned.svg"]


@pytest.mark.parametrize("name", [*PICTURES, *MADE])
def test_a_picture_can_be_read(browser, place, tmp_path, name):
    """Whatever colour a page has, its pictures have their own ground."""
    svg = ((place if name in MADE else ROOT) / name).read_text()
    page = tmp_path / "page.html"
    style = "body { margin: 0; background: #777; } svg { max-width: 100%; height: auto; }"
    page.write_text(f"<!doctype html><style>{style}</style>{svg[svg.index('<svg') :]}")
    for width in WIDTHS:
        browser.open(page, width)
        assert browser.faults() == {}
        assert browser.ask("texts.length") > 5
    if name == "runs.svg":
        texts = browser.ask("texts.map(named)")
        assert all(any(begins(text, name) for text in texts) for name in NAMES)


def test_a_report_works_with_keys(browser, place):
    browser.scheme("dark")
    browser.open(place / "several.html")
    opened = "[...document.querySelectorAll('body > details')].map((d) => d.open)"
    assert browser.ask(opened) == [False] * 4
    browser.tab_to("Studies")  # the table, which may have to be scrolled
    browser.tab_to("gemm")
    browser.press(Keys.ENTER)
    browser.wait(f"{opened}[0] && drawn()")
    browser.tab_to("gemm · triton m=4096")
    browser.press(Keys.SPACE)
    assert browser.ask(opened) == [False] * 4
    browser.press(Keys.ENTER)
    assert browser.ask(opened) == [True, False, False, False]
    ends = "document.querySelector('.plot').layout.xaxis.range.join()"
    before = browser.ask(ends)
    browser.tab_to("Zoom in")
    browser.press(Keys.ENTER)
    assert browser.ask(ends) != before
    browser.tab_to("Zoom out")
    browser.tab_to("Reset axes")
    browser.press(Keys.SPACE)
    assert browser.ask(ends) == before
    browser.tab_to("All trials")
    browser.press(Keys.ENTER)
    browser.tab_to("All trials")
    assert browser.ask("document.activeElement.role") == "region"  # the table, not its title
    buttons = browser.ask("[...document.querySelectorAll('button')].map((b) => b.ariaLabel)")
    assert len(set(buttons)) == 4  # none of Plotly's, which sends the figure to its maker
    assert browser.requests() == []
