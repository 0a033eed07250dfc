"""The one currency: questions, turns and trajectories, and their JSONL form (schema 1).

    [ prompt | assistant_0 | tool_0 | assistant_1 | tool_1 | ... | assistant_T-1 ]
               ^start  ^end   ^obs_end = start of turn 1

Token ids are kept as sampled; text is derived by decoding, masks and boundaries are derived from
the spans. Whoever made the tokens recorded the spans; they are checked here once, at construction,
and nothing downstream searches for them again.
"""

import math
import os
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

from venus.files import read_jsonl

SCHEMA = 1
ACTIONS = ("search", "visit", "answer", "malformed")
TOOL_STATUSES = ("ok", "empty", "error", "timeout")
MAY_HAVE_NO_TURN = ("time_limit", "straggler", "tool_error", "model_error")
STOP_REASONS = (
    "answered",
    "turn_limit",
    "context_limit",
    "token_limit",
    "no_answer",
    *MAY_HAVE_NO_TURN,
)
OUTCOME_STATUSES = ("ok", "judge_error", "tool_error", "cut_off")


def span_mask(spans: Iterable[tuple[int, int]], length: int) -> list[int]:
    """Mark the tokens of half-open spans: [(1, 3)] over 4 tokens -> [0, 1, 1, 0]."""
    mask = [0] * length
    for start, end in spans:
        mask[start:end] = [1] * (end - start)
    return mask


def _one_of(value: Any, names: tuple, where: str) -> None:
    if value not in names:
        raise ValueError(f"{where} {value!r} is none of {', '.join(names)}")


def _read(cls: type, obj: dict, where: str, **made: Any) -> Any:
    """Build dataclass `cls` from a JSON object, each field of the type its annotation names; `made`
    holds the fields already converted.
    """
    unknown = sorted(set(obj) - {f.name for f in fields(cls)})
    missing = [
        f.name
        for f in fields(cls)
        if f.name not in obj and f.default is MISSING and f.default_factory is MISSING
    ]
    if unknown or missing:
        raise ValueError(
            f"{where}: unknown field {unknown[0]!r}"
            if unknown
            else f"{where}: field {missing[0]!r} is missing"
        )
    for f in fields(cls):
        types = (
            get_args(f.type) if isinstance(f.type, UnionType) else (get_origin(f.type) or f.type,)
        )
        if f.name in obj and f.name not in made:
            made[f.name] = obj[f.name]
            # exact: a JSON true is not the integer 1
            if type(obj[f.name]) not in types + (int,) * (float in types):
                raise ValueError(f"{where}: field {f.name!r} cannot be {str(obj[f.name])[:80]!r}")
    try:
        return cls(**made)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


@dataclass(frozen=True)
class Question:
    """A question with its accepted answers; `corpus` is the absolute path of its pages
    (offline tools) or None.
    """

    id: str
    question: str
    ground_truth: tuple[str, ...]
    corpus: str | None = None
    meta: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.id or not self.question.strip():
            raise ValueError("fields 'id' and 'question' must not be empty")

    @classmethod
    def from_json(cls, obj: dict, where: str = "question") -> "Question":
        """Read one row (`ground_truth`: string or list). ValueError names `where` and the field;
        extra data belongs in `meta`.
        """
        aliases = (
            [obj["ground_truth"]]
            if isinstance(obj.get("ground_truth"), str)
            else obj.get("ground_truth")
        )
        if (
            not isinstance(aliases, list)
            or not aliases
            or not all(isinstance(a, str) and a.strip() for a in aliases)
        ):
            raise ValueError(
                f"{where}: field 'ground_truth' must be a string or a list of strings, none "
                f"empty, not {str(aliases)[:80]!r}"
            )
        return _read(cls, obj, where, ground_truth=tuple(aliases))

    def to_json(self) -> dict:
        return {**vars(self), "ground_truth": list(self.ground_truth)}


@dataclass
class Turn:
    """One assistant turn: sampled ids [start, end), then glue and observation [end, obs_end).

    info_gain None = not scored, 0.0 = scored without gain; advantage None = not trained;
    tool_status None = no tool answered; seconds: how long the tool took, None where none was asked
    (a clock, so no part of what makes two turns equal).
    """

    start: int
    end: int
    obs_end: int
    action: str
    tool_status: str | None
    arguments: dict | None
    duplicate: bool = False
    info_gain: float | None = None
    advantage: float | None = None
    format_ok: bool = True
    seconds: float | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        where = f"turn [{self.start}, {self.end}, {self.obs_end}]:"
        if not 0 <= self.start < self.end <= self.obs_end:
            raise ValueError(f"{where} need 0 <= start < end <= obs_end")
        _one_of(self.action, ACTIONS, f"{where} action")
        _one_of(self.tool_status or "ok", TOOL_STATUSES, f"{where} tool_status")
        if self.format_ok == (self.action == "malformed"):
            raise ValueError(
                f"{where} action {self.action!r} with format_ok {self.format_ok}; malformed "
                "means exactly not format_ok"
            )


@dataclass
class Outcome:
    """Outcome reward: value None = not graded; status says whether the sample may enter
    statistics and loss.
    """

    value: float | None
    status: str

    def __post_init__(self) -> None:
        _one_of(self.status, OUTCOME_STATUSES, "outcome status")


@dataclass
class Trajectory:
    """One rollout. log_probs: natural logs, one per SAMPLED token, in order (empty = absent);
    seconds: {"model", "tool"}.
    """

    run: str
    question_id: str
    sample: int
    seed: int
    question: str
    ground_truth: tuple[str, ...]
    prompt_len: int
    token_ids: list[int]
    log_probs: list[float]
    turns: list[Turn]
    prediction: str | None
    outcome: Outcome
    stop_reason: str
    seconds: dict[str, float]
    manifest: dict

    def __post_init__(self) -> None:
        where = f"trajectory {self.id}:"
        _one_of(self.stop_reason, STOP_REASONS, f"{where} stop_reason")
        if not self.turns and self.stop_reason not in MAY_HAVE_NO_TURN:
            raise ValueError(f"{where} no turns, but stop_reason is {self.stop_reason}")
        starts = [turn.start for turn in self.turns] + [len(self.token_ids)]
        ends = [self.prompt_len] + [turn.obs_end for turn in self.turns]
        for k, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if start != end:
                raise ValueError(
                    f"{where} a span ends at token {end}, the next of {len(self.turns)} "
                    f"turns ({k}) or the end is at {start}"
                )
        if len(self.log_probs) not in (0, self.num_sampled):
            raise ValueError(
                f"{where} {len(self.log_probs)} log_probs for {self.num_sampled} sampled tokens"
            )
        rewards = [x for turn in self.turns for x in (turn.info_gain, turn.advantage)] + [
            self.outcome.value
        ]
        for value in (*self.log_probs, *(x for x in rewards if x is not None)):
            if not math.isfinite(value):
                raise ValueError(f"{where} a log-prob, info gain, advantage or outcome is {value}")

    @property
    def id(self) -> str:
        return f"{self.question_id}/{self.sample}"

    @property
    def key(self) -> tuple[str, str, int]:
        return (self.run, self.question_id, self.sample)

    @property
    def num_sampled(self) -> int:
        return sum(turn.end - turn.start for turn in self.turns)

    @property
    def kept(self) -> bool:
        return self.outcome.status == "ok"

    def sampled_mask(self) -> list[int]:
        """1 for each sampled token, 0 for prompt, glue and observations; as long as token_ids."""
        return span_mask([(turn.start, turn.end) for turn in self.turns], len(self.token_ids))

    def to_json(self) -> dict:
        nested = {
            "turns": [dict(vars(turn)) for turn in self.turns],
            "outcome": dict(vars(self.outcome)),
        }
        return {"schema": SCHEMA, **vars(self), "ground_truth": list(self.ground_truth), **nested}

    @classmethod
    def from_json(cls, obj: dict, where: str = "trajectory") -> "Trajectory":
        """Read one JSONL row; ValueError names `where` and what is wrong with it. An empty
        ground_truth (unlabelled rollout) is allowed.
        """
        if obj.get("schema") != SCHEMA or type(obj.get("outcome")) is not dict:
            raise ValueError(
                f"{where}: not a trajectory of schema {SCHEMA}: schema "
                f"{obj.get('schema')!r}, outcome {obj.get('outcome')!r}"
            )
        lists = {
            "turns": (dict,),
            "token_ids": (int,),
            "log_probs": (int, float),
            "ground_truth": (str,),
        }
        for name, kinds in lists.items():
            if type(obj.get(name)) is not list or not all(type(x) in kinds for x in obj[name]):
                raise ValueError(f"{where}: field {name!r} must be a list of {kinds[-1].__name__}")
        turns = [_read(Turn, turn, f"{where}: turn {k}") for k, turn in enumerate(obj["turns"])]
        made = {
            "turns": turns,
            "outcome": _read(Outcome, obj["outcome"], where),
            "ground_truth": tuple(obj["ground_truth"]),
        }
        return _read(
            cls, {name: value for name, value in obj.items() if name != "schema"}, where, **made
        )


def read_questions(path: str | os.PathLike) -> list[Question]:
    """Read a question file; corpus paths, relative to it, become absolute. ValueError: no file, no
    question, a bad row, equal ids.
    """
    questions = {}
    for where, obj in read_jsonl(path):
        if type(obj.get("corpus")) is str:
            obj["corpus"] = str((Path(path).parent / obj["corpus"]).resolve())
        question = Question.from_json(obj, where)
        if questions.setdefault(question.id, question) is not question:
            raise ValueError(f"{where}: id {question.id!r} occurs twice; ids must be unique")
    if not questions:
        raise ValueError(f"{path}: no questions in the file")
    return list(questions.values())


def read_trajectories(path: str | os.PathLike, torn_tail: bool = False) -> list[Trajectory]:
    """Read a trajectory file (schema 1), optionally without a torn last row. ValueError:
    missing file, bad row.
    """
    return [
        Trajectory.from_json(obj, where) for where, obj in read_jsonl(path, torn_tail=torn_tail)
    ]
