"""The memory, CPU time and threads of a process, as the system counts them."""

from __future__ import annotations

import os
import time
from typing import NamedTuple


class ProcessFacts(NamedTuple):
    """Figures of one process; 0 where the system does not give them."""

    rss_bytes: int = 0
    cpu_s: float = 0.0
    threads: int = 0


def process_facts(pid: int) -> ProcessFacts:
    """Return the figures of a process; all are 0 if it has ended. Reads `/proc`, so it blocks."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # After the name, which is in parentheses and may have spaces; see proc(5).
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return ProcessFacts(cpu_s=time.process_time()) if pid == os.getpid() else ProcessFacts()
    ticks = int(fields[11]) + int(fields[12])
    return ProcessFacts(
        int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
        ticks / os.sysconf("SC_CLK_TCK"),
        int(fields[17]),
    )
