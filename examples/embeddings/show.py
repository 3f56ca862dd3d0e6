"""Prints how similar the sentences are: the cosine of each pair of embeddings that the job made."""

from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
SENTENCES = HERE / "sentences.txt"
OUTPUTS = HERE / "sentences" / "out"


def main() -> None:
    sentences = SENTENCES.read_text().splitlines()
    rows = []
    for index in range(len(sentences)):
        with np.load(OUTPUTS / f"{index:02}.npz") as result:
            rows.append(result["sentence_embedding"][0])
    embeddings = np.stack(rows)  # [sentences, 384], each of length 1
    similarity = embeddings @ embeddings.T

    print("\nCosine similarity, by sentence:\n")
    for index, sentence in enumerate(sentences):
        values = "  ".join(f"{value:5.2f}" for value in similarity[index])
        print(f"  {index}  {values}   {sentence}")
    first, second = sentences[0], sentences[1]
    print(f'\n"{first}" and "{second}": {similarity[0, 1]:.4f}')


if __name__ == "__main__":
    main()
