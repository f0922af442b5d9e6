"""A soak of mixed requests: budgets hold at every moment, memory stays level, and nothing leaks, raises or is wrong."""

from __future__ import annotations

import logging

import pytest

from benchmarks.soak import DISK_BYTES, RAM_BYTES, WAITING_BYTES, Report, Soak, tiny_engine

# Beside the budgets: caches of prompts at work, the index, chunks on their way, what PyTorch and the allocator keep.
# Most of it is there after the first hundred requests.
CONSTANT_BYTES = 128 << 20
DRIFT_BYTES = 32 << 20  # what the second half of a long soak may add


def check(report: Report) -> None:
    assert report.broken == []
    assert sum(report.done.values()) == report.requests
    assert 0 < report.most_stored_bytes <= RAM_BYTES
    assert 0 < report.most_disk_bytes <= DISK_BYTES
    assert report.most_waiting_bytes <= WAITING_BYTES
    # What is forgotten while its file is written may count as not written.
    assert report.write_errors <= report.done["forget"] + report.done["clear"], report.last_error
    assert report.threads[0] == report.threads[1]
    if report.files[0] is not None:
        assert report.files[1] <= report.files[0]
    if report.start_bytes:
        assert report.peak_bytes - report.start_bytes <= RAM_BYTES + WAITING_BYTES + CONSTANT_BYTES
    assert report.reused_share > 0.3


def test_a_short_soak(tmp_path, caplog):
    caplog.set_level(logging.CRITICAL, "kvboost_rag")
    check(Soak(lambda: tiny_engine(tmp_path), 200).run())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_long_soak(tmp_path, caplog, seed):
    caplog.set_level(logging.CRITICAL, "kvboost_rag")
    report = Soak(lambda: tiny_engine(tmp_path), 2000, threads=4 + 4 * seed, seed=seed).run()
    check(report)
    assert report.evictions > 200
    assert report.disk_evictions > 50
    assert report.loads > 200
    assert report.end_bytes - report.half_bytes <= DRIFT_BYTES
