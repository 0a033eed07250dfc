"""The report people look at: one self-contained HTML file with figures, a paired comparison and
every trajectory, readable offline.

    write_report("report.html", "GAIA", [Run("igpo", trajectories, tokenizer, verdicts, summary),
    Run("sft", ...)], baseline="sft")

`summary` is eval.py's summary.json, `verdicts` are the rows of its verdicts.jsonl. A run without
them (rollouts of a training step, released trajectories) is shown in the browser alone. The first
run is paired by question with the run named `baseline`.

Figures are static HTML, made here and escaped. Trajectories are JSON, deflated, in base64, a block
each, that the page (report.html beside this file) unpacks when one is opened; it puts their text on
the page as text nodes only. The policy in the head allows the page's own style and script by their
hashes and nothing else: no request, no image, no script that a trajectory brings along.
"""

import base64
import hashlib
import html
import json
import os
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

from venus.files import read_jsonl, replacing
from venus.report.figures import Run, as_text, figures
from venus.tokenizer import ChatTokenizer
from venus.trajectory import Trajectory, Turn, read_trajectories

# of a verdict's row, those that the page shows elsewhere or not at all
VERDICT_KEYS = ("run", "question_id", "sample", "verdict", "manifest")
PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")


def write_report(
    path: str | os.PathLike, title: str, runs: Sequence[Run], *, baseline: str | None = None
) -> None:
    """Write the report of `runs` to `path`, by rename. ValueError: no run, a name or trajectory
    that occurs twice, no run named `baseline`.
    """
    names = [run.name for run in runs]
    if not runs or len(set(names)) < len(names) or baseline not in (None, *names[1:]):
        raise ValueError(
            f"a report of the runs {names} against {baseline!r}: need a run, names that "
            "differ, and the baseline among the later ones"
        )
    template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    parts = {
        "title": html.escape(title),
        "policy": policy(template),
        "figures": figures(title, runs, baseline),
        "index": script_json(index_of(runs)),
    }
    before, after = (
        PLACEHOLDER.sub(lambda match: parts[match[1]], half) for half in template.split("{{data}}")
    )
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    everything = ((trajectory, run) for run in runs for trajectory in run.trajectories)
    with (
        replacing(path) as temporary,
        # a lone surrogate has no UTF-8 form
        open(temporary, "w", encoding="utf-8", errors="xmlcharrefreplace") as handle,
    ):
        handle.write(before)
        handle.writelines(block(f"t{k}", payload(*one)) for k, one in enumerate(everything))
        handle.write(after)


def policy(template: str) -> str:
    """The Content-Security-Policy: the template's one style and one script, by
    hash, and nothing else.
    """
    texts = (template.split(f"<{tag}>")[1].split(f"</{tag}>")[0] for tag in ("style", "script"))
    style, script = (
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts
    )
    return (
        f"default-src 'none'; style-src 'sha256-{style}'; script-src 'sha256-{script}'; base-uri "
        "'none'; form-action 'none'"
    )


# -- trajectories: an index for the list, a block each


def script_json(obj: object) -> str:
    """JSON that may stand in a script element: no `<`, so that no text in it can close the
    element or open a comment.
    """
    return json.dumps(obj, separators=(",", ":")).replace("<", "\\u003c")


def block(name: str, obj: dict) -> str:
    """One data block: JSON, deflated, in base64."""
    text = json.dumps(obj, ensure_ascii=False, separators=(",", ":"))
    packed = zlib.compress(text.encode("utf-8", "surrogatepass"), 9)
    return f'<script type="text/plain" id="{name}">{base64.b64encode(packed).decode()}</script>\n'


def index_of(runs: Sequence[Run]) -> dict:
    """What the list shows and filters by: questions once, and of each trajectory a row. ValueError:
    two trajectories with one link.
    """
    questions, rows = {}, {}
    for run in runs:
        for t in run.trajectories:
            graded = {"verdict": None, "failure": None, "leaks": ()} | run.verdict_of.get(t.key, {})
            question = (t.question_id, t.question, t.ground_truth)
            row = {
                "run": run.name,
                "link": run.link(t.question_id, t.sample),
                "asked": questions.setdefault(question, len(questions)),
                "sample": t.sample,
                "prediction": t.prediction,
                "turns": len(t.turns),
                "tokens": len(t.token_ids),
                "stop_reason": t.stop_reason,
                "verdict": graded["verdict"],
                "failure": graded["failure"],
                "leak": "leak suspected" if graded["leaks"] else None,
            }
            if rows.setdefault(row["link"], row) is not row:
                raise ValueError(
                    f"run {run.name!r} holds two trajectories {t.id}; give runs of their own "
                    "to trajectories of several"
                )
    return {
        "questions": [
            {"id": name, "question": text, "ground_truth": gt} for name, text, gt in questions
        ],
        "trajectories": [*rows.values()],
    }


def payload(t: Trajectory, run: Run) -> dict:
    """All that an opened trajectory shows. A part is [kind, number of tokens,
    pieces]; see `pieces`.
    """
    status, value = t.outcome.status, t.outcome.value
    facts = {
        "stop reason": t.stop_reason,
        "sample": f"{t.sample}, seed {t.seed}, run {t.run}",
        "outcome": status if value is None else f"{value:g} ({status})",
    }
    if any(t.seconds.values()):
        facts["seconds"] = ", ".join(f"{name} {spent:,.1f}" for name, spent in t.seconds.items())
    for name, value in run.verdict_of.get(t.key, {}).items():
        if name not in VERDICT_KEYS and value not in (None, [], ""):
            facts[name.replace("_", " ")] = as_text(value)
    return {
        "facts": facts,
        "prompt": ["prompt", t.prompt_len, pieces(t.token_ids[: t.prompt_len], run)],
        "turns": [turn_payload(turn, t, run) for turn in t.turns],
    }


def turn_payload(turn: Turn, t: Trajectory, run: Run) -> dict:
    """All that an opened trajectory shows of a turn."""
    parts = parts_of(turn, t.token_ids, run.tokenizer.think_close_id)
    return {
        "start": turn.start,
        "sampled": turn.end - turn.start,
        "context": turn.obs_end,
        "action": turn.action,
        "what": headline(turn, t.prediction),
        "status": turn.tool_status,
        "seconds": turn.seconds,
        "duplicate": turn.duplicate,
        "gain": turn.info_gain,
        "advantage": turn.advantage,
        "parts": [[kind, len(ids), pieces(ids, run)] for kind, ids in parts if ids],
    }


def headline(turn: Turn, prediction: str | None) -> str:
    """Say in a few words what a turn does: its queries, its addresses, or the answer."""
    if turn.action == "answer":
        return prediction or ""
    key = {"search": "query", "visit": "url"}.get(turn.action)
    return " | ".join(turn.arguments[key]) if key else ""


def parts_of(turn: Turn, ids: list[int], think_close_id: int) -> list[tuple[str, list[int]]]:
    """Cut a turn into thoughts, action and observation; some may be empty. Without a `</think>` of
    its own, what was sampled is one part.
    """
    sampled = ids[turn.start : turn.end]
    cut = sampled.index(think_close_id) + 1 if think_close_id in sampled else 0
    kind = "call" if turn.action in ("search", "visit") else turn.action
    return [
        ("think", sampled[:cut]),
        (kind, sampled[cut:]),
        ("observation", ids[turn.end : turn.obs_end]),
    ]


def pieces(ids: list[int], run: Run) -> list[str]:
    """Decode ids into [text, structure token, text, ...]: told apart by id, so that a page that
    spells `<|im_end|>` cannot pass for one.
    """
    found, start = [], 0
    for k, token in enumerate(ids):
        if token in run.structure_ids:
            found += [run.tokenizer.decode(ids[start:k]), run.tokenizer.decode([token])]
            start = k + 1
    return [*found, run.tokenizer.decode(ids[start:])]


def read_run(directory: str, tokenizer: ChatTokenizer, beside: Run | None = None) -> Run:
    """Read an evaluation, named after its directory, or by the whole path when `beside` has that
    name. ValueError or OSError: a file is missing or bad.
    """
    path = Path(directory)
    name = directory if beside and beside.name == path.name else path.name
    summary = json.loads((path / "summary.json").read_bytes())
    verdicts = [row for _, row in read_jsonl(path / "verdicts.jsonl")]
    rolled_out = path / "trajectories.jsonl"  # one that graded trajectories of elsewhere has none
    trajectories = read_trajectories(rolled_out) if rolled_out.exists() else []
    return Run(name, trajectories, tokenizer, verdicts, summary)
