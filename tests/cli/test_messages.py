"""What messages say to type exists: sub-commands, their options, and the settings that they name."""

import argparse
import ast
import importlib
import inspect
import pkgutil
import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import trl
from peft import LoraConfig
from transformers import GenerationConfig, LlamaConfig, Trainer

import hf_tpu_ext
from hf_tpu_ext import cli
from hf_tpu_ext.cli.main import _TRAINING, _parser


# Names that stand with a value in messages and are set by no config: of modules, launchers and other libraries.
_OTHERS = {
    *(
        "torch_tpu",
        "torch_xla",
        "input_ids",
        "seq_length",
        "attn_implementation",
        "requires_grad",
        "nproc_per_node",
        "ref_model",
    ),
    *(
        "in_features",
        "out_features",
        "model_type",
        "tie_word_embeddings",
        "num_labels",
        "router_aux_loss_coef",
        "rope_type",
        "attention_type",
        "zero_stage",
    ),
}


def texts():
    """The texts in the code, with X where a value is put in; without docstrings."""
    for path in sorted(Path(hf_tpu_ext.__file__).parent.rglob("*.py")):
        parts = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                parts.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts.update(node.values)
                yield path.stem, "".join(part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
                yield path.stem, node.value


# For which people in the field have other words, or none.
_PRIVATE = re.compile(
    r"\bfew bits\b|\bpretended\b|\b(weights|values) of now\b|\brefused by name\b|\bturns of|\balike\b|\bafter all\b|\ball is well\b|"
    r"\bon the host only\b|\bnot there yet\b|\bgoes? on as\b|\bvisits?\b|\bseam\b",
    re.IGNORECASE,
)


def test_words_are_those_of_the_field():
    top = Path(__file__).parents[2]
    pages = [
        top / "README.md",
        *(top / "docs").rglob("*.md"),
        *(top / "docs").rglob("*.ipynb"),
        *(top / "recipes").glob("*"),
    ]
    # About the code, for those who change it.
    pages = {page.name: page.read_text(encoding="utf-8") for page in pages if page.is_file()}
    del pages["architecture.md"]
    assert len(pages) > 40
    found = [(name, match.group()) for name, text in [*pages.items(), *texts()] for match in _PRIVATE.finditer(text)]
    assert found == []


def found(pattern):
    return sorted({match.group(0) for _, text in texts() for match in re.finditer(pattern, text)})


@pytest.fixture(scope="module")
def settings():
    """Names of all settings of recipes, commands, trainers and models."""
    modules = [
        importlib.import_module(f"{cli.__name__}.{module.name}") for module in pkgutil.iter_modules(cli.__path__)
    ]
    classes = [value for module in modules for value in vars(module).values() if is_dataclass(value)]
    classes += [trl.ScriptArguments, trl.ModelConfig, trl.DatasetMixtureConfig, LoraConfig]
    classes += [getattr(hf_tpu_ext, name) for name in hf_tpu_ext.__all__ if name.endswith(("Config", "Arguments"))]
    names = {field.name for cls in classes for field in fields(cls)}
    for function in (Trainer.__init__, Trainer.train, Trainer.save_model, trl.GRPOTrainer.__init__):
        names |= inspect.signature(function).parameters.keys()
    # The help of a plan lists its own.
    names |= {option.replace("-", "_") for option in re.findall(r"--([a-z-]+)", cli.plan.DESCRIPTION)}
    return names | vars(LlamaConfig()).keys() | vars(GenerationConfig()).keys() | {"config", "smoke", "help"}


def test_commands_and_their_options_exist(settings):
    (choices,) = (action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction))
    commands = found(r"hf-tpu +(?!does |has )[a-z][a-z-]*+(?!:)[^`;.\n]*")
    assert len(commands) > 20
    for text in commands:
        command = text.split()[1]
        assert command in choices.choices or command in _TRAINING, text
        options = {option.replace("-", "_") for option in re.findall(r"(?<!\S)--([a-z][a-z_-]*)", text)}
        if command in _TRAINING:
            assert options <= settings, text
        else:
            parser = choices.choices[command]
            nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
            parsers = [parser, *(inner for action in nested for inner in action.choices.values())]
            known = {name.lstrip("-").replace("-", "_") for one in parsers for name in one._option_string_actions}
            assert options <= known, text


def test_settings_that_messages_name_exist(settings):
    named = found(r"(?<=[Ss]et )`?[a-z]+(?:_[a-z]+)+(?=[\s=`:,.])|\b[a-z]+(?:_[a-z]+)+(?==['\w])")
    assert len(named) > 60
    assert sorted({name.strip("`") for name in named} - settings - _OTHERS) == []


#: Words that no other project has for these things.
PRIVATE = re.compile(
    r"\b(alike|of now|few bits|superfluous|pretended|made anew|in the place of its own)\b", re.IGNORECASE
)


def test_messages_help_and_pages_have_the_words_of_the_field():
    root = Path(__file__).parents[2]
    pages = [root / "README.md", *root.glob("docs/*.md"), *root.glob("docs/notebooks/*.ipynb")]
    written = [*texts(), *((page.name, page.read_text(encoding="utf-8")) for page in pages)]
    assert [(name, match[0]) for name, text in written for match in PRIVATE.finditer(text)] == []
