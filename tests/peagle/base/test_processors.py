"""How long threads ran and waited."""

import threading
import time
from pathlib import Path

import pytest

from peagle.base import processors
from peagle.base.processors import ThreadTimes, thread_times


def test_times_are_those_of_all_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, (ran, waited) in enumerate(((2_000_000_000, 500_000_000), (1_000_000_000, 250_000_000))):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "schedstat").write_text(f"{ran} {waited} 7\n")
    (tmp_path / "ended").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "schedstat").write_text("none\n")
    monkeypatch.setattr(processors, "TASKS", tmp_path)
    assert thread_times() == ThreadTimes(3.0, 0.75)
    assert thread_times().waiting_frac(ThreadTimes(2.0, 0.5)) == 0.2
    assert thread_times().waiting_frac(thread_times()) == 0.0
    monkeypatch.setattr(processors, "TASKS", tmp_path / "another system")
    assert thread_times() == ThreadTimes(0.0, 0.0)


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel has no scheduler statistics")
def test_a_thread_that_computes_counts_while_it_lives() -> None:
    before, computed, over = thread_times(), threading.Event(), threading.Event()

    def compute() -> None:
        started = time.thread_time()
        while time.thread_time() < started + 0.1:
            pass
        computed.set()
        over.wait()

    thread = threading.Thread(target=compute)
    thread.start()
    computed.wait()
    assert thread_times().ran_s > before.ran_s + 0.05
    over.set()
    thread.join()
