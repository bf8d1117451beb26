"""Trains the tiny model in a process of its own, which sees as many devices as CPU_NUM_DEVICES says."""

import json
import sys
from contextlib import nullcontext

import torch
import torch_xla
import torch_xla.distributed.spmd as spmd
import torch_xla.runtime
from conftest import Runs, logged, make_rows
from peft.tuners.lora import layer as lora_layer
from test_counts import CountPerStep
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TrainerCallback

from hf_tpu_ext import TPUSFTConfig
from hf_tpu_ext.distillation import fused_head
from hf_tpu_ext.layers import chunked_head, layer_loop, sliced_attention
from hf_tpu_ext.temporarily import temporarily


def shards_of(tensor):
    """Shape of what each chip holds."""
    if not torch_xla.runtime.is_spmd():
        return [list(tensor.shape)]
    return [list(part.shape) for part, _ in torch_xla._XLAC._get_local_shards([tensor])[0]]


class CountToTheLastStep(CountPerStep):
    """Leaves out what the end of training takes: layers that ran as a loop get their parameters back before `on_train_end`."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == state.max_steps:
            self.on_step_begin(args, state, control)

    def on_train_end(self, args, state, control, **kwargs):
        if state.global_step < state.max_steps:
            super().on_train_end(args, state, control)


class Shown(TrainerCallback):
    """Notes the batch sizes that callbacks see in arguments, and what trackers make of them."""

    def __init__(self):
        self.sizes, self.reported = set(), {}

    def on_train_begin(self, args, state, control, **kwargs):
        self.sizes.add((args.per_device_train_batch_size, args.per_device_eval_batch_size))
        self.reported = args.to_sanitized_dict()

    on_step_end = on_log = on_save = on_prediction_step = on_evaluate = on_train_end = on_train_begin


def describe(trainer, steps):
    parameters = dict(trainer.model.named_parameters())
    moments = {
        name: trainer.optimizer.state[parameter]["exp_avg"]
        for name, parameter in parameters.items()
        # Those of layers in a loop are of the stacked parameters.
        if parameter in trainer.optimizer.state
    }
    return {
        "log": logged(trainer),
        "steps": [[step.executions, step.reads, step.compiles, step.fallbacks] for step in steps],
        "recompiles": trainer.watch.recompiles,
        "causes": [event.cause for event in trainer.watch.events if event.cause is not None],
        "mesh": trainer.chips.mesh,
        "local_gradients": trainer.was_local,
        "weight_shards": {name: shards_of(parameter)[0] for name, parameter in parameters.items()},
        "moment_shards": {name: shards_of(moment)[0] for name, moment in moments.items()},
        "average_shards": {
            name: shards_of(trainer.averaging.tensors[parameter])[0]
            for name, parameter in parameters.items()
            if parameter in trainer.averaging.tensors
        },
        "shapes": {name: list(parameter.shape) for name, parameter in parameters.items()},
        "batch_shard": trainer.batch_shard,
        "head_tokens": sorted(trainer.head_tokens),
        "train_batch_size": trainer.state.train_batch_size,
    }


class Moves(TrainerCallback):
    """Places a weight otherwise on the chips: each has another part of it, of the same size."""

    def on_step_end(self, args, state, control, model, **kwargs):
        if state.global_step == 4:
            weight = model.model.layers[0].mlp.up_proj.weight
            chips = torch_xla.runtime.global_runtime_device_count()
            spmd.clear_sharding(weight)
            spmd.mark_sharding(weight, spmd.Mesh(range(chips), (chips,), ("columns",)), (None, "columns"))


# It is a method of peft's, which is no code of the user's.
READING_FORWARD = """
def reading_forward(self, x, *args, **kwargs):
    self.calls_so_far = vars(self).get("calls_so_far", 0) + 1
    if self.calls_so_far > self.calls_without_reading:
        x.sum().item()
    return Linear.forward_as_written(self, x, *args, **kwargs)
"""
exec(compile(READING_FORWARD, lora_layer.__file__, "exec"), vars(lora_layer))


def adapters_read(calls_without_reading):
    """Context in which each adapter of LoRA reads a value on the host, after so many calls."""
    adapter = lora_layer.Linear
    return temporarily(
        adapter,
        forward=lora_layer.reading_forward,
        forward_as_written=adapter.forward,
        calls_without_reading=calls_without_reading,
    )


class Full(TrainerCallback):
    """Has no memory for more than some rows, as the first micro-step has found."""

    def __init__(self, rows):
        self.rows = rows

    def on_substep_end(self, args, state, control, **kwargs):
        if state.train_batch_size > self.rows:
            raise RuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm.")


def run(
    model_dir,
    output_dir,
    lora=None,
    rows=120,
    resume=None,
    stop_after=None,
    shows=False,
    quantized=None,
    moves=False,
    most_rows=None,
    calls_without_reading=None,
    **config,
):
    mesh = config.get("mesh")
    from hf_tpu_ext import TPUSFTTrainer

    runs = Runs(model_dir, output_dir)
    runs.train_dataset = make_rows(rows)

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if stop_after is not None and state.global_step >= stop_after:
                control.should_training_stop = True

    model = None
    if quantized is not None:
        quantization_config = BitsAndBytesConfig(**quantized)
        model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, quantization_config=quantization_config
        )
    # What watches the tokens is in no known package, and does the same at every step.
    config.setdefault("step_replay", True)
    trainer = runs.trainer(TPUSFTTrainer, runs.config(TPUSFTConfig, **config), model, lora)
    trainer.batch_shard, trainer.was_local, trainer.head_tokens = [], False, set()
    send_rows = trainer.backend.send_rows

    # Of the backend: a method of the trainer's would be code of one's own in a step, whose results are looked at with more care.
    def watch_rows(data, num_rows):
        sent = send_rows(data, num_rows)
        if not trainer.batch_shard and isinstance(sent, dict):
            trainer.was_local = trainer.chips.local_gradients is not None
            trainer.batch_shard = shards_of(sent["batch"]["input_ids"])[0]
        return sent

    score = chunked_head.LoopedLogProbs.apply

    def watch_tokens(backend, hidden, *rest):
        trainer.head_tokens.add(hidden.shape[0])
        return score(backend, hidden, *rest)

    place_as, placed = trainer.backend.place_as, []

    def watch_places(tensor, like):
        made = place_as(tensor, like)
        placed.append([id(like), shards_of(like)[0], shards_of(made)[0]])
        return made

    trainer.backend.send_rows = watch_rows
    if mesh == "fsdp":
        # A look at what is whole compiles a graph, at a line that is taken for one of the user's.
        trainer.backend.place_as = watch_places
    chunked_head.LoopedLogProbs.apply = watch_tokens
    counter = CountToTheLastStep(trainer.backend)
    trainer.add_callback(counter)
    trainer.add_callback(Stop())
    if moves:
        trainer.add_callback(Moves())
    if most_rows is not None:
        trainer.add_callback(Full(most_rows))
    shown = Shown()
    if shows:
        # Layers that run as a loop would be handed out to it at every log.
        trainer.add_callback(shown)
    with nullcontext() if calls_without_reading is None else adapters_read(calls_without_reading):
        trainer.train(resume_from_checkpoint=resume)
    trainer.backend.send_rows, trainer.backend.place_as = send_rows, place_as
    chunked_head.LoopedLogProbs.apply = score
    shown.on_train_begin(trainer.args, trainer.state, trainer.control)
    return {
        **describe(trainer, counter.steps),
        "sizes": sorted(shown.sizes),
        "reported": shown.reported,
        "placed": placed,
    }


if __name__ == "__main__":
    model_dir, spec_file, output_file = sys.argv[1:]
    # With a real vocabulary and real lengths the loss, attention and layers take many turns of their loops, which the partitioner
    # is to bear.
    fused_head._CHUNK_ELEMENTS = 32 * 259
    sliced_attention.SLICE_ELEMENTS = 1024
    layer_loop._BLOCK_TOKENS = 40
    chunked_head._TILE_ELEMENTS, chunked_head._LEAST_SLICE = 32 * 259, 64
    with open(spec_file) as file:
        spec = json.load(file)
    results = {}
    for name, config in spec.items():
        torch.manual_seed(0)
        config.setdefault("output_dir", f"{output_file}.{name}")
        results[name] = run(config.pop("model_dir", model_dir), config.pop("output_dir"), **config)
    with open(output_file, "w") as file:
        json.dump(results, file)
