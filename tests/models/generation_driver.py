"""
Prints how the greedy text of a tiny model of a family on XLA compares with that of upstream's `generate` on eager CPU: `equal`,
`refused`, `other`, or `upstream fails`.

    python generation_driver.py MODEL_TYPE
"""

import copy
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent))
import torch
from huggingface_hub.errors import StrictDataclassError
from tiny_configs import tiny_config
from transformers import AutoModelForCausalLM

from hf_tpu_ext import generate
from hf_tpu_ext.errors import UserError


PROMPTS = [[17, 31, 8], [12, 30, 33, 45, 50, 9, 20, 44, 51, 22, 11, 18], [41]]
END, GREEDY = 2, dict(max_new_tokens=14, do_sample=False)


def compare(model_type: str) -> str:
    torch.manual_seed(0)
    try:
        model = AutoModelForCausalLM.from_config(tiny_config(model_type, decoder=True), dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                # Far from uniform, for first choices not to depend on the order of summation.
                parameter.add_(torch.randn_like(parameter), alpha=0.15)
        # What a family's own settings force or leave out is another test's.
        for name in (
            "forced_bos_token_id",
            "forced_eos_token_id",
            "begin_suppress_tokens",
            "encoder_no_repeat_ngram_size",
        ):
            setattr(model.generation_config, name, None)
        model.generation_config.update(bos_token_id=1, eos_token_id=END, pad_token_id=0)
        upstream = copy.deepcopy(model)
        # Row by row: not all families have the same text with padding on the left.
        expected = [_complete(upstream.generate, [prompt]) for prompt in PROMPTS]
    except (AttributeError, ImportError, RuntimeError, ValueError, StrictDataclassError) as error:
        return f"upstream fails: {type(error).__name__}"
    try:
        found = _complete(lambda **inputs: generate(model, prompt_lengths=[16], **inputs), PROMPTS)
    except UserError:
        return "refused"
    return "equal" if found == [row for (row,) in expected] else "other"


def _complete(generate, prompts):
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    rows = generate(input_ids=ids, attention_mask=mask, **GREEDY)[:, longest:].tolist()
    return [row[: row.index(END) + 1] if END in row else row for row in rows]


if __name__ == "__main__":
    print(compare(*sys.argv[1:]))
