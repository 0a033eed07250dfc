"""The HTML report in headless Chromium: it opens from a file without a request, shows what it
should, runs nothing that a page or a model wrote.
"""

import random
from dataclasses import replace

import pytest
from browser import CHROMIUM, Browser
from chat_samples import HOSTILE
from report_runs import ATTACK, tokenizer, trajectory, two_runs

from venus.report.page import Run, write_report
from venus.trajectory import Turn

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH")
STEP = "#step/id%20of%20up/0"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "calm.html"
    write_report(path, "title", two_runs(), baseline="second")
    return path


@pytest.fixture
def page(browser, calm):
    """The report, opened anew at a training trajectory."""
    return opened(browser, calm, STEP)


def opened(browser, path, fragment):
    browser.emulate()
    browser.call("Page.navigate", url="about:blank")
    browser.requests.clear()
    browser.problems.clear()
    browser.open(path, fragment)
    browser.wait("document.querySelector('#view .turns') !== null")
    return browser


def test_the_report_opens_from_a_file_without_a_request_or_an_error(page, calm):
    assert page.requests == [calm.resolve().as_uri()] and page.problems == []
    assert page.js("document.querySelectorAll('#list li').length") == 13
    assert page.js("document.querySelectorAll('.plot').length") == 2


def test_a_deep_link_opens_its_trajectory_and_no_text_before_it_is_unfolded(page):
    """Folded text costs nothing: a turn's parts are made when it is opened, a part's text
    when it is unfolded.
    """
    assert page.js("document.querySelector('#view .question').textContent") == "up"
    assert page.js(
        "[...document.querySelectorAll('details.turn .action')].map(x => x.textContent)"
    ) == ["search", "malformed", "visit", "answer"]
    assert page.js("document.querySelectorAll('.turn .part').length") == 0
    page.js("document.querySelector('details.turn').open = true")
    page.wait("document.querySelectorAll('.turn .part').length === 3")
    assert page.js(
        "[...document.querySelectorAll('.turn .part')].map(x => [x.className, "
        "x.querySelectorAll('.text').length])"
    ) == [
        ["part think sampled", 1],
        ["part call sampled", 1],
        ["part observation", 0],
    ]
    assert '"query": ["who"]' in page.js("document.querySelector('.turn .call .text').textContent")
    page.js("document.querySelector('.turn .observation').open = true")
    page.wait("document.querySelector('.turn .observation .text') !== null")
    assert "a page" in page.js("document.querySelector('.turn .observation .text').textContent")


def test_gain_bars_and_advantage_tints_have_the_sign_of_their_number(page):
    page.js("document.getElementById('all').click()")
    page.wait("document.querySelectorAll('.turn .part').length === 11")
    assert page.js(
        "[...document.querySelectorAll('.turn .gain')].map(x => [x.textContent, "
        "x.querySelectorAll('.minus').length])"
    ) == [
        ["", 0],
        ["", 0],
        ["−0.250", 1],
        ["", 0],
    ]
    tints = page.js(
        "[...document.querySelectorAll('.turn .part')].map(x => "
        "x.style.getPropertyValue('--tint') + x.style.getPropertyValue('--depth'))"
    )
    # 4 % to 26 %, by the share of the largest advantage
    plus, minus = "var(--plus)15.0%", "var(--minus)26.0%"
    assert tints == [plus, plus, "", minus, minus, "", plus, plus, "", "", ""]
    background = "getComputedStyle(document.querySelectorAll('.turn .part')[{}]).backgroundColor"
    assert len({page.js(background.format(k)) for k in (0, 2, 3, 9)}) == 4


def test_an_injected_script_does_not_run_and_is_shown_as_text(browser, tmp_path):
    """In title, run names, questions, predictions and observations; fold by fold,
    everything is opened.
    """
    runs = two_runs(attack=True)
    write_report(tmp_path / "hostile.html", ATTACK, runs, baseline="second" + ATTACK)
    trajectory = runs[0].trajectories[2]
    opened(
        browser, tmp_path / "hostile.html", runs[0].link(trajectory.question_id, trajectory.sample)
    )
    browser.js("document.querySelectorAll('details').forEach(x => { x.open = true })")
    browser.wait("document.querySelectorAll('.turn .observation').length === 3")
    browser.js("document.querySelectorAll('details').forEach(x => { x.open = true })")
    browser.wait("document.querySelectorAll('.turn .observation .text').length === 3")
    assert (
        browser.js("typeof window.hit") == "undefined" and browser.js("document.images.length") == 0
    )
    assert browser.js("document.scripts.length") == 2 + sum(len(run.trajectories) for run in runs)
    assert (
        browser.requests == [(tmp_path / "hostile.html").resolve().as_uri()]
        and browser.problems == []
    )
    texts = browser.js(
        "['h1', '#view .question', '#view dl', '.turn .observation .text'].map(x => "
        "document.querySelector(x).textContent)"
    )
    assert all(ATTACK in text for text in texts) and HOSTILE in texts[3]
    assert (
        browser.js(
            "[...document.querySelectorAll('.turn .observation .tok')].filter(x => "
            "x.textContent === '<|im_start|>').length"
        )
        == 6
    )


def test_the_list_is_filtered_by_run_verdict_and_text(page):
    def listed(**values):
        page.js("for (const x of document.querySelectorAll('#filters > *')) x.value = ''")
        for name, value in values.items():
            page.js(f"document.getElementById('{name}').value = '{value}'")
        page.js("document.getElementById('search').oninput()")
        assert (
            page.js("document.getElementById('count').textContent")
            == f"{page.js('shown.length')} of 13"
        )
        return page.js(
            "[...document.querySelectorAll('#list a')].map(x => "
            "decodeURI(x.getAttribute('href').slice(1)))"
        )

    assert listed(run="step") == ["step/id of up/0"]
    assert listed(run="first", verdict="incorrect") == ["first/id of down/0", "first/id of down/1"]
    assert listed(verdict="null") == ["step/id of up/0"]
    assert len(listed(search="UP")) == 5 and listed(search="up nothing") == []
    assert len(listed(failure="evidence_not_seen")) == 4 and len(listed()) == 13


def test_the_keys_search_step_and_unfold(page):
    page.press("o")
    page.wait("document.querySelectorAll('details.turn[open]').length === 4")
    page.press("k")
    page.wait("document.querySelector('#view .question').textContent === 'same'")
    assert page.js("location.hash") == "#second/id%20of%20same/1"
    page.press("j")
    page.wait("document.querySelector('#view .question').textContent === 'up'")
    assert page.js("document.querySelector('#list [aria-current]').getAttribute('href')") == STEP
    page.press("/")
    page.press("j")  # typed, not a command
    assert page.js("[document.activeElement.id, document.activeElement.value]") == ["search", "j"]


def test_dark_mode_is_honoured(page):
    def luminance():
        red, green, blue = page.js(
            "getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)"
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    page.emulate(scheme="light")
    assert luminance() > 200
    page.emulate(scheme="dark")
    assert luminance() < 50


@pytest.mark.parametrize("width", [400, 800, 1280, 2200])
def test_the_page_never_scrolls_sideways(page, width):
    page.emulate(width=width)
    page.js("document.querySelectorAll('details').forEach(x => { x.open = true })")
    page.wait("document.querySelectorAll('.turn .part').length === 11")
    assert page.js("document.documentElement.scrollWidth") <= width


@pytest.mark.slow
def test_500_trajectories_of_200_turns_open(browser, tmp_path):
    """The page holds them packed and unpacks one; the list makes 200 rows at once,
    the trajectory no text.
    """
    rng, first = random.Random(0), trajectory("q", 0, answer="yes")
    turn = first.turns[0]
    last = first.turns[-1]
    words = tokenizer().encode("abcdefghij klmnopqrst uvwxyz")
    step, tail = first.token_ids[turn.start : turn.obs_end], first.token_ids[last.start :]
    noise = 30
    length = len(step) + noise
    turns = [
        replace(turn, start=s, end=s + turn.end - turn.start, obs_end=s + length)
        for s in range(turn.start, turn.start + 199 * length, length)
    ]
    start = turns[-1].obs_end
    turns.append(Turn(start, start + len(tail), start + len(tail), "answer", None, None))
    trajectories = []
    for k in range(500):
        body = [token for _ in range(199) for token in (*step, *rng.choices(words, k=noise))]
        ids = [*first.token_ids[: turn.start], *body, *tail]
        trajectories.append(
            replace(
                first, question_id=f"q{k}", question=f"question {k}", token_ids=ids, turns=turns
            )
        )
    write_report(tmp_path / "big.html", "big", [Run("r", trajectories, tokenizer())])
    opened(browser, tmp_path / "big.html", "#r/q499/0")
    assert (
        browser.js("document.querySelectorAll('#view .question')[0].textContent") == "question 499"
    )
    assert browser.js("document.querySelectorAll('details.turn').length") == 200
    assert (
        browser.js("document.querySelectorAll('#list a').length") == 200
        and browser.js("document.querySelectorAll('.turn .part').length") == 0
    )
    assert (
        browser.js("document.getElementById('count').textContent") == "500 of 500"
        and browser.problems == []
    )
    browser.js("document.getElementById('all').click()")
    browser.wait("document.querySelectorAll('.turn .part').length === 199 * 3 + 2")
