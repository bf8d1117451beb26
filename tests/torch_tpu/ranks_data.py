"""Runs of several processes: how they are started, and what they evaluate."""

import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

from datasets import Dataset


HERE = Path(__file__).parent
SECONDS = 300
# Left to run ahead, torch_tpu and the plug-in for CPU have waited for each other now and then, when a buffer was freed.
BLOCKING = {"TORCH_TPU_LAUNCH_BLOCKING": "1"}


def on_ranks(spec, model_dir, directory, count=2, hosts=1):
    """
    Run `ranks_driver.py` in `count` processes: what each noted of each training, and what they printed. Of several `hosts`,
    launchers are started as on each, in a directory of its own.
    """
    spec_file, output_file = directory / "spec.json", directory / "noted.json"
    spec_file.write_text(json.dumps(spec))
    driver = [str(HERE / "ranks_driver.py"), str(model_dir), str(directory), str(spec_file), str(output_file)]
    with socket.socket() as listening:
        listening.bind(("", 0))
        port = listening.getsockname()[1]
    started = []
    for host in range(hosts):
        disk = directory / f"host_{host}"
        disk.mkdir(exist_ok=True)
        meets = (
            ["--standalone"] if hosts == 1 else [f"--nnodes={hosts}", f"--node_rank={host}", f"--master_port={port}"]
        )
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *meets, f"--nproc_per_node={count // hosts}", *driver],
                env={
                    **os.environ,
                    "TPU_SKIP_MDS_QUERY": "1",
                    "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
                    **BLOCKING,
                },
                stdout=(disk / "printed").open("w"),
                stderr=subprocess.STDOUT,
                cwd=disk,
            )
        )
    try:
        statuses = [process.wait(SECONDS) for process in started]
    finally:
        for process in started:
            process.terminate()
    printed = "".join((directory / f"host_{host}" / "printed").read_text() for host in range(hosts))
    assert statuses == [0] * hosts, printed[-12000:]
    return json.loads(output_file.read_text()), printed


def evaluated_rows():
    """As many tokens in each completion: the mean over batches is that over tokens, however many rows are in a batch."""
    rng = random.Random(7)
    words = ["".join(rng.choices("abcdefgh ", k=size)) for size in rng.choices(range(4, 30), k=16)]
    return Dataset.from_list([{"prompt": word, "completion": word[:3] + "z"} for word in words])


def logits_in_mean(predicted):
    """Of all rows: their number, and the mean of their logits at the labels."""
    logits, labels = predicted.predictions, predicted.label_ids
    return {"rows": len(labels), "logits": float(logits[labels != -100].mean())}
