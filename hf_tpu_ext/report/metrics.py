"""What a report shows of a run: its logged numbers, and which of them are one picture; the phases that its time is divided into."""

import re


#: Logged numbers that are one picture, where they were logged and in this order: its title, and their labels in it, by their names.
#: Evaluations log the same with `eval_` before it.
GROUPS: tuple[tuple[str, dict[str, str]], ...] = (
    ("Loss", {"loss": "loss"}),
    # GRPO and RLOO log these.
    ("Reward", {"reward": "mean", "reward_std": "standard deviation"}),
    (
        "Tokens of completions",
        {"completions/max_length": "max", "completions/mean_length": "mean", "completions/min_length": "min"},
    ),
    # DPO and KTO log these: beta times the log-probs of policy over reference.
    ("Rewards", {"rewards/chosen": "chosen", "rewards/rejected": "rejected", "rewards/margins": "margin"}),
    # A reward model logs these over the rows of a batch.
    ("Rewards", {"max_reward": "max", "mean_reward": "mean", "min_reward": "min"}),
    ("Margin", {"margin": "margin"}),
    ("Accuracy", {"rewards/accuracies": "accuracy"}),
    ("Accuracy", {"accuracy": "accuracy"}),
    ("KL to the reference", {"kl": "KL"}),
    ("Log-probs of completions", {"logps/chosen": "chosen", "logps/rejected": "rejected"}),
    ("Learning rate", {"learning_rate": "learning rate"}),
    ("Gradient norm", {"grad_norm": "gradient norm"}),
)
#: What tables have beside the numbers of the groups.
MORE_NAMES = ("mean_token_accuracy", "kd_loss")
#: Logged numbers that reports say elsewhere, or that are no results. All others have a section of their own.
ELSEWHERE = re.compile(
    r"(eval_)?(step|at|epoch|num_tokens|num_input_tokens_seen|step_time|mfu|peak_memory_gb|phase/.*)|train_loss|total_flos"
    r"|(.*_)?(runtime|(samples|steps|tokens)_per_second|jit_compilation_time|model_preparation_time)"
)
#: What runs are judged by, with the names that it is logged under.
RESULTS = {
    "loss": ("loss",),
    "reward": ("reward",),
    "evaluation loss": ("eval_loss",),
    "evaluation accuracy": ("eval_rewards/accuracies", "eval_accuracy"),
    "evaluation margin": ("eval_rewards/margins", "eval_margin"),
}
#: All phases, in the order of logs, with what the host does in them.
PHASES = {
    "data": "takes the next batches from the data loader",
    "rollout": "generates completions, and has them scored and rewarded",
    "trace": "traces the step and launches the graph",
    "replay": "launches the compiled graph by its handle",
    "step": "runs the operators of the step, or on a GPU launches them",
    "device": "waits for the device before a log",
    "read": "fetches what is logged",
    "log": "hands logs to report_to and to the screen",
    "other": "the rest: callbacks and the loop itself",
    "compile": "compiles graphs, or loads them from the compilation cache",
    "eval": "evaluates",
    "save": "writes checkpoints",
    "samples": "answers the prompts of show_samples",
}
#: Phases that are not part of a step: what a step takes is the rest.
BESIDES_STEPS = ("compile", "eval", "save", "samples")
#: Classes of step times to a power of ten.
CLASSES_PER_DECADE = 20


def column(name: str) -> str:
    """The column of a logged number in a table, e.g. `"rewards chosen"`."""
    return name.replace("grad_", "gradient ").replace("_", " ").replace("/", " ")
