"""Runs the code blocks of pages, each page in a namespace of its own, in a directory that holds what they name."""

import re
import sys
from pathlib import Path

import yaml

from hf_tpu_ext.cli.main import main
from hf_tpu_ext.examples.tiny import make_arithmetic, make_model, make_preferences
from hf_tpu_ext.examples.tiny_vision import make_digits, make_vision_model


BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<language>python|yaml)\n(?P<code>.*?)^(?P=indent)```", re.DOTALL | re.MULTILINE
)


def make_world():
    """What pages take from the hub or from an earlier run, by the same names: a local directory counts more than the hub."""
    for name in ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "runs/sft_lora_qwen3", "runs/mine"):
        make_model(name)
    make_arithmetic("trl-lib/Capybara", num_rows=32)
    make_preferences("trl-lib/ultrafeedback_binarized", num_rows=32)
    make_vision_model("HuggingFaceTB/SmolVLM-256M-Instruct", "smolvlm")
    make_digits(8).to_parquet("trl-lib/llava-instruct-mix/train.parquet")


def run_yaml(code):
    recipe = yaml.safe_load(code)
    Path("block.yaml").write_text(code, encoding="utf-8")
    # What is left out of a fragment.
    rest = {"model_name_or_path": "Qwen/Qwen3-0.6B", "dataset_name": "trl-lib/Capybara", "output_dir": "runs/block"}
    words = [word for key, value in rest.items() if key not in recipe for word in (f"--{key}", value)]
    assert main(["sft", "--config", "block.yaml", "--max_steps", "1", "--report_to", "none", *words]) == 0


def run_page(page):
    namespace = {"__name__": page.stem}
    for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
        code = re.sub(rf"^{block['indent']}", "", block["code"], flags=re.MULTILINE)
        if block["language"] == "python":
            exec(compile(code, str(page), "exec"), namespace)
        else:
            run_yaml(code)


if __name__ == "__main__":
    make_world()
    for name in sys.argv[1:]:
        print(f"page {name}", flush=True)
        run_page(Path(name))
