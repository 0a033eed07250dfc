"""Raw agent trajectories to SFT rows: python -m venus.clean (`curation.clean`)."""

import functools
import os

from venus.cli import run
from venus.curation.clean import CleanConfig, main
from venus.tools.options import Keys

if __name__ == "__main__":
    run(
        functools.partial(main, keys=Keys.read(os.environ)),
        CleanConfig,
        "Raw agent trajectories to SFT rows.",
    )
