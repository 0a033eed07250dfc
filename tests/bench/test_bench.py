"""The benchmarks' claims that are no times: what is compared agrees, what disagrees is noticed, and
the lengths are those of the released row.
"""

import re
import subprocess
import sys

import pytest
import torch
from chat_samples import DATA, needs_data, tiny_file, tiny_spec

from venus.bench import inference as bench
from venus.bench import share as bench_share
from venus.bench.inference import DecodeConfig, IgConfig
from venus.files import write_jsonl
from venus.protocol import assistant_text, format_answer, format_tool_call
from venus.rl import info_gain
from venus.tokenizer import ChatTokenizer

# cuts after 20, 32, 39 and 53 tokens; a branch is the prefix and all but the last answer token
SHORT = 20, ((5, 7), (3, 4), (6, 8), (9, 0)), 3, 2
TINY_DECODE = DecodeConfig(context=40, batch=3, new_tokens=6, repeats=1)


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(bench, "RELEASED", SHORT)


@pytest.fixture
def no_transformers(monkeypatch):
    find_spec = bench.importlib.util.find_spec
    monkeypatch.setattr(
        bench.importlib.util,
        "find_spec",
        lambda name: None if name == "transformers" else find_spec(name),
    )


def figures(text):
    """{side: (tokens processed, max |difference|)} of the printed table of `ig`."""
    rows = re.findall(
        r"^(packed|cache reuse|uncached) .* packed +([\d,]+) tokens +max \|difference\| from "
        r"uncached (\S+) nats$",
        text,
        re.M,
    )
    return {side: (int(tokens.replace(",", "")), float(error)) for side, tokens, error in rows}


# ig


def test_the_embedded_lengths_add_up_to_the_released_row():
    prompt, turns, prefix, answer = bench.RELEASED
    assert (len(turns), prompt + sum(map(sum, turns)), prefix, answer) == (49, 43_504 - 1, 13, 9)


@needs_data
def test_the_embedded_lengths_are_counted_from_the_released_row():
    assert (
        bench.lengths_of(str(DATA / "trajectories" / "sft" / "0004.json"), str(DATA / "qwen3"))
        == bench.RELEASED
    )


def test_packed_and_cached_values_agree_with_uncached_ones(short, capsys):
    bench.ig(IgConfig())
    errors = {side: error for side, (_, error) in figures(capsys.readouterr().out).items()}
    # fp32 rounding, a tenth of what is allowed
    assert errors.keys() == {"packed", "cache reuse", "uncached"} and max(errors.values()) <= 1e-6


def test_the_tokens_of_each_side_are_counted(short, capsys):
    """Packed: trunk and four branches of 4. Cache reuse: the trunk's last token of a cut runs again
    with the branch. Uncached: every prefix.
    """
    bench.ig(IgConfig())
    tokens = {side: count for side, (count, _) in figures(capsys.readouterr().out).items()}
    assert tokens == {
        "packed": 53 + 4 * 4,
        "cache reuse": 52 + 4 * 5,
        "uncached": 20 + 32 + 39 + 53 + 4 * 4,
    }


@pytest.mark.parametrize("error", [2e-5, float("nan")])
def test_values_that_disagree_are_an_error(short, monkeypatch, error):
    monkeypatch.setattr(
        bench,
        "score_cached",
        lambda model, item: [value + error for value in info_gain.score_cached(model, item)],
    )
    # a string: exit code 1
    with pytest.raises(
        SystemExit, match="error: the values differ from uncached ones .*'cache reuse'"
    ):
        bench.ig(IgConfig())


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_branch_that_sees_one_token_less_or_more_is_noticed(short, monkeypatch, shift):
    """The negative control: random weights with weak attention would hide a wrong cut
    below the tolerance.
    """
    span = info_gain.Span
    monkeypatch.setattr(
        info_gain,
        "Span",
        lambda start, end, doc, pre: span(
            start, end, doc, min(pre + shift, 53) if pre > doc else pre
        ),
    )
    with pytest.raises(SystemExit, match="'packed': 0.0[0-9]*[1-9]"):
        bench.ig(IgConfig())


def test_a_trajectory_of_ones_own_gives_the_lengths(tmp_path):
    tokenizer = ChatTokenizer(tiny_file(tmp_path, tiny_spec()))
    texts = [
        assistant_text("look", format_tool_call("search", {"query": ["a"]})),
        assistant_text("done", format_answer("x")),
    ]
    messages = [
        ("system", "s"),
        ("user", "q?"),
        ("assistant", texts[0]),
        ("user", "<tool_response>\nhit\n</tool_response>"),
        ("assistant", texts[1]),
    ]
    row = {
        "question": "q?",
        "gt": "x y",
        "messages": [{"role": role, "content": content} for role, content in messages],
    }
    write_jsonl(tmp_path / "rows.jsonl", [row])
    turns = [len(tokenizer.turn_ids(text)) for text in texts]
    observation = len(tokenizer.observation_ids(["hit"], closed=True))
    wanted = (
        len(tokenizer.prompt_ids("s", "q?")),
        ((turns[0], observation), (turns[1], 0)),
        len(tokenizer.answer_prefix_ids),
        3,
    )
    assert bench.lengths_of(str(tmp_path / "rows.jsonl"), str(tmp_path)) == wanted


def test_a_row_without_ground_truth_is_refused(tmp_path):
    tiny_file(tmp_path, tiny_spec())
    write_jsonl(tmp_path / "rows.jsonl", [{"question": "q?", "messages": []}])
    with pytest.raises(ValueError, match="rows.jsonl: no row, or the first one has no gt"):
        bench.lengths_of(str(tmp_path / "rows.jsonl"), str(tmp_path))


def test_gain_scored_at_rollout_is_that_of_packed_passes(capsys):
    model = bench.random_model(bench.SHAPES["tiny"], 0)
    prompt, turns, prefix, answer = SHORT
    bench_share.print_share(model, prompt, turns, prefix, answer, rows=3, seed=0, tolerance=1e-6)
    out = capsys.readouterr().out
    assert "an IGPO step of 3 trajectories, 4 turns, 62 tokens; CPU seconds: rollout " in out
    assert re.search(r"^information gain, packed +\d+\.\d\d s +\d+\.\d % of the step$", out, re.M)
    assert re.search(
        r"^information gain, at rollout +-?\d+\.\d\d s +-?\d+\.\d % of the step \(goal 5 %: "
        r"(met|missed)\)$",
        out,
        re.M,
    )


def test_gain_that_differs_at_rollout_is_an_error(monkeypatch):
    monkeypatch.setattr(
        bench_share,
        "score_ground_truth",
        lambda *args: [
            [v + 1e-4 for v in values] for values in info_gain.score_ground_truth(*args)
        ],
    )
    with pytest.raises(
        SystemExit, match="values at rollout time differ from packed ones by 0.0001"
    ):
        bench_share.print_share(
            bench.random_model(bench.SHAPES["tiny"], 0), *SHORT, rows=2, seed=0, tolerance=1e-5
        )


def test_scoring_that_changes_what_is_sampled_is_an_error(monkeypatch):
    """As a branch left behind in the cache would."""
    score = bench_share.Sampler.score

    def leaves_a_token(self, slot, prefix, answers, done):
        score(self, slot, prefix, answers, done)
        self.rows[slot].ids[-1] = prefix[0]

    monkeypatch.setattr(bench_share.Sampler, "score", leaves_a_token)
    with pytest.raises(SystemExit, match="scoring during the rollout changed the ids"):
        bench_share.print_share(
            bench.random_model(bench.SHAPES["tiny"], 0), *SHORT, rows=2, seed=0, tolerance=1e-5
        )


# decode


def test_all_sides_decode_the_same_ids(no_transformers, capsys):
    bench.decode(TINY_DECODE)
    out = capsys.readouterr().out
    assert "greedy ids are equal: sampler, forked; sampler; uncached; one forward over all; " in out
    assert "transformers is not installed" in out


def test_transformers_decodes_the_same_ids(capsys):
    pytest.importorskip("transformers")
    bench.decode(TINY_DECODE)
    out = capsys.readouterr().out
    assert (
        "greedy ids are equal: sampler, forked; sampler; uncached; transformers; one forward "
        "over all; "
    ) in out
    assert re.search(
        r"^sampler, forked over transformers generate: \d+\.\d\dx \(goal 2x: (met|missed)\)$",
        out,
        re.M,
    )


def test_ids_that_differ_are_an_error(no_transformers, monkeypatch):
    """One wrong token in one row of the forked side."""
    real = bench.sampled_ids

    def wrong_when_forked(model, prompts_BS, num_new, num_common):
        ids_BL, at_first = real(model, prompts_BS, num_new, num_common)
        if num_common:
            ids_BL[-1, -1] += 1
        return ids_BL, at_first

    monkeypatch.setattr(bench, "sampled_ids", wrong_when_forked)
    with pytest.raises(
        SystemExit, match=r"error: greedy ids of 'sampler' are not those of \['sampler, forked'\]"
    ):
        bench.decode(TINY_DECODE)


def test_rows_have_ids_of_their_own(no_transformers):
    """Else equal ids would say nothing of rows being mixed up; and no row repeats one token."""
    model = bench.random_model(bench.SHAPES["tiny"], 0)
    prompts_BS = torch.randint(656, (4, 30), generator=torch.Generator().manual_seed(0))
    rows = bench.sampled_ids(model, prompts_BS, 12, 0)[0].tolist()
    assert len({tuple(row) for row in rows}) == 4 and min(len(set(row)) for row in rows) > 3


@pytest.mark.parametrize("wrong", [{"new_tokens": 1}, {"context": 1}, {"batch": 0}, {"repeats": 0}])
def test_sizes_without_a_meaning_are_refused(wrong):
    with pytest.raises(ValueError, match="must be at least"):
        bench.decode(DecodeConfig(**wrong))


def test_an_unknown_command_is_one_line():
    result = subprocess.run(
        [sys.executable, "-m", "venus.bench", "speed"], capture_output=True, text=True
    )
    assert result.returncode == 2 and re.fullmatch(
        r"error: no command 'speed'; choose one of ig, decode, .*\n", result.stderr
    )
