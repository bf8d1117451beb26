"""What counts as a secret."""

import json

import pytest

from hf_tpu_ext.redaction import redact


def test_secrets_are_found_by_their_names_however_deep():
    secrets = {
        "hub_token": "s3cr3t",
        "model_init_kwargs": {"token": "s3cr3t", "use_auth_token": "s3cr3t"},
        "env": {"HF_TOKEN": "s3cr3t", "WANDB_API_KEY": "s3cr3t", "AWS_SECRET_ACCESS_KEY": "s3cr3t"},
        "loaders": [{"storage_options": {"secret": "s3cr3t", "account_key": "s3cr3t", "Password": "s3cr3t"}}],
        "headers": {"Authorization": "Bearer s3cr3t", "cookies": {"session": "s3cr3t"}},
        "dataset": "https://me:s3cr3t@example.com/data.jsonl",
        "token": ["s3cr3t", ("s3cr3t",)],
    }
    written = json.dumps(redact(secrets))
    assert "s3cr3t" not in written
    assert redact(secrets)["hub_token"] == "<HUB_TOKEN>"
    assert redact(secrets)["dataset"] == "https://<REDACTED>@example.com/data.jsonl"
    assert secrets["model_init_kwargs"]["token"] == "s3cr3t"
    assert redact({"dataset": "postgres://me:pa@ss@host/db"})["dataset"] == "postgres://<REDACTED>@host/db"


@pytest.mark.parametrize(
    "token",
    [
        *("hf_" + "aB3" * 10, "sk-" + "a" * 30, "ghp_" + "0a" * 15, "Bearer abc.def"),
        *("github_pat_" + "0a_" * 15, "glpat-" + "0a" * 10),
    ],
)
def test_tokens_that_say_what_they_are_are_found_in_any_text(token):
    assert token not in redact({"note": f"with {token}"})["note"]


@pytest.mark.parametrize(
    "query",
    [
        "token=s3cr3t",
        "v=1&access_token=s3cr3t",
        "sv=2&sig=s3cr3t%3D",
        "X-Amz-Signature=s3cr3t&x=1",
        "api_key=s3cr3t#a",
    ],
)
def test_secrets_in_the_query_of_a_url_are_found(query):
    (url,) = redact(["https://example.com/data.jsonl?" + query])
    assert "s3cr3t" not in url and url.startswith("https://example.com/data.jsonl?") and "=<REDACTED>" in url


def test_nothing_else_changes():
    settings = {
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "num_tokens": 12,
        "hub_token": None,
        "use_auth_token": True,
        "max_length": 48,
        "keys": ["a", "b"],
        "label_key": "label",
        "tokenizer": "Qwen/Qwen3-0.6B",
        "output_dir": "runs/a@b",
        "url": "https://example.com/@someone/x",
        "betas": (0.9, 0.95),
    }
    assert redact(settings) == settings
