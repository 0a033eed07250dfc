"""Small evaluations for the tests of the report: trajectories of a tiny tokenizer, graded and
summarised as eval.py does it.
"""

import functools
import tempfile
from dataclasses import replace
from pathlib import Path

from chat_samples import HOSTILE, tiny_file, tiny_spec

from venus.curation.formats import from_messages
from venus.grading import summary
from venus.grading.grade import grade_trajectories
from venus.grading.judge import RULES
from venus.protocol import assistant_text, format_answer, format_tool_call
from venus.report.page import Run
from venus.tokenizer import ChatTokenizer
from venus.trajectory import Outcome, Trajectory

# as a page or a model may write it
ATTACK = (
    "</script><script>window.hit = 1</script><img src=x onerror='window.hit = 1'><!-- {{data}} & "
    '"q"'
)


@functools.cache
def tokenizer() -> ChatTokenizer:
    with tempfile.TemporaryDirectory() as directory:
        return ChatTokenizer(tiny_file(Path(directory), tiny_spec()))


def trajectory(
    question: str,
    sample: int,
    *,
    answer: str,
    page: str = "a page",
    gains: bool = False,
    run: str = "r",
) -> Trajectory:
    """search, malformed, visit, answer, with the ground truth "yes"; with gains as a
    training step leaves it.
    """
    turns = [
        assistant_text("look", format_tool_call("search", {"query": ["who"]})),
        "<think>\nno action\n</think>",
        assistant_text("open", format_tool_call("visit", {"url": ["http://a"], "goal": "find"})),
        assistant_text("done", format_answer(answer)),
    ]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": question}]
    for turn in turns:
        messages += [
            {"role": "assistant", "content": turn},
            {"role": "user", "content": f"<tool_response>\n{page}\n</tool_response>"},
        ]
    made = from_messages(
        {"question": question, "gt": "yes", "messages": messages[:-1]}, tokenizer()
    )
    made = replace(
        made, run=run, question_id=f"id of {question}", sample=sample, manifest={"temperature": 1.0}
    )
    if gains:
        made = replace(made, outcome=Outcome(1.0, "ok"), seconds={"model": 2.5, "tool": 1.0})
        for turn, gain, advantage in zip(
            made.turns, (None, None, -0.25, None), (0.5, -1.0, 0.5, 0.0), strict=True
        ):
            turn.info_gain, turn.advantage = gain, advantage
        made.turns[0].seconds, made.turns[2].seconds = 0.25, 1.5
    return made


def evaluation(name: str, trajectories: list[Trajectory], **manifest: object) -> Run:
    """Grade by equality and summarise."""
    manifest = {"judge": "em", "prompt_hash": None} | manifest
    graded = grade_trajectories(
        trajectories,
        RULES["em"],
        tokenizer(),
        items=False,
        addresses=(),
        canaries={},
        manifest=manifest,
    )
    figures = summary.summarise((), trajectories, graded, seed=0, resamples=50)
    made = {
        "config": {"seed": 0, "resamples": 50},
        "git": None,
        "versions": {"python": "3"},
        "platform": {"cores": 2},
        "argv": ["eval.py"],
    }
    return Run(name, trajectories, tokenizer(), graded, {"name": name, **figures, "run": made})


def two_runs(*, attack: bool = False) -> list[Run]:
    """Three questions of two samples: "up" rises, "down" falls, "same" stays; and a
    run of a training step.
    """
    page, mark = (HOSTILE + ATTACK, ATTACK) if attack else ("a page", "")
    right = {
        "first": {"up": "yes", "down": "no", "same": "yes"},
        "second": {"up": "no", "down": "yes", "same": "yes"},
    }
    runs = [
        evaluation(
            name + mark,
            [
                trajectory(q + mark, s, answer=answer + mark * (answer == "no"), page=page)
                for q, answer in answers.items()
                for s in (0, 1)
            ],
        )
        for name, answers in right.items()
    ]
    return [
        *runs,
        Run("step", [trajectory("up" + mark, 0, answer="yes", page=page, gains=True)], tokenizer()),
    ]
