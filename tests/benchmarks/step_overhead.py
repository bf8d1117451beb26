import argparse
import json
import multiprocessing
import os
import time
from pathlib import Path

import contenders


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--layers", type=int, default=16)
    p.add_argument("--batch", type=int, default=1)
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--window", type=int, default=20)
    p.add_argument("--only", nargs="+", default=["bare", "ours", "stock_padded"])
    p.add_argument("--dir", default="/tmp/so/run")
    a = p.parse_args()
    os.environ.update({"HF_TPU_EXT": "0", "PJRT_DEVICE": "CPU", "HF_HUB_OFFLINE": "1"})
    from transformers import AutoTokenizer

    from hf_tpu_ext.examples.tiny import make_arithmetic, make_model

    d = Path(a.dir)
    d.mkdir(parents=True, exist_ok=True)
    make_model(d / "model", num_hidden_layers=a.layers)
    data = make_arithmetic(d / "data", 2048)
    tok = AutoTokenizer.from_pretrained(d / "model")
    rows = []
    for line in (data / "train.jsonl").read_text().splitlines():
        r = json.loads(line)
        rows.append({"input_ids": tok(r["prompt"][0]["content"] + r["completion"][0]["content"])["input_ids"]})
    L = max(len(r["input_ids"]) for r in rows)
    L = -(-L // 8) * 8
    print("max_length", L, min(len(r["input_ids"]) for r in rows))
    (d / "rows.json").write_text(json.dumps(rows))
    plan = contenders.Plan(d, L, a.batch, 5, a.window, a.repeats)
    ctx = multiprocessing.get_context("spawn")
    runs = {}
    for name in a.only:
        here, there = ctx.Pipe()
        pr = ctx.Process(target=contenders.run, args=(name, plan, there))
        t = time.time()
        pr.start()
        there.close()
        print(name, here.recv(), time.time() - t, flush=True)
        runs[name] = here
    W = {n: [] for n in runs}
    for r in range(a.repeats):
        for n, c in runs.items():
            c.send(None)
            m = c.recv()
            W[n].append(m)
            print(r, n, m, flush=True)
    for n, c in runs.items():
        e = c.recv()
        print(
            n,
            e["programs"],
            list(e["losses"].items())[-1],
            "ratio bare",
            [round(x["steps_per_second"] / b["steps_per_second"], 3) for x, b in zip(W[n], W["bare"])],
            "cpu ratio",
            [round(b["cpu_seconds_per_step"] / x["cpu_seconds_per_step"], 3) for x, b in zip(W[n], W["bare"])],
        )


if __name__ == "__main__":
    main()
