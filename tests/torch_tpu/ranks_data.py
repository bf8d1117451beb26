"""What runs of several processes, and of one that they are compared with, evaluate."""

import random

from datasets import Dataset


def evaluated_rows():
    """As many tokens in each completion: the mean over batches is that over tokens, however many rows are in a batch."""
    rng = random.Random(7)
    words = ["".join(rng.choices("abcdefgh ", k=size)) for size in rng.choices(range(4, 30), k=16)]
    return Dataset.from_list([{"prompt": word, "completion": word[:3] + "z"} for word in words])


def logits_in_mean(predicted):
    """Of all rows: their number, and the mean of their logits at the labels."""
    logits, labels = predicted.predictions, predicted.label_ids
    return {"rows": len(labels), "logits": float(logits[labels != -100].mean())}
