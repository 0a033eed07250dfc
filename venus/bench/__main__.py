"""Time the claims of speed, each against its references, and check that the results agree.

    python -m venus.bench ig        information gain of every turn in one packed pass, against a
                                    cache-reuse loop and a forward pass per cut
    python -m venus.bench decode    the sampler, against a forward pass per token and, when
                                    installed, transformers' `generate` with its cache
    python -m venus.bench step      a training step, against transformers with a plain cross-entropy
                                    (`step`)
    python -m venus.bench gpu       training and decoding of a 4B-shaped model on a GPU (`gpu`)
    python -m venus.bench clean     the cleaning of trajectories, alone and against the bare
                                    tokenizer (`clean`)

Weights and ids are random: only shapes and lengths matter to the clock. The sides run in turn in
one process, so that a noisy machine disturbs all of them alike. Sides that disagree are an error
(exit code 1); a missed goal is printed and is none.
"""

from functools import partial

from venus.bench.clean import CleanBenchConfig, clean
from venus.bench.gpu import GpuConfig, gpu
from venus.bench.inference import RELEASED, DecodeConfig, IgConfig, decode, ig
from venus.bench.step import StepConfig, step
from venus.cli import run_command

if __name__ == "__main__":
    commands = {
        "ig": (ig, IgConfig, "Time the scoring of information gain."),
        "decode": (decode, DecodeConfig, "Time the decoding of tokens."),
        "step": (
            partial(step, released_turns=RELEASED[:2]),
            StepConfig,
            "Time a training step and measure its memory.",
        ),
        "gpu": (gpu, GpuConfig, "Measure a 4B-shaped model."),
        "clean": (clean, CleanBenchConfig, "Time the cleaning of rows."),
    }
    run_command(commands, "Time the claims of speed and check that the results agree.")
