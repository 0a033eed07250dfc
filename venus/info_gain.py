"""The ground truth's log-probability after every turn: python -m venus.info_gain score
(`rl.info_gain`).
"""

from venus.cli import run_command
from venus.rl.info_gain import ScoreConfig, score_command

if __name__ == "__main__":
    run_command(
        {"score": (score_command, ScoreConfig, "Print v_t and the gain of every turn.")},
        "The ground truth's log-probability after every turn.",
    )
