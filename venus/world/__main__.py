"""Synthetic webs, questions, experts, tokenizer: python -m venus.world build (`build`)."""

from venus.cli import run_command
from venus.world.build import WorldConfig, build

if __name__ == "__main__":
    commands = {"build": (build, WorldConfig, "Build a synthetic offline world.")}
    run_command(commands, "A synthetic offline world.")
