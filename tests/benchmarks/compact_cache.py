"""
What the compact form of a teacher's cache loses, measured on a cache in the plain form.

    python tests/benchmarks/compact_cache.py DIRECTORY

Prints a table with one line for each temperature.
"""

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa

from hf_tpu_ext.distillation.cache_format import normalised, read_manifest, read_sequence
from hf_tpu_ext.distillation.compact import CompactTokens, compact_bytes_per_token


def measure(directory: Path) -> dict[float, dict[str, float]]:
    """
    Compare the two forms on all tokens of a cache.

    Args:
        directory (`Path`):
            Directory of a plain cache.

    Returns:
        `dict[float, dict[str, float]]`: For each temperature the error of a log-probability (`rms`, `max`, and `weighted` by
        the teacher's probabilities), and that of the mass in the top K (`mass`, `mass_max`).
    """
    manifest = read_manifest(directory)
    exact, rounded, normalisers = [], [], []
    for shard in manifest.shards:
        reader = pa.ipc.open_file(str(directory / shard.file))
        sequences = [read_sequence(reader, number) for number in range(shard.sequences)]
        tensors = {name: np.concatenate([sequence[name] for sequence in sequences]) for name in sequences[0]}
        ids, values = tensors["ids"], tensors["values"]
        packed_ids, packed_values = CompactTokens.pack(ids, values).unpack()
        # Both in the order of the ids: entries that are rounded to the same value may change places.
        exact.append(np.take_along_axis(values.astype(np.float64), ids.argsort(1), 1))
        rounded.append(np.take_along_axis(packed_values.astype(np.float64), packed_ids.argsort(1), 1))
        normalisers.append(tensors.get("normalisers", np.empty((len(ids), 0))).astype(np.float64))
    exact, rounded, normalisers = map(np.concatenate, (exact, rounded, normalisers))
    results = {}
    for temperature in manifest.temperatures:
        normaliser = 0.0
        if temperature != 1:
            normaliser = normalisers[:, normalised(manifest.temperatures).index(temperature), None]
        log_p, log_q = exact / temperature - normaliser, rounded / temperature - normaliser
        p, error = np.exp(log_p), np.abs(log_q - log_p)
        mass = np.abs((np.exp(log_q) - p).sum(1))
        results[temperature] = {
            "rms": float(np.sqrt(np.square(error).mean())),
            "max": float(error.max()),
            "weighted": float((p * error).sum(1).mean()),
            "mass": float(mass.mean()),
            "mass_max": float(mass.max()),
        }
    return results


def make_table(results: dict[float, dict[str, float]]) -> str:
    """
    Show the results.

    Args:
        results (`dict[float, dict[str, float]]`):
            See [`measure`].

    Returns:
        `str`: Markdown table.
    """
    lines = [
        "| Temperature | log-probability: RMS | greatest | weighted by probability | mass in the top K: mean | greatest |",
        "|---|" + "---:|" * 5,
    ]
    for temperature, result in results.items():
        numbers = " | ".join(f"{value:.4f}" for value in result.values())
        lines.append(f"| {temperature:g} | {numbers} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="a cache that `hf-tpu cache-teacher` made without --compact")
    directory = parser.parse_args().directory
    manifest = read_manifest(directory)
    print(make_table(measure(directory)))
    size = compact_bytes_per_token(manifest.top_k, manifest.vocab_size) - 6 * manifest.top_k
    print(
        f"\n{manifest.tokens} tokens of {manifest.sequences} sequences, K={manifest.top_k}, vocabulary {manifest.vocab_size}: "
        f"{manifest.bytes_per_token:.1f} bytes per token, compact {manifest.bytes_per_token + size:.1f}"
    )


if __name__ == "__main__":
    main()
