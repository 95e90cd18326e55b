// Two launches that run at once: the second starts on the multiprocessors that the first leaves over.
#pragma once

#include "ptx.cuh"

// Let the second start, once every block of the first has come here.
DEVICE void start_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Wait, in the second, for the first to end: what follows on the stream waits for the second alone.
DEVICE void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
