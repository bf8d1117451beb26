"""Text that a model generates in the middle of its training: the weights of now, programs replayed, training as without it."""

import pytest
import torch
from transformers import GenerationConfig, TrainerCallback


NEW_TOKENS = 6
PROMPT_LENGTHS = [8, 16]


class Writes(TrainerCallback):
    """Generates after every step, and notes what that took, and what eager generation with the same weights gives."""

    def __init__(self, trainer, prompts, eager=None):
        from hf_tpu_ext.trainers.run.text import TextGeneration

        config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False)
        self.text = TextGeneration(trainer, config, PROMPT_LENGTHS)
        self.trainer, self.prompts, self.eager = trainer, prompts, eager
        self.found, self.expected, self.spent = [], [], []

    def on_step_end(self, args, state, control, **kwargs):
        backend = self.trainer.backend
        backend.wait()
        before = backend.counters()
        self.found.append(self.text.generate(self.prompts).token_ids)
        self.spent.append(backend.counters() - before)
        if self.eager is not None:
            weights = backend.fetch(dict(self.trainer.model.state_dict(keep_vars=True)))
            self.eager.load_state_dict(weights)
            self.expected.append([generate_eagerly(self.eager, prompt) for prompt in self.prompts])


def generate_eagerly(model, prompt):
    ids = torch.tensor([prompt])
    made = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
    )
    return made[0, len(prompt) :].tolist()


@pytest.mark.ci
@pytest.mark.usefixtures("two_layers")
@pytest.mark.parametrize(
    "settings",
    [pytest.param(dict(), marks=pytest.mark.slow), dict(scan_layers="on")],
    ids=["layers", "layers as a loop"],
)
def test_text_is_that_of_the_weights_of_now(runs, settings):
    from transformers import AutoModelForCausalLM

    from hf_tpu_ext import TPUSFTConfig

    config = dict(config_cls=TPUSFTConfig, max_steps=5, gradient_checkpointing=True, learning_rate=3e-2, **settings)
    alone = runs.ours(**config)
    trainer = runs.ours(train=False, **config)
    eager = AutoModelForCausalLM.from_pretrained(runs.model_dir, dtype=torch.float32).eval()
    prompts = [[5, 9, 7], [11, 6, 8, 12, 15, 9, 7, 20]]
    writes = Writes(trainer, prompts, eager)
    trainer.add_callback(writes)
    trainer.train()
    assert writes.found == writes.expected
    # It does not write the same after every step.
    assert writes.found[0] != writes.found[-1]
    losses = [[log["loss"] for log in each.state.log_history if "loss" in log] for each in (alone, trainer)]
    assert losses[0] == losses[1]
    # Nothing is compiled, nothing traced, and the host reads once.
    last = writes.spent[-1]
    assert (last.compiles, last.executions, last.reads, last.replays) == (0, 2, 1, 2)
    assert sum(spent.compiles for spent in writes.spent[1:]) == 0


def test_samples_of_an_eager_device_follow_the_seed(runs):
    """And leave the random numbers of the run as they were."""
    from hf_tpu_ext.trainers.run.text import TextGeneration

    text = TextGeneration(
        runs.ours(use_cpu=True, train=False), GenerationConfig(max_new_tokens=8, do_sample=True, eos_token_id=None)
    )
    before = torch.get_rng_state()
    first, again, other = (text.generate([[5, 6, 7]], seed=seed).token_ids for seed in (1, 1, 2))
    assert first == again != other
    assert torch.equal(torch.get_rng_state(), before)
