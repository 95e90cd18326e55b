"""Two phases in one launch: reductions over whole rows, then the tiles that need them.

A band is a group of rows. Its first-phase tasks (`FIRST` of them) reduce some of its rows each;
its second-phase tasks (`second`) wait until all of those are done, and read the band again. Tasks
are numbered so that the first phase runs `lead` bands ahead: far enough that nobody waits, near
enough that the second reading finds the band in L2. Programs take tasks by ticket, so a task that
others wait for is always held by a program that runs already: there is no deadlock, however few
programs fit the device.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def take(ticket_ptr, bands, lead, first, second):
    """Take the next task: (is second phase, band, index in the band).

    The last to take one resets the ticket.
    """
    task = tl.atomic_add(ticket_ptr, 1, sem="relaxed")
    if task == bands * (first + second) - 1:
        tl.store(ticket_ptr, 0)
    later = task - lead * first
    group = later // (first + second)
    within = later - group * (first + second)
    tail = later - (bands - lead) * (first + second)
    is_second = (later >= 0) & ((group >= bands - lead) | (within >= first))
    band = tl.where(
        later < 0,
        task // first,
        tl.where(
            group >= bands - lead,
            bands - lead + tail // second,
            tl.where(within >= first, group, group + lead),
        ),
    )
    index = tl.where(
        later < 0,
        task % first,
        tl.where(
            group >= bands - lead,
            tail % second,
            tl.where(within >= first, within - first, within),
        ),
    )
    return is_second, band, index


@triton.jit
def arrive(counter_ptr):
    """A first-phase task has stored its results."""
    tl.debug_barrier()
    tl.atomic_add(counter_ptr, 1, sem="release")


@triton.jit
def wait(counter_ptr, first):
    """Until every first-phase task of the band has arrived."""
    while tl.atomic_add(counter_ptr, 0, sem="acquire") < first:
        pass
    tl.debug_barrier()


@triton.jit
def leave(counter_ptr, first, second):
    """A second-phase task waits no longer; the last of a band resets the counter."""
    if tl.atomic_add(counter_ptr, 1, sem="relaxed") == first + second - 1:
        tl.store(counter_ptr, 0)
