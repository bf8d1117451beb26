"""`hf-tpu export`: a plain model of what a run has trained."""

import argparse
from pathlib import Path

from ..errors import UserError
from ..formatting import format_bytes


DESCRIPTION = """\
Make a plain model of a run, which transformers, vLLM and others load without this package, and say what that changed:
the logits of the written files are compared with those of the trained model. An adapter (LoRA, DoRA) is merged into its
base in float32; a model that was fine-tuned as a whole is converted to another dtype. A reward model keeps its head, and
its scores are compared. With --ema, the weights are the average that a run with ema_decay keeps. With --quantize, the
weights of linear layers are rounded to integers, as in a run with qat_weight_dtype, and written in the format of
compressed-tensors. Runs on the CPU.

examples:
  hf-tpu export runs/sft_lora_qwen3 --merge
  hf-tpu export runs/sft_lora_qwen3/checkpoint-500 --merge --dtype float32 --output_dir models/mine
  hf-tpu export runs/sft_full_qwen3 --dtype bfloat16
  hf-tpu export runs/sft_full_qwen3 --ema
  hf-tpu export runs/reward_qwen3 --dtype bfloat16
  hf-tpu export runs/qad_q4_qwen3 --merge --quantize
  hf-tpu export runs/sft_full_qwen3 --quantize int8 --group_size 32
  hf-tpu export runs/qad_q4_qwen3 --quantize --gguf runs/qad_q4_qwen3/merged.gguf

The exit status is 0 if the exported model may be used in place of the trained one, 1 if it was written and differs much
or its base is not the one of the training, and 2 if nothing was written.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the `export` subcommand."""
    parser = subparsers.add_parser(
        "export",
        help="merge an adapter, convert weights, and compare the result with what was trained",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", type=Path, help="output_dir of a run, or a checkpoint-N in it")
    parser.add_argument("--merge", action="store_true", help="merge the adapter into its base")
    parser.add_argument(
        "--ema", action="store_true", help="the average of the trained weights (ema_decay) instead of the last ones"
    )
    parser.add_argument("--dtype", help="float32, bfloat16 or float16 (default: that of the adapter's base)")
    parser.add_argument(
        "--quantize",
        nargs="?",
        const="as trained",
        metavar="DTYPE",
        help="round linear layers: to what the run was trained for (qat_weight_dtype), or to DTYPE, int2 to int8",
    )
    parser.add_argument(
        "--group_size",
        type=int,
        metavar="N",
        help="how many weights of a row share a scale (default: as trained, or 32)",
    )
    parser.add_argument(
        "--scale",
        metavar="HOW",
        help="how that scale is chosen: max, by their largest magnitude, or mse, with the least squared error (default: as "
        "trained, or max)",
    )
    parser.add_argument(
        "--gguf",
        type=Path,
        metavar="FILE",
        help="with --quantize: round a float32 GGUF file of the merged model instead, made by llama.cpp's "
        "convert_hf_to_gguf.py, to the types Q4_0 (int4) or Q8_0 (int8), beside it",
    )
    parser.add_argument(
        "--output_dir",
        type=Path,
        help="where to write (default: `merged`, `converted` or `quantized` in the run's directory, with `-ema` behind it "
        "for --ema)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export there")
    parser.add_argument("--base_model", help="the adapter's base, where it is elsewhere than the adapter says")
    parser.add_argument(
        "--prompts", nargs="+", metavar="TEXT", help="what to compare on (default: four that come with this package)"
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Export a run, say what that changed, and return the exit status."""
    from transformers.utils import logging

    from ..export.make import export_run
    from ..export.proof import PROMPTS

    logging.disable_progress_bar()
    if args.gguf is not None:
        return _write_gguf(args)
    export = export_run(
        args.run_dir,
        args.output_dir,
        merge=args.merge,
        dtype=args.dtype,
        overwrite=args.overwrite,
        base_model=args.base_model,
        prompts=args.prompts or PROMPTS,
        ema=args.ema,
        quantize=args.quantize,
        group_size=args.group_size,
        scale=args.scale,
        quiet=False,
    )
    print(_page(export))
    return 0 if export.good else 1


def _write_gguf(args: argparse.Namespace) -> int:
    from ..export.gguf import write_gguf
    from ..export.quantized import choose_quantization

    if args.quantize is None:
        raise UserError(
            "--gguf rounds the weights of a GGUF file that is there, and needs --quantize. Add --quantize. For a GGUF file without "
            f"rounding: hf-tpu export {args.run_dir} --merge, then convert_hf_to_gguf.py of llama.cpp's repository"
        )
    for name in ("merge", "ema", "dtype", "output_dir", "base_model", "prompts"):
        if vars(args)[name]:
            raise UserError(f"--{name} has no effect on --gguf, which is the merged model. Leave one of the two out.")
    if not args.gguf.is_file():
        raise UserError(
            f"--gguf {args.gguf}: there is no such file. Make it of the merged model by llama.cpp: hf-tpu export {args.run_dir} "
            f"--merge --dtype float32; python convert_hf_to_gguf.py {args.run_dir}/merged --outtype f32 --outfile {args.gguf}"
        )
    trained_for = choose_quantization(args.run_dir, args.quantize, args.group_size, args.scale)
    export = write_gguf(args.gguf, trained_for, args.overwrite)
    print(
        f"{export.tensors} matrices in {trained_for.describe()}, as {export.type}; {format_bytes(export.num_bytes)} in all\n"
        f"Scales are float16: a weight differs by at most {export.difference:.2g} of its scale from the one that was trained\n"
        f"Written: {export.path}"
    )
    return 0


def _page(export) -> str:
    what = f"{export.run_dir}, merged into {export.base}" if export.base else export.run_dir
    if export.ema:
        what += ", the average of its weights (EMA)"
    lines = [f"{what}: {export.num_parameters:,} parameters, {export.dtype}"]
    if export.quantized is not None:
        lines.append(f"Weights of linear layers in {export.quantized}; {format_bytes(export.num_bytes)} in all")
    elif export.trained_for is not None:
        lines.append(f"The run was trained for {export.trained_for}: add --quantize to export the rounded weights")
    if export.untied:
        lines.append(
            "The adapter changes one of two tied embeddings: they are two weights now (tie_word_embeddings=false)"
        )
    rows = {
        "the base: what training changed": export.training,
        f"{export.dtype} weights, computed in float32": export.weights,
        f"{export.dtype} weights, computed in {export.dtype}": export.exported,
    }
    width = max(map(len, rows))
    what, choice = ("tokens", "same top-1") if export.scores is None else ("pairs of answers", "same choice")
    against = f"against the trained model, {export.prompts} prompts, {export.positions} {what}"
    lines += ["", against, f"{'':<{width}}{'max |diff|':>15}{'mean KL':>12}{choice:>12}"]
    for name, row in rows.items():
        if row is not None:
            lines.append(f"{name:<{width}}{row.max_abs:>15.3g}{row.mean_kl:>12.2g}{row.same_top1:>12.1%}")
    if export.scores is not None:
        ranges = (f"{low:.4g} to {high:.4g} {name}" for name, (low, high) in export.scores.items())
        lines += ["", f"Scores: {', '.join(ranges)}. Load it with {export.auto_class}."]
    if export.base_check and export.base_check != export.verdict:
        lines += ["", export.base_check]
    return "\n".join([*lines, "", export.verdict, f"Written: {export.output_dir}"])
