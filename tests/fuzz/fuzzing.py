"""Fuzz one target: `python tests/fuzz/fuzzing.py TARGET --seconds 60 --corpus FOLDER`.

Coverage of the project's code guides it (Atheris, which is libFuzzer for Python). What it learns
stays in the corpus. It stops at the first fault and leaves the input beside the corpus: put that
into `tests/fuzz/found/TARGET`, where it is a test from then on.
"""

import argparse
import hashlib
import sys
from pathlib import Path
from random import Random
from typing import Final

import atheris

with atheris.instrument_imports(
    include=["shoal_protocol", "shoal_api", "shoal_coordinator", "shoal_agent", "shoal_cli"]
):
    from fuzz.message_mutation import mutated
    from fuzz.targets import TARGETS, check_harmless, found

HANG_SECONDS: Final = 20
INPUT_BYTES: Final = 64 << 10
PROCESS_MIB: Final = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--corpus", type=Path, required=True)
    asked = parser.parse_args()
    target = TARGETS[asked.target]
    corpus = asked.corpus / asked.target
    corpus.mkdir(parents=True, exist_ok=True)
    for seed in (*target.seeds(), *(path.read_bytes() for path in found(asked.target))):
        (corpus / hashlib.sha256(seed).hexdigest()[:40]).write_bytes(seed)

    def mutate(data: bytes, most_bytes: int, seed: int) -> bytes:
        random = Random(seed)  # noqa: S311 - no secret

        def flip(value: bytes) -> bytes:
            return bytes(atheris.Mutate(value, len(value) + 64))

        if target.message is None or random.random() < 0.1:
            return bytes(atheris.Mutate(data, most_bytes))
        made = mutated(data, target.message, random, flip)
        return made if len(made) <= most_bytes else data

    options = {
        "max_total_time": asked.seconds,
        "timeout": HANG_SECONDS,
        "max_len": INPUT_BYTES,
        "rss_limit_mb": PROCESS_MIB,
        "artifact_prefix": f"{asked.corpus}/fault-{asked.target}-",
        "print_final_stats": 1,
    }
    arguments = [f"-{name}={value}" for name, value in options.items()]
    atheris.Setup(
        [sys.argv[0], *arguments, str(corpus)],
        lambda data: check_harmless(target, data),
        custom_mutator=mutate,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
