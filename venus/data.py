"""SFT rows and question sets: python -m venus.data stats|questions (`curation.formats`)."""

from venus.cli import run_command
from venus.curation.formats import QuestionsConfig, StatsConfig, convert_questions, stats

STATS = "Count turns, tool calls, tokens, loss tokens and strict-valid turns per file."
QUESTIONS = "Write question sets of other forms as our JSONL {id, question, ground_truth, meta}."
COMMANDS = {
    "stats": (stats, StatsConfig, STATS),
    "questions": (convert_questions, QuestionsConfig, QUESTIONS),
}

if __name__ == "__main__":
    run_command(COMMANDS, "SFT rows and RL questions.")
