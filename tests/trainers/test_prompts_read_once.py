"""When layers read a prompt once for all its completions; what is not known to allow it is trained as upstream trains it."""

import pytest
import torch
from peft import IA3Config, LoraConfig
from refusals import refused
from rollouts import OURS, Case, OurGRPO, assert_same_numbers, train, trainer_for
from trl.trainer.utils import shuffle_sequence_dict

from hf_tpu_ext import TPUGRPOConfig
from hf_tpu_ext.generation.generator import are_in_groups
from hf_tpu_ext.trainers.online.shared_prompts import leave_in_order


ONCE, AGAIN = "layers read a prompt once", "layers read a prompt again"


class OwnLoss(OurGRPO):
    def compute_loss(self, model, inputs, *args, **kwargs):
        # The last row of each group is left out: the others are in no groups any more.
        kept = [row for row in range(len(inputs["prompt_ids"])) if row % 4 != 3]
        inputs = {key: value[kept] if value.ndim else value for key, value in inputs.items()}
        return super().compute_loss(model, inputs, *args, **kwargs)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("shared")


@pytest.mark.parametrize(
    ("case", "given", "words"),
    [
        (Case("grpo"), {}, None),
        (Case("rloo", lora="new"), {}, None),
        (
            Case("grpo", {"steps_per_generation": 2}),
            {},
            "several batches with steps_per_generation=2 (share_prompts=on",
        ),
        (Case("grpo", {"steps_per_generation": 2, "share_prompts": True}), {}, None),
        (Case("grpo", {"share_prompts": "off"}), {}, "share_prompts=off"),
        (Case("grpo", model="qwen3_moe"), {}, "Qwen3MoeForCausalLM may compute with other tokens"),
        (
            Case("grpo"),
            {"peft_config": LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.1, target_modules="all-linear")},
            "with dropout (as lora_dropout) each has other random numbers (share_prompts=on",
        ),
        (
            Case("grpo", {"share_prompts": "on"}),
            {"peft_config": LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.1, target_modules="all-linear")},
            None,
        ),
        (
            Case("grpo"),
            {"peft_config": IA3Config(task_type="CAUSAL_LM", target_modules=["v_proj"], feedforward_modules=[])},
            "IA3Config",
        ),
    ],
)
def test_when(xla, models, case, given, words):
    trainer = trainer_for(case, models, ours=True, **given)
    said = [line for line in trainer.adapted.changes if line.startswith((ONCE, AGAIN))]
    assert trainer.shares_prompts == (words is None) and len(said) == 1
    assert said[0].startswith(ONCE if words is None else AGAIN) and (words or "") in said[0]


def test_wanted_and_not_possible(xla, models):
    settings = {"share_prompts": "on", "per_device_train_batch_size": 2, "steps_per_generation": 2}
    refused(
        ["share_prompts='on'", "per_device_train_batch_size=2", "num_generations=4", "set it to 'auto'"],
        lambda: trainer_for(Case("grpo", settings), models, ours=True),
    )
    refused(["share_prompts='yes'", "auto, on, off"], lambda: TPUGRPOConfig("out", share_prompts="yes"))
    settings = {"share_prompts": "on", "max_prompt_length": 2, "use_cpu": True}
    eager = trainer_for(Case("grpo", settings), models, ours=True)
    assert "share_prompts=on has no effect on cpu: it is for torch_xla" in eager.adapted.changes
    assert any(line.startswith("max_prompt_length=2 has no effect on cpu: ") for line in eager.adapted.changes)


@pytest.mark.ci
@pytest.mark.parametrize(
    "case",
    [
        Case("grpo", {"num_iterations": 2, "beta": 0.04, "share_prompts": "on", "steps_per_generation": 2}),
        pytest.param(
            Case("rloo", {"gradient_accumulation_steps": 2, "share_prompts": "on"}, lora="new"), marks=pytest.mark.slow
        ),
    ],
)
def test_whole_prompts_are_shuffled(xla, models, monkeypatch, case):
    """Every number is that of upstream's trainer, had it shuffled so."""
    trainer = train(case, models, ours=True)
    assert trainer.shares_prompts

    def shuffle(batch):
        rows = (torch.randperm(2)[:, None] * 4 + torch.arange(4)).flatten()
        return {key: value[rows] if value is not None and value.ndim else value for key, value in batch.items()}

    monkeypatch.setattr(f"trl.trainer.{case.kind}_trainer.shuffle_sequence_dict", shuffle)
    assert_same_numbers(trainer.state.log_history, train(case, models, ours=False).state.log_history)


def test_code_of_the_users_that_reads_rows(xla, models, monkeypatch):
    case = Case("grpo", {"per_device_train_batch_size": 8}, steps=4)
    monkeypatch.setitem(OURS, "grpo", (OwnLoss, OURS["grpo"][1]))
    trainer = train(case, models, ours=True)
    assert not trainer.shares_prompts
    assert any("compute_loss" in line for line in trainer.adapted.changes if line.startswith(AGAIN))


@pytest.mark.ci
def test_dropout_that_is_switched_on_later(xla, models):
    """A callback or the caller may change the model after the trainer was made: then it trains as upstream, too."""
    case = Case("grpo", steps=2)
    trainer = trainer_for(case, models, ours=True)
    assert trainer.shares_prompts
    trainer.model.config.attention_dropout = 0.1
    shapes = set()
    norm = trainer.model.model.norm
    forward = norm.forward
    norm.forward = lambda hidden: (shapes.add(tuple(hidden.shape[:2])), forward(hidden))[1]
    trainer.train()
    rows, length = 4, trainer.step_lengths[0]
    assert shapes == {(rows, length)}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("from_generation", "evaluates"),
    # The last: after an evaluation that has been replayed, and before another one.
    [(0, False), pytest.param(2, False, marks=pytest.mark.slow), pytest.param(8, True, marks=pytest.mark.slow)],
)
def test_a_rollout_func_that_gives_completions_other_prompts(xla, models, from_generation, evaluates, caplog):
    """From then on the prompts of a batch are read with each completion, and every number stays upstream's."""

    def rollouts():
        made = 0

        def write(prompts, trainer):
            nonlocal made
            changes = made >= from_generation
            made += 1
            tokens = [
                trainer._tokenizer(prompt)["input_ids"] + [70 + row] * (changes and row % 3)
                for row, prompt in enumerate(prompts)
            ]
            return {
                "prompt_ids": tokens,
                "completion_ids": [[71 + row % 7] * (1 + row % 5) for row in range(len(prompts))],
                "logprobs": None,
            }

        return write

    settings = {"per_device_train_batch_size": 8, "max_prompt_length": 64, "beta": 0.04}
    case = Case("grpo", settings, steps=6, evaluates=evaluates)
    reference = train(case, models, ours=False, rollout_func=rollouts())
    with caplog.at_level("WARNING", logger="hf_tpu_ext"):
        trainer = train(case, models, ours=True, rollout_func=rollouts())
    assert_same_numbers(trainer.state.log_history, reference.state.log_history)
    assert not trainer.shares_prompts and (evaluates or trainer.counted[-1].compiles == 0)


def test_prompts_in_groups():
    # A pad token may be a token, too.
    ids = torch.tensor([[0, 7], [0, 7], [0, 7], [9, 7], [5, 6], [5, 6]])
    mask = torch.tensor([[0, 1], [0, 1], [0, 1], [0, 1], [1, 1], [1, 1]])
    assert are_in_groups(ids[:2], mask[:2], 2) and are_in_groups(ids[4:], mask[4:], 2)
    assert not are_in_groups(ids, mask, 2) and not are_in_groups(ids, mask, 3)
    mask[1, 0] = 1
    assert not are_in_groups(ids[:2], mask[:2], 2)


def test_an_order_that_is_left_takes_as_many_random_numbers():
    batch = {"prompt_ids": torch.arange(8)[:, None], "num_items": torch.tensor(8)}
    torch.manual_seed(0)
    shuffle_sequence_dict(batch)
    after = torch.rand(1)
    torch.manual_seed(0)
    assert leave_in_order(batch, shuffle_sequence_dict=shuffle_sequence_dict) is batch
    assert torch.equal(torch.rand(1), after)
