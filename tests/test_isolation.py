"""Nobody can use, see or time what another tenant or another model stored, and what is deleted is gone."""

from __future__ import annotations

from kvboost_rag import Engine
from tests.tiny import engine_of, prompt_of, text

DOCUMENTS = [text(seed, 40) for seed in range(800, 804)]


def hits(engine: Engine, documents: list[str], **options: object) -> int:
    """Tokens of a prompt that were not computed; changes nothing."""
    usage = engine.prefill(prompt_of(documents), store=False, **options).usage
    return usage.exact_tokens + usage.approximate_tokens


# ---- hashes ----------------------------------------------------------------------------------------------------------


def twins() -> tuple[str, str]:
    """Two names with the same xxh3-128 behind ``32:<any fingerprint>:``.

    In two of its lanes XXH3 adds products of halves of (input xor known constant). Where one half is made equal in both
    lanes, what is added to the other half in one lane can be taken from it in the other.
    """
    names = []
    for one, other in ("`b", "b`"):
        name = list("x" * 1064)
        name[28], name[32:36], name[604], name[608:612] = one, "0@00", other, "eldb"
        names.append("".join(name))
    return names[0], names[1]


def test_a_tenant_whose_name_was_made_to_collide_stores_and_learns_nothing_of_the_other():
    alice, mallory = twins()
    engine = engine_of()
    engine.warm(DOCUMENTS, namespace=alice)
    assert hits(engine, DOCUMENTS, namespace=mallory) == 0
    assert engine.warm(DOCUMENTS, namespace=mallory).computed == len(DOCUMENTS)  # else he knows that Alice has them
    assert hits(engine, DOCUMENTS, namespace=mallory) == hits(engine, DOCUMENTS, namespace=alice) > 0
    assert engine.clear(mallory) == len(DOCUMENTS)
    assert hits(engine, DOCUMENTS, namespace=alice) > 0
