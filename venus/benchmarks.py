"""Documents to a corpus: python -m venus.benchmarks (`grading.benchmarks`)."""

from venus.cli import run
from venus.grading.benchmarks import CorpusConfig, main

if __name__ == "__main__":
    run(
        main,
        CorpusConfig,
        "BrowseComp-Plus's documents, or the paragraphs of multi-hop QA, to a corpus of the "
        "offline tools.",
    )
