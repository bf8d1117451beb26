"""A run pushes to the Hub at each save and at its end: to a local stand-in of the Hub's API."""

import base64
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import ModelCard


TOKEN = f"hf_{'x' * 30}"


@pytest.fixture
def hub():
    """The address of a Hub that takes every commit, and the commits that it has taken: their title, and their files by name."""
    commits: list[tuple[str, dict[str, bytes]]] = []

    class Hub(BaseHTTPRequestHandler):
        def do_POST(self):
            assert self.headers["Authorization"] == f"Bearer {TOKEN}"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if "/preupload/" in self.path:
                paths = [file["path"] for file in json.loads(body)["files"]]
                answer = {"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]}
            elif "/commit/" in self.path:
                lines = [json.loads(line) for line in body.splitlines()]
                files = {line["value"]["path"]: line["value"] for line in lines if line["key"] == "file"}
                summary = next(line["value"]["summary"] for line in lines if line["key"] == "header")
                commits.append((summary, {path: base64.b64decode(file["content"]) for path, file in files.items()}))
                answer = {"commitUrl": f"{address}/me/mine/commit/{'0' * 40}", "commitOid": "0" * 40}
            else:
                # A repository is created, or the header of a card is looked at.
                answer = {"url": f"{address}/me/mine", "name": "me/mine", "errors": [], "warnings": []}
            self.do_GET(answer)

        def do_GET(self, answer=None):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(
                json.dumps(answer or {"name": "me", "type": "user", "siblings": [], "id": "me/mine"}).encode()
            )

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield address, commits
    server.shutdown()


@pytest.mark.ci
def test_pushes_at_saves_and_at_the_end(hub, tmp_path):
    address, commits = hub
    command = [sys.executable, "-m", "hf_tpu_ext.cli.main"]
    subprocess.run([*command, "prepare", "tiny", "--output_dir", "tiny"], cwd=tmp_path, check=True)
    argv = "sft --model_name_or_path tiny/model --dataset_name tiny/data --use_peft --max_length 64 --max_steps 4 --save_steps 2"
    argv += " --output_dir run --push_to_hub --hub_model_id me/mine --hub_strategy all_checkpoints --hub_always_push"
    argv += f" --hub_token {TOKEN}"
    environment = {
        **os.environ,
        "HF_ENDPOINT": address,
        "HF_TOKEN": TOKEN,
        "HF_HUB_OFFLINE": "0",
        "PJRT_DEVICE": "CPU",
    }
    done = subprocess.run(
        [*command, *argv.split()], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    files: dict[str, bytes] = {}
    for _, committed in commits:
        files |= committed
        assert [name for name, content in committed.items() if TOKEN.encode() in content] == []
    titles = [title for title, _ in commits]
    assert {"Training in progress, step 2", "Training in progress, step 4", "End of training"} <= set(titles), titles
    # Whole checkpoints, the adapter as it is here, and the report.
    for name in ("checkpoint-2/manifest.json", "checkpoint-4/manifest.json", "adapter_model.safetensors", "report.md"):
        assert files[name] == (tmp_path / "run" / name).read_bytes(), name
    card = ModelCard(files["README.md"].decode())
    assert {"trl", "sft", "hf_tpu_ext"} <= set(card.data.tags)
    assert "[report](report.md)" in card.text and "| steps | 4 of 4 |" in card.text
