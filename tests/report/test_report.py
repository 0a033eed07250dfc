"""The HTML report without a browser: every trajectory is in it whole, nothing that came from the
web or the model is markup, figures and links agree.
"""

import base64
import hashlib
import json
import re
import zlib
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from chat_samples import HOSTILE, needs_data, qwen, real
from report_runs import ATTACK, evaluation, tokenizer, trajectory, two_runs

from venus.curation.formats import from_messages
from venus.files import write_jsonl
from venus.report.page import Run, read_run, write_report

BLOCK = re.compile(r'<script type="text/plain" id="t(\d+)">([A-Za-z0-9+/=]*)</script>')


class Page(HTMLParser):
    """Elements, their attributes, and the text of each script."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.scripts, self.texts, self._open = [], [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self._open = tag
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self._open == "script":
            self.scripts[-1] += data
        else:
            self.texts.append(data)

    def handle_endtag(self, tag):
        self._open = None


def written(tmp_path, runs, **options):
    write_report(tmp_path / "report.html", "title", runs, **options)
    return (tmp_path / "report.html").read_text(encoding="utf-8")


def index_of(text):
    return json.loads(
        re.search(r'<script type="application/json" id="index">(.*?)</script>', text)[1]
    )


def payloads(text):
    return [
        json.loads(zlib.decompress(base64.b64decode(packed))) for _, packed in BLOCK.findall(text)
    ]


def test_every_token_of_every_trajectory_is_in_a_part_of_its_turn(tmp_path):
    """Joined again, the pieces of a part are what its ids decode to, and sampled parts hold exactly
    the tokens of the loss mask.
    """
    runs = two_runs()
    text, shown = written(tmp_path, runs), [t for run in runs for t in run.trajectories]
    assert len(payloads(text)) == len(index_of(text)["trajectories"]) == len(shown) == 13
    for made, t in zip(payloads(text), shown, strict=True):
        assert made["prompt"][1] == t.prompt_len and "".join(
            made["prompt"][2]
        ) == tokenizer().decode(t.token_ids[: t.prompt_len])
        for turn, mine in zip(t.turns, made["turns"], strict=True):
            sampled = [part for part in mine["parts"] if part[0] != "observation"]
            assert sum(part[1] for part in sampled) == mine["sampled"] == turn.end - turn.start
            assert "".join("".join(part[2]) for part in sampled) == tokenizer().decode(
                t.token_ids[turn.start : turn.end]
            )
            assert all(
                part[2][-2:] == ["</think>", ""] for part in mine["parts"] if part[0] == "think"
            )
            assert (
                sum(part[1] for part in mine["parts"]) == turn.obs_end - turn.start
                and mine["context"] == turn.obs_end
            )
        kinds = [[part[0] for part in turn["parts"]] for turn in made["turns"]]
        called, answered = ["think", "call", "observation"], ["think", "answer"]
        assert kinds == [called, ["think", "malformed", "observation"], called, answered]


def test_gain_advantage_status_and_call_of_a_turn_are_told(tmp_path):
    turns = payloads(written(tmp_path, two_runs()))[-1]["turns"]
    assert [turn["gain"] for turn in turns] == [None, None, -0.25, None]
    assert [turn["advantage"] for turn in turns] == [0.5, -1.0, 0.5, 0.0]
    assert [turn["what"] for turn in turns] == ["who", "", "http://a", "yes"]
    assert [turn["seconds"] for turn in turns] == [0.25, None, 1.5, None]


def test_structure_tokens_are_told_from_text_that_spells_them(tmp_path):
    """Decoded, a page that spells `<|im_end|>` looks like the end of its message. Odd pieces are
    structure ids, and no page can bring one.
    """
    run = Run("r", [trajectory("q", 0, answer="yes", page=HOSTILE)], tokenizer())
    pieces = payloads(written(tmp_path, [run]))[0]["turns"][0]["parts"][-1][2]
    assert pieces[1::2] == [
        "<|im_start|>",
        "<tool_response>",
        "</tool_response>",
        "<|im_end|>",
        "<|im_start|>",
        "<think>",
    ]
    assert HOSTILE in pieces[4]


def test_nothing_that_came_from_outside_is_markup(tmp_path):
    """Title, run names, questions, ids, predictions and pages with tags: the page keeps the
    elements it has without them.
    """
    write_report(tmp_path / "calm.html", "title", two_runs(), baseline="second")
    write_report(
        tmp_path / "hostile.html", ATTACK, two_runs(attack=True), baseline="second" + ATTACK
    )
    calm, hostile = (
        Page((tmp_path / f"{name}.html").read_text(encoding="utf-8"))
        for name in ("calm", "hostile")
    )
    assert [tag for tag, _ in hostile.elements] == [tag for tag, _ in calm.elements]
    assert [script for script in hostile.scripts if "window.hit" in script] == [
        hostile.scripts[0]
    ] and json.loads(hostile.scripts[0])
    assert not [
        name
        for _, attributes in hostile.elements
        for name in attributes
        if name.startswith("on") or name == "src"
    ]
    assert ATTACK in "".join(hostile.texts)


def test_the_policy_allows_the_own_style_and_script_and_nothing_else(tmp_path):
    text = written(tmp_path, two_runs())
    hashes = [
        base64.b64encode(
            hashlib.sha256(re.search(f"<{tag}>(.*?)</{tag}>", text, re.S)[1].encode()).digest()
        ).decode()
        for tag in ("style", "script")
    ]
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1]
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src "
        f"'sha256-{hashes[1]}'; base-uri 'none'; form-action 'none'"
    )
    assert text.index("Content-Security-Policy") < text.index("<style>")
    assert not re.findall(r"""(?:src|href)\s*=\s*["']?(?:https?:|//)""", text)


def test_the_same_runs_give_the_same_bytes(tmp_path):
    assert written(tmp_path, two_runs(), baseline="second") == written(
        tmp_path, two_runs(), baseline="second"
    )


def test_the_size_grows_with_the_trajectories(tmp_path):
    """Twice the trajectories, at most twice the data: the index says nothing twice, and no block
    holds another's text.
    """
    sizes = []
    for number in (20, 40, 80):
        run = Run("r", [trajectory(f"q{k}", 0, answer="yes") for k in range(number)], tokenizer())
        sizes.append(len(written(tmp_path, [run])))
    # ids of one and two digits compress a little differently
    assert sizes[2] - sizes[1] == pytest.approx(2 * (sizes[1] - sizes[0]), rel=0.05)


def test_figures_are_those_of_the_summary(tmp_path):
    runs = two_runs()
    text = written(tmp_path, runs, baseline="second")
    rows = {
        row[0]: row[1:]
        for row in (
            re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line)
            for line in text.splitlines()
            if line.startswith("<tr>")
        )
    }
    success = runs[0].summary["success"]
    assert rows["success"][0] == (
        f"{100 * success['mean']:.1f} % <small>[{100 * success['low']:.1f}, "
        f"{100 * success['high']:.1f}]</small>"
    )
    assert rows["pass@2, unbiased"][0].startswith("66.7 %") and rows["any of the first 2"][
        0
    ].startswith("66.7 %")
    assert rows["trajectories"] == ["6", "6"] and rows["by call, overall"] == ["50.0 %", "50.0 %"]
    assert rows["evidence not seen"] == ["2 <small>100.0 %</small>", "2 <small>100.0 %</small>"]
    assert text.count("<svg xmlns") == 2


def test_flipped_questions_link_to_their_trajectories(tmp_path):
    text = written(tmp_path, two_runs(), baseline="second")
    rose, fell = (
        re.search(rf"1 questions whose success {word}</summary>(.*?)</details>", text, re.S)[1]
        for word in ("rose", "fell")
    )
    marks = re.findall(r'class="verdict (\w+)" href="([^"]*)"', rose)
    assert marks == [
        (verdict, f"#{run}/id%20of%20up/{sample}")
        for verdict, run in (("incorrect", "second"), ("correct", "first"))
        for sample in (0, 1)
    ]
    assert "down" in fell and "+0.0 points" in text and "3 questions, 1 of them equal" in text
    assert {href for _, href in marks} <= {row["link"] for row in index_of(text)["trajectories"]}


def test_a_baseline_without_its_trajectories_is_compared_without_links(tmp_path):
    first, second, _ = two_runs()
    text = written(tmp_path, [first, replace(second, trajectories=[])], baseline="second")
    assert (
        'href="#first/id%20of%20up/0"' in text
        and 'href="#second' not in text
        and 'class="verdict incorrect" title="incorrect, sample 0"' in text
    )


def test_different_settings_are_named_beside_the_difference(tmp_path):
    runs = [
        evaluation("a", [trajectory("q", 0, answer="yes")]),
        evaluation("b", [trajectory("q", 0, answer="yes")], date="2026-01-01"),
    ]
    assert "Made under different settings, which may be the cause: date." in written(
        tmp_path, runs, baseline="b"
    )
    assert "different settings" not in written(tmp_path, two_runs(), baseline="second")


@needs_data
def test_released_trajectories_need_no_verdict_no_seconds_and_no_log_probs(tmp_path):
    run = Run("released", [from_messages(real("sft/0000"), qwen())], qwen())
    text = written(tmp_path, [run])
    made = payloads(text)[0]
    assert (
        len(made["turns"]) == len(run.trajectories[0].turns)
        and "seconds" not in made["facts"]
        and "judge" not in made["facts"]
    )
    assert all(turn["gain"] is None and turn["advantage"] is None for turn in made["turns"])
    assert index_of(text)["trajectories"][0]["verdict"] is None and "<table>" not in text


def test_a_trajectory_of_no_turn_and_broken_text_are_written(tmp_path):
    """A rollout whose model was down has no turn; a lone surrogate, from a broken JSON
    escape, has no UTF-8 form.
    """
    broken = trajectory("q", 0, answer="yes")
    broken = replace(
        broken,
        question="q \ud800",
        turns=[],
        token_ids=broken.token_ids[: broken.prompt_len],
        prediction=None,
        stop_reason="model_error",
    )
    text = written(tmp_path, [Run("r \udfff", [broken], tokenizer())])
    assert (
        payloads(text)[0]["turns"] == []
        and index_of(text)["questions"][0]["question"] == "q \ud800"
    )


@pytest.mark.parametrize(
    ("runs", "baseline", "message"),
    [
        ([], None, "need a run"),
        (["a", "a"], None, "names that differ"),
        (["a", "b"], "c", "the baseline among the later ones"),
        (["a", "b"], "a", "the baseline among the later ones"),
    ],
)
def test_runs_that_cannot_be_told_apart_are_refused(tmp_path, runs, baseline, message):
    with pytest.raises(ValueError, match=message):
        written(tmp_path, [Run(name, [], tokenizer()) for name in runs], baseline=baseline)


def test_two_trajectories_of_one_link_are_refused_and_leave_the_old_report(tmp_path):
    before = written(tmp_path, [Run("r", [trajectory("q", 0, answer="yes")], tokenizer())])
    with pytest.raises(ValueError, match="run 'r' holds two trajectories id of q/0"):
        written(
            tmp_path,
            [
                Run(
                    "r",
                    [
                        trajectory("q", 0, answer="yes"),
                        trajectory("q", 0, answer="no", run="other"),
                    ],
                    tokenizer(),
                )
            ],
        )
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == before


def test_a_summary_of_another_version_is_named(tmp_path):
    run = two_runs()[0]
    del run.summary["tokens"]["context"]
    with pytest.raises(
        ValueError, match="the summary of first holds no tokens.context.median: evaluate again"
    ):
        written(tmp_path, [run])


def test_an_evaluation_is_read_from_its_directory(tmp_path):
    """Two may lie in directories of one name; one that graded trajectories of
    elsewhere holds none.
    """
    first, second, _ = two_runs()
    directory = tmp_path / first.name
    directory.mkdir()
    write_jsonl(directory / "verdicts.jsonl", first.verdicts)
    (directory / "summary.json").write_text(json.dumps(first.summary), encoding="utf-8")
    assert read_run(str(directory), tokenizer()).trajectories == []
    write_jsonl(directory / "trajectories.jsonl", (t.to_json() for t in first.trajectories))
    read = read_run(str(directory), tokenizer())
    assert read_run(str(directory), tokenizer(), beside=read).name == str(directory)
    assert written(tmp_path, [read, second], baseline="second") == written(
        tmp_path, [first, second], baseline="second"
    )


def test_tables_say_nothing_of_what_there_is_none_of(tmp_path):
    """Without ground truths, samples, seconds and leaks: no rows of dashes, no heading without
    rows, and no plot of successes.
    """
    text = written(
        tmp_path, [evaluation("bare", [replace(trajectory("q", 0, answer="yes"), ground_truth=())])]
    )
    tables = re.findall(r"<h3>(.*?)</h3><table>", text)
    assert tables == [
        "What counts",
        "Tool use: visits / (visits + searches)",
        "Effort",
        "Stop reasons",
        "Tool calls by status",
    ]
    assert (
        "–" not in "".join(re.findall(r"<tr>.*?</tr>", text))
        and "seconds, model" not in text
        and "by call, correct" not in text
    )
    assert text.count("<svg xmlns") == 1


def test_success_is_drawn_between_0_and_100(tmp_path):
    """Ticks around the one value of a plot, where no question was answered, were
    -0.5 .. 0.5 percent.
    """
    text = written(tmp_path, [evaluation("a", [trajectory("q", k, answer="no") for k in (0, 1)])])
    plot = re.search(r"<svg xmlns.*?Success by number of samples.*?</svg>", text, re.S)[0]
    assert [
        float(tick) for tick in re.findall(r'text-anchor="end" font-size="12">([-\d.]+)<', plot)
    ] == [0, 20, 40, 60, 80, 100]
