"""Without torch and what else the extra `run` brings, plans are made, explained, explored and exported; a command that
needs it says so in one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import importlib.util, io, json, sys
from contextlib import redirect_stderr

PACKAGES = ("torch", "megatron", "transformers", "tokenizers", "safetensors", "einops", "networkx")

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in PACKAGES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in PACKAGES else find_spec(name, *rest)
sys.meta_path.insert(0, Absent())

import meshwright.api
from meshwright.runtime.cli.main import COMMANDS, main

for entry in COMMANDS:
    entry.load()
for command in json.loads(sys.argv[1]):
    sys.argv, said = ["meshwright", *command], io.StringIO()
    with redirect_stderr(said):
        try:
            main()
        except SystemExit as end:
            print(json.dumps([end.code, said.getvalue()]))
"""


def test_commands_load_without_torch_and_those_that_need_it_say_how_to_get_it(job: Path, plan: Path) -> None:
    commands = {
        "run": ["run", plan, job, "--steps", 1, "--out", "out"],
        "rehearse": ["rehearse", plan],
        "profile": ["profile", job, "-o", "table.json"],
        "reward try": ["reward", "try", job],
        "export --to hf": ["export", plan.parent, "--to", "hf", "-o", "models"],
    }
    words = json.dumps([[str(word) for word in command] for command in commands.values()])
    ran = subprocess.run([sys.executable, "-c", SCRIPT, words], capture_output=True, text=True, check=True)
    said = [json.loads(line) for line in ran.stdout.splitlines()]
    assert said == [
        [
            2,
            f"error: {command} needs packages that are not installed here (torch, megatron, transformers, tokenizers, "
            "safetensors, einops); install them with: pip install 'meshwright[run]'.\n",
        ]
        for command in commands
    ]
