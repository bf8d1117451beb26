"""Trains with a last batch that the devices of CPU_NUM_DEVICES cannot share, and compares it with one device."""

import sys

from conftest import assert_same_logs
from test_ragged_batches import BATCH, NOT_ALIKE, rows_of_programs, texts, train
from transformers import Trainer

from hf_tpu_ext import TPUTrainer
from hf_tpu_ext.trainers import ExtensionArguments


if __name__ == "__main__":
    ExtensionArguments.run_report = False
    make_model, targets, _ = NOT_ALIKE["pooled"]
    dataset = texts(**targets)
    rows = {f"per_device_{kind}_batch_size": BATCH // 8 for kind in ("train", "eval")}
    ours = train(TPUTrainer, make_model, dataset, sys.argv[1], **rows)
    assert ours.backend.num_chips == 8 and rows_of_programs(ours) == ([8, 1], [8, 1])
    assert_same_logs(ours, train(Trainer, make_model, dataset, sys.argv[1]))
