"""Rollouts into a file: interrupted and continued, equal to never interrupted, nothing done twice;
other settings refused.
"""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from agent_fakes import (
    JOBS,
    SCRIPTS,
    fake_tools,
    model_agent,
    question,
    scripted_agent,
    tiny_model,
    tiny_tokenizer,
)

from venus.cli import option
from venus.files import append_jsonl, write_jsonl
from venus.model.qwen3 import Qwen3Config
from venus.rollout.agent import Job
from venus.rollout.collect import (
    check_corpora,
    collect,
    jobs_of,
    rollout_metrics,
    share_of_jobs,
)
from venus.rollout.options import DecodingOptions, RolloutOptions
from venus.tools.options import ToolOptions
from venus.trajectory import Outcome, Trajectory, Turn, read_trajectories

TESTS = Path(__file__).resolve().parents[1] / "support"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_tokenizer(tmp_path_factory.mktemp("tiny"))


def agent_of(tiny, **options):
    return scripted_agent(tiny, SCRIPTS, **options)


def content(trajectories):
    """All of the trajectories but what the clock says."""
    return [dataclasses.replace(trajectory, seconds={}) for trajectory in trajectories]


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """The trajectories of an uninterrupted run."""
    return collect(
        agent_of(tiny), JOBS, tmp_path_factory.mktemp("whole") / "t.jsonl", progress=None
    )


def run_some(tiny, path, count, **options):
    """Collect until `count` trajectories are in the file, then fail as a full disk or a Ctrl-C
    would. Return the agent.
    """
    agent = agent_of(tiny, **options)
    rollouts = agent.run

    def failing(jobs, *_, **__):
        for number, trajectory in enumerate(rollouts(jobs)):
            if number == count:
                raise KeyboardInterrupt
            yield trajectory

    agent.run = failing
    with pytest.raises(KeyboardInterrupt):
        collect(agent, JOBS, path, progress=None)
    return agent


def num_calls(agent):
    return sum(len(tool.calls) for tool in agent.tools.values())


def test_all_jobs_come_back_in_their_order_and_lie_in_the_file(tiny, whole, tmp_path):
    """Six jobs end in another order than they began (two slots, turns of different number), and
    come back sorted as asked.
    """
    path = tmp_path / "new" / "t.jsonl"
    trajectories = collect(agent_of(tiny, num_slots=2), JOBS, path, progress=None)
    assert [t.id for t in trajectories] == ["q0/0", "q0/1", "q1/0", "q1/1", "q2/0", "q2/1"]
    assert (
        sorted(content(read_trajectories(path)), key=lambda t: t.id)
        == content(trajectories)
        == content(whole)
    )


@pytest.mark.parametrize("count", [0, 1, 4])
def test_an_interrupted_run_continues_where_it_stopped(tiny, whole, tmp_path, count):
    """Finished trajectories are read back, the others made: each tool call of an unfinished
    rollout, and no other.
    """
    path = tmp_path / "t.jsonl"
    run_some(tiny, path, count, num_slots=1)
    assert len(read_trajectories(path)) == count
    agent = agent_of(tiny)
    assert content(collect(agent, JOBS, path, progress=None)) == content(whole)
    assert num_calls(agent) == 2 * (len(JOBS) - count)
    assert len(agent.sampler.feeds) == 3 * (len(JOBS) - count)
    assert sorted(t.id for t in read_trajectories(path)) == [
        f"{job.question.id}/{job.sample}" for job in JOBS
    ]


def test_a_finished_run_is_read_and_not_made_again(tiny, whole, tmp_path):
    path = tmp_path / "t.jsonl"
    collect(agent_of(tiny), JOBS, path, progress=None)
    before = path.read_bytes()
    agent = agent_of(tiny)
    assert content(collect(agent, JOBS, path, progress=None)) == content(whole)
    assert (num_calls(agent), agent.sampler.feeds, path.read_bytes()) == (0, [], before)


@pytest.mark.parametrize(
    "torn", ["", "{", '{"schema": 1, "run": "r", "question_id": "q2", "sam', "\udcc3"]
)
def test_a_torn_last_line_is_dropped_and_made_again(tiny, whole, tmp_path, torn):
    """Trap 32: what a crash left of a row is cut off before anything is appended; the
    rows before it count.
    """
    path = tmp_path / "t.jsonl"
    run_some(tiny, path, 3, num_slots=1)
    with open(path, "a", encoding="utf-8", errors="surrogateescape") as handle:
        handle.write(torn)
    agent = agent_of(tiny)
    assert content(collect(agent, JOBS, path, progress=None)) == content(whole)
    assert num_calls(agent) == 2 * 3
    assert len(read_trajectories(path)) == 6


def test_rollouts_whose_service_was_down_are_made_again_and_stand_once(tiny, whole, tmp_path):
    """Counted as done, an outage of an hour would stay in the evaluation for good. Finished rows
    keep their bytes, another process's its file.
    """
    path, other = tmp_path / "t.jsonl", tmp_path / "other.jsonl"
    rows = [t.to_json() for t in whole]
    for number, reason in ((1, "tool_error"), (4, "model_error")):
        rows[number] |= {"stop_reason": reason, "outcome": {"value": None, "status": "tool_error"}}
    write_jsonl(other, rows[:1])
    write_jsonl(path, rows[1:])
    before = path.read_text().splitlines()
    agent = agent_of(tiny)
    assert content(collect(agent, JOBS, path, others=[other], progress=None)) == content(whole)
    after = path.read_text().splitlines()
    assert num_calls(agent) == 2 * 2
    assert after[:3] == [line for number, line in enumerate(before, 1) if number not in (1, 4)]
    assert sorted(t.id for t in read_trajectories(path)) == sorted(t.id for t in whole[1:])


def test_a_complete_row_without_its_newline_is_made_again(tiny, whole, tmp_path):
    """It may be whole or not; appending behind it would glue two rows together."""
    path = tmp_path / "t.jsonl"
    run_some(tiny, path, 2, num_slots=1)
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    assert content(collect(agent_of(tiny), JOBS, path, progress=None)) == content(whole)
    assert len(read_trajectories(path)) == 6


@pytest.mark.parametrize("calls", [1, 8])
def test_a_killed_process_leaves_a_resumable_file(tiny, whole, tmp_path, calls):
    """kill -9 in the first and in the eighth of twelve tool calls, one rollout at a time: 0 and 3
    rollouts of two calls each are done.
    """
    code = f"from agent_fakes import collect_and_die; collect_and_die({str(tmp_path)!r}, {calls})"
    environment = {"PYTHONPATH": f"{TESTS}:{TESTS.parents[1]}", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stderr) == (-9, "")
    done = (calls - 1) // 2
    assert len(read_trajectories(tmp_path / "t.jsonl")) == done
    agent = agent_of(tiny)
    assert content(collect(agent, JOBS, tmp_path / "t.jsonl", progress=None)) == content(whole)
    assert num_calls(agent) == 2 * (len(JOBS) - done)


def test_a_resumed_run_of_a_model_equals_an_uninterrupted_one(tiny, tmp_path):
    """With a real sampler the batch mates differ after a resume, and what a row computes may not.

    While steps of fewer than eight tokens were not padded, most rows differed in their last bits,
    and an id only in the rare run in which a uniform lay on the edge between two tokens. Where this
    was written the bits are equal; another processor's products may round otherwise, hence 1e-6.
    """
    model, jobs = tiny_model(tiny.vocab_size), jobs_of([question(f"q{n}") for n in range(4)], 3)
    want = collect(
        model_agent(tiny, model, fake_tools()), jobs, tmp_path / "whole.jsonl", progress=None
    )
    with open(tmp_path / "part.jsonl", "w", encoding="utf-8") as handle:
        for trajectory in want[1:12:2]:
            append_jsonl(handle, trajectory.to_json())
    got = collect(
        model_agent(tiny, model, fake_tools(), num_slots=8),
        jobs,
        tmp_path / "part.jsonl",
        progress=None,
    )
    assert [t.token_ids for t in got] == [t.token_ids for t in want]
    for mine, theirs in zip(got, want, strict=True):
        assert mine.log_probs == pytest.approx(theirs.log_probs, abs=1e-6)


def test_more_samples_can_be_asked_of_a_finished_file(tiny, whole, tmp_path):
    path, agent = tmp_path / "t.jsonl", agent_of(tiny)
    assert content(collect(agent_of(tiny), JOBS[::2], path, progress=None)) == content(whole[::2])
    assert content(collect(agent, JOBS, path, progress=None)) == content(whole)
    assert num_calls(agent) == 2 * 3


def test_fewer_jobs_than_the_file_holds_give_only_those(tiny, whole, tmp_path):
    collect(agent_of(tiny), JOBS, tmp_path / "t.jsonl", progress=None)
    assert content(
        collect(agent_of(tiny), JOBS[3:4], tmp_path / "t.jsonl", progress=None)
    ) == content(whole[3:4])


# What is refused


@pytest.mark.parametrize(
    "other",
    [{"run": "s"}, {"seed": 8}, {"manifest": {"made": "otherwise"}}],
    ids=lambda other: next(iter(other)),
)
def test_the_file_of_another_run_seed_or_settings_is_refused_unchanged(tiny, tmp_path, other):
    path = tmp_path / "t.jsonl"
    run_some(tiny, path, 2, num_slots=1)
    before = path.read_bytes()
    with pytest.raises(
        ValueError,
        match="^.*t.jsonl: holds q0/0 of run 'r' .seed 7. made under other settings; give another "
        "output",
    ) as raised:
        collect(agent_of(tiny, **other), JOBS, path, progress=None)
    assert "\n" not in str(raised.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "change",
    [{"question": "When?"}, {"ground_truth": ("y",)}],
    ids=lambda change: next(iter(change)),
)
def test_other_questions_under_the_same_ids_are_refused(tiny, tmp_path, change):
    """Two synthetic worlds have equal question ids. With world and questions replaced, the rollouts
    of the old world were taken for finished.
    """
    path = tmp_path / "t.jsonl"
    collect(agent_of(tiny), JOBS, path, progress=None)
    jobs = [Job(dataclasses.replace(job.question, **change), job.sample) for job in JOBS]
    with pytest.raises(
        ValueError, match="holds q0/0 with another question or ground truth; give another output"
    ):
        collect(agent_of(tiny), jobs, path, progress=None)


def test_a_broken_row_before_the_last_is_named(tiny, tmp_path):
    path = tmp_path / "t.jsonl"
    run_some(tiny, path, 2, num_slots=1)
    first, second = path.read_text(encoding="utf-8").splitlines()
    path.write_text(f"{first}\n{{broken\n{second}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"t.jsonl:2: not a JSON row"):
        collect(agent_of(tiny), JOBS, path, progress=None)


def test_a_prompt_longer_than_the_context_leaves_no_file(tiny, tmp_path):
    jobs = [*JOBS, Job(question("long", "why " * 3000), 0)]
    with pytest.raises(ValueError, match="question long: a prompt of"):
        collect(agent_of(tiny), jobs, tmp_path / "new" / "t.jsonl", progress=None)
    assert not (tmp_path / "new").exists()


def test_corpora_are_checked_before_a_rollout_starts(tmp_path):
    (tmp_path / "good.jsonl").write_text('{"url": "a", "text": "b"}\n', encoding="utf-8")
    (tmp_path / "bad.jsonl").write_text(
        '{"url": "a", "text": "b"}\n{"text": "c"}\n', encoding="utf-8"
    )
    good = question("q", corpus=str(tmp_path / "good.jsonl"))
    bad = question("p", corpus=str(tmp_path / "bad.jsonl"))
    check_corpora([good, good])
    with pytest.raises(ValueError, match=r"bad.jsonl:2: a page needs a url"):
        check_corpora([good, bad])
    with pytest.raises(ValueError, match="the question names no corpus"):
        check_corpora([good, question("r")])


# Options


@dataclasses.dataclass(frozen=True)
class Options(RolloutOptions):
    extra: int = option(0, help="none")


def test_the_manifest_names_what_decides_a_trajectory():
    """All rollout options but those of decoding and threads, what decides the tools' answers, and
    none of the script's own.
    """
    names, tools, decoding = (
        {field.name for field in dataclasses.fields(options)}
        for options in (RolloutOptions, ToolOptions, DecodingOptions)
    )
    assert set(Options().manifest()) == names - tools - decoding - {
        "threads",
        "policy",
        "policy_seconds",
    } | {"tools"}


def test_slots_may_change_between_start_and_resume(tiny, tmp_path):
    model, jobs = tiny_model(tiny.vocab_size), [Job(question(), s) for s in range(3)]
    options = RolloutOptions(
        max_context=1500,
        max_turns=2,
        max_turn_tokens=16,
        max_observation_tokens=32,
        system_prompt="short",
    )
    first = collect(
        options.agent(model, tiny, run="r", seed=0, manifest={}),
        jobs[:1],
        tmp_path / "t.jsonl",
        progress=None,
    )
    options = dataclasses.replace(options, slots=3)
    again = collect(
        options.agent(model, tiny, run="r", seed=0, manifest={}),
        jobs,
        tmp_path / "t.jsonl",
        progress=None,
    )
    assert again[0] == first[0]
    assert [t.sample for t in again] == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_turns": 0}, "max_turns 0"),
        ({"slots": 0}, "slots 0"),
        ({"top_p": 1.5}, "top_p 1.5"),
        ({"temperature": -1.0}, "temperature -1.0"),
    ],
)
def test_options_out_of_range_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        RolloutOptions(**change).validate()


def test_a_model_that_does_not_fit_the_options_is_refused(tiny):
    """A context beyond the model's positions; a tokenizer with ids that the embedding lacks, which
    would be an IndexError in mid-run.
    """
    model = tiny_model(tiny.vocab_size)
    with pytest.raises(
        ValueError, match="max_context 8193 exceeds the model's max_position_embeddings 8192"
    ):
        RolloutOptions(max_context=8193).agent(model, tiny, run="r", seed=0, manifest={})
    with pytest.raises(
        ValueError,
        match=f"the tokenizer has {tiny.vocab_size} ids, the model {tiny.vocab_size - 1}",
    ):
        RolloutOptions(max_context=8192).agent(
            tiny_model(tiny.vocab_size - 1), tiny, run="r", seed=0, manifest={}
        )


def test_the_plan_counts_what_the_run_would_hold(tmp_path):
    """The 4B shape in bf16: 36 layers, 8 kv heads of 128, so 147,456 bytes a token; 2 rows of
    1,024 tokens are 288 MiB.
    """
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=5e6,
        max_position_embeddings=262_144,
        tie_word_embeddings=True,
    )
    (tmp_path / "config.json").write_text(
        json.dumps(config.to_dict() | {"torch_dtype": "bfloat16"}), encoding="utf-8"
    )
    rows = dict(
        RolloutOptions(slots=2, max_context=1024, max_turns=5, max_turn_tokens=100).plan(
            str(tmp_path), 30
        )
    )
    assert rows == {
        "parameters": "4,022,468,096",
        "rollouts": "30",
        "sampled tokens, at most": "15,000",
        "KV cache, all rows full": "288.0 MiB",
    }


def test_a_step_that_keeps_no_trajectory_reports_counts_only():
    """A success of 0.0 would read as a result; nothing was measured. Each one left out has its
    reason, a call that failed counts wherever it was.
    """

    def left_out(sample, status, tool_status):
        turns = [
            Turn(2, 3, 4, "search", tool_status, {"query": ["q"]}),
            Turn(4, 5, 5, "answer", None, None),
        ]
        return Trajectory(
            "r",
            "q",
            sample,
            0,
            "?",
            ("x",),
            2,
            [0] * 5,
            [],
            turns,
            "x",
            Outcome(None, status),
            "answered",
            {},
            {},
        )

    trajectories = [
        left_out(k, *how)
        for k, how in enumerate(
            [
                ("judge_error", "ok"),
                ("ok", "error"),
                ("judge_error", "timeout"),
                ("cut_off", "empty"),
            ]
        )
    ]
    reasons = {"judge_error": 2, "small_group": 1, "cut_off": 1}
    assert rollout_metrics(trajectories, []) == {
        "trajectories": 4,
        "excluded": 4,
        "excluded_by": reasons,
        "failed_calls": 2,
    }


# Several processes, and a stop


def test_rollouts_that_another_process_finished_are_taken_up(tiny, whole, tmp_path):
    """After a resume with another number of processes, a job belongs to another rank than the one
    that has it on disk, here with a torn last row.
    """
    theirs, path = tmp_path / "rank1.jsonl", tmp_path / "rank0.jsonl"
    run_some(tiny, theirs, 4, num_slots=1)
    with theirs.open("a") as handle:
        handle.write('{"schema": 1, "run"')
    before = theirs.read_bytes()
    agent = agent_of(tiny, num_slots=1)
    assert content(collect(agent, JOBS, path, progress=None, others=[theirs])) == content(whole)
    missing = {t.id for t in whole} - {t.id for t in read_trajectories(theirs, torn_tail=True)}
    assert {t.id for t in read_trajectories(path)} == missing and len(missing) == 2
    assert theirs.read_bytes() == before


def test_a_stop_returns_what_is_finished_and_the_next_run_makes_the_rest(tiny, whole, tmp_path):
    path = tmp_path / "t.jsonl"
    finished = collect(
        agent_of(tiny, num_slots=1),
        JOBS,
        path,
        progress=None,
        should_stop=lambda: len(path.read_text().splitlines()) >= 2,
    )
    assert [t.id for t in finished] == ["q0/0", "q0/1"]
    assert content(finished) == content(read_trajectories(path)) == content(whole)[:2]
    assert content(collect(agent_of(tiny, num_slots=1), JOBS, path, progress=None)) == content(
        whole
    )


def shares(costs, num_samples, num_ranks):
    """[rank]["question/sample", ..]"""
    asked = [question(f"q{number}") for number in range(len(costs))]
    jobs = [
        share_of_jobs(asked, num_samples, costs, rank=rank, num_ranks=num_ranks)
        for rank in range(num_ranks)
    ]
    return [[f"{job.question.id}/{job.sample}" for job in share] for share in jobs]


def test_the_costliest_questions_are_dealt_first_and_groups_stay_together():
    """10 + 1 + .5 against 6 + 5: in turn, as q0 q2 q4 and q1 q3, it would be 17 against 5.5."""
    assert shares([10, 0.5, 1, 5, 6], 2, 2) == [
        [f"q{k}/{s}" for k in ks for s in (0, 1)] for ks in ((0, 1, 2), (3, 4))
    ]


def test_groups_are_split_only_where_there_are_fewer_questions_than_ranks():
    """Else a rank would have nothing to do. 4 rollouts at 10 and 4 at 1 over three ranks: 20 and 1
    + 1, 10 + 1 and so on, each job once.
    """
    split = shares([10, 1], 4, 3)
    assert sorted(job for share in split for job in share) == [
        f"q{k}/{s}" for k in (0, 1) for s in range(4)
    ]
    assert sorted(sum(10 if job.startswith("q0") else 1 for job in share) for share in split) == [
        12,
        12,
        20,
    ]
    assert shares([0.1, 0.7, 0.2], 1, 1) == [["q0/0", "q1/0", "q2/0"]]
