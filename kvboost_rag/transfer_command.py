"""`kvboost-rag transfer`: fit a map between two models of a family, and show what one is worth."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from .errors import ConfigError
from .transfer.fitting import FitOptions
from .transfer.making import make
from .transfer.mapping import TransferMap
from .transfer.models import Reader
from .transfer.picture import draw
from .warm_command import PATTERNS, check_dtype, exit_status, texts_in

_DEFAULT = FitOptions()


def transfer(arguments: Sequence[str]) -> int:
    """Run `kvboost-rag transfer`.

    Returns:
        0 if the map may be used; 1 if its gate refused it; 2 if there is none, or no picture of it; 130 if stopped.
    """
    options = _parser().parse_args(arguments)
    return exit_status(lambda: _run(options), "stopped; the same command goes on from its last checkpoint")


def _run(options: argparse.Namespace) -> int:
    mapping = _fit(options) if options.what == "fit" else TransferMap.load(options.map)
    print(table(mapping))
    if options.plot:
        draw(mapping, options.plot)
    return 0 if mapping.accepted else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("kvboost-rag transfer", description="KV of one model as KV of another one.")
    what = parser.add_subparsers(dest="what", metavar="what", required=True)
    fit = what.add_parser("fit", help="fit a map on a folder of text, and measure it")
    fit.add_argument("--source", required=True, help="model whose KV is there: Hugging Face id or folder")
    fit.add_argument("--target", required=True, help="model whose KV is wanted, of the same family and tokenizer")
    fit.add_argument("--text", type=Path, required=True, help="folder of text files of the kind that both will read")
    fit.add_argument("--out", type=Path, required=True, help="file of the map")
    fit.add_argument("--glob", action="append", help=f"names of text files (default: {', '.join(PATTERNS)})")
    fit.add_argument("--tokens", type=int, help="tokens to fit on (default: all; 25,000 make a good map)")
    fit.add_argument("--sequence-tokens", type=int, default=1024, help="read at once (1024)")
    fit.add_argument("--sources", type=int, default=_DEFAULT.sources, help="source layers of each layer (%(default)s)")
    fit.add_argument("--reach", type=int, default=_DEFAULT.reach, help="layers that these may be away (%(default)s)")
    fit.add_argument("--strength", type=float, default=_DEFAULT.strength, help="of the ridge (%(default)s)")
    fit.add_argument("--all-heads", action="store_true", help="map each head from all heads of the source")
    fit.add_argument("--even", action="store_true", help="let all tokens count alike, whatever attention uses")
    fit.add_argument("--dtype", default="auto", help="torch dtype of both models; a map is of one dtype")
    show = what.add_parser("show", help="print what is known of a map")
    show.add_argument("map", type=Path)
    for one in (fit, show):
        one.add_argument("--plot", type=Path, metavar="PNG", help="draw the figures (needs the extra `plots`)")
    return parser


def _fit(options: argparse.Namespace) -> TransferMap:
    check_dtype(options.dtype)
    if options.tokens is not None and options.tokens < 1:
        raise ConfigError(f"--tokens is {options.tokens}; it must be 1 or more")
    documents = texts_in(options.text, options.glob)
    how = FitOptions(options.sources, options.reach, options.strength, options.all_heads, not options.even)
    source, target = (Reader.load(name, options.dtype) for name in (options.source, options.target))
    return make(
        source, target, documents, options.out,
        options=how, sequence_tokens=options.sequence_tokens, most_tokens=options.tokens, show_progress=True,
    )  # fmt: skip


def table(mapping: TransferMap) -> str:
    """A map's figures as Markdown, and the verdict."""
    about, source, target = mapping.about, mapping.source, mapping.target
    lines = [
        f"{source.name} → {target.name}: {about['tokens']['fit']:,} tokens fitted in {about['fit_s']:,} s, "
        f"{about['tokens']['check']:,} tokens checked; of held-out keys {_percent(about['explained']['keys'])} "
        f"explained, of values {_percent(about['explained']['values'])}",
        "",
        "| context | tokens run | fidelity | KL | nats per token | same likeliest token | attention cosine |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in mapping.figures.items():
        cosines = row["cosines"]
        cosine = f"{sum(cosines) / len(cosines):.3f}" if cosines else "–"
        lines.append(
            f"| {name} | {row['charged']:.1%} | {row['fidelity']:.3f} | {row['kl']:.4f} | {row['nll']:.3f} | "
            f"{row['agreement']:.3f} | {cosine} |"
        )
    return "\n".join([*lines, "", "accepted" if mapping.accepted else f"refused: {mapping.refused}"])


def _percent(shares: Sequence[float]) -> str:
    return f"{sum(shares) / len(shares):.0%}"
