"""The ground truth's log-probability after every turn: python -m venus.info_gain score
(`rl.info_gain`).
"""

import sys

from venus.cli import run
from venus.rl.info_gain import ScoreConfig, score_command

if __name__ == "__main__":
    if sys.argv[1:2] != ["score"]:
        print(
            "error: usage: python -m venus.info_gain score TRAJECTORIES --model DIR",
            file=sys.stderr,
        )
        sys.exit(2)
    argv = sys.argv[2:]
    if argv and not argv[0].startswith("-"):
        argv.insert(0, "--trajectories")
    run(score_command, ScoreConfig, "Print v_t and the gain of every turn.", argv)
