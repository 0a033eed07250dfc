"""The figures of evaluations as HTML: tables with a column a run, plots, the paired comparison, how
it was made. All text is escaped here.
"""

import html
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import quote

from venus.grading.stats import RESAMPLES
from venus.grading.summary import FREE, difference, unlike
from venus.protocol import SPECIAL_TOKENS
from venus.report.plot_svg import Curve, svg_curves
from venus.tokenizer import ChatTokenizer
from venus.trajectory import Trajectory

BINS = 40  # of the histogram of turns, at most
MARKS = {"correct": "✓", "incorrect": "✗", "error": "!"}


@dataclass(frozen=True)
class Run:
    """One evaluation, or trajectories alone. `name` stands in tables and in links
    (#name/question/sample); each run has another.
    """

    name: str
    trajectories: Sequence[Trajectory]
    tokenizer: ChatTokenizer
    verdicts: Sequence[dict] = ()
    summary: dict | None = None

    @cached_property
    def structure_ids(self) -> frozenset[int]:
        """The ids of the structure tokens."""
        return frozenset(token for text in SPECIAL_TOKENS for token in self.tokenizer.encode(text))

    @cached_property
    def verdict_of(self) -> dict[tuple, dict]:
        """The verdict rows by (run, question_id, sample)."""
        return {(row["run"], row["question_id"], row["sample"]): row for row in self.verdicts}

    def link(self, question_id: str, sample: int) -> str:
        """The address of a trajectory within the report."""
        return "#" + "/".join(
            quote(part, safe="", errors="surrogatepass")
            for part in (self.name, question_id, str(sample))
        )


class Html(str):
    """Text that is HTML already."""


def cell(value: object) -> str:
    """A value of a table; None is a dash."""
    return (
        value
        if isinstance(value, Html)
        else "–"
        if value is None
        else html.escape(f"{value:,}" if isinstance(value, int) else str(value))
    )


def percent(value: float | None) -> str | None:
    """A share of 1 in percent."""
    return None if value is None else f"{100 * value:.1f} %"


def interval(found: dict | None) -> Html | None:
    """A mean in percent with its interval."""
    return (
        None
        if found is None
        else Html(
            f"{100 * found['mean']:.1f} % <small>[{100 * found['low']:.1f}, "
            f"{100 * found['high']:.1f}]</small>"
        )
    )


def clock(seconds: float) -> str | None:
    """Seconds; 0 is what trajectories have that others made."""
    return f"{seconds:,.1f}" if seconds else None


def table(caption: str, columns: Sequence[str], rows: Sequence[tuple], kind: str = "n") -> str:
    """A table; the first cell of a row is its head, the others are numbers (kind n) or text that
    wraps (long). Without the rows that hold nothing, and empty when none is left.
    """
    rows = [row for row in rows if any(value is not None for value in row[1:])]
    if not rows:
        return ""
    heads = "".join(f'<th class="{kind}">{cell(name)}</th>' for name in columns)
    body = ""
    for first, *rest in rows:
        cells = "".join(f"<td class={kind}>{cell(value)}</td>" for value in rest)
        body += f"<tr><th>{cell(first)}</th>{cells}</tr>\n"
    title = f"<h3>{cell(caption)}</h3>" * bool(caption)
    return (
        f'<div class="wide">{title}<table><thead><tr><th></th>{heads}</tr></thead>'
        f"<tbody>\n{body}</tbody></table></div>"
    )


# of analysis.summarise: what a row says -> where it stands there, how it is written
FIGURES: dict[str, dict[str, tuple[str, Callable]]] = {
    "What counts": {
        "questions": ("questions", int),
        "trajectories": ("trajectories", int),
        "graded": ("graded", int),
        "judge errors, counted as wrong": ("judge_errors", int),
        "cut off by the clock": ("cut_off", int),
        "service down": ("tool_error", int),
        "no ground truth": ("no_ground_truth", int),
        "leak suspected": ("leaks.suspected", cell),
        "success without those": ("leaks.success", interval),
    },
    "Tool use: visits / (visits + searches)": {
        f"{label}, {which}": (f"tool_use.{which}.{key}", percent)
        for which in ("overall", "correct", "wrong")
        for key, label in (
            ("browse", "by call"),
            ("browse_macro", "mean of trajectories"),
            ("browse_items", "by item"),
        )
    },
    "Effort": {
        "turns, mean over questions": ("turns.mean", "{:.2f}".format),
        "sampled tokens, mean": ("tokens.sampled.mean", round),
        "context at the end, median": ("tokens.context.median", int),
        "context at the end, most": ("tokens.context.most", int),
        "calls made before": ("duplicate_calls.share", percent),
        "format-valid turns": ("format_valid_share", percent),
        "reliable sources": ("reliable_share", percent),
        "seconds, model": ("seconds.model", clock),
        "seconds, tools": ("seconds.tool", clock),
    },
}


def at(run: Run, path: str) -> object:
    """The figure at a dotted path of a summary; None below None. ValueError: a
    summary of another version.
    """
    found = run.summary
    for name in path.split("."):
        if found is not None and name not in found:
            raise ValueError(f"the summary of {run.name} holds no {path}: evaluate again")
        found = found and found[name]
    return found


def figures(title: str, runs: Sequence[Run], baseline: str | None) -> str:
    """All of the page above the browser."""
    evaluated = [run for run in runs if run.summary]
    about = " · ".join(f"{run.name}: {len(run.trajectories):,} trajectories" for run in runs)
    parts = [f'<h1>{html.escape(title)}</h1>\n<p class="soft">{html.escape(about)}</p>']
    if evaluated:
        parts.append(
            '<h2 id="figures">Figures</h2>\n<div class="cards">'
            + "\n".join(tables(evaluated))
            + "</div>"
        )
        parts.append('<div class="plots">' + "\n".join(plots(evaluated)) + "</div>")
    if baseline:
        parts.append(comparison(runs[0], next(run for run in runs if run.name == baseline)))
    if evaluated:
        parts.append(
            '<details class="fold"><summary>How it was made: settings, versions, '
            f"commands</summary>{manifests(evaluated)}</details>"
        )
    return "\n".join(parts)


def tables(runs: Sequence[Run]) -> list[str]:
    """The figures of the evaluations, a column a run."""
    names = [run.name for run in runs]

    def keyed(part: str, label: str) -> list[tuple]:
        columns = [at(run, part) or {} for run in runs]
        return [
            (label.format(key), *(interval(column.get(key)) for column in columns))
            for key in dict.fromkeys(key for column in columns for key in column)
        ]

    success = [
        (label, *(interval(at(run, path)) for run in runs))
        for label, path in (("success", "success"), ("of those graded", "success_graded"))
    ]
    success += [
        *keyed("scores", "{}"),
        ("majority vote", *(interval(at(run, "majority")) for run in runs)),
    ]
    found = [
        table("Success, with 95 % intervals over questions", names, success),
        table(
            "Success by number of samples",
            names,
            [*keyed("pass_at", "pass@{}, unbiased"), *keyed("any_of_first", "any of the first {}")],
        ),
    ]
    for caption, rows in FIGURES.items():
        cells = {label: [at(run, path) for run in runs] for label, (path, _) in rows.items()}
        found.append(
            table(
                caption,
                names,
                [
                    (label, *(None if x is None else rows[label][1](x) for x in row))
                    for label, row in cells.items()
                ],
            )
        )
    statuses = [
        {
            f"{kind}, {status}": n
            for kind, of in at(run, "tool_status").items()
            for status, n in of.items()
        }
        for run in runs
    ]
    found += [
        counts("Why the wrong ones failed", names, [at(run, "failures") for run in runs]),
        counts("Stop reasons", names, [at(run, "stop_reasons") for run in runs]),
        counts("Tool calls by status", names, statuses),
    ]
    return [
        *found,
        counts(
            "Strings of the leak guard that were seen",
            names,
            [at(run, "leaks.strings") or {} for run in runs],
        ),
    ]


def counts(caption: str, names: Sequence[str], columns: Sequence[dict[str, int]]) -> str:
    """A table of counts and their shares by name, a column a run; what nowhere
    occurs is left out.
    """
    rows = []
    for name in dict.fromkeys(
        name for column in columns for name, number in column.items() if number
    ):
        numbers = [(column.get(name, 0), sum(column.values()) or 1) for column in columns]
        rows.append(
            (
                name.replace("_", " "),
                *(
                    Html(f"{number:,} <small>{percent(number / total)}</small>")
                    for number, total in numbers
                ),
            )
        )
    return table(caption, names, rows)


def plots(runs: Sequence[Run]) -> list[str]:
    """pass@k by both estimators, and the share of trajectories by number of turns."""
    samples, turns = [], []
    longest = max(int(n) for run in runs for n in at(run, "turn_histogram"))
    width = -(-longest // BINS) or 1
    for color, run in enumerate(runs):
        for key, label, dashed in (
            ("pass_at", "pass@k, unbiased", False),
            ("any_of_first", "any of the first k", True),
        ):
            points = {int(k): 100 * found["mean"] for k, found in (at(run, key) or {}).items()}
            samples += (
                [Curve([*points], [*points.values()], f"{run.name}: {label}", color, dashed)]
                if len(points) > 1
                else []
            )
        histogram = {int(n): count for n, count in at(run, "turn_histogram").items()}
        bins = range(min(histogram) // width, max(histogram) // width + 1)
        shares = [
            100
            * sum(histogram.get(n, 0) for n in range(b * width, (b + 1) * width))
            / sum(histogram.values())
            for b in bins
        ]
        edges = [b * width - 0.5 for b in (*bins, bins.stop)]
        turns.append(
            Curve(
                [x for x in edges for _ in range(2)],
                [0, *(share for share in shares for _ in range(2)), 0],
                run.name,
                color,
                filled=True,
            )
        )
    found = (
        [
            svg_curves(
                samples,
                "Success by number of samples",
                "samples k",
                "% of questions",
                y_range=(0, 100),
            )
        ]
        if samples
        else []
    )
    return [*found, svg_curves(turns, "Turns", "turns", "% of trajectories")]


def comparison(first: Run, second: Run) -> str:
    """The difference in success, paired by question, and the questions that flipped, with links
    to their trajectories.
    """
    # the numbers of summary.json
    config = (
        first.summary["run"]["config"] if first.summary else {"seed": 0, "resamples": RESAMPLES}
    )
    found = difference(
        first.verdicts,
        second.verdicts,
        second.name,
        seed=config["seed"],
        resamples=config["resamples"],
    )
    equal = found["questions"] - len(found["gained"]) - len(found["lost"])
    numbers = (
        f"{100 * found['mean']:+.1f} points [{100 * found['low']:+.1f}, {100 * found['high']:+.1f}]"
    )
    text = (
        f"Success of {first.name} minus {second.name}: {numbers}, 95 %, paired over "
        f"{found['questions']:,} questions, {equal:,} of them equal."
    )
    parts = [f'<h2 id="comparison">Comparison</h2>\n<p>{html.escape(text)}</p>']
    if (
        fields := unlike(at(first, "manifest"), at(second, "manifest"), FREE)
        if first.summary and second.summary
        else []
    ):
        parts.append(
            '<p class="error">Made under different settings, which may be the cause: '
            f"{html.escape(', '.join(fields))}.</p>"
        )
    asked = {t.question_id: t.question for run in (first, second) for t in run.trajectories}
    for name, word in (("gained", "rose"), ("lost", "fell")):
        rows = [
            (asked.get(question, question), marks(second, question), marks(first, question))
            for question in found[name]
        ]
        flips = table("", [second.name, first.name], rows, "long")
        parts.append(
            f'<details class="fold"><summary>{len(rows):,} questions whose success '
            f"{word}</summary>{flips}</details>"
        )
    return "\n".join(parts)


def marks(run: Run, question: str) -> Html:
    """The samples of a question, each a mark that links to its trajectory where the
    report has it.
    """
    known, found = {t.key for t in run.trajectories}, []
    for key, row in sorted(run.verdict_of.items(), key=lambda item: item[1]["sample"]):
        if row["question_id"] == question:
            href = f' href="{run.link(question, row["sample"])}"' if key in known else ""
            found.append(
                f'<a class="verdict {row["verdict"]}"{href} title="{row["verdict"]}, sample '
                f'{row["sample"]}">{MARKS[row["verdict"]]}</a>'
            )
    return Html(" ".join(found))


def manifests(runs: Sequence[Run]) -> str:
    """Manifest, versions, commit and command of each run, a row a field."""
    made = []
    for run in runs:
        record = at(run, "run")
        git = record["git"] or {"commit": "", "dirty": False}
        made.append(
            {
                **at(run, "manifest"),
                "commit": git["commit"][:12] + " with changes" * git["dirty"],
                **record["versions"],
                "machine": " · ".join(map(str, record["platform"].values())),
                "command": " ".join(record["argv"]),
            }
        )
    rows = [
        (name, *(shown(fields.get(name)) for fields in made))
        for name in dict.fromkeys(name for fields in made for name in fields)
    ]
    return table("", [run.name for run in runs], rows, "long")


def shown(value: object) -> str | None:
    """A JSON value as text."""
    return value if isinstance(value, str | None) else json.dumps(value, ensure_ascii=False)
