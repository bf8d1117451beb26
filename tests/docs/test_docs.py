"""The documentation names what is there, and what is there is named."""

import dataclasses
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from pictures import ASSETS, PICTURES
from transformers.utils.chat_template_utils import render_jinja_template

from hf_tpu_ext.trainers import ExtensionArguments


ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
_LINK = re.compile(r"\]\((?!https?://|mailto:)([^)\s]+)\)")
_BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<language>python|yaml)\n(?P<code>.*?)^(?P=indent)```", re.DOTALL | re.MULTILINE
)


def anchors(page):
    """Anchors of a page's headings, as MkDocs and GitHub make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def undent(block):
    return re.sub(rf"^{block['indent']}", "", block["code"], flags=re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_exist(page):
    for link in _LINK.findall(page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks_parse(page):
    for block in _BLOCK.finditer(page.read_text(encoding="utf-8")):
        if block["language"] == "python":
            compile(undent(block), page.name, "exec")
        else:
            assert isinstance(yaml.safe_load(undent(block)), dict)


def test_code_blocks_are_found():
    found = [block["language"] for page in PAGES for block in _BLOCK.finditer(page.read_text(encoding="utf-8"))]
    assert {"python", "yaml"} <= set(found)
    assert len(found) == sum(len(re.findall(r"```(?:python|yaml)\b", page.read_text("utf-8"))) for page in PAGES)


def test_described_recipes_exist():
    for page in PAGES:
        for name in re.findall(r"recipes/\w+\.yaml", page.read_text(encoding="utf-8")):
            assert (ROOT / name).is_file(), f"{page.name} names {name}"


def test_every_setting_is_described():
    configuration = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    variables = {
        name
        for source in (ROOT / "hf_tpu_ext").rglob("*.py")
        for name in re.findall(r"\bHF_TPU_EXT\w*", source.read_text(encoding="utf-8"))
    }
    for name in {field.name for field in dataclasses.fields(ExtensionArguments)} | variables:
        assert f"`{name}`" in configuration, f"docs/configuration.md does not describe {name}"


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_what_their_script_draws(name):
    assert (ASSETS / name).read_text(encoding="utf-8") == PICTURES[name]().svg(), "run: python tests/docs/pictures.py"


def test_every_picture_is_on_a_page():
    shown = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert all(f"assets/{picture.name}" in shown for picture in ASSETS.glob("*.svg"))


def test_every_page_is_in_the_navigation():
    navigation = str(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert sorted(re.findall(r"\w+\.md", navigation)) == [page.name for page in DOCS]


def test_pages_need_no_network_to_be_looked_at():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert {"search", "offline"} <= {plugin for plugin in site["plugins"] if isinstance(plugin, str)}
    assert site["theme"]["font"] is False and "extra_javascript" not in site
    for script in site["extra"]["polyfills"]:
        assert (ROOT / "docs" / script).is_file()
    for page in [*DOCS, *(ROOT / "docs" / "notebooks").glob("*.ipynb")]:
        # Their script comes from elsewhere.
        assert "```mermaid" not in page.read_text(encoding="utf-8"), page.name


def test_described_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in PAGES:
        for target in re.findall(r"(?:^|`)(?:\w+=\w+ )?make ([a-z-]+)", page.read_text("utf-8"), re.MULTILINE):
            assert target in targets, f"{page.name} names `make {target}`"


def test_chat_template_with_marks():
    template = re.search(r"```jinja\n(.*?)```", (ROOT / "docs" / "sft.md").read_text(encoding="utf-8"), re.DOTALL)[1]
    chat = [
        {"role": role, "content": text} for role, text in [("user", "Hi"), ("assistant", "Yes?"), ("user", "2+2?")]
    ]
    settings = {"chat_template": template, "add_generation_prompt": True, "return_assistant_tokens_mask": True}
    (text,), ((span,),) = render_jinja_template([chat], **settings)
    turns = ["user\nHi<|im_end|>\n", "assistant\nYes?<|im_end|>\n", "user\n2+2?<|im_end|>\n", "assistant\n"]
    assert text == "".join(f"<|im_start|>{turn}" for turn in turns)
    assert text[slice(*span)] == "Yes?<|im_end|>"


def test_the_script_that_finishes_a_preempted_run(tmp_path):
    """At the first start, after each preemption, and at the next boot."""
    (script,) = re.findall(
        r"^```bash\n(status=75\n.*?)^```", (ROOT / "docs" / "checkpoints.md").read_text(), re.DOTALL | re.M
    )
    command = tmp_path / "hf-tpu"
    command.write_text(
        "#!/bin/bash\necho $* >> calls\nmkdir -p runs/sft_lora_qwen3/checkpoint-2\n[ $(wc -l < calls) -ge 3 ] || exit 75\n"
    )
    command.chmod(0o755)
    for _ in range(2):
        subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, check=True
        )
    first, *others = (tmp_path / "calls").read_text().splitlines()
    assert first == "sft recipes/sft_lora_qwen3.yaml"
    assert others == [f"{first} --resume_from_checkpoint true"] * 3
