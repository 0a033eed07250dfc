"""Synthetic webs, questions, experts, tokenizer: python -m venus.world build (`build`)."""

import sys

from venus.cli import run
from venus.world.build import WorldConfig, build

if __name__ == "__main__":
    if sys.argv[1:2] != ["build"]:
        print(
            "error: usage: python -m venus.world build --out DIR [--seed S]; build --help "
            "lists the flags",
            file=sys.stderr,
        )
        sys.exit(2)
    del sys.argv[1]
    run(build, WorldConfig, "build a synthetic offline world")
